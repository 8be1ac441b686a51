"""A test of a reward model counts the pairs whose prompts it has learned from."""

import json

import pytest
from typer.testing import CliRunner

import tether
from tether.cli import app
from tether.cli.tools.reward_bench import bench_rewards

TRAINED = [f"Question number {n}?" for n in range(12)]


def write(path, prompts, long=()):
    rows = [
        {"prompt": p, "chosen": f"good {n}", "rejected": f"bad {n}"} for n, p in enumerate(prompts)
    ]
    rows += [{"prompt": p, "chosen": "x" * 3000, "rejected": "b"} for p in long]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    how = {"epochs": 1, "prompts_per_update": 6, "progress": False}
    data = write(folder / "train.jsonl", TRAINED)
    for name, more in (
        ("all", {"heldout_fraction": 0.0}),
        ("part", {"heldout_fraction": 0.4}),
        ("three", {"members": 2}),
    ):
        tether.reward("tiny", data=data, run=folder / name, **how, **more)
    return folder


def test_rows_of_training_are_counted_in_any_case_and_spacing(trained):
    others = ["Something else?", "And this?"]
    asked = write(trained / "asked.jsonl", [*TRAINED[:3], "  question NUMBER 3? ", *others])
    found = bench_rewards(str(trained / "all"), [asked])["asked.jsonl"]
    assert found["seen_in_training"] == 4
    fresh = bench_rewards(str(trained / "all"), [write(trained / "fresh.jsonl", others)])[
        "fresh.jsonl"
    ]
    assert fresh["seen_in_training"] == 0 and fresh["accuracy_on_new_prompts"] == fresh["accuracy"]
    assert found["accuracy_on_new_prompts"]["count"] == 2


def test_held_out_prompts_were_not_seen(trained):
    summary = tether.load(trained / "part").summary
    found = bench_rewards(str(trained / "part"), [str(trained / "train.jsonl")])["train.jsonl"]
    assert 0 < summary["num_heldout_pairs"] == 12 - found["seen_in_training"]
    assert found["accuracy_on_new_prompts"]["value"] == pytest.approx(
        summary["heldout_accuracy"]["value"],
    )


def test_an_ensemble_knows_them_and_a_classifier_or_an_older_model_does_not(trained, tmp_path):
    train = str(trained / "train.jsonl")
    assert bench_rewards(str(trained / "three"), [train])["train.jsonl"]["seen_in_training"] > 0
    (trained / "part" / "reward" / "model" / "trained_prompts.txt").rename(tmp_path / "away")
    assert bench_rewards(str(trained / "part"), [train])["train.jsonl"]["seen_in_training"] is None
    (tmp_path / "away").rename(trained / "part" / "reward" / "model" / "trained_prompts.txt")


def test_the_command_says_so(trained):
    result = CliRunner().invoke(
        app,
        ["reward-bench", str(trained / "all"), str(trained / "train.jsonl")],
    )
    assert "12 pairs have prompts" in result.output


def test_pairs_that_cannot_be_scored_are_counted_by_reason(trained):
    asked = write(trained / "long.jsonl", ["Something else?"], long=["Too long?"])
    found = bench_rewards(str(trained / "all"), [asked], max_length=1000)["long.jsonl"]
    assert found["skipped"] == {"longer than 1000 tokens": 1} and found["num_pairs"] == 1
