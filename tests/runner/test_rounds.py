"""Rounds of sampling and training on a tiny model: who samples, who the reference is, what is kept
and what is not done twice.
"""

import json
import math
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from tests.every_stage import differences, results
from tests.runner.journeys import Killed

from tether.cli.tools.doctor_run import examine_run
from tether.core.errors import ConfigError, DataError, RewardError, RunError
from tether.core.rundir import RunDirectory, read_json, read_jsonl, write_json
from tether.core.types import Comparison, Demonstration, Prompt, Sampling, Score, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.sources import read
from tether.models.tiny import tiny_tokenizer
from tether.runner.assembly.job import Job
from tether.runner.assembly.roles import load_policy, local_engine, newest_policy
from tether.runner.methods import rounds
from tether.runner.methods.stage import run_stage
from tether.runner.run import run_recipe
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import REWARD_KEYS
from tether.settings.stages import STAGES
from tether.settings.supervised import DirectConfig, DirectSection
from tether.stages.learner.loop import epoch_order
from tether.watch.report.narrative import conclusion
from tether.watch.report.numbers import decimal
from tether.watch.report.page import write_report
from tether.watch.report.reading import read_journey

MODEL = ModelConfig(source="tiny", dtype="float32", device="cpu")
PROMPTS = [Prompt((user(f"question {n}"),), f"q{n}") for n in range(12)]
DEMONSTRATIONS = [
    Demonstration((user(f"question {n}"), assistant("bcd" * (2 + n % 3))), f"d{n}")
    for n in range(12)
]


class EvenReward:
    """Ten times the share of even token ids."""

    name = "even"

    def score(self, rollouts):
        return [
            Score(10.0 * sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids))
            for r in rollouts
        ]


def section(lora=LoraConfig(rank=8), direct=(), **settings):  # noqa: B008  (frozen)
    direct = {
        "optimizer": OptimizerConfig(learning_rate=5e-3),
        "prompts_per_update": 4,
        "heldout_fraction": 0.0,
        **dict(direct),
    }
    if settings.get("method") != "spin":
        settings = {"samples_per_prompt": 4, **settings}
    return RoundsSection(
        **{
            "rounds": 2,
            "max_new_tokens": 8,
            "lora": lora,
            "direct": DirectConfig(**direct),
            **settings,
        },
    )


def run_rounds(chosen, model, folder, seed, reward=None, **given):
    """With what `reward` makes in place of a trained reward model."""
    with mock.patch.object(rounds, "reward_apart", side_effect=lambda *_: reward()):
        return run_stage(
            job(chosen, folder, model=model, seed=seed, scorer=folder / "reward", **given),
        )


def job(settings, folder, name="rounds", **given):
    return Job(name=name, kind=STAGES[name], settings=settings, folder=folder, **given)


def rows_of(folder, number):
    return list(read_jsonl(folder / f"round-{number:02d}" / "pairs.jsonl"))


def losses_of(folder, number):
    return [row["loss"] for row in read_jsonl(folder / f"round-{number:02d}" / "metrics.jsonl")]


def weights_of(folder, number):
    policy = folder / f"round-{number:02d}" / "policy"
    (file,) = [
        *policy.glob("adapter/adapter_model.safetensors"),
        *policy.glob("model/model.safetensors"),
    ]
    return load_file(file)


def test_rounds_climb_and_are_not_run_twice(tmp_path):
    made = []

    def reward():
        made.append(1)
        return EvenReward()

    prompts = [Prompt((user(f"question {n}"),), f"q{n}") for n in range(64)]
    chosen = section(
        rounds=3,
        direct={"epochs": 2, "optimizer": OptimizerConfig(learning_rate=1e-2)},
    )
    summary = run_rounds(chosen, MODEL, tmp_path / "run", 0, reward=reward, rows=prompts)
    proxies = [one["sampling"]["proxy"] for one in summary["rounds"]]
    assert (
        proxies[0] + 0.5 < proxies[1] < proxies[2]
        and proxies[0] + 1.0 < proxies[2]
        and len(made) == 3
    )
    assert [one["sampling"]["pairs"] + one["sampling"]["tied"] for one in summary["rounds"]] == [
        64,
        64,
        64,
    ]
    assert run_rounds(chosen, MODEL, tmp_path / "run", 0, reward=reward, rows=prompts) == summary
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "round-03" / "summary.json").unlink()
    again = run_rounds(chosen, MODEL, tmp_path / "run", 0, reward=reward, rows=prompts)
    assert len(made) == 3  # two rounds are finished, and the third has its pairs
    assert [one["train_loss"] for one in again["rounds"]] == [
        one["train_loss"] for one in summary["rounds"]
    ]
    _, loaded = load_policy(str(tmp_path / "run" / summary["policy"]))
    assert loaded.source == "tiny"


@pytest.mark.parametrize("lora", [LoraConfig(rank=8), False])
def test_each_round_trains_on_what_its_own_start_samples(lora, tmp_path):
    run_rounds(section(lora), MODEL, tmp_path / "run", 0, reward=EvenReward, rows=PROMPTS)
    for number, start in ((1, "tiny"), (2, str(tmp_path / "run" / "round-01"))):
        policy, loaded = load_policy(start, MODEL)
        rows, order = (
            rows_of(tmp_path / "run", number),
            [PROMPTS[i] for i in epoch_order(12, 0, number - 1)],
        )
        engine, by_id = local_engine(policy, loaded), {prompt.id: prompt for prompt in PROMPTS}
        places = range(12 * (number - 1), 12 * number)
        groups = engine.generate(
            order,
            Sampling(max_new_tokens=8),
            num_samples=4,
            ordinals=list(places),
        )
        sampled = {group.prompt.id: {r.response_ids for r in group.rollouts} for group in groups}
        assert rows and all(
            tuple(row[f"{side}_ids"]) in sampled[row["id"]]
            for row in rows
            for side in ("chosen", "rejected")
        )
        assert all(row["chosen_score"] > row["rejected_score"] for row in rows)
        assert all([m["content"] for m in row["prompt"]] == [by_id[row["id"]].text] for row in rows)


@pytest.mark.parametrize("lora", [LoraConfig(rank=8), False])
@pytest.mark.parametrize("asked", ["each_update", "precomputed"])
def test_the_reference_is_the_rounds_start_or_stays(lora, asked, tmp_path):
    """Before its first update a policy that starts at its reference loses log 2 on every pair."""
    direct = {"reference_logprobs": asked}
    for reference in ("round", "fixed"):
        folder = tmp_path / reference
        run_rounds(
            section(lora, direct, reference=reference),
            MODEL,
            folder,
            0,
            reward=EvenReward,
            rows=PROMPTS,
        )
        assert losses_of(folder, 1)[0] == pytest.approx(math.log(2), abs=1e-5)
        assert (losses_of(folder, 2)[0] == pytest.approx(math.log(2), abs=1e-5)) == (
            reference == "round"
        )
    # Round 1 is the same in both; so is what round 2 samples.
    assert rows_of(tmp_path / "round", 2) == rows_of(tmp_path / "fixed", 2)


def test_killed_in_a_round_and_resumed_equals_uninterrupted(tmp_path):
    chosen = section(direct={"checkpoint_every": 1})
    run_rounds(chosen, MODEL, tmp_path / "whole", 0, reward=EvenReward, rows=PROMPTS)
    seen = []

    def progress(done, total, metrics):
        seen.append(done)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rounds(
            chosen,
            MODEL,
            tmp_path / "cut",
            0,
            reward=EvenReward,
            rows=PROMPTS,
            progress=progress,
        )
    assert (tmp_path / "cut" / "round-01" / "summary.json").is_file()
    run_rounds(chosen, MODEL, tmp_path / "cut", 0, reward=EvenReward, rows=PROMPTS)
    whole, cut = weights_of(tmp_path / "whole", 2), weights_of(tmp_path / "cut", 2)
    assert whole.keys() == cut.keys() and all(torch.equal(whole[key], cut[key]) for key in whole)
    assert not (tmp_path / "cut" / "round-02" / "checkpoints").exists()


def cut_after_sampling(chosen, folder):
    """A run that ends after the first round's pairs are written and before the first update."""
    with pytest.raises(Killed), mock.patch.object(rounds.Direct, "fit", side_effect=Killed):
        run_rounds(chosen, MODEL, folder, 0, reward=EvenReward, rows=PROMPTS)
    assert (folder / "round-01" / "pairs.jsonl").is_file()


@pytest.mark.parametrize("noted", [True, False])
def test_killed_after_sampling_and_resumed_equals_uninterrupted(noted, tmp_path):
    """Also where the counts of the sampling were lost: it is done again."""
    chosen = section()
    run_rounds(chosen, MODEL, tmp_path / "whole", 0, reward=EvenReward, rows=PROMPTS)
    cut_after_sampling(chosen, tmp_path / "cut")
    manifest = tmp_path / "cut" / "round-01" / "manifest.json"
    if not noted:
        values = read_json(manifest)
        del values["sampling"]
        write_json(manifest, values)
    before = (manifest.parent / "pairs.jsonl").stat().st_mtime_ns
    run_rounds(chosen, MODEL, tmp_path / "cut", 0, reward=EvenReward, rows=PROMPTS)
    assert differences(results(tmp_path / "whole"), results(tmp_path / "cut")) == []
    assert ((manifest.parent / "pairs.jsonl").stat().st_mtime_ns == before) is noted
    assert read_json(manifest)["sampling"]["pairs"] == len(rows_of(tmp_path / "whole", 1))


def test_a_round_that_has_pairs_is_not_trained_with_other_settings(tmp_path):
    cut_after_sampling(section(), tmp_path / "cut")
    folder = tmp_path / "cut" / "round-01"
    with pytest.raises(RunError, match=r"round-01 .*config: .*temperature"):
        RunDirectory.open(
            folder,
            {"rounds": section(temperature=0.5), "model": MODEL, "seed": 0, "round": 1},
        )


def test_leftovers_of_a_killed_end_go_at_the_next_start(tmp_path):
    """The process died between the summary and the removal of checkpoints and lock."""
    chosen, root = section(rounds=1, direct={"checkpoint_every": 1}), tmp_path / "run"
    with (
        pytest.raises(Killed),
        mock.patch.object(rounds, "drop_checkpoint", side_effect=Killed),
    ):
        run_rounds(chosen, MODEL, root, 0, reward=EvenReward, rows=PROMPTS)
    assert list((root / "round-01" / "checkpoints").iterdir())
    run_rounds(chosen, MODEL, root, 0, reward=EvenReward, rows=PROMPTS)
    assert not (root / "round-01" / "checkpoints").exists()
    for leftover in ("checkpoints/step-000001", ".lock"):
        (root / leftover).mkdir(parents=True) if "/" in leftover else (root / leftover).touch()
    before = (root / "summary.json").stat().st_mtime_ns
    run_rounds(chosen, MODEL, root, 0, reward=EvenReward, rows=PROMPTS)
    assert not (root / "checkpoints").exists() and not (root / ".lock").exists()
    assert (root / "summary.json").stat().st_mtime_ns == before


def test_spin_sets_demonstrations_over_the_policys_own_answers(tmp_path):
    chosen = section(method="spin", direct={"epochs": 4})
    unusable = Demonstration((user("q"),), "no answer")
    summary = run_rounds(chosen, MODEL, tmp_path / "run", 0, rows=[*DEMONSTRATIONS, unusable])
    encoder, shown = ChatEncoder(tiny_tokenizer(), (1,)), {d.id: d for d in DEMONSTRATIONS}
    for number in (1, 2):
        rows = rows_of(tmp_path / "run", number)
        assert len(rows) == 12 and summary["rounds"][number - 1]["sampling"]["unusable"] == 1
        for row in rows:
            encoded = encoder.conversation(shown[row["id"]].messages)
            assert tuple(row["prompt_ids"] + row["chosen_ids"]) == encoded.ids
            assert len(row["rejected_ids"]) <= 8 and row["rejected_ids"] != row["chosen_ids"]
        assert losses_of(tmp_path / "run", number)[0] == pytest.approx(math.log(2), abs=1e-5)
        assert losses_of(tmp_path / "run", number)[-1] < 0.5


def test_pairs_are_a_published_layout(tmp_path):
    run_rounds(section(rounds=1), MODEL, tmp_path / "run", 0, reward=EvenReward, rows=PROMPTS)
    rows = rows_of(tmp_path / "run", 1)
    pairs = list(read([tmp_path / "run" / "round-01" / "pairs.jsonl"], Comparison))
    assert len(pairs) == len(rows) > 8
    for pair, row in zip(pairs, rows, strict=True):
        assert pair.prompt[0].content == row["prompt"][0]["content"] and pair.group == row["group"]
        assert pair.margin == pytest.approx(row["chosen_score"] - row["rejected_score"])


class Even:
    name = "even"

    def score(self, rollouts):
        return [Score(1.0)] * len(rollouts)


def test_rounds_without_prompts_or_without_pairs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"set rounds\.data\.path"):
        run_rounds(section(), MODEL, tmp_path / "b", 0, reward=EvenReward)
    with pytest.raises(DataError, match=r"no pair.*'tied': 12"):
        run_rounds(section(), MODEL, tmp_path / "d", 0, rows=PROMPTS, reward=Even)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["method=spin", "samples_per_prompt=4"],
            "samples_per_prompt has no effect with rounds.method = 'spin'",
        ),
        (["method=spin", "missing_stop_penalty=1.0"], "missing_stop_penalty has no effect"),
        (["method=spin", "reference=fixed"], "against the round's own start"),
        (["method=spin", "direct.loss=ipo"], "with rounds.direct.loss = 'dpo'"),
        (
            ["method=spin", "reward_source=random"],
            "rounds.reward_source has no effect with rounds.method = 'spin'",
        ),
        (["method=spin", "max_failed=0.1"], "rounds.max_failed has no effect"),
        (["reward_source=function"], "belong together"),
        (["verifiable.kind=reasoning-gym"], "takes them from data"),
        (
            ["reference=fixed", "direct.loss=orpo"],
            "rounds.reference has no effect with rounds.direct.loss = 'orpo'",
        ),
    ],
)
def test_wrong_settings_are_one_clear_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(RoundsSection, {}, overrides, where="recipe.toml")


def observed(folder, monkeypatch, rows=PROMPTS, **settings):
    """All that an option may change: pairs, weights, and how many responses were decoded at
    once.
    """
    made = []
    monkeypatch.setattr(
        rounds,
        "local_engine",
        lambda *a, **k: (made.append(k), local_engine(*a, **k))[1],
    )
    chosen = section(**settings)
    run_rounds(
        chosen,
        MODEL,
        folder,
        0,
        reward=None if chosen.method == "spin" else EvenReward,
        rows=rows,
    )
    last = chosen.rounds
    return (
        made,
        rows_of(folder, last),
        [float(t.double().sum()) for t in weights_of(folder, last).values()],
    )


def test_every_option_has_an_effect(tmp_path, monkeypatch):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.text}) + "\n" for p in PROMPTS[:6]))
    effects = {
        "method": {"method": "spin", "rows": DEMONSTRATIONS},
        "rounds": {"rounds": 1},
        "reference": {"reference": "fixed"},
        "prompts_per_round": {"prompts_per_round": 8},
        "samples_per_prompt": {"samples_per_prompt": 2},
        "max_new_tokens": {"max_new_tokens": 6},
        "temperature": {"temperature": 0.5},
        "missing_stop_penalty": {"missing_stop_penalty": 10.0},
        "engine_rows": {"engine_rows": 4},
        "data": {"data": {"path": str(file)}, "rows": None},
        "lora": {"lora": False},
        "direct": {"direct": {"beta": 0.5}},
    }
    # tests/runner/test_budgets.py has that
    assert effects.keys() == RoundsSection.model_fields.keys() - {*REWARD_KEYS, "budget"}
    plain = observed(tmp_path / "plain", monkeypatch)
    for option, settings in effects.items():
        assert observed(tmp_path / option, monkeypatch, **settings) != plain, option


FUNCTION = """
def longest(prompts, responses):
    return [float(len(response)) for response in responses]

def failing(prompts, responses):
    return [None] * len(responses)
"""


def rewarded(folder, name, **more):
    (folder / "mine.py").write_text(FUNCTION)
    return section(rounds=2, function={"call": f"{folder / 'mine.py'}:{name}"}, **more)


def test_a_reward_of_ones_own_orders_the_pairs(tmp_path):
    chosen = rewarded(tmp_path, "longest")
    summary = run_stage(job(chosen, tmp_path / "run", model=MODEL, rows=PROMPTS))
    for number in (1, 2):
        rows = rows_of(tmp_path / "run", number)
        texts = [[row[side][0]["content"] for side in ("chosen", "rejected")] for row in rows]
        assert rows and all(len(chosen) > len(rejected) for chosen, rejected in texts)
        assert [[row["chosen_score"], row["rejected_score"]] for row in rows] == [
            [*map(float, map(len, pair))] for pair in texts
        ]
        sampled = summary["rounds"][number - 1]["sampling"]
        assert (
            sampled["proxy_std"] > 0
            and 0 <= sampled["finished"] <= 1
            and 1 <= sampled["length"] <= 8
        )


def test_a_reward_that_fails_ends_the_rounds_in_one_sentence(tmp_path):
    chosen = rewarded(tmp_path, "failing")
    with pytest.raises(
        RewardError,
        match=r"last \d+.*max_failed = 0.5",
    ):
        run_stage(job(chosen, tmp_path / "run", model=MODEL, rows=PROMPTS))
    chosen = rewarded(tmp_path, "failing", max_failed=1.0)
    with pytest.raises(DataError, match="'failed': 12"):
        run_stage(job(chosen, tmp_path / "other", model=MODEL, rows=PROMPTS))


def test_the_numbers_of_all_rounds_are_those_of_one_training(tmp_path):
    run_rounds(section(rounds=2), MODEL, tmp_path / "rounds", 0, reward=EvenReward, rows=PROMPTS)
    rows = RunDirectory(tmp_path / "rounds").metrics()
    own = [losses_of(tmp_path / "rounds", number) for number in (1, 2)]
    assert [row["loss"] for row in rows] == own[0] + own[1]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["round"] for row in rows] == [1] * len(own[0]) + [2] * len(own[1])
    summary = RunDirectory(tmp_path / "rounds").summary()
    assert [
        read_json(tmp_path / "rounds" / f"round-{n:02d}" / "manifest.json")["rows"] for n in (1, 2)
    ] == [len(PROMPTS)] * 2
    assert summary["updates"] == len(rows) and summary["num_pairs"] == sum(
        len(rows_of(tmp_path / "rounds", n)) for n in (1, 2)
    )
    assert summary["seconds"] >= sum(one["sampling"]["seconds"] for one in summary["rounds"]) > 0
    (stage,) = read_journey(tmp_path / "rounds").stages
    assert stage.kind == "rounds" and [row["loss"] for row in stage.metrics] == own[0] + own[1]
    results = examine_run(tmp_path / "rounds")["rounds"]
    assert {result.check for result in results} == {"stop tokens", "scores", "pairs", "movement"}


def test_a_stage_cut_in_its_first_round_has_a_page(tmp_path):
    def progress(done, total, metrics):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rounds(
            section(),
            MODEL,
            tmp_path / "run" / "rounds",
            0,
            reward=EvenReward,
            rows=PROMPTS,
            progress=progress,
        )
    journey = read_journey(tmp_path / "run")
    assert [stage.name for stage in journey.stages] == ["rounds"] and len(
        journey.stages[0].metrics,
    ) == 2
    assert "not finished" in " ".join(journey.notes) and write_report(tmp_path / "run").is_file()


def test_the_newest_policy_is_that_of_the_stage_that_began_last(tmp_path):
    run_rounds(section(rounds=1), MODEL, tmp_path / "rounds", 0, reward=EvenReward, rows=PROMPTS)
    pairs = list(read([tmp_path / "rounds" / "round-01" / "pairs.jsonl"], Comparison))
    settings = DirectSection(max_length=64)
    run_stage(job(settings, tmp_path / "direct", "direct", model=MODEL, rows=pairs))
    for earlier, later in (("direct", "rounds"), ("rounds", "direct")):
        RunDirectory(tmp_path / earlier).update_manifest(started="2026-01-01T00:00:00Z")
        RunDirectory(tmp_path / later).update_manifest(started="2026-01-02T00:00:00Z")
        expected = tmp_path / later / ("policy" if later == "direct" else "round-01/policy")
        assert newest_policy(tmp_path) == expected and newest_policy(expected) == expected


def test_the_verdict_has_the_training_loss_of_every_round(tmp_path):
    rows = [{"prompt": f"Say {n}.", "response": f"{n}!"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    stage = {
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "method": "spin",
        "rounds": 2,
        "max_new_tokens": 4,
        "direct": {"heldout_fraction": 0},
    }
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, "rounds": stage}
    summary = run_recipe(build(Recipe, values))["rounds"]
    said = " ".join(conclusion(read_journey(tmp_path / "run")).sentences)
    losses = [one["train_loss"] for one in summary["rounds"]]
    assert len(losses) == 2 and ", ".join(map(decimal, losses)) in said
