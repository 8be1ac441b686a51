"""What a classic training leaves behind can be reported and examined; and what it is given is used,
told of or refused.
"""

import math
import warnings

import pytest
import torch
from tests.api.classic.test_ppo import QUERIES, RESPONSES, SCORES, make

import tether
from tether.cli.tools.doctor_run import examine_run
from tether.core.errors import DataError, RunError
from tether.core.rundir import read_jsonl
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_journey


def logged(trainer, steps=12, scores=tuple(SCORES)):
    """Steps with their log, as a textbook's loop makes them."""
    batch = {"query": ["q"] * 4, "response": ["r"] * 4, "source": [0] * 4}
    for _ in range(steps):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stats = trainer.step(QUERIES, RESPONSES, list(scores))
        trainer.log_stats(stats, batch, list(scores))
    return trainer.run.path


def test_a_classic_run_has_a_page_and_is_examined(folder, tokenizer, tmp_path):
    trainer = make(folder, tokenizer, learning_rate=1e-4, ppo_epochs=2)
    path = logged(trainer)
    rows = list(read_jsonl(path / "metrics.jsonl"))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(
        row["objective/kl"] == row["kl/policy_reference_k1"]
        and row["ppo/mean_scores"] == row["reward/proxy"]
        for row in rows
    )
    assert next(read_jsonl(path / "samples.jsonl")) == {
        "step": 1,
        "prompt": "q",
        "response": "r",
        "proxy": SCORES[0],
    }
    journey = read_journey(path)
    assert [stage.kind for stage in journey.stages] == ["policy"] and journey.stages[0].settings[
        "epochs"
    ] == 2
    page = write_report(path).read_text()
    assert "Proximal policy optimisation" in page and "KL (nats per response)" in page
    results = examine_run(path)[path.name]
    assert {result.check for result in results} >= {"scores", "far_updates", "cut_off"}
    assert not (path / "summary.json").is_file()
    trainer.save_pretrained(tmp_path / "final")
    assert "not finished" not in " ".join(read_journey(path).notes)
    # and so is the folder of several trainings
    assert read_journey(path.parent).stages[0].name == path.name
    with pytest.raises(
        RunError,
        match=(f"holds no results of tether.*Give the folder of a run, such as .*/{path.name}"),
    ):
        read_journey(path.parent.parent)


def test_updates_that_go_too_far_are_told_of_at_once_in_the_log_and_by_the_doctor(
    folder,
    tokenizer,
):
    trainer = make(folder, tokenizer, learning_rate=1e-2, ppo_epochs=20)
    with pytest.warns(
        UserWarning,
        match="too long updates",
    ) as told:
        stats = trainer.step(QUERIES, RESPONSES, SCORES)
    assert stats["ppo/policy/clipfrac"] > 0.4 and len(told) == 1
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        trainer.step(QUERIES, RESPONSES, SCORES)
    path = logged(trainer, steps=14)
    assert "long_updates" in {alarm["detector"] for alarm in trainer.run.alarms()}
    found = next(one for one in examine_run(path)[path.name] if one.check == "long_updates")
    assert found.severity == "warning"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(folder, tokenizer, learning_rate=1e-6, ppo_epochs=2).step(QUERIES, RESPONSES, SCORES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_counted_and_told_of(folder, tokenizer, value):
    trainer = make(folder, tokenizer, learning_rate=1e-6)
    with pytest.warns(
        UserWarning,
        match=(
            r"1 of 4 scores are not finite: scores\[1\] is "
            r"-?(nan|inf)"
        ),
    ):
        stats = trainer.step(QUERIES, RESPONSES, [1.0, value, 2.0, 3.0])
    assert stats["objective/scores_missing"] == 1 and stats["ppo/mean_scores"] == 2.0
    trainer.log_stats(stats, {}, [1.0, value, 2.0, 3.0])
    (row,) = trainer.run.metrics()
    assert row["reward/failed"] == 1 and row["env/reward_mean"] == 2.0
    with pytest.raises(DataError, match=r"4 of 4 .*the reward"):
        trainer.step(QUERIES, RESPONSES, [value] * 4)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("queries", torch.tensor([], dtype=torch.long), r"queries\[1\] is empty"),
        (
            "queries",
            torch.tensor([5, 9999]),
            r"queries\[1\] holds the id 9999, and the model's "
            r"vocabulary ends at",
        ),
        (
            "queries",
            torch.tensor([5.0, 6.0]),
            r"queries\[1\] holds torch.float32 and not token ids",
        ),
        ("responses", torch.tensor([-100, 7]), r"responses\[1\] holds the id -100"),
        (
            "responses",
            torch.tensor([], dtype=torch.long),
            r"responses\[1\] is empty: it needs at "
            r"least one token",
        ),
        (
            "scores",
            torch.tensor([1.0, 2.0]),
            r"scores\[1\] is a tensor of shape \(2,\): give one "
            r"number",
        ),
        ("scores", [1.0, 2.0], r"scores\[1\] is a tensor of shape \(2,\): give one number"),
        ("scores", None, r"scores\[1\] is None: give one number for each response"),
        ("scores", "good", r"scores\[1\] is 'good': give one number for each response"),
    ],
)
def test_tensors_that_step_cannot_use_are_refused_by_name(folder, tokenizer, place, value, message):
    trainer = make(folder, tokenizer)
    before = trainer.model.pretrained_model.get_input_embeddings().weight.clone()
    given = {"queries": list(QUERIES), "responses": list(RESPONSES), "scores": list(SCORES)}
    given[place][1] = value
    with pytest.raises(tether.TetherError, match=message) as refused:
        trainer.step(**given)
    assert "\n" not in str(refused.value) and trainer.current_step == 0
    assert torch.equal(before, trainer.model.pretrained_model.get_input_embeddings().weight)
    if place == "queries":
        with pytest.raises(DataError, match=r"query_tensor\[0\]"):
            trainer.generate([value], max_new_tokens=2)


def test_fewer_rows_than_a_batch_are_told_of(folder, tokenizer):
    trainer = make(folder, tokenizer, learning_rate=1e-6)
    with pytest.warns(UserWarning, match="3 rows.*batch_size is 4"):
        trainer.step(QUERIES[:3], RESPONSES[:3], SCORES[:3])


def test_the_front_door_has_the_errors(folder, tokenizer):
    from tether.core import errors

    names = [name for name in vars(errors) if name.endswith("Error")]
    assert len(names) == 8 and all(getattr(tether, name) is getattr(errors, name) for name in names)
    assert {*names} <= {*dir(tether)}
