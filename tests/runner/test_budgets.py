"""Budgets by a clock that is set by hand: a step takes ten seconds, everything else none."""

import json
import math
import time

import pytest
from tests.runner.journeys import FEW, Killed, numbered_prompts

import tether
from tether.cli import app
from tether.cli.tools.doctor_run import examine_run
from tether.core.budget import TimeLimit
from tether.core.errors import ConfigError
from tether.runner.assembly.data.fitting import has_time
from tether.runner.budgets import Budgets, seconds_of
from tether.runner.call import recipe_of
from tether.runner.jobs import expand
from tether.runner.run import run_recipe
from tether.runner.start import start_run
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.watch.monitoring.doctor import Finding

PAIRS = [
    {"prompt": f"number {n}", "chosen": "yes" * (1 + n % 3), "rejected": "no"} for n in range(24)
]
STEADY = {"learning_rate": 1e-2, "schedule": "constant", "warmup_fraction": 0.0}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def free(monkeypatch):
    """The page takes no time."""
    monkeypatch.setattr("tether.runner.budgets.PAGE", 0.0)


def started(recipe, clock, lives=None, step=10.0):
    """Run it; each step takes ten seconds of the clock; killed at the end of step `lives`."""
    left = [lives]

    def bar(done, total, metrics):
        clock.now += step
        if left[0] is not None:
            left[0] -= 1
            if not left[0]:
                raise Killed

    return run_recipe(recipe, None, lambda title: bar, clock=clock)


def recipe(root, **sections):
    return build(
        Recipe,
        {"run": str(root), "seed": 3, "model": {"source": "tiny", "dtype": "float32"}, **sections},
    )


def pairs_file(folder):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return {"path": str(path)}


def direct(folder, root, **changes):
    own = {
        "data": pairs_file(folder),
        "epochs": 8,
        "prompts_per_update": 8,
        "heldout_fraction": 0.2,
        "optimizer": STEADY,
    }
    return recipe(root, direct={**own, **changes})


def grpo(folder, root, **changes):
    own = {
        "data": numbered_prompts(folder),
        "function": {"call": "tests.runner.test_budgets:length"},
        "steps": 40,
    }
    own |= {
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
        "checkpoint_every": 1,
    }
    return recipe(root, grpo={**own, **changes})


def slow(prompts, responses):
    """A judge that takes some of the clock for each answer."""
    slow.clock.now += slow.each * len(responses)
    return length(prompts, responses)


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def rates(root, stage):
    rows = map(json.loads, (root / stage / "metrics.jsonl").read_text().splitlines())
    return [row["learning_rate"] for row in rows]


def test_time_ends_a_training_at_a_whole_step_and_its_summary_says_so(tmp_path):
    """After k updates 10 k seconds are spent. The next takes ten, and ten more are kept for saving,
    with as many for held-out rows as learning from them would take.
    """
    made = direct(tmp_path, tmp_path / "run", budget=1)
    summary = started(made, Clock())["direct"]
    fits = math.floor((60 - 10 - 10 * summary["num_heldout_pairs"] / 8) / 10)
    assert summary["updates"] == summary["budget"]["ended_at"] == fits
    assert (
        summary["budget"]["total"] > fits
        and summary["budget"]["minutes"] == 1.0
        and summary["budget"]["spent"] == 10.0 * fits
    )
    assert (
        "value" in summary["heldout_accuracy"] and (tmp_path / "run" / "direct" / "policy").is_dir()
    )
    tether.load(tmp_path / "run").report()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert (
        f"Time ended dpo at step {fits} of {summary['budget']['total']}: its budget was 1 minutes."
    ) in page


def measured(folder, root, prompts, judge, **changes):
    """Six steps of ten seconds, measured on held-out prompts before and after."""
    evaluate = {"prompts": prompts, "best_of": (), "temperatures": (), "every": 4, "judge": judge}
    path = folder / "many.txt"
    path.write_text("".join(f"Tell me about number {n}.\n" for n in range(24)), encoding="utf-8")
    changes = {"data": {"path": str(path)}, "steps": 6, "optimizer": STEADY, **changes}
    return grpo(folder, root, evaluate=evaluate, **changes)


def test_held_out_prompts_are_as_many_as_fit_a_part_of_the_time(tmp_path, caplog):
    """An answer takes a quarter of a second. After sixteen of them 0.15 of the rest of half a minute
    is enough for 15, and of more for all 18. Sixteen are the least.
    """
    clock = Clock()
    for minutes, fits in ((2, 18), (1, 18), (0.5, 16)):
        slow.clock, slow.each = clock, 0.25
        judge = {"call": "tests.runner.test_budgets:slow"}
        made = measured(tmp_path, tmp_path / f"{minutes}", 18, budget=minutes, judge=judge)
        started(made, clock)
        rows = (tmp_path / f"{minutes}" / "grpo" / "heldout.jsonl").read_text().splitlines()
        assert {len(json.loads(row)["scores"]["score"]) for row in rows} == {fits}
    assert "its measurements take 16 of 18 held-out prompts" in caplog.text


def test_the_learning_rate_is_drawn_over_the_steps_that_fit(tmp_path):
    """At the third step 20 of 60 seconds are spent, so four more fit: linear from the first of
    seven to 0 after the last.
    """
    summary = started(grpo(tmp_path, tmp_path / "run", budget={"minutes": 1}), Clock())["grpo"]
    assert (
        summary["steps"] == 7
        and summary["budget"]["drawn"] == 7
        and summary["budget"]["total"] == 40
    )
    peak = 5e-4
    assert rates(tmp_path / "run", "grpo")[3:] == pytest.approx(
        [peak * (1 - (update - 1) / 6) for update in (3, 4, 5, 6)],
    )
    # still over forty, of which two warm up
    assert rates(tmp_path / "run", "grpo")[:2] == pytest.approx([peak / 2, peak])


@pytest.mark.parametrize("lives", [3, 5])
def test_a_start_that_goes_on_has_the_same_schedule(tmp_path, lives):
    clock = Clock()
    with pytest.raises(Killed):
        started(grpo(tmp_path, tmp_path / "cut", budget=1), clock, lives)
    clock.now += 5000.0  # time between two starts does not count
    started(grpo(tmp_path, tmp_path / "cut", budget=1), clock)
    started(grpo(tmp_path, tmp_path / "whole", budget=1), Clock())
    cut, whole = (rates(tmp_path / name, "grpo") for name in ("cut", "whole"))
    assert len(whole) == 7 and cut[:7] == whole
    # the last ten seconds of the first life were not saved: a step beyond has the last rate
    assert cut[7:] == [whole[-1]]


def test_a_stage_that_time_ended_is_finished_and_a_larger_budget_is_named(tmp_path, caplog):
    before = started(grpo(tmp_path, tmp_path / "run", budget=1), Clock())["grpo"]
    after = started(grpo(tmp_path, tmp_path / "run", budget=3), Clock())["grpo"]
    assert after == before
    assert "its budget of 1 minutes ended it at 7 of 40" in caplog.text
    caplog.clear()
    assert (
        started(grpo(tmp_path, tmp_path / "run", budget=1), Clock())["grpo"] == before
        and not caplog.text
    )


def test_a_schedule_that_is_drawn_keeps_its_budget_in_a_later_start(tmp_path, caplog):
    clock = Clock()
    with pytest.raises(Killed):
        started(grpo(tmp_path, tmp_path / "run", budget=1), clock, 5)
    summary = started(grpo(tmp_path, tmp_path / "run", budget=5), clock)["grpo"]
    assert summary["budget"]["minutes"] == 1.0 and summary["budget"]["drawn"] == 7
    assert "its learning rate was drawn over 7 of 40 steps" in caplog.text


def test_the_time_of_the_page_is_kept(tmp_path, monkeypatch):
    """Fifteen of sixty seconds: two updates fewer."""
    steps = {}
    for page in (0.0, 15.0):
        monkeypatch.setattr("tether.runner.budgets.PAGE", page)
        made = direct(tmp_path, tmp_path / f"{page}", budget=1)
        steps[page] = started(made, Clock())["direct"]["updates"]
    assert steps[0.0] - steps[15.0] in (1, 2)


def test_one_step_is_made_however_small_the_budget(tmp_path):
    assert (
        started(direct(tmp_path, tmp_path / "run", budget=0.01), Clock())["direct"]["updates"] == 1
    )


def test_rounds_end_whole(tmp_path):
    rounds = {
        "data": numbered_prompts(tmp_path),
        "function": {"call": "tests.runner.test_budgets:length"},
        "rounds": 3,
    }
    rounds |= {
        "max_new_tokens": 4,
        "samples_per_prompt": 2,
        "direct": {"prompts_per_update": 8, "heldout_fraction": 0.0},
    }
    summary = started(
        recipe(tmp_path / "run", rounds={**rounds, "budget": 0.3}),
        Clock(),
        step=10.0,
    )["rounds"]
    assert (summary["budget"]["ended_at"], summary["budget"]["total"]) == (
        len(summary["rounds"]),
        3,
    )
    folders = list((tmp_path / "run" / "rounds").glob("round-*"))
    assert len(folders) == len(summary["rounds"]) < 3


def test_a_budget_of_the_whole_run_is_divided_before_each_stage(tmp_path):
    """Ten minutes, with two parts for each policy and one for each other stage: sft 1 of 6, then
    direct 2 of 5, grpo 2 of 3, and evaluate what is left. Time that a stage leaves goes to all.
    """
    sections = {
        "sft": {"data": FEW["demonstrations"]},
        "direct": {"data": pairs_file(tmp_path)},
        "grpo": {"data": FEW["prompts"], "function": {"call": "a:b"}, "budget": 2},
        "evaluate": {
            "data": FEW["heldout"],
            "judge": {"call": "tether.quickstart.judges:letters"},
        },
    }
    made = recipe(tmp_path / "run", **sections, budget=10)
    clock = Clock()
    jobs = {job.name: job for job in expand(made)}
    assert list(jobs) == list(sections)
    budgets = Budgets([*jobs.values()], clock, clock.now, made.budget)
    assert budgets.limit(jobs["sft"]).seconds == pytest.approx(600 / 6)
    clock.now += 10.0
    assert budgets.limit(jobs["direct"]).seconds == pytest.approx(590 * 2 / 5)
    clock.now += 300.0
    assert budgets.limit(jobs["grpo"]).seconds == 120.0  # its own is smaller than 290 * 2 / 3
    clock.now += 130.0
    assert budgets.limit(jobs["evaluate"]).seconds == pytest.approx(160.0)


def test_a_budget_of_one_call_is_none_of_the_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"q{n}", "response": "a"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"data": {"path": "rows.jsonl"}, "epochs": 1, "heldout_fraction": 0.0}
    made = recipe("run", sft=sft, budget=5.0)
    start_run(made, ["sft"], lambda title: lambda *_: None, began=time.monotonic())
    later = recipe_of("dpo", "run", pairs_file(tmp_path), where="tether.dpo")
    assert later.budget is None and later.sft is not None and made.budget is not None


def test_each_combination_of_a_sweep_has_the_whole_budget_of_a_stage(tmp_path):
    values = grpo(tmp_path, tmp_path / "run", budget=2.0).model_dump(exclude_unset=True)
    swept = build(Recipe, {**values, "sweep": {"grpo.kl.coefficient": [0.0, 0.1, 0.2]}})
    results = started(swept, Clock())
    assert [one["steps"] for one in results.values()] == [13, 13, 13]


def test_finished_members_of_a_killed_reward_model_have_spent_their_time(tmp_path):
    section = {"data": pairs_file(tmp_path), "epochs": 8, "prompts_per_update": 8, "members": 2}
    values = {"reward": {**section, "budget": 2.0}}
    clock = Clock()
    with pytest.raises(Killed):
        started(recipe(tmp_path / "run", **values), clock, lives=9)
    assert (tmp_path / "run/reward/member-0/summary.json").is_file()
    each = [seconds_of(tmp_path / f"run/reward/member-{number}") for number in (0, 1)]
    assert seconds_of(tmp_path / "run/reward") == sum(each) > each[1] > 0


def test_the_time_of_earlier_starts_counts_in_a_whole_runs_budget(tmp_path):
    made = recipe(
        tmp_path / "run",
        sft={"data": FEW["demonstrations"]},
        direct={"data": pairs_file(tmp_path)},
        budget=10,
    )
    (tmp_path / "run" / "sft").mkdir(parents=True)
    (tmp_path / "run" / "sft" / "summary.json").write_text('{"seconds": 480.0}')
    clock = Clock()
    budgets = Budgets(jobs := expand(made), clock, clock.now, made.budget)
    assert [budgets.limit(job).seconds for job in jobs][1] == pytest.approx(120.0)


def test_a_control_leaves_half_of_the_time_to_the_training(tmp_path):
    limit = TimeLimit(100.0, clock=(clock := Clock()))
    clock.now += 20.0
    assert has_time(limit, 30.0, tmp_path / "a") and not has_time(limit, 31.0, tmp_path / "b")
    limit.reserve = 25.0
    assert has_time(limit, 5.0, tmp_path / "c") and not has_time(limit, 6.0, tmp_path / "d")
    endless = TimeLimit(clock=clock)
    assert has_time(endless, 1e9, tmp_path / "e") and not has_time(endless, 1.0, tmp_path / "d")


@pytest.mark.parametrize("minutes", [1, 2.5])
def test_the_doctor_names_the_key_of_a_budget_that_was_too_small(minutes, tmp_path):
    """16 steps of ten seconds, after the last of which 20 s are kept: four minutes are enough."""
    root = tmp_path / "run"
    summary = started(direct(tmp_path, root, budget=minutes), Clock())["direct"]["budget"]
    steps = summary["ended_at"]
    assert summary["total"] == 16 and summary["left_out"] == pytest.approx(10.0 * (16 - steps))
    (result,) = (one for one in examine_run(root)["dpo"] if one.check == "budget")
    assert isinstance(result, Finding) == (steps < 10) == (minutes == 1)
    if steps < 10:
        assert f"after {steps} of 16 steps" in result.message
        assert "set direct.budget to 3 minutes" in result.message


def test_a_limit_by_hand():
    clock = Clock()
    limit = TimeLimit(100.0, clock=clock)
    limit.begin(0, 50)
    limit.reserve = 16.0
    for done, passed in ((1, 20.0), (2, 4.0), (3, 4.0)):
        clock.now += passed
        drawn = limit.step(done)
    assert drawn
    assert limit.drawn == 3 + (100 - 28 - 16) // 4
    clock.now += 52.0
    assert not limit.over()  # 80 + 4 + 16
    clock.now += 1.0
    assert limit.over() and limit.summary()["budget"]["ended_at"] == 3
    assert not TimeLimit().bounded and TimeLimit().summary() == {}


def test_an_evaluation_keeps_no_more_time_than_its_measured_answers_take(tmp_path):
    """Two parts of three are 400 of 600 s. 32 prompts × 4 answers × 4 temperatures × 2 sides are
    1,024 answers, of 0.05 s each: 51.2 s are kept, not 200. With a second policy a half is given.
    """
    judge = {"call": "tether.quickstart.judges:letters"}
    data = {"path": "tether:heldout", "limit": 32}
    own = {"data": FEW["prompts"], "function": {"call": "a:b"}, "evaluate": {"judge": judge}}
    asked = {"data": data, "judge": judge, "samples": 4}
    clock = Clock()

    def limit(**changes):
        made = recipe(tmp_path / "run", **{"grpo": own, "evaluate": asked, **changes}, budget=10)
        jobs = expand(made)
        return Budgets(jobs, clock, clock.now, made.budget).limit(jobs[0])

    one = limit()
    assert one.seconds == pytest.approx(400.0)
    one.answered(0.05)
    assert one.seconds == pytest.approx(600 - 51.2)
    one.answered(0.5)
    assert one.seconds == pytest.approx(600 - 51.2)
    slow_answers = limit()
    slow_answers.answered(0.5)
    assert slow_answers.seconds == pytest.approx(400.0)
    two = limit(ppo=own)  # 1,536 answers of 3 models, 76.8 s, and the rest is the two policies'
    assert two.seconds == pytest.approx(240.0)
    two.answered(0.05)
    assert two.seconds == pytest.approx((600 - 76.8) / 2)
    for other in ({**asked, "judge": {"call": "a:c"}}, {**asked, "evaluators": {"refusal": {}}}):
        unlike = limit(evaluate=other)
        unlike.answered(0.05)
        assert unlike.seconds == pytest.approx(400.0)


@pytest.mark.parametrize("budget", [True, 0, -1, {"hours": 1}, "soon"])
def test_what_is_no_budget_is_refused(tmp_path, budget):
    with pytest.raises(ConfigError, match="budget"):
        recipe(tmp_path, sft={"data": FEW["demonstrations"], "budget": budget})


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_a_minute_is_a_minute(method, tmp_path, monkeypatch):
    """With a report, and by the clock on the wall: within a tenth, or one step."""
    monkeypatch.undo()
    how = {"run": tmp_path / "run", "budget": 1, "progress": False}
    began = time.monotonic()
    if method == "grpo":
        run = tether.grpo(
            "tiny",
            "tether:prompts",
            length,
            steps=100_000,
            prompts_per_step=8,
            samples_per_prompt=4,
            **how,
        )
    elif method == "dpo":
        run = tether.dpo("tiny", PAIRS, epochs=10_000, **how)
    else:
        run = tether.sft(
            "tiny",
            {"path": "tether:demonstrations", "limit": 100},
            epochs=10_000,
            **how,
        )
    took = time.monotonic() - began
    step = max(row["time/step"] for row in run.metrics())
    assert abs(took - 60.0) <= max(6.0, step), (took, step, run.summary["budget"])
    assert (tmp_path / "run" / "report.html").is_file() and run.summary["budget"]["ended_at"] > 1


@pytest.mark.parametrize(
    "words",
    [["run", "smoke"], ["sft", "smoke"], ["quickstart", "--smoke"], ["dpo", "{dpo}"]],
)
def test_every_command_that_trains_takes_a_budget(words, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "tether.cli.journeys._stages",
        lambda config, *_: made.append(config.budget),
    )
    path = tmp_path / "dpo.toml"
    path.write_text(
        f'run = "{tmp_path}/run"\nmodel = {{ source = "tiny" }}\n[direct]\ndata = {{ path = '
        f'"{pairs_file(tmp_path)["path"]}" }}\n',
    )
    app([word.format(dpo=path) for word in words] + ["--budget", "2.5"], standalone_mode=False)
    assert [budget.minutes for budget in made] == [2.5]


@pytest.mark.parametrize("budget", [2, {"minutes": 2}])
def test_python_takes_a_budget_for_a_stage_and_for_a_recipe(budget, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "tether.api.methods._run",
        lambda config, *_: made.append(config) or tether.Run(tmp_path),
    )
    tether.grpo("tiny", numbered_prompts(tmp_path), length, budget=budget, run=tmp_path / "run")
    tether.run("smoke", f"run={tmp_path}/smoke", budget=budget)
    assert made[0].grpo.budget.minutes == made[1].budget.minutes == 2.0
