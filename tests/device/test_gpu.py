"""On a real NVIDIA GPU: it draws what the CPU draws, gives the same bits twice, the host waits once
a token, and graphs draw what single passes draw.
"""

import logging
import warnings

import pytest
import torch
from tests.models.architectures import small_folder
from tests.run.journeys import VALUES

from tether.build.models import open_model
from tether.build.roles import local_engine
from tether.core.rundir import read_jsonl
from tether.core.types import Prompt, Sampling, user
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rollout import graphs
from tether.rollout.graphs import Graphs
from tether.rollout.local import _Decoding
from tether.runner.run import run_recipe
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe

pytestmark = pytest.mark.gpu
PROMPTS = [Prompt((user(text),)) for text in ("one", "two or three", "and four")]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox",
            "olmo2", "granite", "mixtral", "qwen3_moe", "gpt_oss")  # fmt: skip


def drawn(device, source="tiny", count=8, *, rows=4, adapter=False, **sampling):
    loaded = open_model(ModelConfig(source=str(source), dtype="float32", device=device))
    role = Role(loaded.model)
    if adapter:
        role = Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=1), "policy")
        with torch.no_grad():
            for number, parameter in enumerate(role.parameters()):
                values = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(number)
                )
                parameter.copy_(0.1 * values)
    engine = local_engine(role, loaded, max_rows=rows)
    groups = engine.generate(
        PROMPTS, Sampling(max_new_tokens=count, **sampling), num_samples=3, seed=5
    )
    return [rollout for group in groups for rollout in group.rollouts]


def assert_same(there, here, tolerance=1e-3):
    assert [row.response_ids for row in there] == [row.response_ids for row in here]
    assert [p for row in there for p in row.logprobs] == pytest.approx(
        [p for row in here for p in row.logprobs], abs=tolerance
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_draws_what_the_cpu_draws(family, tmp_path):
    source = small_folder(family, tmp_path / "model")
    assert_same(drawn("cuda", source, adapter=True), drawn("cpu", source, adapter=True))


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 5, "temperature": 0.7},
                                      {"temperature": 0.0}, {"stop_strings": ("a", "e")}])  # fmt: skip
def test_graphs_draw_what_single_passes_draw(sampling, monkeypatch):
    """150 tokens: the cache grows over three widths, and rows leave."""
    kept = []
    record = Graphs._record
    monkeypatch.setattr(
        Graphs, "_record", lambda self, *how: (record(self, *how), kept.append(self.graphs))
    )
    replayed = drawn("cuda", count=150, adapter=True, **sampling)
    assert kept and len(kept[-1]) >= (2 if "stop_strings" in sampling else 4)
    monkeypatch.setenv("TETHER_GRAPHS", "0")
    single = drawn("cuda", count=150, adapter=True, **sampling)
    assert not Graphs(torch.device("cuda")).records
    assert_same(replayed, single)


def test_a_model_that_waits_for_the_host_is_run_as_it_is(monkeypatch, caplog):
    forward = torch.nn.functional.silu
    expected = drawn("cpu")
    monkeypatch.setattr(graphs, "once", lambda log, *words: log(*words))
    monkeypatch.setattr(
        torch.nn.functional, "silu", lambda x, **how: forward(x * (float(x.sum()) == 0 or 1), **how)
    )
    with caplog.at_level(logging.WARNING):
        assert_same(drawn("cuda"), expected)


def test_a_deterministic_run_gives_the_same_bits_twice(tmp_path):
    records, stages = [], ["sft", "pairs", "reward", "ppo"]
    for name in ("first", "second"):
        values = {
            **VALUES,
            "run": str(tmp_path / name),
            "model": {"source": "tiny", "device": "cuda"},
            "deterministic": True,
        }
        run_recipe(build(Recipe, values), stages)
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
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step(self)
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{one.filename}:{one.lineno}" for one in reported]
        reports.append([place for place in places if "/tether/" in place])

    monkeypatch.setenv("TETHER_GRAPHS", "0")  # a graph hides where the host would wait
    monkeypatch.setattr(_Decoding, "step", watched)
    drawn("cuda")
    assert reports and all(len(one) <= 1 for one in reports), max(reports, key=len)
