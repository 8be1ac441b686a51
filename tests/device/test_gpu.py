"""On a real NVIDIA GPU: it draws what the CPU draws, gives the same bits twice, the host waits once
a token, and graphs draw what single passes draw.
"""

import logging
import warnings

import pytest
import torch
from tests.models.architectures import small_folder
from tests.runner.journeys import VALUES

from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Prompt, Sampling, user
from tether.models.carried import MergedChange, carry
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rollout import graphs
from tether.rollout.graphs import Graphs
from tether.rollout.local import SlotDecoding
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import local_engine
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
                    parameter.shape,
                    generator=torch.Generator().manual_seed(number),
                )
                parameter.copy_(0.1 * values)
    engine = local_engine(role, loaded, max_rows=rows)
    groups = engine.generate(
        PROMPTS,
        Sampling(max_new_tokens=count, **sampling),
        num_samples=3,
        seed=5,
    )
    return [rollout for group in groups for rollout in group.rollouts]


def assert_same(there, here, tolerance=1e-3):
    assert [row.response_ids for row in there] == [row.response_ids for row in here]
    assert [p for row in there for p in row.logprobs] == pytest.approx(
        [p for row in here for p in row.logprobs],
        abs=tolerance,
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
        Graphs,
        "_record",
        lambda self, *how: (record(self, *how), kept.append(self.graphs)),
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
        torch.nn.functional,
        "silu",
        lambda x, **how: forward(x * (float(x.sum()) == 0 or 1), **how),
    )
    with caplog.at_level(logging.WARNING):
        assert_same(drawn("cuda"), expected)


def test_a_recording_that_failed_leaves_memory_and_random_numbers_usable():
    passes = Graphs(torch.device("cuda", 0))
    total = torch.zeros((), device="cuda")

    def work():
        total.add_(1)
        float(total)  # the host waits, which cannot be recorded
        total.add_(torch.rand((), device="cuda") * 0)

    for _ in range(3):
        passes.run("one", work)
    assert not passes.records and float(total) == 3
    torch.cuda.empty_cache()
    torch.nn.functional.dropout(torch.ones(1000, device="cuda"), 0.5)
    again = Graphs(torch.device("cuda", 0))
    for _ in range(3):
        again.run("two", lambda: total.add_(1))
    assert len(again.graphs) == 1 and float(total) == 6


def test_memory_of_recorded_passes_can_be_given_back():
    drawn("cuda", count=150, adapter=True)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        drawn("cuda", count=150, adapter=True)
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert all(new <= old + 2**22 for old, new in zip(before, after, strict=True)), (before, after)


def test_recorded_passes_follow_an_adapter_that_changes_in_place():
    """Between two calls of one engine, as an update changes it."""
    loaded = open_model(ModelConfig(source="tiny", dtype="float32", device="cuda"))
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=1), "policy")
    engine, results = local_engine(role, loaded, max_rows=4), []
    for number in (0, 1, 0):
        with torch.no_grad():
            for parameter in role.parameters():
                draw = torch.Generator().manual_seed(number)
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
        groups = engine.generate(PROMPTS, Sampling(max_new_tokens=40), num_samples=3, seed=5)
        results.append([row.response_ids for group in groups for row in group.rollouts])
    assert results[0] == results[2] != results[1]


def test_graphs_are_dropped_and_recorded_again(monkeypatch):
    expected = drawn("cuda", count=150, adapter=True)
    monkeypatch.setattr(graphs, "GRAPHS_AT_ONCE", 2)
    assert_same(drawn("cuda", count=150, adapter=True), expected)


def test_many_stop_tokens_can_be_recorded(monkeypatch):
    made = []
    record = Graphs._record
    monkeypatch.setattr(
        Graphs,
        "_record",
        lambda self, *how: (record(self, *how), made.append(self.records)),
    )
    loaded = open_model(ModelConfig(source="tiny", dtype="float32", device="cuda"))
    engine = local_engine(Role(loaded.model), loaded, max_rows=4)
    object.__setattr__(engine.encoder, "stop_ids", tuple(range(1000, 1060)))
    engine.generate(PROMPTS, Sampling(max_new_tokens=20), num_samples=3, seed=5)
    assert made and all(made)


def test_a_carried_change_can_be_recorded(monkeypatch):
    """In bfloat16, with graphs and without. Graphs read more places, so that sums are rounded
    otherwise: rows are compared up to the first token that differs.
    """
    records = []
    record = Graphs._record
    monkeypatch.setattr(
        Graphs,
        "_record",
        lambda self, *how: (record(self, *how), records.append(self.records)),
    )

    def answers():
        loaded = open_model(ModelConfig(source="tiny", dtype="bfloat16", device="cuda"))
        model, draw = loaded.model, torch.Generator().manual_seed(0)
        factors = {
            name: (
                torch.randn(4, layer.in_features, generator=draw),
                1e-3 * torch.randn(layer.out_features, 4, generator=draw),
            )
            for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and "proj" in name
        }
        carry(model, MergedChange(factors, torch.bfloat16))
        engine = local_engine(Role(model), loaded, max_rows=4)
        groups = engine.generate(PROMPTS, Sampling(max_new_tokens=20), num_samples=3, seed=5)
        return [row for group in groups for row in group.rollouts]

    recorded = answers()
    assert records and all(records)
    monkeypatch.setenv("TETHER_GRAPHS", "0")
    compared = 0
    for one, other in zip(recorded, answers(), strict=True):
        for place, (new, old) in enumerate(zip(one.response_ids, other.response_ids, strict=False)):
            if new != old:
                break
            assert one.logprobs[place] == pytest.approx(other.logprobs[place], abs=0.1)
            compared += 1
    assert compared > 40


def test_sizes_of_passes_are_chosen_written_down_and_kept(tmp_path):
    values = {
        **VALUES,
        "run": str(tmp_path / "run"),
        "model": {"source": "tiny", "device": "cuda"},
    }
    for key in ("engine_rows", "micro_batch_tokens"):
        values["ppo"] = {name: value for name, value in values["ppo"].items() if name != key}
    run_recipe(build(Recipe, values), ["sft", "pairs", "reward", "ppo"])
    noted = read_json(tmp_path / "run" / "ppo" / "config.json")["ppo"]
    assert (noted["engine_rows"], noted["micro_batch_tokens"]) == (256, 8192)
    run_recipe(build(Recipe, values), ["ppo"])


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
            ],
        )
    assert records[0] == records[1]


def test_the_host_waits_once_a_token(monkeypatch):
    step, reports = SlotDecoding.step, []

    def watched(self):
        with warnings.catch_warnings(record=True) as reported:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step(self)
            torch.cuda.set_sync_debug_mode("default")
        places = [f"{one.filename}:{one.lineno}" for one in reported]
        reports.append([place for place in places if "/tether/" in place])

    monkeypatch.setenv("TETHER_GRAPHS", "0")  # a graph hides where the host would wait
    monkeypatch.setattr(SlotDecoding, "step", watched)
    drawn("cuda")
    assert reports and all(len(one) <= 1 for one in reports), max(reports, key=len)
