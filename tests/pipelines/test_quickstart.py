"""The whole pipeline on the tiny model: phases, resume, arms, summary and page."""

import json
import tomllib

import pytest

from tether.assemble import encoder_of
from tether.core.config import build, packaged_recipe
from tether.core.errors import ConfigError
from tether.core.rundir import read_jsonl
from tether.core.types import Comparison, assistant, user
from tether.data.comparisons import encode_comparisons
from tether.models.config import ModelConfig
from tether.models.loading import load_model
from tether.pipelines.foundation import Foundation
from tether.pipelines.quickstart import Quickstart, QuickstartConfig
from tether.preferences.annotators import in_true_order
from tether.report import write_report


def config(root, *overrides, arms=("ppo",)):
    values = {**tomllib.loads(packaged_recipe("smoke").read_text()), "run": str(root), "arms": list(arms), "max_prompts": 8}
    return build(QuickstartConfig, values, ["ppo.steps=2", "ppo.prompts_per_step=8", "ppo.max_new_tokens=12", *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("quickstart") / "run"
    return root, Quickstart(config(root, arms=("ppo", "beta0", "random"))).run()


def test_the_summary_has_what_is_promised(finished):
    root, summary = finished
    assert {"train_loss", "eval_loss"} <= set(summary["sft"])
    assert {"heldout_accuracy", "gold_accuracy", "heldout_loss", "calibration_error", "length_correlation"} <= set(
        summary["reward"]
    )
    assert {"proxy_gain", "gold_gain", "gold_win_rate", "kl", "seconds", "peak_rss_bytes", "gold_parts"} <= set(summary["ppo"])
    assert set(summary["arms"]) == {"ppo", "beta0", "random"}
    for estimate in (summary["reward"]["heldout_accuracy"], summary["ppo"]["gold_win_rate"]):
        assert estimate["low"] <= estimate["value"] <= estimate["high"] and estimate["count"] > 0
    assert json.loads((root / "summary.json").read_text()) == summary


@pytest.mark.parametrize("gold_difference", [0.4, -0.4])
def test_gold_accuracy_is_asked_of_the_true_order(gold_difference):
    """Annotators said "good"; after the way to a ranking, which turns labels below one half, gold's answer must stand first."""
    loaded = load_model(ModelConfig(source="tiny"))
    label = Comparison((user("hi"),), (assistant("good"),), (assistant("bad"),), metadata={"gold_difference": gold_difference})
    (ranking,), _ = encode_comparisons([in_true_order(label)], encoder_of(loaded), 64)
    best, worst = (loaded.tokenizer.decode(ranking.sequences[side[0]].ids) for side in (ranking.chosen, ranking.rejected))
    assert ranking.probability == (1.0,)
    assert ("good" in best and "bad" in worst) if gold_difference > 0 else ("bad" in best and "good" in worst)


def test_each_arm_differs_in_its_one_setting(finished):
    root, _ = finished
    settings = {arm: json.loads((root / arm / "config.json").read_text())["ppo"] for arm in ("ppo", "ppo-beta0", "ppo-random")}
    assert settings["ppo"]["kl"]["coefficient"] == 0.05 and settings["ppo-beta0"]["kl"]["coefficient"] == 0.0
    assert settings["ppo-random"]["reward_source"] == "random"
    assert all(row["kl/coefficient"] == 0 for row in read_jsonl(root / "ppo-beta0" / "metrics.jsonl"))


def test_heldout_prompts_are_never_trained_on(finished):
    root, _ = finished
    heldout = {row["prompt"] for row in read_jsonl(root / "evaluation" / "answers.jsonl")}
    seen = {row["prompt"] for row in read_jsonl(root / "ppo" / "samples.jsonl")} | {
        r["prompt"] for r in read_jsonl(root / "pairs" / "pairs.jsonl")
    }
    assert heldout and seen and not heldout & seen


def test_started_again_it_finishes_at_once_and_changes_nothing(finished, monkeypatch):
    root, summary = finished
    monkeypatch.setattr(Foundation, "build", None)
    monkeypatch.setattr(Foundation, "optimise", None)
    monkeypatch.setattr(Quickstart, "evaluate", None)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("metrics.jsonl")}
    assert Quickstart(config(root, arms=("ppo", "beta0", "random"))).run() == summary
    assert {p: p.stat().st_mtime_ns for p in root.rglob("metrics.jsonl")} == before


def test_an_arm_can_be_added_later_and_none_is_lost(finished, tmp_path):
    _, whole = finished
    first = Quickstart(config(tmp_path / "run")).run()
    assert set(first["arms"]) == {"ppo"}
    both = Quickstart(config(tmp_path / "run", arms=("ppo", "random"))).run()
    assert set(both["arms"]) == {"ppo", "random"} and both["arms"]["ppo"]["gold_win_rate"] == whole["ppo"]["gold_win_rate"]
    assert both["arms"]["random"]["gold_win_rate"] == whole["arms"]["random"]["gold_win_rate"]
    third = Quickstart(config(tmp_path / "run", arms=("ppo", "beta0"))).run()
    assert set(third["arms"]) == {"ppo", "random", "beta0"}


@pytest.mark.parametrize("phase", ["sft", "pairs", "ppo"])
def test_interrupted_anywhere_it_ends_with_the_same_numbers(finished, tmp_path, phase):
    root, _ = finished
    run = tmp_path / "run"

    def announce(name):
        def update(done, total, metrics):
            if name == phase and done >= min(2, total):
                raise KeyboardInterrupt

        return update

    with pytest.raises(KeyboardInterrupt):
        Quickstart(config(run, "ppo.checkpoint_every=1"), announce).run()
    Quickstart(config(run, "ppo.checkpoint_every=1")).run()
    for part in ("sft", "reward", "ppo"):
        ours, whole = (list(read_jsonl(r / part / "metrics.jsonl")) for r in (run, root))
        assert [(r["step"], r.get("loss"), r.get("policy/loss")) for r in ours] == [
            (r["step"], r.get("loss"), r.get("policy/loss")) for r in whole
        ]


def test_the_page_is_written(finished):
    root, summary = finished
    page = write_report(root).read_text()
    assert f"{100 * summary['ppo']['gold_win_rate']['value']:.0f}" in page


def test_settings_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="arms must contain 'ppo'"):
        config(tmp_path, arms=("beta0",))
    with pytest.raises(ConfigError, match="needs adapters"):
        config(tmp_path, "ppo.lora=false")
    with pytest.raises(ConfigError, match="the arm 'random' cannot be run"):
        config(tmp_path, "ppo.value_init=reward", arms=("ppo", "random"))
    assert not any(tmp_path.iterdir())
