"""The expected time: counts by hand, and that every way to train shows it before a model trains."""

import contextlib
import json
import math
import re

import pytest
from tests.runner.journeys import FEW

import tether
from tether.cli import app
from tether.cli.terminal import price
from tether.cli.terminal.price import price_lines
from tether.cli.tools.doctor_run import examine_run
from tether.core.errors import DataError
from tether.core.once import once
from tether.core.types import Sampling
from tether.runner.budgets import last_share
from tether.runner.jobs import expand
from tether.runner.methods.stage import run_stage
from tether.runner.planning.devices import Device
from tether.runner.planning.memory import Planner
from tether.runner.planning.phases import Phase, StagePlan
from tether.runner.planning.plan import Plan, plan, shape_config
from tether.runner.planning.sizes import row_sizes
from tether.runner.planning.speeds import RowSizes
from tether.runner.prepare import prepare
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.section import Counts, StageWork
from tether.settings.stages import STAGES
from tether.watch.report.doubts import doubts
from tether.watch.report.reading import read_journey

FAST = Device(name="planted", memory=8e9, products=1e12, bandwidth=1e11, gpu=False, dispatch=1e-6)
SLOW = Device(name="planted", memory=8e9, products=1e8, bandwidth=1e8, gpu=False, dispatch=1e-3)
PAIRS = [
    {"prompt": f"number {n // 2}", "chosen": "yes" * (1 + n % 2), "rejected": "no"}
    for n in range(40)
]


def recipe(tmp_path, **sections):
    return build(Recipe, {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, **sections})


def rows_file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return {"path": str(path)}


def test_rows_are_counted_by_prompt_and_measured_in_tokens(tmp_path):
    """Twenty prompts with three different answers each; a byte is a token, and eight more are
    guessed for a turn's marks.
    """
    made = recipe(tmp_path, direct={"data": rows_file(tmp_path)})
    sizes = row_sizes(made, ["direct"])["direct"]
    assert (sizes.count, sizes.groups, sizes.answers) == (40, 20, 3.0)
    assert sizes.prompt in (16, 17) and sizes.answer == round((2 + (3 + 6) / 2) / 2) + 8


def test_calls_thoughts_and_the_schemas_of_tools_are_tokens_too(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": "x" * 300}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "y" * 200}}}
    turns = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "z" * 100},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    path = tmp_path / "calls.jsonl"
    path.write_text((json.dumps({"messages": turns, "tools": [tool]}) + "\n") * 4)
    sizes = row_sizes(recipe(tmp_path, sft={"data": {"path": str(path)}}), ["sft"])["sft"]
    least = sum(len(json.dumps(part)) for part in (tool, call)) + 100
    assert least <= sizes.prompt + sizes.answer <= least + 100


def test_prompts_of_another_length_leave_the_measured_answers(tmp_path):
    made = recipe(tmp_path, direct={"data": rows_file(tmp_path)})
    measured = row_sizes(made, ["direct"])["direct"]
    given = row_sizes(made, ["direct"], 1000)["direct"]
    assert (given.prompt, given.answer) == (1000, measured.answer)
    assert given.longest == (1000, measured.longest[1])
    assert row_sizes(made, ["direct"], measured.prompt)["direct"].answer == measured.answer


@pytest.mark.parametrize("too_long", ["leave_out", "truncate"])
def test_a_plan_counts_the_rows_that_train_by_the_stages_own_code(tmp_path, too_long, caplog):
    """16 of 40 pairs, of 8 of 20 prompts, are longer than 64 bytes. The stage has the same counts, and
    the log says it once.
    """
    once.cache_clear()
    rows = [{**row, "chosen": "y" * (100 if n < 16 else 3)} for n, row in enumerate(PAIRS)]
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({**r, "rejected": f"no {n}"}) + "\n" for n, r in enumerate(rows)),
    )
    how = {"data": {"path": str(path)}, "max_length": 64, "too_long": too_long}
    made = recipe(tmp_path, direct={**how, "heldout_fraction": 0.0, "prompts_per_update": 64})
    cut = too_long == "truncate"
    sizes = row_sizes(made, ["direct"], encode=math.inf)["direct"]
    assert (sizes.count, sizes.groups) == ((40, 20) if cut else (24, 12))
    said = "16 of 40 rows (40%) " + ("are cut" if cut else "do not train")
    assert [line.count(said) for line in caplog.messages] == [1]
    (job,) = prepare(made, ["direct"])
    summary = run_stage(job)
    assert summary["num_pairs"] == sizes.count and summary["num_prompts"] == sizes.groups
    assert sum(summary["cut" if cut else "skipped"].values()) == 16
    (line,) = [line for line in caplog.messages if said in line]
    name, _, stage = line.partition(": ")
    assert name == "rows of [direct]"
    # the page and the doctor have its title
    assert any(stage in line for line in doubts(read_journey(tmp_path / "run")))
    found = examine_run(tmp_path / "run")
    assert [one.message for one in found["dpo"] if one.check == "rows"] == [stage]


def test_episodes_need_the_memory_of_their_longest_and_the_time_of_usual_ones(tmp_path):
    """Longest: 512 tokens; usual: sqrt(32 × 512) = 128."""
    rows = {"data": rows_file(tmp_path), "reward_source": "random"}
    tool = {"environment": {"tools": ["sums.py:add"], "turns": 5, "tokens": 512}}

    def planned(tokens, more=None):
        made = recipe(tmp_path, grpo={**rows, "max_new_tokens": tokens, **(more or {})})
        (stage,) = Planner(
            made,
            SLOW,
            shape_config(made.model),
            RowSizes(),
            measured=False,
        ).stages()
        return stage

    plans = [planned(32, tool), planned(512), planned(128)]
    episodes = plans[0]
    names = {phase.name for phase in episodes.phases}
    assert {"rollout", "update"} <= names
    for ours, most, time in zip(*(one.phases for one in plans), strict=True):
        sizes = [{**phase.bytes, "process": 0} for phase in (ours, most)]
        assert sizes[0] == sizes[1]
        assert ours.seconds == time.seconds != most.seconds
    assert episodes.work.words.endswith("× up to 5 turns × up to 32 tokens")


def test_a_plan_counts_the_solutions_that_fit(tmp_path, caplog):
    """Of 20 problems with two solutions each, 14 are longer than 64 bytes."""
    rows = [
        {
            "prompt": f"number {n // 2}",
            "steps": ["one", "two" if (n % 2 and n > 7) or n >= 20 else "t" * 90],
            "labels": [True, n % 2 == 0],
        }
        for n in range(40)
    ]
    once.cache_clear()
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [row for row in rows if len(row["steps"][1]) < 90]
    how = {"data": {"path": str(path)}, "max_length": 64, "heldout_fraction": 0.0}
    made = recipe(tmp_path, process={**how, "calibration_fraction": 0.0})
    sizes = row_sizes(made, ["process"], encode=math.inf)["process"]
    assert sizes.count == len(kept) < len(rows)
    assert sizes.groups == len({row["prompt"] for row in kept}) < 20
    said = f"{len(rows) - len(kept)} of 40 rows ({1 - len(kept) / 40:.0%}) do not train"
    (job,) = prepare(made, ["process"])
    summary = run_stage(job)
    assert summary["num_train"] == sizes.count
    assert [line.startswith(f"solutions: {said}") for line in caplog.messages].count(True) == 1
    assert any(said in line for line in doubts(read_journey(tmp_path / "run")))


def test_a_plan_of_rows_of_which_none_trains_says_so(tmp_path):
    made = recipe(tmp_path, direct={"data": rows_file(tmp_path), "max_length": 8})
    with pytest.raises(DataError, match=r"none of 40 rows of \[direct\] can be used"):
        row_sizes(made, ["direct"], encode=math.inf)


def test_updates_and_their_time_by_hand(tmp_path):
    """18 of 20 prompts are learned from, three times, 8 in an update: nine of 10 s. In each pass the
    other two are read, at 0.4 of the time of learning.
    """
    made = recipe(
        tmp_path,
        direct={
            "data": rows_file(tmp_path),
            "epochs": 3,
            "prompts_per_update": 8,
            "heldout_fraction": 0.1,
        },
    )
    work = made.direct.work(Counts(rows=40, prompts=20))
    assert (work.steps, work.words) == (9, "40 rows × 3 passes in 9 updates")
    stage = StagePlan(name="direct", phases=[Phase("update", {}, 10.0)], work=work, beside=7.0)
    assert stage.seconds == pytest.approx(7.0 + 90.0 * (1 + 0.4 / 9))


@pytest.mark.parametrize(
    ("section", "settings", "counts", "steps"),
    [
        ("sft", {"batch_size": 8, "epochs": 2}, Counts(90, 90), 2 * 11),
        ("reward", {"prompts_per_update": 4, "members": 3}, Counts(80, 20), 3 * 5),
        ("process", {"solutions_per_update": 16}, Counts(100, 10), 1),
        ("grpo", {"steps": 7}, Counts(), 7),
        ("rounds", {"rounds": 4}, Counts(10, 10), 4),
        ("pairs", {"prompts": 50, "samples_per_prompt": 4, "engine_rows": 64}, Counts(90, 90), 4),
        ("pairs", {}, Counts(), None),
        ("evaluate", {"engine_rows": 64}, Counts(32, 32, 2, Sampling(temperature=0.7)), 3 * 2),
        ("evaluate", {"engine_rows": 64}, Counts(32, 32, 2, Sampling(temperature=1.0)), 3 * 2),
        ("sft", {}, Counts(), None),
    ],
)
def test_steps_of_each_stage_by_hand(section, settings, counts, steps):
    """A tenth of the rows is held out. An evaluation answers at 3 or 4 temperatures, by 3 models."""
    judged = {"judge": {"call": "a:b"}} if section in ("pairs", "evaluate") else {}
    if section in ("grpo", "rounds"):
        judged = {"reward_source": "random"}
    more = {"heldout_fraction": 0.1} if section in ("sft", "reward", "process") else {}
    made = STAGES[section].section.model_validate({**judged, **more, **settings})
    assert made.work(counts).steps == steps


def test_the_gold_judge_is_loaded_once_and_embeds_what_it_reads(tmp_path):
    """The first stage that has it pays for its start."""
    gold = {"call": "tether.quickstart.judges:gold"}
    pairs = {"data": {"path": "tether:prompts"}, "prompts": 8, "judge": gold}
    ppo = {"data": {"path": "tether:prompts"}, "evaluate": {"prompts": 4, "judge": gold}}
    ppo |= {"function": {"call": "a:b"}, "reward_source": "function"}
    whole = recipe(tmp_path, pairs=pairs, ppo=ppo)
    config = shape_config(whole.model)
    planner = Planner(whole, FAST, config, RowSizes(), row_sizes(whole, ["pairs", "ppo"]))
    opening = planner.speeds.opening + 2 * 10.6e6 * 12_000 / 1e12
    assert planner.speeds.gold_opening == pytest.approx(opening)
    both, alone = planner.stages(), planner.stages(["ppo"])
    assert both[0].beside == pytest.approx(
        planner.speeds.opening + planner.speeds.saving + opening,
    )
    assert alone[0].beside - both[1].beside == pytest.approx(opening)
    read, judged = (
        planner.speeds.reading(6, 50, 20),
        planner.speeds.judging(whole.section("pairs").judge, 6, 50, 20),
    )
    assert judged - read == pytest.approx(2 * 10.6e6 * 6 * 30 / 1e12)


def test_rows_of_the_hub_have_no_time(tmp_path):
    made = recipe(tmp_path, direct={"data": {"path": "hub:somebody/pairs:train"}})
    priced = plan(made, FAST, sizes=row_sizes(made, ["direct"]), measured=False)
    assert priced.seconds is None and "time unknown" in next(price_lines(made, priced))


@pytest.mark.parametrize("section", ["sft", "reward", "ppo", "online_direct", "rounds", "pairs"])
def test_a_plan_of_the_time_alone_has_the_same_time_and_the_least_memory(section, tmp_path):
    gold = {"call": "tether.quickstart.judges:gold"}
    settings = {
        "sft": {"data": FEW["demonstrations"]},
        "reward": {"data": {"path": "tether:comparisons"}},
        "ppo": {"data": FEW["prompts"], "reward_source": "function", "function": {"call": "a:b"}},
        "online_direct": {
            **{"data": FEW["prompts"], "function": {"call": "a:b"}},
            **{"lora": False, "roles": "separate"},
        },
        "rounds": {"data": FEW["prompts"], "function": {"call": "a:b"}},
        "pairs": {"data": FEW["prompts"], "judge": gold},
    }
    made = recipe(tmp_path, **{section: settings[section]})
    config, sizes = shape_config(made.model), row_sizes(made, [section])
    (whole,), (cut,) = (
        Planner(made, FAST, config, RowSizes(), sizes, measured=measured).stages()
        for measured in (True, False)
    )
    assert cut.seconds == pytest.approx(whole.seconds)
    if section != "pairs":  # it learns nothing: all of its memory is known
        assert 0 < cut.peak < whole.peak


def test_the_price_of_a_whole_run_adds_its_stages(tmp_path):
    made = recipe(
        tmp_path,
        sft={"data": FEW["demonstrations"]},
        pairs={"data": FEW["prompts"], "judge": {"call": "a:b"}},
        reward={},
        repeat=2,
        ppo={},
    )
    stages = [
        StagePlan(
            name=name,
            phases=[Phase("update", {}, step)],
            work=StageWork(words, steps),
            beside=10.0,
            rounds=rounds,
        )
        for name, words, steps, step, rounds in (
            ("sft", "work", 3, 10.0, 1),
            ("ppo", "more", 2, 15.0, 2),
        )
    ]
    assert list(price_lines(made, Plan(FAST, 0, stages))) == [
        "sft: work; about 40 s",
        "ppo: 2 times more; about 80 s",
        "All 2 stages: about 2 min",
    ]


TOML = """run = "{}"
model = {{ source = "tiny", dtype = "float32" }}
[sft]
data = {{ path = "tether:demonstrations", limit = 12 }}
epochs = 1
"""
PRICED = r"sft: 12 rows × 1 pass in 1 update; about \d+ s"


@pytest.mark.parametrize("way", ["run", "stage", "resume", "python", "recipe in python"])
def test_every_way_to_train_shows_the_price_before_a_model_trains(
    way,
    tmp_path,
    capsys,
    monkeypatch,
):
    begun = []

    def trains(section, context, rows, run):
        begun.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr("tether.runner.methods.supervised.train", trains)
    path, root = tmp_path / "recipe.toml", tmp_path / "run"
    path.write_text(TOML.format(root))
    data = {"path": "tether:demonstrations", "limit": 12}
    ways = {
        "run": lambda: app(["run", str(path)], standalone_mode=False),
        "stage": lambda: app(["sft", str(path)], standalone_mode=False),
        "python": lambda: tether.sft("tiny", data, epochs=1, run=root),
        "recipe in python": lambda: tether.run(str(path)),
        "resume": lambda: app(["resume", str(root)], standalone_mode=False),
    }
    if way == "resume":
        with pytest.raises(KeyboardInterrupt):
            tether.sft("tiny", data, epochs=1, run=root, progress=False)
        assert not begun.pop()  # nobody looks
    with contextlib.suppress(KeyboardInterrupt):
        ways[way]()
    assert re.search(PRICED, begun[0]), begun


def test_a_model_that_the_planner_cannot_work_out_is_trained_all_the_same(
    tmp_path,
    capsys,
    monkeypatch,
):
    def unknown(*_, **__):
        raise AttributeError("no decoder\nof that name")

    monkeypatch.setattr("tether.cli.terminal.price.plan", unknown)
    run = tether.sft(
        "tiny",
        {"path": "tether:demonstrations", "limit": 12},
        epochs=1,
        run=tmp_path / "run",
    )
    assert run.summary["updates"] == 1
    assert "not known before the start: no decoder" in capsys.readouterr().out


def test_the_reward_model_reads_what_a_round_sampled(tmp_path):
    """Two rounds of 32 prompts, 4 answers of 16 tokens each: the reward model reads 128 answers in
    a round.
    """
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"number {n:04d}"}) + "\n" for n in range(32)),
    )
    data = {"path": str(tmp_path / "prompts.jsonl")}
    rounds = {
        "data": data,
        "rounds": 2,
        "samples_per_prompt": 4,
        "max_new_tokens": 16,
        "engine_rows": 128,
    }
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    reward = {"data": {"path": str(tmp_path / "pairs.jsonl")}}
    made = recipe(tmp_path, reward=reward, rounds={**rounds, "reward_source": "learned"})
    sizes = row_sizes(made, ["rounds"])
    config = shape_config(made.model)
    planner = Planner(made, SLOW, config, RowSizes(), sizes)
    (stage,) = planner.stages(["rounds"])

    (rollout,) = [phase for phase in stage.phases if phase.name == "rollout"]

    sampling = 16 * planner.speeds.decoding(128)
    reading = planner.speeds.reading(128, sizes["rounds"].prompt, 16)
    assert reading > 0.1 * sampling
    assert rollout.seconds == pytest.approx(sampling + reading)


def test_a_price_names_the_evaluators_whose_time_it_leaves_out(tmp_path):
    """Evaluators at the end and along a training; none where none is named."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(prompts, responses):\n    return [0.0 for _ in responses]\n")
    made = recipe(
        tmp_path,
        grpo={
            "data": FEW["prompts"],
            "reward_source": "function",
            "function": {"call": f"{rewards}:score"},
            "steps": 2,
            "prompts_per_step": 2,
            "evaluate": {"prompts": 2, "evaluators": {"diversity": {}}},
        },
        evaluate={
            "data": {"path": "tether:heldout"},
            "judge": {"call": f"{rewards}:score"},
            "evaluators": {"refusal": {}, "sycophancy": {}},
        },
    )
    priced = plan(made, FAST, sizes={}, measured=False)
    told = [line for line in price_lines(made, priced) if "not in this time" in line]
    assert told == [
        "grpo: not in this time: evaluators diversity.",
        "evaluate: not in this time: evaluators refusal, sycophancy.",
    ]
    made.evaluate.evaluators.clear()
    made.grpo.evaluate.evaluators.clear()
    assert not any("evaluators" in line for line in price_lines(made, priced))


LONG_RUN = {
    "sft": {"data": FEW["demonstrations"]},
    "direct": {"data": {"path": "tether:comparisons"}},
    "evaluate": {"data": {"path": "tether:heldout"}, "judge": {"call": "a:b"}},
}


@pytest.mark.parametrize(
    ("evaluation", "share"),
    [(600.0, 707 / 3 / 600), (100.0, 1.0)],
)
def test_the_share_of_an_evaluation_in_a_budget_by_hand(evaluation, share, tmp_path):
    """Of 12 minutes 3 s are for the report. SFT takes 10 s and leaves its rest; of 707 s the
    training of a policy has two parts, and the evaluation one, if it needs so much.
    """
    jobs = expand(recipe(tmp_path, **LONG_RUN), [*LONG_RUN])
    seconds = {"sft": 10.0, "direct": 9000.0, "evaluate": evaluation}
    assert last_share(jobs, seconds, 12) == pytest.approx(share)


class Shown:
    """A screen that keeps the lines of a price."""

    shows = True

    def __init__(self):
        self.lines = []

    def __call__(self, phase):
        return lambda *_: None

    def price(self, lines, expected):
        self.lines = [*lines]


@pytest.mark.parametrize(
    ("seconds", "data", "top", "named"),
    [
        (9000.0, {}, {}, " The win rate is then of about 58 of 150 prompts: ±12% instead of ±8%."),
        (60.0, {}, {}, None),
        (9000.0, {}, {"budget": 20}, None),
        (9000.0, {}, {"sweep": {"seed": [0, 1]}}, None),
        (9000.0, {"path": "hub:owner/prompts"}, {}, ""),
        (9000.0, {"limit": 16}, {}, ""),
    ],
)
def test_a_long_price_names_a_budget_and_what_it_costs(
    seconds,
    data,
    top,
    named,
    tmp_path,
    monkeypatch,
):
    """58 of 150 comparisons have Wilson's interval of ±12 points about one half. An unknown number of
    prompts has no interval, and sixteen are judged in any case.
    """
    times = {"sft": 10.0, "direct": seconds, "evaluate": 600.0 if seconds > 900 else 60.0}
    evaluate = {**LONG_RUN["evaluate"], "data": {**LONG_RUN["evaluate"]["data"], **data}}
    stages = [
        StagePlan(
            name=name,
            phases=[Phase("update", {}, 0.0)],
            work=StageWork("work", 1),
            beside=time,
        )
        for name, time in times.items()
    ]
    monkeypatch.setattr(price, "plan", lambda *_, **__: Plan(FAST, 0, stages))
    shown = Shown()
    made = recipe(tmp_path, **{**LONG_RUN, "evaluate": evaluate}, **top)
    price.announce_price(made, [*LONG_RUN], shown)
    told = [line for line in shown.lines if "--budget 12" in line]
    ends = "--budget 12 ends within 12 minutes, after fewer steps."
    assert told == ([] if named is None else [ends + named])


@pytest.mark.parametrize("most", [40, 39])
def test_the_price_is_of_the_rows_that_train_and_names_the_others_once(
    most,
    tmp_path,
    monkeypatch,
    caplog,
):
    """71 of 120 rows are longer than 64 bytes; of more rows than the price encodes it counts all."""
    once.cache_clear()
    rows = [{"prompt": f"n {n}", "response": "y" * (90 if n < 71 else 3)} for n in range(120)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"data": {"path": str(path)}, "max_length": 64, "heldout_fraction": 0.0, "epochs": 1}
    made = recipe(tmp_path, sft=how)
    monkeypatch.setattr(price, "ENCODED", 3 * most)
    shown = Shown()
    price.announce_price(made, ["sft"], shown)
    said = "rows of [sft]: 71 of 120 rows (59%) do not train: 71 longer than sft.max_length = 64"
    named = [line for line in caplog.messages if line.startswith(said)]
    assert len(named) == (most == 40)
    assert any(f"{49 if named else 120} rows × 1 pass" in line for line in shown.lines)
    (job,) = prepare(made, ["sft"])
    assert run_stage(job)["num_train"] == 49
    assert [line.startswith(said) for line in caplog.messages].count(True) == 1
