"""The price before work: counts by hand, words, and that every way to train shows it before a model
trains.
"""

import contextlib
import json
import re

import pytest
from tests.run.journeys import FEW

import tether
from tether.cli import app
from tether.core.pace import Forecast
from tether.planning.devices import Device
from tether.planning.memory import Planner
from tether.planning.phases import Phase, StagePlan
from tether.planning.plan import Plan, shape_config
from tether.planning.price import costs, priced
from tether.planning.shares import Price, StagePrice
from tether.planning.sizes import row_sizes
from tether.planning.speeds import RowSizes
from tether.settings.reading import build
from tether.settings.recipe import Recipe

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


def test_prompts_of_another_length_leave_the_measured_answers(tmp_path):
    made = recipe(tmp_path, direct={"data": rows_file(tmp_path)})
    measured = row_sizes(made, ["direct"])["direct"]
    given = row_sizes(made, ["direct"], 1000)["direct"]
    assert (given.prompt, given.answer) == (1000, measured.answer)
    assert given.longest == (1000, measured.longest[1])
    assert row_sizes(made, ["direct"], measured.prompt)["direct"].answer == measured.answer


def test_updates_and_their_time_by_hand(tmp_path):
    """18 of 20 prompts are learned from, three times, 8 in an update: nine of 10 s; two are read at
    0.4 of that in an epoch.
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
    plan = Plan(
        FAST,
        1,
        [
            StagePlan(
                name="direct",
                phases=[Phase("update", {}, 10.0)],
                learning_rate=None,
                before=5.0,
                each=0.0,
                after=2.0,
            ),
        ],
    )
    (cost,) = costs(made, plan, {"direct": RowSizes(count=40, groups=20)})
    assert (cost.steps, cost.step, cost.before) == (9, 10.0, 5.0)
    assert cost.work == "40 rows × 3 passes in 9 updates"
    assert cost.seconds == pytest.approx(5.0 + 90.0 + 2.0 + 30.0 / 9 * 0.4)


@pytest.mark.parametrize(
    ("sections", "before", "along", "after"),
    [
        # 64 of 80 prompts are learned from in eight updates of 10 s; 16 are read, and 32 to centre
        ({"reward": {"data": {"path": "tether:comparisons"}}}, 0.0, 0.0, 0.25 + 0.5),
        (
            {"reward": {"data": {"path": "tether:comparisons"}, "evaluate_every": 4}},
            0.0,
            0.25 * 2,
            0.25 + 0.5,
        ),
        # pairs whose true order the judge's scores give are ranked once more
        (
            {"reward": {}, "pairs": {"data": FEW["prompts"], "judge": {"call": "a:b"}}},
            0.0,
            0.0,
            1.0,
        ),
        # demonstrations: held-out rows before the first update and after each of two passes
        ({"sft": {"data": FEW["demonstrations"], "epochs": 2}}, 0.25, 0.25, 0.25),
    ],
)
def test_what_a_training_reads_again_by_hand(sections, before, along, after, tmp_path):
    """In units of one pass over the rows that are learned from; reading takes 0.4 of learning."""
    (name, section), *others = sections.items()
    section = {"heldout_fraction": 0.2, **section}
    section["batch_size" if name == "sft" else "prompts_per_update"] = 8
    made = recipe(tmp_path, **{name: section}, **dict(others))
    plan = Plan(FAST, 1, [StagePlan(name=name, phases=[Phase("update", {}, 10.0)])])
    (cost,) = costs(made, plan, {name: RowSizes(count=80, groups=80)})
    assert cost.steps == 8 * section.get("epochs", 1)
    assert (cost.before, cost.after) == pytest.approx((0.4 * 80 * before, 0.4 * 80 * after))
    # what is read along with the training is spread over its steps, so that a budget may end it
    assert cost.steps * (cost.step - 10.0) == pytest.approx(0.4 * 80 * along)


def test_the_gold_judge_is_loaded_once_and_embeds_what_it_reads(tmp_path):
    """The first stage that has it pays for its start: after its answers, or before its steps."""
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
    assert both[0].after == pytest.approx(planner.speeds.saving + opening)
    assert alone[0].before - both[1].before == pytest.approx(opening)
    read, judged = (
        planner.speeds.reading(6, 50, 20),
        planner.speeds.judging(whole.section("pairs").judge, 6, 50, 20),
    )
    assert judged - read == pytest.approx(2 * 10.6e6 * 6 * 30 / 1e12)


def test_a_stage_that_goes_on_costs_what_is_left(tmp_path):
    made = recipe(tmp_path, grpo={"data": FEW["prompts"], "function": {"call": "a:b"}, "steps": 10})
    folder = tmp_path / "run" / "grpo" / "checkpoints" / "step-000007"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").write_text("{}")
    assert priced(made, ["grpo"], FAST).stages[0].steps == 3
    (tmp_path / "run" / "grpo" / "summary.json").write_text("{}")
    assert priced(made, ["grpo"], FAST).stages == []


def test_rows_of_the_hub_have_no_time(tmp_path):
    made = recipe(tmp_path, direct={"data": {"path": "hub:somebody/pairs:train"}})
    price = priced(made, ["direct"], FAST)
    assert price.seconds is None and ("time not known before its rows are counted") in next(
        price.lines(),
    )


@pytest.mark.parametrize("section", ["sft", "reward", "ppo", "online_direct", "rounds", "pairs"])
def test_a_price_that_ran_out_of_time_has_the_same_time_and_the_least_memory(section, tmp_path):
    """The planner measures no memory any more, and one sentence says so."""
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
    whole, cut = (
        costs(
            made,
            Plan(FAST, 0, Planner(made, FAST, config, RowSizes(), sizes, **how).stages()),
            sizes,
        )
        for how in ({}, {"until": 0.0})
    )
    assert cut[0].seconds == pytest.approx(whole[0].seconds)
    assert whole[0].whole and " at the peak" in next(Price(whole).lines())
    if section != "pairs":  # it learns nothing: all of its memory is known
        assert 0 < cut[0].memory < whole[0].memory
        assert re.search(r"at least [\d.]+ GB", next(Price(cut).lines())) and not cut[0].whole


def test_more_than_an_hour_names_two_keys_that_shorten_it(tmp_path):
    grpo = {
        "data": FEW["prompts"],
        "function": {"call": "a:b"},
        "steps": 1000,
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
    }
    grpo |= {"max_new_tokens": 128, "engine_rows": 8}
    made = recipe(tmp_path, grpo=grpo)
    price = priced(made, ["grpo"], SLOW)
    assert price.seconds > 3600
    (first, then), (second, later) = price.shorter
    assert {first, second} <= {
        f"grpo.{key}"
        for key in ("steps=500", "prompts_per_step=4", "samples_per_prompt=4", "max_new_tokens=64")
    }
    assert 0.3 * price.seconds < then <= later < 0.75 * price.seconds
    key, value = first.removeprefix("grpo.").split("=")
    halved = recipe(tmp_path, grpo={**grpo, key: int(value)})
    assert priced(halved, ["grpo"], SLOW).seconds == pytest.approx(then)
    *_, sentence = price.lines()
    assert f"{first} (about " in sentence and f"{second} (about " in sentence
    assert priced(made, ["grpo"], FAST).shorter == []


def test_the_price_of_a_whole_run_adds_its_stages(tmp_path):
    price = Price(
        [
            StagePrice(
                name="sft",
                work="work",
                steps=3,
                step=10.0,
                before=5.0,
                after=5.0,
                memory=int(1e9),
            ),
            StagePrice(
                name="ppo",
                work="more",
                steps=2,
                step=40.0,
                before=0.0,
                after=0.0,
                memory=int(2e9),
            ),
        ],
    )
    assert list(price.lines()) == [
        "sft: work; about 40 s, 1.00 GB at the peak",
        "ppo: more; about 80 s, 2.00 GB at the peak",
        "All 2 stages: about 2 min, 2.00 GB at the peak",
    ]


TOML = """run = "{}"
model = {{ source = "tiny", dtype = "float32" }}
[sft]
data = {{ path = "tether:demonstrations", limit = 12 }}
epochs = 1
"""
PRICED = r"sft: 12 rows × 1 pass in 1 update; about \d+ s, \d\.\d\d GB at the peak"


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

    monkeypatch.setattr("tether.methods.supervised.train", trains)
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

    monkeypatch.setattr("tether.planning.price.plan", unknown)
    run = tether.sft(
        "tiny",
        {"path": "tether:demonstrations", "limit": 12},
        epochs=1,
        run=tmp_path / "run",
    )
    assert run.summary["updates"] == 1
    assert (
        "The time and memory that this takes are not known before it starts: no decoder"
    ) in capsys.readouterr().out


def test_answers_are_judged_after_the_last_turn(tmp_path):
    """16 answers in four turns: a turn takes 5 s of sampling, and 2 of the judge's reading, which
    comes at the end. After the first turn three are left, and 8 s of reading.
    """
    pairs = {"data": FEW["prompts"], "prompts": 8, "samples_per_prompt": 2, "engine_rows": 4}
    judge = {"call": "tether.quickstart.judges:gold"}
    made = recipe(tmp_path, pairs={**pairs, "judge": judge})
    phases = [Phase("rollout", {}, 5.0), Phase("judge", {}, 2.0)]
    (price,) = costs(
        made,
        Plan(SLOW, 0, [StagePlan(name="pairs", phases=phases, learning_rate=None)]),
        {},
    )
    assert (price.steps, price.step, price.after) == (4, 5.0, 8.0)
    forecast = Forecast(0.0, price.expected)
    forecast.step(5.0, 2, 8)
    assert forecast.whole(5.0) == 4 * 5.0 + 8.0


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
    told = [line for line in priced(made, made.stages, FAST).lines() if "not in this time" in line]
    assert told == [
        "grpo: not in this time: evaluators diversity.",
        "evaluate: not in this time: evaluators refusal, sycophancy.",
    ]
    made.evaluate.evaluators.clear()
    made.grpo.evaluate.evaluators.clear()
    assert not any("evaluators" in line for line in priced(made, made.stages, FAST).lines())
