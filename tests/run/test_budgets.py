"""Budgets by a clock that is set by hand: a step takes ten seconds, everything else none."""

import json
import re
import time

import pytest
from benchmarks.every_stage import differences, results
from tests.run.journeys import FEW, Killed, journey, numbered_prompts

import tether
from tether.build.data.fitting import has_time
from tether.cli import app
from tether.core.budget import TimeLimit
from tether.core.errors import ConfigError
from tether.monitoring.doctor import Finding
from tether.planning.shares import Need, Price, StagePrice, budget_lines, share_out
from tether.runner.budgets import Budgets
from tether.runner.jobs import expand
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.tools.doctor_run import examine_run

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
    """A price by which a step takes ten seconds and nothing stands beside the steps."""

    def priced(recipe, names):
        return Price(
            [
                StagePrice(
                    name=name,
                    work="work",
                    steps=12,
                    step=10.0,
                    before=0.0,
                    after=0.0,
                    memory=0,
                )
                for name in names
            ],
        )

    monkeypatch.setattr("tether.planning.price.priced", priced)


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
        "function": {"call": "tests.run.test_budgets:length"},
        "steps": 40,
    }
    own |= {
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
        "checkpoint_every": 1,
    }
    return recipe(root, grpo={**own, **changes})


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def rates(root, stage):
    rows = map(json.loads, (root / stage / "metrics.jsonl").read_text().splitlines())
    return [row["learning_rate"] for row in rows]


def test_time_ends_a_training_at_a_whole_step_and_its_summary_says_so(tmp_path):
    """After k updates 10 k seconds are spent, and the next takes ten: the sixth is the last within
    a minute.
    """
    made = direct(tmp_path, tmp_path / "run", budget=1)
    summary = started(made, Clock())["direct"]
    assert summary["updates"] == summary["budget"]["ended_at"] == 6
    assert (
        summary["budget"]["total"] > 6
        and summary["budget"]["minutes"] == 1.0
        and summary["budget"]["spent"] == 60.0
    )
    assert (
        "value" in summary["heldout_accuracy"] and (tmp_path / "run" / "direct" / "policy").is_dir()
    )
    assert [path.name for path in (tmp_path / "run" / "direct" / "checkpoints").iterdir()] == [
        "step-000006",
    ]
    tether.load(tmp_path / "run").report()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert (
        f"Time ended dpo at step 6 of {summary['budget']['total']}: its budget was 1 minutes."
    ) in page


def test_a_larger_budget_gives_what_it_would_have_given_from_the_start(tmp_path):
    """With a learning rate that counts no updates: to the bit."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    started(direct(tmp_path, cut, budget=1, evaluate_every=4), Clock())
    started(direct(tmp_path, cut, budget=1.2, evaluate_every=4), Clock())
    assert json.loads((cut / "direct" / "summary.json").read_text())["budget"]["ended_at"] == 7
    started(direct(tmp_path, cut, evaluate_every=4), Clock())
    started(direct(tmp_path, whole, evaluate_every=4), Clock())
    assert differences(results(whole / "direct"), results(cut / "direct")) == []


def measured(folder, root, prompts, **changes):
    """Six steps of ten seconds, measured on held-out prompts before and after."""
    evaluate = {"prompts": prompts, "best_of": (2,), "temperatures": (0.5,), "every": 4}
    path = folder / "many.txt"
    path.write_text("".join(f"Tell me about number {n}.\n" for n in range(24)), encoding="utf-8")
    changes = {"data": {"path": str(path)}, "steps": 6, "optimizer": STEADY, **changes}
    return grpo(folder, root, evaluate=evaluate, **changes)


@pytest.mark.parametrize(("minutes", "steps"), [(0.5, 4), (0.4, 3)])
def test_a_measured_policy_goes_on_as_if_its_budget_had_been_larger(minutes, steps, tmp_path):
    """Ended at a step that is measured anyway, and at one that is not."""
    before = started(measured(tmp_path, tmp_path / "cut", 4, budget=minutes), Clock())["grpo"]
    assert before["steps"] == before["budget"]["ended_at"] == steps
    after = started(measured(tmp_path, tmp_path / "cut", 4, budget=2), Clock())["grpo"]
    started(measured(tmp_path, tmp_path / "whole", 4, budget=2), Clock())
    assert after["steps"] == 6 and "budget" not in after
    assert (
        differences(results(tmp_path / "whole" / "grpo"), results(tmp_path / "cut" / "grpo")) == []
    )


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (16, "the best answers of its start are not measured"),
        (18, "it is measured on 16 of 18 held-out prompts"),
    ],
)
def test_fewer_measurements_stay_and_a_sentence_says_so(
    prompts,
    why,
    tmp_path,
    monkeypatch,
    caplog,
):
    """Forty of sixty seconds are expected after the last step."""

    def priced(recipe, names):
        price = StagePrice(
            name="grpo",
            work="work",
            steps=6,
            step=10.0,
            before=0.0,
            after=40.0,
            memory=0,
        )
        return Price([price])

    monkeypatch.setattr("tether.planning.price.priced", priced)
    before = started(measured(tmp_path, tmp_path / "run", prompts, budget=1), Clock())["grpo"]
    assert before["budget"]["ended_at"] == 3
    assert "the best of 2 answers of the start is not measured" in caplog.text
    caplog.clear()
    after = started(measured(tmp_path, tmp_path / "run", prompts), Clock())["grpo"]
    assert (after["steps"], after["budget"]) == (3, before["budget"])
    assert f"keeps its budget: {why}. To train longer" in caplog.text


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


def test_more_time_for_a_schedule_that_was_drawn_is_refused_in_a_sentence(tmp_path, caplog):
    before = started(grpo(tmp_path, tmp_path / "run", budget=1), Clock())["grpo"]
    after = started(grpo(tmp_path, tmp_path / "run", budget=3), Clock())["grpo"]
    assert after == before
    assert (
        "its learning rate was drawn over 7 of 40 steps" in caplog.text
        and ("start anew with run=PATH") in caplog.text
    )
    caplog.clear()
    assert (
        started(grpo(tmp_path, tmp_path / "run", budget=1), Clock())["grpo"] == before
        and not caplog.text
    )


def test_the_time_of_the_evaluation_is_kept(tmp_path, monkeypatch):
    """Twenty seconds after the last step: the fourth is the last within a minute."""

    def priced(recipe, names):
        return Price(
            [
                StagePrice(
                    name=name,
                    work="work",
                    steps=12,
                    step=10.0,
                    before=0.0,
                    after=15.0,
                    memory=0,
                )
                for name in names
            ],
            closing=5.0,
        )

    monkeypatch.setattr("tether.planning.price.priced", priced)
    assert started(direct(tmp_path, tmp_path / "run", budget=1), Clock())["direct"]["updates"] == 4


def test_one_step_is_made_however_small_the_budget(tmp_path):
    assert (
        started(direct(tmp_path, tmp_path / "run", budget=0.01), Clock())["direct"]["updates"] == 1
    )


def test_rounds_end_whole_and_go_on(tmp_path):
    rounds = {
        "data": numbered_prompts(tmp_path),
        "function": {"call": "tests.run.test_budgets:length"},
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
    assert len(started(recipe(tmp_path / "run", rounds=rounds), Clock())["rounds"]["rounds"]) == 3


def test_a_budget_of_the_whole_run_is_shared_by_expected_times(tmp_path):
    """600 s, of which 30 for the page: 570 of the 660 s expected. Each has one and a half times its
    first ten steps, or its first 32 prompts, and a part of the rest by what it lacks then.
    """
    sections = {
        "sft": {"data": FEW["demonstrations"]},
        "grpo": {"data": FEW["prompts"], "function": {"call": "a:b"}},
    }
    judge = {"call": "tether.quickstart.judges:letters"}
    made = recipe(
        tmp_path / "run",
        **sections,
        direct={"data": pairs_file(tmp_path)},
        evaluate={"data": FEW["heldout"], "judge": judge},
        budget=10,
    )
    expected = {"sft": 100.0, "direct": 200.0, "grpo": 300.0, "evaluate": 60.0}
    price = Price(
        [
            StagePrice(
                name=name,
                work="",
                steps=100,
                step=seconds / 100,
                before=0.0,
                after=0.0,
                memory=0,
                prompts=64 if name == "evaluate" else None,
            )
            for name, seconds in expected.items()
        ],
        closing=30.0,
    )
    clock = Clock()
    jobs = {job.name: job for job in expand(made)}
    assert list(jobs) == list(expected)
    budgets = Budgets([*jobs.values()], price, clock, clock.now)
    least = {"sft": 15.0, "direct": 30.0, "grpo": 45.0, "evaluate": 45.0}
    rest = (570 - sum(least.values())) / (660 - sum(least.values()))
    assert budgets.limit(jobs["sft"]).seconds == pytest.approx(15 + 85 * rest)
    clock.now += 10.0  # it needed less: the others have all that they need
    assert budgets.limit(jobs["direct"]).seconds == pytest.approx(200.0)
    clock.now += 300.0  # and it took more
    assert budgets.limit(jobs["grpo"]).seconds == pytest.approx(45 + 255 * (260 - 90) / (360 - 90))
    assert budgets.limit(jobs["evaluate"]).seconds == pytest.approx(260.0)


def test_a_cheap_stage_is_not_starved_by_an_expensive_one(tmp_path):
    """Three minutes, of which a proportional share would leave the reward model one of its seven
    updates of three seconds; its loading and its evaluation take 15 s.
    """
    made = journey(tmp_path / "run", "budget=3")
    reward = {"steps": 7, "step": 3.0, "before": 10.0, "after": 5.0}
    ppo = {"steps": 30, "step": 10.0, "before": 20.0, "after": 10.0}
    others = {"pairs": 60.0, "evaluate": 60.0}
    stages = [
        *(
            StagePrice(
                name=n,
                work="",
                steps=32,
                step=s / 32,
                before=0,
                after=0,
                memory=0,
                prompts=32,
            )
            for n, s in others.items()
        ),
        StagePrice(name="reward", work="", memory=0, **reward),
        StagePrice(name="ppo", work="", memory=0, **ppo),
    ]
    jobs = {job.name: job for job in expand(made, ["pairs", "reward", "ppo", "evaluate"])}
    clock = Clock()
    budgets = Budgets([*jobs.values()], Price(stages), clock, clock.now)
    clock.now += budgets.limit(jobs["pairs"]).seconds
    share = budgets.limit(jobs["reward"]).seconds
    assert 180 * 36 / 486 < 15 < 36 <= share  # by expected times it would not even be loaded
    (line,) = (one for one in budget_lines(made, Price(stages)) if "enough for" in one)
    assert "reward all 7 updates" in line and re.search(r"ppo about \d of 30 steps", line)
    assert line.endswith("For all of it, start with budget = 9 or without a budget.")


def test_shares_by_hand():
    """The least of the cheapest first; what is left goes by what is missing."""
    needs = [Need(300.0, 900.0), Need(10.0, 100.0), Need(40.0, 50.0)]
    assert share_out(needs, 120.0) == [70.0, 10.0, 40.0]
    assert share_out(needs, 420.0) == pytest.approx([300 + 70 * 60 / 70, 10 + 9.0, 40 + 1.0])
    assert share_out([Need(1.0, 1.0), Need(3.0, 3.0)], 8.0) == [2.0, 6.0]


def test_a_control_leaves_half_of_the_time_to_the_training(tmp_path):
    limit = TimeLimit(100.0, after=10.0, clock=(clock := Clock()))
    clock.now += 20.0
    assert has_time(limit, 20.0, tmp_path / "a") and not has_time(limit, 21.0, tmp_path / "b")
    limit.measured = 25.0
    assert has_time(limit, 5.0, tmp_path / "c") and not has_time(limit, 6.0, tmp_path / "d")
    endless = TimeLimit(clock=clock)
    assert has_time(endless, 1e9, tmp_path / "e") and not has_time(endless, 1.0, tmp_path / "d")


def test_a_busy_machine_needs_more_of_what_is_left():
    """Steps take twice as long as expected."""
    limit = TimeLimit(100.0, each=2.0, clock=(clock := Clock()))
    limit.begin(0, 9)
    assert limit.slowness == 1.0
    for done in range(1, 4):
        clock.now += 4.0
        limit.step(done)
    assert limit.slowness == 2.0


@pytest.mark.parametrize(
    ("section", "minutes", "says"),
    [
        ("grpo", 3, "enough for about 6 of 40 steps. For all of it, start with grpo.budget = 9 "),
        ("grpo", 9, "enough for all 40 steps."),
        ("direct", 1, "enough for about 1 of 12 updates. For all of it, start with direct.budget"),
    ],
)
def test_the_price_says_what_a_budget_is_enough_for(section, minutes, says, tmp_path):
    """90 s and 30 s beside the steps of 10 s each; a budget of the stage's own."""
    made = {"grpo": grpo, "direct": direct}[section](tmp_path, tmp_path / "run", budget=minutes)
    steps = 40 if section == "grpo" else 12
    price = StagePrice(
        name=section,
        work="",
        steps=steps,
        step=10.0,
        before=90.0,
        after=30.0,
        memory=0,
    )
    line, *longer = budget_lines(made, Price([price]))
    assert says.rstrip() in line
    # loading, one step and the evaluation take 130 s
    assert [one[:38] for one in longer] == ["It will take longer than that, about 2"] * (
        minutes == 1
    )


def test_a_budget_of_a_stage_is_that_of_one_round(tmp_path):
    """Three rounds of ten minutes, of which each has five."""
    made = direct(tmp_path, tmp_path / "run", budget=5)
    rounds = {
        "name": "direct",
        "work": "",
        "steps": 100,
        "step": 6.0,
        "before": 0.0,
        "after": 0.0,
        "memory": 0,
        "rounds": 3,
    }
    lines = [*budget_lines(made, Price([StagePrice(**rounds)]))]
    assert len(lines) == 1 and "start with direct.budget = 10 " in lines[0]


def test_the_time_of_earlier_starts_counts_in_the_budget_that_is_enough(tmp_path):
    """Eight minutes are gone and five are left."""
    root = tmp_path / "run"
    made = direct(tmp_path, root, budget=9)
    (root / "direct").mkdir(parents=True)
    (root / "direct" / "summary.json").write_text(json.dumps({"seconds": 480.0}))
    price = StagePrice(
        name="direct",
        work="",
        steps=50,
        step=6.0,
        before=0.0,
        after=0.0,
        memory=0,
    )
    (line,) = budget_lines(made, Price([price]))
    assert "start with direct.budget = 13 " in line


@pytest.mark.parametrize(("minutes", "steps"), [(1, 6), (2.5, 15)])
def test_the_doctor_names_the_key_of_a_budget_that_was_too_small(minutes, steps, tmp_path):
    """16 steps of ten seconds: three minutes are enough."""
    root = tmp_path / "run"
    summary = started(direct(tmp_path, root, budget=minutes), Clock())["direct"]["budget"]
    assert (summary["ended_at"], summary["total"]) == (steps, 16)
    (result,) = (one for one in examine_run(root)["dpo"] if one.check == "budget")
    assert isinstance(result, Finding) == (steps < 10)
    if steps < 10:
        assert "after 6 of 16 steps" in result.message
        assert "set direct.budget to 3 minutes" in result.message


def test_a_limit_by_hand():
    clock = Clock()
    limit = TimeLimit(100.0, after=8.0, each=2.0, clock=clock)
    limit.begin(0, 50)
    for done, passed in ((1, 20.0), (2, 4.0), (3, 4.0)):
        clock.now += passed
        drawn = limit.step(done)
    # steps take twice as long as expected, and so does what follows
    assert drawn and limit.reserve == 16.0
    assert limit.drawn == 3 + (100 - 28 - 16) // 4
    clock.now += 52.0
    assert not limit.over()  # 80 + 4 + 16
    clock.now += 1.0
    assert limit.over() and limit.summary()["budget"]["ended_at"] == 3
    assert not TimeLimit().bounded and TimeLimit().summary() == {}


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


@pytest.mark.parametrize(("seconds", "warned"), [(50.0, False), (70.0, True)])
def test_a_budget_that_no_cut_can_keep_is_announced(tmp_path, seconds, warned):
    """Two minutes, of which collecting and comparing 32 prompts take so many seconds each, and a
    step of training ten.
    """
    recipe = journey(tmp_path / "run", "budget=2")
    work = {"pairs": seconds, "ppo": 900.0, "evaluate": seconds}
    stages = [
        StagePrice(
            name=name,
            work="work",
            steps=90,
            step=s / 90,
            before=0.0,
            after=0.0,
            memory=10**9,
            prompts=None if name == "ppo" else 32,
        )
        for name, s in work.items()
    ]
    lines = [line for line in budget_lines(recipe, Price(stages)) if "longer" in line]
    assert bool(lines) == warned
    if warned:
        assert "about 2 min: each training makes one step" in lines[0]
