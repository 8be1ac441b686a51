"""Measurements on prompts that are never trained on: chosen by their words, judged by the policy as
it then is.
"""

import json
import math
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tether.core.errors import ConfigError, DataError, RunError
from tether.core.rundir import RunDirectory, read_jsonl
from tether.core.types import Message, Prompt, Rollout, Sampling, Score, StopReason, user
from tether.evaluation.held_out import HeldOutAnswers, HeldOutScores
from tether.evaluation.peaks import has_fallen
from tether.evaluation.suite import MeasuredPolicy, Suite
from tether.evaluation.winrate import gain
from tether.runner.assembly.evaluation.evaluators import EVALUATORS, EvaluatorKind
from tether.runner.assembly.roles import load_policy, local_engine
from tether.runner.methods import sampling as online
from tether.runner.run import run_recipe
from tether.settings.evaluation import EvaluateConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.heldout import SEED, HeldOut, held_out_split
from tether.stages.learner.checkpoint import load_checkpoint
from tether.stages.policy_gradient import PolicyGradient
from tether.stats import Estimate

WORDS = [f"{a}{b}" for a in "abcdefgh" for b in "xyz"]


def prompts(words):
    return [
        Prompt((Message("system", "be kind"), user(word)), str(n)) for n, word in enumerate(words)
    ]


def test_no_training_prompt_says_what_a_held_out_one_says():
    rows = prompts([*WORDS, *WORDS, *WORDS[:5]])
    train, test = held_out_split(rows, 7)
    assert len(test) == len({p.messages for p in test}) == 7
    assert {p.messages for p in train} == {p.messages for p in rows} - {p.messages for p in test}
    assert [p for p in rows if p in train] == train


def test_the_choice_depends_on_words_alone():
    chosen = {p.text for p in held_out_split(prompts(WORDS), 7)[1]}
    assert {p.text for p in held_out_split(prompts(WORDS[::-1]), 7)[1]} == chosen
    more = {p.text for p in held_out_split(prompts([*WORDS, "new", "newer"]), 7)[1]}
    assert len(more - chosen) <= 2


def test_start_and_policy_answer_at_other_temperatures_too(tmp_path):
    """What stands in the file is what the saved policy and the untrained model answer there, scored
    by hand.
    """
    made = recipe(
        tmp_path,
        evaluate={
            "every": 3,
            "prompts": 6,
            "samples_per_prompt": 4,
            "temperatures": [0.5, 1.0, 0.0],
        },
    )
    found = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    rows = [row for row in read_jsonl(f"{made.run}/grpo/heldout.jsonl") if "temperature" in row]
    assert [(row["step"], row["temperature"]) for row in rows] == [
        (0, 0.5),
        (0, 0.0),
        (4, 0.5),
        (4, 0.0),
    ]
    asked = [
        Prompt((user(p.text),)) for p in held_out_split([Prompt((user(w),)) for w in WORDS], 6)[1]
    ]
    for row in rows:
        role, loaded = load_policy(
            f"{made.run}/grpo" if row["step"] else made.model.source,
            made.model,
        )
        greedy = row["temperature"] == 0
        how = {"num_samples": 1 if greedy else 4, "seed": SEED}
        groups = local_engine(role, loaded).generate(asked, Sampling(8, row["temperature"]), **how)
        texts = [r.text for g in groups for r in g.rollouts for _ in range(4 if greedy else 1)]
        assert row["scores"]["format"] == [
            float(any("a" <= c <= "m" for c in text)) for text in texts
        ]
        drawn = [r for g in groups for r in g.rollouts]
        assert row["length"] == pytest.approx(sum(len(r.response_ids) for r in drawn) / len(drawn))
    assert (
        list(found["by_temperature"]) == ["1", "0.5", "0"]
        and found["by_temperature"]["1"] == found["correct"]
    )
    assert found["over_best_decoding"]["temperature"] in (1.0, 0.5, 0.0) and found["verdict"] in (
        "better",
        "sharper",
        "undecided",
        "worse",
    )
    low, high = (found["over_best_decoding"][side] for side in ("low", "high"))
    assert (
        found["over_best_decoding"]["reason"].startswith("too few") if low is None else low <= high
    )


def test_a_start_that_nothing_beats_is_compared_with_itself_at_all_temperatures(tmp_path):
    """With the best weights kept, the start is both sides where no later measurement is better."""
    made = recipe(
        tmp_path,
        optimizer={"learning_rate": 1e-12},
        evaluate={"every": 2, "prompts": 6, "keep": "best", "temperatures": [0.0]},
    )
    found = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    assert found["kept_step"] == 0
    assert [*found["by_temperature"]] == ["1", "0"]
    assert "over_best_decoding" in found


def test_without_other_temperatures_there_is_no_control(tmp_path):
    made = recipe(tmp_path, steps=1, evaluate={"every": 3, "prompts": 6, "temperatures": []})
    found = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    assert (
        "over_best_decoding" not in found
        and len(list(read_jsonl(f"{made.run}/grpo/heldout.jsonl"))) == 2
    )


def test_greedy_answers_are_not_asked_for_twice():
    with pytest.raises(
        ValueError,
        match=r"evaluate.temperature = 0",
    ):
        EvaluateConfig(temperature=0.0, samples_per_prompt=2)


def test_all_prompts_cannot_be_held_out():
    with pytest.raises(
        DataError,
        match=r"24 .*24 .*evaluate.prompts lower",
    ):
        held_out_split(prompts([*WORDS, *WORDS]), 24)


def test_the_summary_is_of_the_same_prompts_before_and_after(tmp_path):
    values = {0: [1.0, None, 0.0, 0.0], 3: [1.0, 1.0, 1.0, 0.0]}
    groups = ["a", "a", "b", "b"]
    run = RunDirectory.open(tmp_path / "run", {})
    answers = HeldOutAnswers(
        prompts=prompts("ab"),
        sampling=Sampling(),
        judge=None,
        seed=0,
        samples=2,
    )
    held = HeldOut(
        config=EvaluateConfig(every=3, samples_per_prompt=2),
        suite=None,
        answers=answers,
        policy=None,
        run=run,
    )
    for step, scores in values.items():
        run.hold_out({"step": step, "scores": {"score": scores}})
    summary = held.summary()
    assert (summary["kept_step"], summary["best_step"]) == (3, 3)
    assert {step: found["count"] for step, found in summary["measured"].items()} == {"0": 3, "3": 4}
    assert summary["score"]["before"]["value"] == pytest.approx(1 / 3)
    assert summary["score"]["after"]["value"] == 0.75
    assert summary["score"]["gain"] == gain(values[0], values[3], groups).as_dict()
    assert summary["score"]["win_rate"]["value"] == pytest.approx(2 / 3)


def test_a_failed_score_is_no_zero(tmp_path):
    class Engine:
        def generate(self, asked, sampling, *, num_samples, seed, **_):
            how = (StopReason.STOP_TOKEN, "x", 0, 0, sampling)
            made = [Rollout((1,), (2, 3), (0.0, 0.0), *how, p) for p in asked]
            return [type("Group", (), {"rollouts": [r]}) for r in made]

    scores = iter([Score(1.0, {"right": 1.0}), Score(None), Score(0.0, {"right": 0.0})])
    run = RunDirectory.open(tmp_path / "run", {})
    answers = HeldOutAnswers(
        prompts=prompts("abc"),
        sampling=Sampling(),
        judge=lambda rows: [next(scores) for _ in rows],
        seed=0,
    )
    policy = MeasuredPolicy(None, None, Engine())
    held = HeldOut(
        config=EvaluateConfig(),
        suite=Suite([HeldOutScores(answers)]),
        answers=answers,
        policy=policy,
        run=run,
    )
    assert held.at(5, 20) == {}
    assert held.at(10, 20) == {"heldout/score": 0.5, "heldout/right": 0.5, "heldout/length": 2.0}
    assert run.held_out() == {10: {"score": [1.0, None, 0.0], "right": [1.0, None, 0.0]}}


def recipe(folder, **section):
    """GRPO on replies that are to have one of thirteen letters: a checked reward, so that nothing
    has to be trained first.
    """
    data = folder / "problems.jsonl"
    data.write_text("".join(json.dumps({"question": word, "answer": "e"}) + "\n" for word in WORDS))
    values = {
        "data": {"path": str(data)},
        **{
            "steps": 4,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_new_tokens": 8,
            "checkpoint_every": 2,
        },
        "reward_source": "verifiable",
        "verifiable": {"kind": "exact", "format_pattern": ".*[a-m].*", "format_weight": 1.0},
        "evaluate": {"every": 3, "prompts": 6, "samples_per_prompt": 4},
        "optimizer": {"learning_rate": 1e-2},
        **section,
    }
    values["evaluate"] = {"best_of": [], **values["evaluate"]}
    return build(
        Recipe,
        {
            "run": str(folder / "run"),
            "model": {"source": "tiny", "dtype": "float32"},
            "grpo": values,
        },
    )


def formats(run):
    rows = read_jsonl(f"{run}/grpo/heldout.jsonl")
    return {row["step"]: row["scores"]["format"] for row in rows if "temperature" not in row}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"ema_decay": 0.9},
        {
            "kl": {"mode": "stop", "target": 0.01, "report": True},
            "optimizer": {"learning_rate": 0.1},
        },
    ],
)
def test_the_last_measurement_is_of_the_policy_that_is_saved(tmp_path, more):
    made = recipe(tmp_path, **more)
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    measured = formats(made.run)
    # beyond its target the second step is the last
    assert set(measured) == ({0, 2} if "kl" in more else {0, 3, 4})
    for step, place in ((0, made.model.source), (max(measured), f"{made.run}/grpo")):
        role, loaded = load_policy(place, made.model)
        asked = [
            Prompt((user(p.text),))
            for p in held_out_split([Prompt((user(w),)) for w in WORDS], 6)[1]
        ]
        groups = local_engine(role, loaded).generate(
            asked,
            Sampling(max_new_tokens=8),
            num_samples=4,
            seed=SEED,
        )
        assert measured[step] == [
            float(any("a" <= c <= "m" for c in r.text)) for g in groups for r in g.rollouts
        ]
    assert summary["format"]["gain"]["value"] == pytest.approx(
        (sum(measured[max(measured)]) - sum(measured[0])) / len(measured[0]),
    )
    assert 0 < sum(measured[0]) < len(measured[0]) == 24 and measured[max(measured)] != measured[0]


def test_an_interrupted_run_measures_the_same(tmp_path, monkeypatch):
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    whole.mkdir(), cut.mkdir()
    run_recipe(recipe(whole), ["grpo"])
    made, measure = recipe(cut), HeldOut.measure

    def stops(self, step, moment=None):
        if step == 3:
            raise KeyboardInterrupt
        return measure(self, step, moment)

    monkeypatch.setattr(HeldOut, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, ["grpo"])
    monkeypatch.setattr(HeldOut, "measure", measure)
    run_recipe(made, ["grpo"])
    assert formats(made.run) == formats(whole / "run")
    with pytest.raises(RunError, match="evaluate"):
        run_recipe(recipe(cut, evaluate={"every": 2}), ["grpo"])


@pytest.fixture
def script(monkeypatch):
    """means -> the weights at each measurement, which are those that the learner then holds."""
    made, learners = {}, []
    real = online.HeldOut

    class Held(real):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            learners.append(named["learner"])
            self.answers.judge = self.judged

        def measure(self, step, moment=None):
            self.step = step
            made[step] = [p.detach().clone() for p in learners[-1].parameters]
            return super().measure(step, moment)

        def judged(self, rows):
            means = script.means.get(self.step)
            return [
                Score(None if means is None else means + 0.01 * (n % 2)) for n in range(len(rows))
            ]

    monkeypatch.setattr(online, "HeldOut", Held)
    script = type("Script", (), {"means": {}, "seen": made})
    return script


def saved(run):
    role, _ = load_policy(f"{run}/grpo")
    return {name: p.detach() for name, p in role.model.named_parameters() if ".policy." in name}


def same(run, weights):
    return all(torch.equal(a, b) for a, b in zip(saved(run).values(), weights, strict=True))


@pytest.mark.parametrize("best", [0, 2, 3, 4])
def test_the_best_weights_are_kept(tmp_path, script, best):
    script.means = {step: 1.0 - (step != best) * 0.5 for step in range(5)}
    made = recipe(tmp_path, evaluate={"every": 1, "prompts": 6, "keep": "best"})
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    assert summary["kept_step"] == summary["best_step"] == best
    assert same(made.run, script.seen[best])
    assert [same(made.run, weights) for weights in script.seen.values()].count(True) == 1
    assert summary["score"]["gain"]["value"] == pytest.approx(0.0 if best == 0 else 0.5)


@pytest.mark.parametrize("figure", ["held_out.format", "-held_out.format", "-tokens.mean"])
def test_the_best_weights_are_those_of_another_figure(tmp_path, monkeypatch, figure):
    """By hand from the records: the first step with the highest, or the lowest, mean."""

    class Tokens:
        name = "tokens"

        def __call__(self, policy, step):
            steps = [3.0, 1.0, 2.0, 1.0, 4.0]
            return {"mean": Estimate(steps[step], 0.0, 9.0, 4)}

    row = EvaluatorKind(
        help="a number",
        make=lambda material: Tokens(),
        data="nothing",
        files=("tether:prompts",),
    )
    monkeypatch.setitem(EVALUATORS, "tokens", row)
    evaluate = {"every": 1, "prompts": 6, "samples_per_prompt": 4, "evaluators": {"tokens": {}}}
    made = recipe(tmp_path, evaluate={**evaluate, "keep": "best", "keep_by": figure})
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    sign = -1 if figure.startswith("-") else 1
    if "tokens" in figure:
        best, judged_by = 1, "all prompts"
    else:
        means = {step: sign * statistics.fmean(rows) for step, rows in formats(made.run).items()}
        best = max(sorted(means), key=means.get)
        judged_by = "the prompts that did not choose the step"
    assert summary["kept_step"] == summary["best_step"] == best
    assert summary["judged_by"] == judged_by and summary["kept_by"] == figure
    (folder,) = (tmp_path / "run" / "grpo" / "best").iterdir()
    assert folder.name == f"step-{best:06d}"
    weights, _ = load_checkpoint(folder)
    assert same(made.run, [weights[str(place)] for place in range(len(weights))])


def test_a_part_that_a_function_does_not_give_is_refused_at_the_start(tmp_path):
    (tmp_path / "own.py").write_text(
        "def length(prompts, responses): return [1.0] * len(prompts)\n",
    )
    judge = {"call": f"{tmp_path}/own.py:length"}
    evaluate = {"prompts": 6, "samples_per_prompt": 1, "keep": "best", "judge": judge}
    made = recipe(tmp_path, evaluate={**evaluate, "keep_by": "held_out.beauty"})
    words = "held_out has no figure 'beauty'. Figures: score, proxy"
    with pytest.raises(ConfigError, match=re.escape(words)):
        run_recipe(made, ["grpo"])


@pytest.mark.parametrize("figure", ["kl.kl", "kl.length", "diversity.distinct_9", "diversity.kl"])
def test_a_figure_that_no_evaluator_has_is_refused_before_the_first_stage(tmp_path, figure):
    evaluate = {"prompts": 6, "temperature": 0.0, "samples_per_prompt": 1, "keep": "best"}
    evaluate |= {"evaluators": {"diversity": {}}, "keep_by": figure}
    with pytest.raises(ConfigError, match="keep_by"):
        run_recipe(recipe(tmp_path, evaluate=evaluate), ["grpo"])
    assert not (tmp_path / "run" / "grpo").exists()


def test_without_any_score_the_last_weights_stay_and_a_sentence_says_so(tmp_path, script, caplog):
    made = recipe(tmp_path, evaluate={"every": 1, "prompts": 6, "keep": "best"})
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    assert "last weights are kept" in caplog.text
    assert (summary["kept_step"], summary["best_step"], summary["measured"]) == (4, None, {})


def test_without_keep_the_last_weights_stay(tmp_path, script):
    script.means = {step: -float(step) for step in range(5)}
    made = recipe(tmp_path, evaluate={"every": 1, "prompts": 6})
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    assert (summary["kept_step"], summary["best_step"]) == (4, 0)
    assert same(made.run, script.seen[4]) and not (tmp_path / "run" / "grpo" / "best").exists()


@pytest.mark.parametrize(
    ("means", "steps"),
    [([0, 1, 0.5, 0.5, 0.5], 2), ([0, 1, 0.998, 1, 0.999], 4), ([0, 1, 2, 3, 4], 4)],
)
def test_training_ends_when_the_score_has_clearly_fallen(tmp_path, script, means, steps):
    """0.002 below is within what prompts differ by from one measurement to the next: here by
    nothing, so they are made to.
    """
    script.means = dict(enumerate(means))
    noisy = [0.05, -0.05, 0.02, -0.02, 0.03, -0.03]
    plain = online.HeldOut.judged
    online.HeldOut.judged = lambda self, rows: [
        Score(s.value + noise * self.step)
        for s, noise in zip(plain(self, rows), noisy, strict=True)
    ]
    made = recipe(tmp_path, evaluate={"every": 1, "prompts": 6, "keep": "best", "stop": True})
    summary = run_recipe(made, ["grpo"])["grpo"]
    assert summary["steps"] == steps
    assert summary["heldout"]["best_step"] == max(range(len(means)), key=means.__getitem__)
    assert same(made.run, script.seen[summary["heldout"]["best_step"]])


def noise(generator, prompts, measurements, shared):
    """Scores that differ by prompt and by measurement, each measurement sharing that part of its
    noise with the one before.
    """
    fresh = generator.normal(size=(prompts, measurements))
    for k in range(1, measurements):
        fresh[:, k] = shared * fresh[:, k - 1] + math.sqrt(1 - shared**2) * fresh[:, k]
    return fresh + generator.normal(size=(prompts, 1))


def ended(scores):
    """The measurement after which a run with these scores, (prompts, measurements), ends; None
    where it goes on to its end.
    """
    groups, measured = [str(i) for i in range(len(scores))], {}
    for k, column in enumerate(scores.T):
        measured[k] = {"score": column.tolist()}
        if has_fallen(measured, groups, scores.shape[1] - 1):
            return k
    return None


@pytest.mark.audit
@pytest.mark.parametrize("shared", [0.0, 0.8])
@pytest.mark.parametrize(
    ("prompts", "measurements", "runs"),
    [
        (64, 10, 200),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(64, 5, 300), (128, 5, 300), (128, 10, 150), (64, 20, 100)]
        ),
    ],
)
def test_runs_that_never_fall_are_hardly_ever_ended(prompts, measurements, runs, shared):
    """5% at most: so many more than one in twenty would come once in a thousand times (a binomial
    tail).
    """
    generator = np.random.default_rng([prompts, measurements, round(10 * shared)])
    stopped = sum(
        ended(noise(generator, prompts, measurements, shared)) is not None for _ in range(runs)
    )
    assert stats.binom.sf(stopped - 1, runs, 0.05) > 0.001


@pytest.mark.audit
@pytest.mark.parametrize(
    ("gold", "falls"),
    [
        ([5.63, 6.08, 6.09, 6.30, 6.40, 6.07, 6.10, 5.94, 5.65, 5.53], 5),
        ([5.66, 6.12, 6.04, 6.01, 5.81, 5.45, 4.01, 3.75, 3.74, 3.77], 4),
    ],
)
def test_runs_without_a_tether_are_ended_within_two_measurements_of_the_fall(gold, falls):
    """Gold of two runs at coefficient 0 (docs/lab.md), every 4 steps on 100 messages whose
    differences have deviation 1.17.
    """
    found = []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        scores = (
            np.array(gold)
            + 1.17 / math.sqrt(2) * generator.normal(size=(100, 10))
            + generator.normal(size=(100, 1))
        )
        found.append(ended(scores) or 99)
    assert (
        np.mean([k <= falls + 2 for k in found]) >= 0.8
        and np.mean([k < falls for k in found]) <= 0.15
    )


@pytest.mark.audit
def test_the_best_of_equals_is_not_said_to_have_gained():
    """Ten measurements of a policy that never changes: the highest lies above the first, and its
    prompts know no gain.
    """
    answers = HeldOutAnswers(prompts=[None] * 64, sampling=Sampling(), judge=None, seed=0)
    gains = []
    for seed in range(150):
        columns = noise(np.random.default_rng(seed), 64, 10, 0.0).T.tolist()
        measured = {step: {"score": column} for step, column in enumerate(columns)}
        records = {"held_out": lambda found=measured: found, "decoded": dict, "best_of": dict}
        run = SimpleNamespace(path=Path("nowhere"), **records)
        config = EvaluateConfig(keep="best")
        held = HeldOut(
            config=config,
            suite=None,
            answers=answers,
            policy=None,
            run=run,
            learner=object(),
        )
        summary = held.summary()
        gains.append(summary["score"]["gain"])
        assert summary["judged_by"] == "the prompts that did not choose the step"
    assert abs(np.mean([gain["value"] for gain in gains])) < 3 * math.sqrt(2 / 64 / 150)
    assert stats.binom.sf(sum((gain["low"] or 0) > 0 for gain in gains) - 1, 150, 0.05) > 0.01


@pytest.mark.audit
def test_a_gain_of_the_best_is_told_at_the_step_that_the_other_half_chose(tmp_path):
    # prompts a and c choose 1, b and d 2
    scores = {0: [0.0, 0.0, 0.0, 0.0], 1: [9.0, 1.0, 9.0, 2.0], 2: [3.0, 8.0, 4.0, 8.0]}
    run = RunDirectory.open(tmp_path / "run", {})
    for step, values in scores.items():
        run.hold_out({"step": step, "scores": {"score": values}})
    answers = HeldOutAnswers(prompts=prompts("abcd"), sampling=Sampling(), judge=None, seed=0)
    config = EvaluateConfig(keep="best")
    summary = HeldOut(
        config=config,
        suite=None,
        answers=answers,
        policy=None,
        run=run,
        learner=object(),
    ).summary()
    assert summary["kept_step"] == 2 and summary["measured"]["2"]["value"] == 5.75
    assert (
        summary["score"]["after"]["value"]
        == summary["score"]["gain"]["value"]
        == (3.0 + 1.0 + 4.0 + 2.0) / 4
    )


def test_an_interrupted_run_keeps_the_same(tmp_path, script, monkeypatch):
    """The best measurement came after the last checkpoint, and is made again."""
    script.means = {0: 0.0, 1: 0.5, 2: 0.1, 3: 1.0, 4: 0.2}
    made = recipe(tmp_path, evaluate={"every": 1, "prompts": 6, "keep": "best"})
    step = PolicyGradient.step

    def stops(self, prompts, number):
        if number == 3:
            raise KeyboardInterrupt
        return step(self, prompts, number)

    monkeypatch.setattr(PolicyGradient, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(made, ["grpo"])
    assert script.seen.pop(3)
    monkeypatch.setattr(PolicyGradient, "step", step)
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    assert summary["kept_step"] == 3 and same(made.run, script.seen[3])


def test_an_average_of_weights_cannot_be_kept_too(tmp_path):
    with pytest.raises(ConfigError, match="ema_decay"):
        recipe(tmp_path, ema_decay=0.9, evaluate={"keep": "best"})


def test_held_out_prompts_may_come_from_data_of_their_own(tmp_path, monkeypatch):
    other = tmp_path / "test.jsonl"
    other.write_text(
        "".join(
            json.dumps({"question": word, "answer": "e"}) + "\n"
            for word in ("new", "ax", "newer", "new")
        ),
    )
    made = recipe(tmp_path, evaluate={"prompts": 6, "data": {"path": str(other)}})
    asked = []
    monkeypatch.setattr(
        online,
        "HeldOut",
        lambda *, answers, **more: (
            asked.extend(answers.prompts) or HeldOut(answers=answers, **more)
        ),
    )
    run_recipe(made, ["grpo"])
    assert [p.text for p in asked] == ["new", "newer"]


def test_the_best_of_n_of_the_start_is_drawn_once_and_told(tmp_path):
    """Picked and scored by the same checked reward, the best of more can only be higher; a resumed
    run does not draw again.
    """
    made = recipe(
        tmp_path,
        evaluate={"every": 3, "prompts": 6, "samples_per_prompt": 4, "best_of": [2, 8]},
    )
    summary = run_recipe(made, ["grpo"])["grpo"]["heldout"]
    run = RunDirectory(Path(made.run) / "grpo")
    drawn = run.best_of()
    assert {n: len(scores) for n, scores in drawn.items()} == {2: 24, 8: 24}
    # one pick stands beside each answer
    assert all(drawn[n][i] == drawn[n][i - i % 4] for n in drawn for i in range(24))
    assert all(more >= fewer for more, fewer in zip(drawn[8], drawn[2], strict=True))
    after = run.held_out()[summary["kept_step"]]["score"]
    for n, told in summary["best_of_n"].items():
        assert told["gain"]["value"] == pytest.approx(
            statistics.fmean(after) - statistics.fmean(drawn[int(n)]),
        )
    assert set(run.held_out()) == {0, 3, 4}  # the picks are no measurement
