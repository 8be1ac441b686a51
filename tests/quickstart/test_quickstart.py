"""The quickstart's recipe on the tiny model: stages, resume, arms, summary, page and terminal."""

import json
import shutil

import pytest
from rich.console import Console

from tether.cli.terminal import results
from tether.core.errors import ConfigError, MissingFileError
from tether.core.rundir import read_json, read_jsonl
from tether.runner.run import run_recipe
from tether.settings.recipe import read_recipe
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_journey

ARMS = {
    "beta0": "arms.beta0.ppo.kl={mode='fixed', coefficient=0.0}",
    "random": "arms.random.ppo.reward_source=random",
}
FEW = [f"{stage}.data.limit=8" for stage in ("sft", "pairs", "evaluate")]
SHORT = [
    "ppo.steps=2",
    "ppo.prompts_per_step=8",
    "ppo.max_new_tokens=12",
    "pairs.max_new_tokens=12",
    "ppo.evaluate.data.limit=8",
]


def config(root, *overrides, arms=()):
    return read_recipe(
        "smoke",
        [*FEW, *SHORT, f"run={root}", *(ARMS[arm] for arm in arms), *overrides],
    )


def finish(root, *overrides, arms=(), progress=None):
    run_recipe(config(root, *overrides, arms=arms), progress=progress)
    return read_json(root / "summary.json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("quickstart") / "run"
    return root, finish(root, arms=("beta0", "random"))


def test_the_summary_has_what_is_promised(finished):
    _, summary = finished
    assert {"train_loss", "eval_loss"} <= set(summary["sft"])
    assert {
        "heldout_accuracy",
        "gold_accuracy",
        "heldout_loss",
        "calibration_error",
        "length_correlation",
    } <= set(summary["reward"])
    assert {
        "proxy_gain",
        "gold_gain",
        "gold_win_rate",
        "kl",
        "seconds",
        "peak_rss_bytes",
        "gold_parts",
    } <= set(summary["ppo"])
    assert set(summary["arms"]) == {"ppo", "beta0", "random"}
    for estimate in (summary["reward"]["heldout_accuracy"], summary["ppo"]["gold_win_rate"]):
        assert estimate["count"] > 0 and (
            "reason" in estimate or estimate["low"] <= estimate["value"] <= estimate["high"]
        )


def test_a_start_that_is_gone_is_said_in_one_sentence(finished, tmp_path):
    root, _ = finished
    copy = tmp_path / "run"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "sft" / "model")
    shutil.rmtree(copy / "evaluate")
    with pytest.raises(MissingFileError, match=r"from which everything in .* starts, is gone"):
        finish(copy)


def test_each_arm_differs_in_its_one_setting(finished):
    root, _ = finished
    settings = {
        arm: read_json(root / arm / "config.json")["ppo"]
        for arm in ("ppo", "ppo-beta0", "ppo-random")
    }
    assert (
        settings["ppo"]["kl"]["coefficient"] == 0.05
        and settings["ppo-beta0"]["kl"]["coefficient"] == 0.0
    )
    assert settings["ppo-random"]["reward_source"] == "random"
    assert all(
        row["kl/coefficient"] == 0 for row in read_jsonl(root / "ppo-beta0" / "metrics.jsonl")
    )


def test_heldout_prompts_are_never_trained_on(finished):
    root, _ = finished
    heldout = {row["prompt"] for row in read_jsonl(root / "evaluate" / "answers.jsonl")}
    trained = {row["prompt"] for row in read_jsonl(root / "ppo" / "samples.jsonl")}
    labelled = {row["prompt"] for row in read_jsonl(root / "pairs" / "answers.jsonl")}
    assert heldout and trained and labelled and not heldout & (trained | labelled)


def test_started_again_it_finishes_at_once_and_changes_nothing(finished, monkeypatch):
    root, summary = finished
    for place in (
        "runner.assembly.manifest.open_model",
        "runner.methods.pairs.load_policy",
        "runner.methods.evaluate.load_policy",
    ):
        monkeypatch.setattr(f"tether.{place}", None)
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*.jsonl")}
    assert finish(root, arms=("beta0", "random")) == summary
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*.jsonl")} == before


@pytest.mark.slow
def test_an_arm_can_be_added_later_and_none_is_lost(finished, tmp_path):
    _, whole = finished
    first = finish(tmp_path / "run")
    assert set(first["arms"]) == {"ppo"}
    both = finish(tmp_path / "run", arms=("random",))
    assert (
        set(both["arms"]) == {"ppo", "random"}
        and both["arms"]["ppo"]["gold_win_rate"] == whole["ppo"]["gold_win_rate"]
    )
    assert both["arms"]["random"]["gold_win_rate"] == whole["arms"]["random"]["gold_win_rate"]
    third = finish(tmp_path / "run", arms=("beta0",))
    assert set(third["arms"]) == {"ppo", "random", "beta0"}


@pytest.mark.parametrize(
    "phase",
    [
        "pairs",
        "reward",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("sft", "ppo", "evaluate")),
    ],
)
def test_interrupted_anywhere_it_ends_with_the_same_numbers(finished, tmp_path, phase):
    root, _ = finished
    run = tmp_path / "run"

    def announce(name):
        def update(done, total, metrics):
            if name == phase and done >= min(2, total):
                raise KeyboardInterrupt

        return update

    with pytest.raises(KeyboardInterrupt):
        finish(run, "ppo.checkpoint_every=1", progress=announce)
    finish(run, "ppo.checkpoint_every=1")
    for part in ("sft", "reward", "ppo"):
        ours, whole = (list(read_jsonl(r / part / "metrics.jsonl")) for r in (run, root))
        assert [(r["step"], r.get("loss"), r.get("policy/loss")) for r in ours] == [
            (r["step"], r.get("loss"), r.get("policy/loss")) for r in whole
        ]


def test_the_page_and_the_terminal_tell_of_it(finished, capsys):
    root, summary = finished
    page = write_report(root).read_text()
    answers = list(read_jsonl(root / "evaluate" / "answers.jsonl"))
    assert (
        f"{100 * summary['ppo']['gold_win_rate']['value']:.0f}" in page
        and len(read_journey(root).answers) == len(answers) == 8
    )
    results.show_run(Console(width=170), root)
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "judged by tether.quickstart.judges:letters" in words
        and "beta0" in words
        and "random" in words
    )


def test_settings_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="needs adapters"):
        config(tmp_path, "ppo.lora=false")
    with pytest.raises(ConfigError, match="the arm 'random'"):
        config(tmp_path, "ppo.value_init=reward", arms=("random",))
    with pytest.raises(ConfigError, match="exactly one section"):
        config(tmp_path, "arms.wrong.sft.epochs=2")
    assert not any(tmp_path.iterdir())


def test_the_first_of_the_answers_is_the_policy_that_is_judged(finished):
    root, summary = finished
    row = next(read_jsonl(root / "evaluate" / "answers.jsonl"))
    texts = json.loads((root / "evaluate" / "ppo" / "answers.json").read_text())["texts"]
    assert row["after"] == texts[0] and set(row["arms"]) == {"beta0", "random"}
    assert summary["ppo"]["gold_gain"] == summary["arms"]["ppo"]["gold_gain"]
