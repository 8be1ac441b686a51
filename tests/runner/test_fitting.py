"""Stages that answer prompts within a budget, by a clock that is set by hand."""

import json
from types import SimpleNamespace

import pytest
from tests.runner.test_budgets import Clock, recipe

from tether.core.budget import TimeLimit
from tether.core.errors import RewardError
from tether.core.types import Prompt, Sampling, Score, user
from tether.runner.assembly.data.fitting import Fitting, measured_prompts, seconds_an_answer
from tether.runner.methods.evaluate import _Sides
from tether.runner.run import run_recipe
from tether.stages.learner.ranks import ALONE

CLOCK = Clock()
PER_ANSWER = 0.25


def slow(prompts, responses):
    """A judge that takes a quarter of a second of the clock for an answer."""
    CLOCK.now += PER_ANSWER * len(responses)
    return [float(len(response)) for response in responses]


def fitting(tmp_path, seconds, total, **how):
    clock = Clock()
    limit = TimeLimit(seconds, minutes=seconds / 60, clock=clock, **how)
    return Fitting(limit, tmp_path / "fitting.json", total), clock


def test_as_many_prompts_as_fit_by_hand(tmp_path):
    """100 s: 32 prompts took 48, so 34 more fit in the 52 that are left at 1.5 s each; half of the
    34 at once.
    """
    made, clock = fitting(tmp_path, 100.0, 200)
    assert made.next(0, 0.0, 20) == 20 and made.next(20, 9.9, 20) == 12
    clock.now += 48.0
    assert made.next(32, 1.5, 100) == 34 and made.next(32, 1.5, 17) == 17
    made.reserve = 40.0
    assert made.next(32, 1.5, 100) == 8
    clock.now += 60.0
    assert made.next(40, 1.5, 100) == 0


def test_a_start_that_goes_on_has_the_same_prompts(tmp_path):
    made, clock = fitting(tmp_path, 100.0, 50)
    order = made.order(range(50), seed=3)
    assert sorted(order) == list(range(50)) and order != list(range(50))
    clock.now += 70.0
    made.close(33)
    again, _ = fitting(tmp_path, 1e6, 50)
    assert again.order(range(50), seed=3) == order[:33]
    assert again.limit.before == 70.0
    ended = again.limit.summary()["budget"]
    assert (ended["ended_at"], ended["total"]) == (33, 50)
    assert ended["minutes"] == pytest.approx(100 / 60)


def test_an_interruption_leaves_a_count_that_is_noted(tmp_path):
    made, _ = fitting(tmp_path, 100.0, 200)
    made.close(100)
    again, _ = fitting(tmp_path, 100.0, 200)
    missing = [(place, f"prompt {place}") for place in range(100)]

    def answer(part):
        if part[0][0] >= 16:
            raise KeyboardInterrupt
        return [{"responses": ["a"]} for _ in part]

    with pytest.raises(KeyboardInterrupt):
        again.answer(missing, 16, answer, None)
    assert fitting(tmp_path, 100.0, 200)[0].count == 100


def test_without_a_budget_all_are_answered_in_their_order(tmp_path):
    made = Fitting(TimeLimit(clock=Clock()), tmp_path / "fitting.json", 40)
    assert made.order(range(40), seed=3) == list(range(40)) and made.next(0, 9.0, 64) == 40
    made.close(40)
    assert not made.limit.summary() and not list(tmp_path.iterdir())


def test_a_judge_is_timed_without_its_first_call():
    calls = []

    def judge(prompts, responses):
        calls.append(len(responses))
        CLOCK.now += 100.0 if len(calls) == 1 else 0.5 * len(responses)
        return [Score(1.0)] * len(responses)

    assert seconds_an_answer(judge, range(40), ["a"] * 40, CLOCK) == 0.5 and calls == [16, 16]

    def broken(prompts, responses):
        raise RewardError("none")

    assert seconds_an_answer(broken, range(4), ["a"] * 4, CLOCK) == 0.0


def test_held_out_prompts_of_a_training_fit_its_time(tmp_path):
    """Sixteen of 128 prompts take 8 of 100 s: 0.15 of the 92 that are left are enough for 27."""
    limit = TimeLimit(100.0, clock=(clock := Clock()))

    def measure(count):
        clock.now += 0.5 * count

    def asked(limit, note):
        return measured_prompts(limit, tmp_path / note, 128, measure, ALONE)

    assert asked(limit, "note.json") == 27
    assert asked(TimeLimit(clock=clock), "note.json") == 27  # a later start
    assert asked(TimeLimit(clock=clock), "other.json") == 128
    assert asked(TimeLimit(1.0, clock=clock), "least.json") == 16


def whole(tmp_path, minutes):
    judge = {"call": "tests.runner.test_fitting:slow"}
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"Tell me about number {n}.\n" for n in range(100, 220)))
    data = {"path": str(path)}
    return recipe(
        tmp_path / f"run-{minutes}",
        pairs={"data": data, "samples_per_prompt": 2, "max_new_tokens": 4, "judge": judge},
        direct={"prompts_per_update": 8, "epochs": 1},
        evaluate={
            "data": data,
            "judge": judge,
            "max_new_tokens": 4,
            "temperature": 1.0,
            "temperatures": [0.0],
        },
        budget=minutes,
    )


def test_the_time_of_the_other_side_is_kept_before_the_second_part(tmp_path):
    """32 prompts took 32 s, and loading 8: the other side needs 40 s. The judge takes half a second
    an answer, so 32 s for both sides.
    """
    limit = TimeLimit(1000.0, minutes=1000 / 60, clock=CLOCK)
    side = object.__new__(_Sides)
    side.fitting = Fitting(limit, tmp_path / "fitting.json", 200)
    side.section = SimpleNamespace(samples=1, engine_rows=32, temperatures=())
    side.sampling = Sampling(max_new_tokens=4)
    side.job = SimpleNamespace(policies={"ppo": None}, progress=None)
    side.steps = 0
    side.distinct = [Prompt((user(f"number {n}"),), id=str(n)) for n in range(200)]
    reserves = []

    def judge(prompts, responses):
        CLOCK.now += 0.5 * len(responses)
        return [Score(1.0)] * len(responses)

    def answered(prompts, first):
        reserves.append(side.fitting.reserve)
        CLOCK.now += len(prompts)
        return {1.0: [SimpleNamespace(text="a")] * len(prompts)}, [0.0] * len(prompts)

    side.judge = judge
    side._fitted(answered, opening=8.0)
    assert reserves[:2] == [0.0, 8.0 + 32.0 + 2 * 32 * 0.5]


def test_pairs_and_evaluation_end_a_whole_run_in_time(tmp_path):
    """An answer costs a quarter of a second of the judge's time and nothing else: pairs of 120
    prompts 60 s, the evaluation 120. A run of two minutes answers fewer, and names how many.
    """
    began = CLOCK.now
    results = run_recipe(whole(tmp_path, 2), None, None, clock=CLOCK)
    assert 100 <= CLOCK.now - began <= 132
    for name in ("pairs", "evaluate"):
        ended = results[name]["budget"]
        assert 32 <= ended["ended_at"] < ended["total"] == 120
        assert results[name]["num_prompts"] == ended["ended_at"]
    rows = (tmp_path / "run-2" / "evaluate" / "answers.jsonl").read_text().splitlines()
    prompts = [json.loads(row)["prompt"] for row in rows]
    assert len(set(prompts)) == len(prompts) == results["evaluate"]["num_prompts"]
    assert prompts != sorted(prompts)
    large = run_recipe(whole(tmp_path, 60), None, None, clock=CLOCK)
    assert "budget" not in large["pairs"] and large["evaluate"]["num_prompts"] == 120


def test_few_prompts_are_named_on_the_page(tmp_path):
    import tether

    run_recipe(whole(tmp_path, 2), None, None, clock=CLOCK)
    tether.load(tmp_path / "run-2").report()
    page = (tmp_path / "run-2" / "report.html").read_text(encoding="utf-8")
    assert "budget was 2 minutes." in page
