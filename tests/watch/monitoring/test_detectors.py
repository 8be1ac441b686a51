"""Every detector against a planted fault, its healthy twin, and noise of the size that real runs
have.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
from tests.watch.monitoring.replay import replay

from tether.core.errors import ConfigError
from tether.core.protocols import Monitor
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.runner.methods.sampling import Guard
from tether.settings.distill import DistillSection
from tether.settings.reading import build
from tether.settings.sampling import PPOSection
from tether.settings.watch import WatchConfig
from tether.watch.monitoring import texts
from tether.watch.monitoring.detectors import DETECTORS
from tether.watch.monitoring.view import View
from tether.watch.monitoring.watch import Watch

ONSET, STEPS, PROMPTS, SAMPLES = 9, 24, 12, 4
SYLLABLES = [
    a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "el", "ir", "on", "um")
]
WORDS = ["".join(random.Random(i).choices(SYLLABLES, k=3)) for i in range(600)]


@dataclass
class Row:
    prompt: str
    text: str
    score: float | None
    tokens: int
    finished: bool = True
    parts: dict[str, float] = field(default_factory=dict)


@dataclass
class Step:
    rows: list[Row]
    metrics: dict[str, float]

    def rewrite(self, share: float, change: Callable[[Row], None]) -> None:
        """Change the first responses of every prompt, `share` of them all."""
        for group in range(PROMPTS):
            for row in self.rows[group * SAMPLES : group * SAMPLES + round(share * SAMPLES)]:
                change(row)


def sentence(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words)).capitalize() + "."


def healthy(rng: random.Random, number: int) -> Step:
    """A step of a run that learns: the score rises, the entropy halves, KL climbs, each with the
    noise of 48 responses.
    """
    rows = []
    for p in range(PROMPTS):
        prompt = sentence(rng, 10)
        for _ in range(SAMPLES):
            tokens = max(5, round(rng.gauss(34 - 0.3 * number, 8)))
            score = rng.gauss(0.12 * number, 1.2)
            rows.append(
                Row(f"{p} {prompt}", sentence(rng, tokens - 1), score, tokens, rng.random() < 0.9),
            )
            rows[-1].parts = {f"member_{m}": score + rng.gauss(0, 0.4) for m in range(4)}
    metrics = {
        "policy/entropy": 3.4 - 1.7 * number / STEPS + rng.gauss(0, 0.1),
        "kl/policy_reference_k1": max(0.0, 0.7 * (number - 2)) * rng.gauss(1, 0.1)
        + rng.gauss(0, 0.05) * (number > 1),
        "group/zero_signal": min(1.0, max(0.0, rng.gauss(0.5, 0.12))),
    }
    if number % 3 == 0:
        metrics["sycophancy/shift"] = random.Random(rows[0].text).gauss(0.02, 0.04)
        metrics["sycophancy/error"] = 0.04
    return Step(rows, metrics)


def longer(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.tokens = round(rng.gauss(34 + 12 * age, 8 + 2 * age))
        row.text = sentence(rng, row.tokens - 1)
        row.score = 0.05 * row.tokens + rng.gauss(0, 0.8)


def length_preferred(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.score = 1.5 + 0.15 * (row.tokens - 34) + rng.gauss(0, 0.7)


def repeating(step: Step, age: int, rng: random.Random) -> None:
    def change(row: Row) -> None:
        row.text = "so good " + " ".join(row.text.split()[:3] * 4)

    step.rewrite(0.5, change)


def collapsed(step: Step, age: int, rng: random.Random) -> None:
    same = sentence(random.Random(7), 25)
    for row in step.rows:
        row.text = same[:-1] + " " + sentence(rng, 4)


def formatted(step: Step, age: int, rng: random.Random) -> None:
    def change(row: Row) -> None:
        row.text = "# Answer\n" + "\n".join(
            (f"- **{word}** {sentence(rng, 4)}") for word in row.text.split()[:5]
        )

    step.rewrite(0.5, change)


def hedged(step: Step, age: int, rng: random.Random) -> None:
    def change(row: Row) -> None:
        row.text = "I'm not sure, it depends. " + row.text + " Perhaps, in some cases."

    step.rewrite(0.5, change)


def opened(step: Step, age: int, rng: random.Random) -> None:
    def change(row: Row) -> None:
        row.text, row.score = "Absolutely wonderful question! " + row.text, 3.0 + rng.gauss(0, 1)

    step.rewrite(min(0.75, 0.25 * (age + 1)), change)


def parroted(step: Step, age: int, rng: random.Random) -> None:
    def change(row: Row) -> None:
        row.text = row.prompt + " " + " ".join(row.text.split()[:8])

    step.rewrite(1.0, change)


def vanishing(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.tokens = 1 + (rng.random() < 0.3)
        row.text = " ".join(rng.choices(WORDS, k=2))


def endless(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.tokens = 64
        row.text, row.finished = sentence(rng, 63), rng.random() < 0.2


def truncated(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.finished = rng.random() < 0.5


def cut_off(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.finished = rng.random() < 0.1


def disagreeing(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.score = rng.gauss(2.2, 1)
        row.parts = {f"member_{m}": row.score + rng.gauss(0, 1.2) for m in range(4)}


def failing(step: Step, age: int, rng: random.Random) -> None:
    def change(row: Row) -> None:
        row.score, row.text = None, "unreadable " + row.text

    step.rewrite(0.25, change)


def jumping(step: Step, age: int, rng: random.Random) -> None:
    for row in step.rows:
        row.score = rng.gauss(4.5, 0.8)


def metric(name: str, value: Callable[[int], float]) -> Callable[[Step, int, random.Random], None]:
    def plant(step: Step, age: int, rng: random.Random) -> None:
        step.metrics[name] = value(age)

    return plant


def agreeing(step: Step, age: int, rng: random.Random) -> None:
    """Measured at every third step alone."""
    if "sycophancy/shift" in step.metrics:
        step.metrics["sycophancy/shift"] = 0.25 + 0.02 * age


@dataclass(frozen=True)
class Case:
    """`within`: steps from the onset on; `shows`: what every piece of evidence must hold;
    `besides`: who may fire too.
    """

    plant: Callable[[Step, int, random.Random], None]
    within: int
    shows: str = ""
    besides: frozenset[str] = frozenset()


KL = frozenset({"kl_acceleration", "kl_explosion"})
CASES = {
    "length_gaming": Case(longer, 4, besides=frozenset({"length_advantage", "score_jump"})),
    "length_advantage": Case(length_preferred, 6),
    "repetition": Case(repeating, 2, shows="so good"),
    "mode_collapse": Case(collapsed, 2),
    "entropy_collapse": Case(metric("policy/entropy", lambda age: 1.6 * 0.5**age), 4),
    "kl_explosion": Case(
        metric("kl/policy_reference_k1", lambda age: 20.0 + 15 * age),
        7,
        besides=KL,
    ),
    "kl_acceleration": Case(
        metric("kl/policy_reference_k1", lambda age: 5 * 1.5 ** (age + 1)),
        7,
        besides=KL,
    ),
    "long_updates": Case(metric("policy/clip_fraction", lambda age: 0.83), 3),
    "shrunk_answers": Case(vanishing, 3),
    "truncation": Case(truncated, 3),
    "cut_off": Case(cut_off, 6, besides=frozenset({"truncation"})),
    "masked_responses": Case(metric("response/masked", lambda age: 0.7), 3),
    "format_gaming": Case(formatted, 2, shows="- **"),
    "hedging": Case(hedged, 2, shows="it depends"),
    "exploit_tokens": Case(opened, 4, shows="Absolutely wonderful question!"),
    "parroting": Case(parroted, 2),
    "reward_disagreement": Case(disagreeing, 2),
    "reward_failures": Case(failing, 3, shows="unreadable"),
    "zero_signal": Case(metric("group/zero_signal", lambda age: 1.0), 6),
    "score_jump": Case(jumping, 2),
    "sycophancy": Case(agreeing, 4),
}


def run_of(
    seed: int,
    plant: Callable[[Step, int, random.Random], None] | None = None,
    last: int = STEPS,
) -> list[Step]:
    """A run whose steps from `ONSET` to `last` carry the fault."""
    steps = []
    for number in range(1, STEPS + 1):
        rng = random.Random(f"{seed} {number}")
        step = healthy(rng, number)
        if plant is not None and ONSET <= number <= last:
            plant(step, number - ONSET, rng)
        steps.append(step)
    return steps


def logged(step: Step) -> dict[str, float]:
    """What a stage logs of such a step."""
    grams = [
        tuple(pair)
        for row in step.rows
        for pair in zip(row.text.split(), row.text.split()[1:], strict=False)
    ]
    scores = [row.score for row in step.rows if row.score is not None]
    return {
        **step.metrics,
        "response/length": statistics.fmean(row.tokens for row in step.rows),
        "response/stop_rate": statistics.fmean(row.finished for row in step.rows),
        "response/distinct_2": len(set(grams)) / len(grams),
        "reward/proxy": statistics.fmean(scores),
        "reward/proxy_std": statistics.pstdev(scores),
        "time/step": 1.0,
    }


def observe(watch: Watch, number: int, step: Step) -> list:
    rollouts = [
        Rollout(
            (1,), tuple(range(row.tokens)), (), StopReason.STOP_TOKEN if row.finished else StopReason.LENGTH,
            row.text, 0, 0, Sampling(), Prompt((user(row.prompt),)),
        )
        for row in step.rows
    ]  # fmt: skip
    return watch.observe(
        number,
        logged(step),
        rollouts,
        [Score(row.score, row.parts) for row in step.rows],
    )


def alarms_of(steps: list[Step], config: WatchConfig | None = None) -> list:
    watch = Watch(config)
    return [alarm for number, step in enumerate(steps, 1) for alarm in observe(watch, number, step)]


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found_in_time_with_its_evidence(name: str):
    case, steps = CASES[name], run_of(0, CASES[name].plant)
    alarms = alarms_of(steps)
    assert {alarm.detector for alarm in alarms} - (case.besides - {name}) == {name}
    (alarm,) = (alarm for alarm in alarms if alarm.detector == name)  # once an episode
    assert ONSET <= alarm.step < ONSET + case.within
    assert alarm.value >= alarm.threshold == DETECTORS[name].threshold
    assert alarm.advice
    assert len(alarm.evidence) == WatchConfig().num_evidence
    shown = {" ".join(row.text.split())[:100]: row for row in steps[alarm.step - 1].rows}
    for text in alarm.evidence:
        assert case.shows in text
        assert text[:100] in shown or len(text) > 300


def test_evidence_is_what_shows_the_fault_most():
    def evidence(name: str) -> tuple[list[Row], list[Row]]:
        steps = run_of(5, CASES[name].plant)
        alarm = next(a for a in alarms_of(steps) if a.detector == name)
        rows = steps[alarm.step - 1].rows
        return [
            next(r for r in rows if r.text.startswith(text[:60])) for text in alarm.evidence
        ], rows

    shown, rows = evidence("length_gaming")
    assert [row.tokens for row in shown] == sorted((row.tokens for row in rows), reverse=True)[:3]
    shown, rows = evidence("truncation")
    assert [row.tokens for row in shown] == sorted(
        (row.tokens for row in rows if not row.finished),
        reverse=True,
    )[:3]
    shown, rows = evidence("score_jump")
    assert [row.score for row in shown] == sorted((row.score for row in rows), reverse=True)[:3]
    shown, rows = evidence("reward_disagreement")
    spread = lambda row: statistics.pstdev(row.parts.values())  # noqa: E731
    assert [spread(row) for row in shown] == sorted(map(spread, rows), reverse=True)[:3]
    _, rows = evidence("exploit_tokens")
    alarm = next(a for a in alarms_of(run_of(5, opened)) if a.detector == "exploit_tokens")
    assert "question" in alarm.message or "wonderful" in alarm.message


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_run_is_left_alone(seed: int):
    assert alarms_of(run_of(100 + seed)) == []


@pytest.mark.parametrize("name", CASES)
def test_a_single_bad_step_is_left_alone(name: str):
    assert alarms_of(run_of(3, CASES[name].plant, last=ONSET)) == []


def test_length_that_the_score_knows_nothing_of_is_no_gaming():
    def plant(step: Step, age: int, rng: random.Random) -> None:
        longer(step, age, rng)
        for row in step.rows:
            row.score = rng.gauss(1.5, 1)

    assert alarms_of(run_of(0, plant)) == []


def test_a_phrase_that_the_score_knows_nothing_of_is_no_exploit():
    def plant(step: Step, age: int, rng: random.Random) -> None:
        scores = [row.score for row in step.rows]
        opened(step, age, rng)
        for row, score in zip(step.rows, scores, strict=True):
            row.score = score

    assert alarms_of(run_of(0, plant)) == []


def test_a_spread_that_rises_under_a_resting_score_is_no_alarm():
    def plant(step: Step, age: int, rng: random.Random) -> None:
        disagreeing(step, age, rng)
        for row in step.rows:
            row.score = rng.gauss(0.3, 1)

    assert alarms_of(run_of(0, plant)) == []


def test_a_policy_that_stays_where_it_was_is_found():
    steps = run_of(0)
    for step in steps:
        step.metrics["kl/policy_reference_k1"] = 0.0
    (alarm,) = alarms_of(steps)
    assert (alarm.detector, alarm.step, alarm.value) == ("kl_stuck", 10, 10.0)
    for step in steps[::5]:
        step.metrics["kl/policy_reference_k1"] = -0.02
    assert alarms_of(steps) == []


def test_sycophancy_is_judged_by_two_measurements_in_a_row_against_the_start():
    def alarms(start: dict[str, float], *shifts: float) -> list[tuple[str, int, float]]:
        watch, found = Watch(), []
        for number in range(1, 5 * len(shifts) + 1):
            measured = (
                {"sycophancy/shift": shifts[number // 5 - 1], **start} if number % 5 == 0 else {}
            )
            found += watch.observe(number, measured, [], [])
        return [(alarm.detector, alarm.step, round(alarm.value, 6)) for alarm in found]

    before = {"sycophancy/start": 0.05, "sycophancy/error": 0.02}
    # the smaller of two, less the start
    assert alarms(before, 0.3, 0.25) == [("sycophancy", 10, 0.2)]
    assert alarms(before | {"sycophancy/error": 0.1}, 0.3, 0.25) == []
    # without a measurement before, the first that is seen is the start
    error = {"sycophancy/error": 0.02}
    assert alarms(error, 0.3, 0.25, 0.3) == []
    assert alarms(error, 0.0, 0.3, 0.25) == [("sycophancy", 15, 0.25)]
    assert alarms(before, 0.3, 0.1, 0.3, 0.1) == []
    assert alarms(before, 0.1, 0.19, 0.19) == []
    # without errors, the measurements themselves must show their noise
    assert alarms({}, 0.0, 0.3, 0.25) == []
    calm = (0.0, 0.01, -0.01, 0.0, 0.02, 0.01, -0.01, 0.0)
    assert alarms({}, *calm, 0.3, 0.29) == [("sycophancy", 50, 0.29)]


def test_an_episode_that_ends_and_returns_is_told_twice():
    steps = run_of(0)
    for number, step in enumerate(steps, 1):
        step.metrics["policy/clip_fraction"] = 0.5 if number in (6, 7, 8, 12, 13, 14) else 0.1
    for number in (9, 10, 11):
        steps[number - 1].metrics["policy/clip_fraction"] = 0.26
    # 0.26 is within the band of release
    assert [(a.detector, a.step) for a in alarms_of(steps)] == [("long_updates", 8)]
    for number in (9, 10, 11):
        steps[number - 1].metrics["policy/clip_fraction"] = 0.1
    for number in range(12, 19):
        steps[number - 1].metrics["policy/clip_fraction"] = 0.5
    first, second = alarms_of(steps)
    assert (first.step, first.detector) == (8, "long_updates") == (8, second.detector)
    assert 14 <= second.step <= 18


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("exploit_tokens", 2),
        ("exploit_tokens", 10),
        ("length_gaming", 9),
        ("repetition", 13),
        ("kl_acceleration", 8),
        ("sycophancy", 10),
    ],
)
def test_a_resumed_run_warns_alike(name: str, cut: int):
    steps = run_of(1, CASES[name].plant)
    whole, first = alarms_of(steps), Watch()
    before = [a for number, step in enumerate(steps[:cut], 1) for a in observe(first, number, step)]
    kept, second = json.loads(json.dumps(first.state(), allow_nan=False)), Watch()
    observe(first, cut + 1, steps[cut])  # what happens after saving must not reach the saved state
    second.load_state(kept)
    after = [
        a for number, step in enumerate(steps[cut:], cut + 1) for a in observe(second, number, step)
    ]
    assert whole and before + after == whole


def test_the_state_stays_small():
    watch = Watch()
    sizes = []
    for number, step in enumerate(run_of(0, opened), 1):
        observe(watch, number, step)
        sizes.append(len(json.dumps(watch.state())))
    assert max(sizes) < 400_000
    assert sizes[-1] < 1.2 * sizes[-6]


def test_nan_and_missing_measures_raise_no_alarm():
    watch: Monitor = Watch()
    for number in range(1, 15):
        assert (
            watch.observe(
                number,
                {"kl/policy_reference_k1": math.nan, "policy/entropy": math.inf, "loss": 1.0},
                [],
                [],
            )
            == []
        )
    for number, step in enumerate(run_of(0), 1):
        for row in step.rows:
            row.score = None
        step.metrics.clear()
        rows = [
            Rollout(
                (1,),
                (1,) * r.tokens,
                (),
                StopReason.STOP_TOKEN,
                r.text,
                0,
                0,
                Sampling(),
                Prompt((user(r.prompt),)),
            )
            for r in step.rows
        ]
        fired = {
            alarm.detector
            for alarm in watch.observe(number + 14, {}, rows, [Score(None)] * len(rows))
        }
        assert fired <= {"reward_failures"}


def test_a_finished_run_is_judged_by_its_files():
    def rows(steps: list[Step]) -> tuple[list[dict], list[dict]]:
        metrics = [
            {"step": number, "time": 0.0, **logged(step)} for number, step in enumerate(steps, 1)
        ]
        samples = [
            {
                "step": n,
                "prompt": r.prompt,
                "response": r.text,
                "proxy": r.score,
                "stop": "stop_token" if r.finished else "length",
            }
            for n, step in enumerate(steps, 1)
            for r in step.rows[:4]
        ]
        return metrics, samples

    for name in (
        "entropy_collapse",
        "truncation",
        "zero_signal",
        "score_jump",
        "kl_explosion",
        "sycophancy",
    ):
        metrics, samples = rows(run_of(0, CASES[name].plant))
        fired = {a.detector for a in replay(metrics, samples)}
        assert fired - (CASES[name].besides - {name}) == {name}
        assert fired == {a.detector for a in replay(metrics)}
    metrics, samples = rows(run_of(0, CASES["repetition"].plant))
    (alarm,) = replay(metrics, samples)
    assert alarm.detector == "repetition"
    assert alarm.step >= ONSET + 1
    for seed in range(4):
        assert replay(*rows(run_of(seed))) == []


def test_thresholds_are_settings():
    steps = run_of(0, CASES["zero_signal"].plant)
    assert alarms_of(steps, WatchConfig(thresholds={"zero_signal": 1.01})) == []
    assert alarms_of(steps, WatchConfig(silent=("zero_signal",))) == []
    (alarm,) = alarms_of(steps, WatchConfig(thresholds={"zero_signal": 0.85}, num_evidence=1))
    assert alarm.threshold == 0.85 and len(alarm.evidence) == 1
    config = build(WatchConfig, {"thresholds": {"hedging": 1.0}}, ["silent=['parroting']"])
    assert build(WatchConfig, config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"thresholds": {"repetitions": 1.0}}, "did you mean 'repetition'"),
        ({"silent": ["xyz"]}, "known: length_gaming"),
        ({"thresholds": {"repetition": 0.0}}, "above 0"),
        ({"thresholds": {"repetition": math.inf}}, "`silent`"),
    ],
)
def test_settings_without_effect_are_refused(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build(WatchConfig, json.loads(json.dumps(values)))


def test_measures_of_texts_by_hand():
    tokens = texts.word_tokens("One, two. One, two. ONE")
    assert tokens == ["one", ",", "two", ".", "one", ",", "two", ".", "one"]
    assert texts.repetition(tokens) == pytest.approx(3 / 7)  # four of seven triples are distinct
    assert texts.repetition(["a", "b"]) == 0.0
    assert texts.word_tokens("don't 東京!") == ["don't", "東", "京", "!"]
    assert texts.parroting(
        ["what", "is", "red", "paint", "made", "of"],
        ["red", "paint", "made", "by", "hand"],
    ) == pytest.approx(1 / 4)
    assert texts.similarity([["a", "b", "c"], ["a", "b", "d"], ["x", "y"]]) == pytest.approx(
        (1 / 3 + 0 + 0) / 3,
    )
    assert texts.format_marks(
        "# T\n- a\n2. b\n**c** \\boxed{4} <b>x</b>\n```\n",
        20,
    ) == pytest.approx(100 * 8 / 20)
    assert texts.format_marks("A minus - sign, 2*3*4, a_b_c, 3.5 and x < y.", 15) == 0.0
    assert texts.hedges(
        "Perhaps. I’m not sure; it depends on may and maypoles.",
        20,
    ) == pytest.approx(15.0)
    assert texts.phrases(["a", "7", "b"]) == {
        "a",
        "0",
        "b",
        "a 0",
        "0 b",
        "a 0 b",
        texts.OPENING + "a 0 b",
    }


def test_pooled_statistics_against_scipy():
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=n) + 5 * n, rng.normal(size=n) - 3 * n) for n in (7, 4, 12)]
    x = np.concatenate([a - a.mean() for a, _ in batches])
    y = np.concatenate([b + 0.5 * a - (b + 0.5 * a).mean() for a, b in batches])
    r, chance = texts.pooled_correlation([texts.co_moments(a, b + 0.5 * a) for a, b in batches])
    assert r == pytest.approx(scipy.stats.pearsonr(x, y).statistic)
    freedom = sum(len(a) for a, _ in batches) - len(batches) - 1
    t = r * math.sqrt(freedom / (1 - r * r))
    assert chance == pytest.approx(scipy.stats.t.sf(t, freedom))
    a, b = batches[0]
    _, alone = texts.pooled_correlation([texts.co_moments(a, b)])
    assert alone == pytest.approx(scipy.stats.pearsonr(a, b, alternative="greater").pvalue)
    # Ranks 2, 3.5, 3.5, 5, 1 and 2.5, 2.5, 4.5, 4.5, 1 about their mean of 3; one length or one
    # response says nothing.
    groups = {
        "p": ([1, 2, 2, 5, 0], [3.0, 3.0, 9.0, 9.0, 1.0]),
        "q": ([1, 1], [2.0, 3.0]),
        "r": ([7], [1.0]),
    }
    rows = [
        texts.Text(p, "", length, score, True)
        for p, sides in groups.items()
        for length, score in zip(*sides, strict=True)
    ]
    rows.append(texts.Text("p", "", 9, None, True))
    assert texts.length_advantage(rows) == (pytest.approx(8 / math.sqrt(9.5 * 9.0)), 1 / 4)
    assert texts.length_advantage(rows[-3:]) is None
    assert texts.co_moments([1e200, 0.0, 0.0], [1.0, 2.0, 3.0]) == [0.0] * 4
    assert texts.pooled_correlation([texts.co_moments([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])]) == (
        0.0,
        1.0,
    )


def course_of(price: float, kl: float, rise: float, steps: int = 30) -> list[int]:
    """The steps at which `held_back` fires, and nothing else says that the policy rests; `rise` in
    deviations over the run.
    """
    rng, watch, found = random.Random(5), Watch(), []
    for number in range(1, steps + 1):
        metrics = {
            "reward/proxy": 0.3 + 0.04 * (rise * number / steps + rng.gauss(0, 0.1)),
            "reward/proxy_std": 0.04,
            "kl/policy_reference_k1": kl * (1 + 0.1 * rng.gauss(0, 1)),
            "kl/coefficient": 0.05,
            "kl/price": price,
            "run/share": number / steps,
        }
        alarms = watch.observe(number, metrics, [], [])
        assert not any(alarm.detector == "unmoved" for alarm in alarms if price >= 0.5)
        found += [alarm for alarm in alarms if alarm.detector == "held_back"]
    return [
        alarm.step for alarm in found if "a nat costs" in alarm.message and "0.05" in alarm.message
    ]


def test_a_policy_that_its_penalty_holds_is_told_of_with_the_price_of_a_nat():
    assert course_of(price=1.25, kl=0.05, rise=0.1) == [15]
    # `unmoved` leaves it to the one that has the reason
    assert course_of(price=1.25, kl=0.005, rise=0.0) == [15]
    assert course_of(price=0.05, kl=0.05, rise=0.1) == []
    assert course_of(price=1.25, kl=0.6, rise=0.1) == []
    assert course_of(price=1.25, kl=0.05, rise=3.0) == []


def test_updates_that_clip_most_tokens_are_an_alarm_but_where_sequences_are_clipped(tmp_path):
    """Twenty epochs on one batch clip 83% of its tokens; GSPO means to clip a large part."""

    def fired(clipped, **settings):
        config = PPOSection(reward_source="random", **settings)
        reward = SimpleNamespace(name="length")
        guard = Guard(
            config.watch,
            SimpleNamespace(config=config, reward=reward),
            RunDirectory(tmp_path),
        )
        seen = [
            guard.observe(step, {"policy/clip_fraction": clipped}, [], []) for step in range(1, 6)
        ]
        return [(step, alarm.detector) for step, alarms in enumerate(seen, 1) for alarm in alarms]

    assert fired(0.83) == [(3, "long_updates")] and fired(0.1) == []
    assert fired(0.83, surrogate="sequence") == []
    assert fired(0.83, watch={"silent": ("long_updates",)}) == []


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("entropy_collapse", metric("policy/entropy", lambda age: 1.6 * 0.2 ** (age + 1))),
        ("shrunk_answers", vanishing),
        ("truncation", endless),
        ("repetition", repeating),
    ],
)
def test_the_known_collapses_of_distillation_are_named_where_they_begin(tmp_path, name, plant):
    """With teachers as the only reward, whose scores know nothing of the length of an answer."""
    config = DistillSection(teacher={"model": "start", "system": "Shout."})
    stage = SimpleNamespace(config=config, reward=SimpleNamespace(name="teacher"))
    guard = Guard(config.watch, stage, RunDirectory(tmp_path))
    fired = {}
    for number, step in enumerate(run_of(0, plant), 1):
        rng = random.Random(number)
        for row in step.rows:
            row.score, row.parts = -abs(rng.gauss(0.2, 0.05)), {}
        for alarm in observe(guard, number, step):
            fired.setdefault(alarm.detector, alarm.step)
    assert ONSET <= fired[name] < ONSET + 4


def test_answers_that_never_end_are_named_after_the_first_steps():
    """A fault that is there from the start; nine in ten answers are cut off, then four in ten."""
    steps = [healthy(random.Random(n), n) for n in range(1, 15)]
    for step in steps:
        for place, row in enumerate(step.rows):
            row.finished = place % 10 == 0
    alarms = [alarm for alarm in alarms_of(steps) if alarm.detector == "cut_off"]
    (alarm,) = alarms
    assert 8 <= alarm.step <= 12 and "max_new_tokens" in alarm.advice
    assert f"90% of the responses end at a limit, by step {alarm.step}" in alarm.message
    for step in steps:
        for place, row in enumerate(step.rows):
            row.finished = place % 10 >= 4
    assert [alarm for alarm in alarms_of(steps) if alarm.detector == "cut_off"] == []


@pytest.mark.parametrize("name", [name for name in DETECTORS if name != "unmoved"])
def test_an_alarm_gives_its_limit(name):
    """`unmoved` has no single value: its evidence gives each measure."""
    assert "{limit" in DETECTORS[name].message


def unchanging(rng: random.Random, answers: int, step: int, ended: float) -> list[texts.Text]:
    """Lognormal lengths and scores of answers, four to a prompt; the answers to a prompt are
    alike.
    """
    rows = []
    for place in range(answers // 4):
        shared, ends = rng.gauss(0, 0.5), rng.betavariate(2 * ended, 2 - 2 * ended)
        for _ in range(4):
            z = shared + rng.gauss(0, 0.87)
            length = max(1, min(256, round(64 * math.exp(0.8 * z))))
            score = 0.3 * z + rng.gauss(0, 0.95)
            word = f"w{rng.randrange(900)}"
            rows.append(texts.Text(f"{step}-{place}", word, length, score, rng.random() < ends))
    return rows


@pytest.mark.parametrize(("answers", "ended"), [(8, 0.5), (8, 0.9), (16, 0.5), (64, 0.3)])
def test_of_runs_in_which_nothing_changes_one_in_twenty_sounds_at_most(answers, ended):
    """By the upper bound of a binomial of 5%, for each detector."""
    fired = Counter()
    for seed in range(15):
        rng, watch, found = random.Random(seed), Watch(), set()
        for step in range(40):
            metrics = {"policy/entropy": 2.0}
            alarms = watch.observe_texts(step, metrics, unchanging(rng, answers, step, ended))
            found |= {alarm.detector for alarm in alarms} - {"unmoved"}
        fired.update(found)
    assert all(count <= scipy.stats.binom.isf(0.01, 15, 0.05) for count in fired.values())


@pytest.mark.parametrize("before", [0, 3, 8, 16])
def test_a_change_of_a_share_is_judged_like_fishers_exact_test(before):
    """Sixteen answers a step to as many prompts, of which `before` are unfinished in ten steps."""
    for now in range(before, 17):
        watch = Watch()
        for step in range(13):
            cut = before if step < 10 else now
            rows = [texts.Text(f"{step}-{n}", "w", 9, 0.0, n >= cut) for n in range(16)]
            watch.observe_texts(step, {}, rows)
        table = [[3 * now, 3 * (16 - now)], [10 * before, 10 * (16 - before)]]
        chance = scipy.stats.fisher_exact(table, alternative="greater").pvalue
        judged = watch.view.moved("unfinished")
        assert judged.sure == (chance <= watch.view.chance)
        assert judged.sure == (now - before >= 16 * judged.least - 1e-9)


def test_a_slow_change_of_shares_is_found_by_small_steps():
    """Of four groups a step half have no signal, then 96%: of thirty steps a dozen show it."""
    found = 0
    for seed in range(20):
        rng, watch = random.Random(seed), Watch()
        for step in range(50):
            share = 0.5 if step < 20 else 0.96
            rows = [texts.Text(f"{step}-{n // 4}", "w", 9, 0.0, True) for n in range(16)]
            silent = sum(rng.random() < share for _ in range(4)) / 4
            alarms = watch.observe_texts(step, {"group/zero_signal": silent}, rows)
            found += step >= 20 and "zero_signal" in {alarm.detector for alarm in alarms}
    assert found >= 17


def test_a_state_of_another_form_begins_anew():
    watch, fresh = Watch(), Watch()
    watch.observe_texts(1, {"reward/proxy": 1.0}, [])
    watch.load_state({"open": ["truncation"], "baseline": [], "series": {"reward/proxy": [9.0]}})
    assert watch.state() == fresh.state()


def test_a_look_with_more_tests_lets_each_of_them_sound_more_rarely():
    """By hand: 0.02 / (10 ln 10) at the tenth look, shared by the tests."""
    view = View(
        config=WatchConfig(),
        metrics={},
        series={},
        phrases=(),
        texts=(),
        columns={},
        course={},
        counts={},
        steps=10,
        looks=10,
        tests=4,
        first=2,
        size=4,
    )
    assert view.chance == pytest.approx(0.000868589 / 4, rel=1e-5)
