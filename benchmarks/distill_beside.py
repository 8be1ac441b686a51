"""On-policy distillation beside TRL's two trainers: answer tokens a second and memory on one pair.

    python -m benchmarks.distill_beside [--steps N]

Student and teacher are SmolLM2-135M-Instruct, each with weights of its own; the student learns an
adapter of rank 16 on all linear layers, in bfloat16 where the processor has it, from 16 of its own
answers of at most 48 tokens a step, by the Jensen-Shannon divergence. Each side runs alone, in a
process of its own, one after another. A step's time is the median without the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.distill import LENGTH, MODEL, prompts_of, rows_of

ANSWERS = 16
SIDES = ("tether", "tether, one trunk", "TRL GKDTrainer", "TRL DistillationTrainer")


def exported(folder: Path) -> Path:
    """The model as a folder that both read."""
    from tether.runner.assembly.roles import load_policy

    _, loaded = load_policy(MODEL)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def tether_side(folder: str, steps: int, teacher: Any) -> dict[str, Any]:
    import tether

    run = tether.distill(
        folder,
        rows_of(prompts_of("prompts", steps * ANSWERS, 0)),
        teacher=teacher,
        divergence="jsd",
        run=tempfile.mkdtemp() + "/run",
        steps=steps,
        prompts_per_step=ANSWERS,
        max_new_tokens=LENGTH,
        kl={"report": False},
        progress=False,
    )
    rows = [row for row in run.metrics() if "time/step" in row]
    return {
        "seconds": [row["time/step"] for row in rows],
        "length": statistics.fmean(row["response/length"] for row in rows),
    }


def trl_side(folder: str, steps: int, which: str) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    dtype = torch.bfloat16 if fast else torch.float32
    seconds, lengths = list[float](), list[float]()

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": steps,
        "per_device_train_batch_size": ANSWERS,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "temperature": 1.0,
        "beta": 0.5,
        "learning_rate": 5e-4,
    }
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for _ in range(2))
    prompts = prompts_of("prompts", steps * ANSWERS, 0)
    asked = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    shared: dict[str, Any] = {
        "model": student,
        "teacher_model": teacher,
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "peft_config": adapter,
        "callbacks": [Clock()],
    }
    if which == "TRL GKDTrainer":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        answered = [[*turns, {"role": "assistant", "content": "Yes."}] for turns in asked]
        trainer = GKDTrainer(
            args=GKDConfig(lmbda=1.0, max_new_tokens=LENGTH, **common),
            train_dataset=Dataset.from_list([{"messages": turns} for turns in answered]),
            **shared,
        )
        plain = trainer.generate_on_policy_outputs

        def counted(*given: Any, **named: Any) -> Any:
            result = plain(*given, **named)
            lengths.append(float((result[2] != -100).sum()) / ANSWERS)
            return result

        trainer.generate_on_policy_outputs = counted
    else:
        from trl import DistillationConfig, DistillationTrainer

        trainer = DistillationTrainer(
            args=DistillationConfig(max_completion_length=LENGTH, **common),
            train_dataset=Dataset.from_list([{"prompt": turns} for turns in asked]),
            **shared,
        )
    trainer.train()
    logged = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    return {"seconds": seconds, "length": statistics.fmean(lengths or logged or [float(LENGTH)])}


def one_side(which: str, folder: str, steps: int) -> None:
    if which.startswith("tether"):
        with_words = {"model": "start", "system": "Answer briefly."}
        result = tether_side(folder, steps, folder if which == "tether" else with_words)
    else:
        result = trl_side(folder, steps, which)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps({**result, "peak_mb": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--smoke", action="store_true", help="one step")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = 1 if options.smoke else options.steps
    if options.side:
        side, folder = options.side
        one_side(side, folder, steps)
        return
    folder = exported(Path(tempfile.mkdtemp()) / "model")
    print("| | seconds a step | answer tokens a second | peak memory, MB |\n|---|---|---|---|")
    for side in SIDES:
        words = ["--steps", str(steps), "--side", side, str(folder)]
        command = [sys.executable, "-m", "benchmarks.distill_beside", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"| {side} | failed: {done.stderr.strip().splitlines()[-1:]} | | |")
            continue
        result = json.loads(lines[0].removeprefix("RESULT "))
        step = statistics.median(result["seconds"][1:] or result["seconds"])
        rate = ANSWERS * result["length"] / step
        print(f"| {side} | {step:.2f} | {rate:.0f} | {result['peak_mb']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
