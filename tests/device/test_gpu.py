"""On a real NVIDIA GPU: it draws what the CPU draws, gives the same bits twice, and the host waits
once a token.
"""

import warnings

import pytest
import torch
from tests.run.journeys import VALUES

from tether.core.config import build
from tether.core.rundir import read_jsonl
from tether.core.types import Prompt, Sampling, user
from tether.models.config import ModelConfig
from tether.models.trunk import Role
from tether.rollout.local import _Decoding
from tether.run.models import open_model
from tether.run.recipe import Recipe
from tether.run.roles import local_engine
from tether.run.runner import run_recipe

pytestmark = pytest.mark.gpu
PROMPTS = [Prompt((user(text),)) for text in ("one", "two or three", "and four")]


def drawn(device):
    loaded = open_model(ModelConfig(source="tiny", dtype="float32", device=device))
    engine = local_engine(Role(loaded.model), loaded, max_rows=4)
    groups = engine.generate(PROMPTS, Sampling(max_new_tokens=8), num_samples=3, seed=5)
    return [rollout for group in groups for rollout in group.rollouts]


def test_a_gpu_draws_what_the_cpu_draws():
    there, here = drawn("cuda"), drawn("cpu")
    assert [row.response_ids for row in there] == [row.response_ids for row in here]
    assert [p for row in there for p in row.logprobs] == pytest.approx(
        [p for row in here for p in row.logprobs], abs=1e-3
    )


def test_a_deterministic_run_gives_the_same_bits_twice(tmp_path):
    records = []
    for name in ("first", "second"):
        values = {
            **VALUES,
            "run": str(tmp_path / name),
            "model": {"source": "tiny", "device": "cuda"},
            "deterministic": True,
        }
        run_recipe(build(Recipe, values), ["sft", "reward", "ppo"])
        rows = [
            row
            for stage in ("sft", "reward", "ppo")
            for row in read_jsonl(tmp_path / name / stage / "metrics.jsonl")
        ]
        records.append(
            [
                {
                    k: v
                    for k, v in row.items()
                    if not any(p in k for p in ("time", "second", "memory"))
                }
                for row in rows
            ]
        )
    assert records[0] == records[1]


def test_the_host_waits_once_a_token(monkeypatch):
    step, reports = _Decoding.step, []

    def watched(self):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step(self)
            torch.cuda.set_sync_debug_mode("default")
        reports.append(
            [f"{one.filename}:{one.lineno}" for one in found if "synchron" in str(one.message)]
        )

    monkeypatch.setattr(_Decoding, "step", watched)
    drawn("cuda")
    assert reports and all(len(one) <= 1 for one in reports), max(reports, key=len)
