"""What decoding alone gives: gains at one temperature against gains over every decoding of the
start.
"""

import numpy as np
import pytest

from tether.core.types import Prompt, Rollout, RolloutGroup, Sampling, StopReason, user
from tether.evaluation.decoding import control, other_temperatures, sharpening, verdict
from tether.evaluation.held_out import answers_at
from tether.evaluation.winrate import gain
from tether.settings.watch import WatchConfig
from tether.watch.monitoring.detectors import DETECTORS
from tether.watch.monitoring.watch import Watch

TEMPERATURES = (1.0, 0.7, 0.5, 0.0)


def sides(seed, start, trained, *, prompts=150, noise=1.2, shared=0.8):
    """Scores of both sides by temperature: a prompt's own level, and noise of each answer."""
    generator = np.random.default_rng(seed)
    level = shared * generator.normal(size=prompts)
    made = [
        {
            t: (level + mean + noise * generator.normal(size=prompts)).tolist()
            for t, mean in side.items()
        }
        for side in (start, trained)
    ]
    return *made, [str(n) for n in range(prompts)]


def test_the_numbers_by_hand():
    before = {1.0: [0.0, 0.0, 2.0, 2.0] * 8, 0.5: [1.0, 1.0, 3.0, 3.0] * 8}
    after = {1.0: [2.0, 2.0, 4.0, 4.0] * 8, 0.5: [1.0, 2.0, 3.0, 4.0] * 8}
    told = control(before, after, [str(n) for n in range(32)], 1.0)
    assert list(told["by_temperature"]) == ["1", "0.5"]
    assert (
        told["by_temperature"]["1"]["gain"]["value"] == 2.0
        and told["by_temperature"]["0.5"]["gain"]["value"] == 0.5
    )
    best = told["over_best_decoding"]
    assert (best["temperature"], best["policy_temperature"]) == (0.5, 1.0)
    assert best["value"] == 1.0 and 0 < best["low"] <= 1.0 <= best["high"]
    assert best["win_rate"]["value"] == 1.0 and told["verdict"] == "better"


def test_a_policy_that_is_only_sharper_is_called_so():
    """At the temperature of training far above the start; at its best as good as the start at its
    best.
    """
    start = {1.0: 5.6, 0.7: 7.1, 0.5: 7.35, 0.0: 7.4}
    words = [
        control(*sides(seed, start, {1.0: 6.7, 0.7: 7.4, 0.5: 7.4, 0.0: 7.4}), 1.0)["verdict"]
        for seed in range(100)
    ]
    assert words.count("sharper") >= 90 and words.count("worse") <= 6 and words.count("better") <= 6


@pytest.mark.parametrize(("gained", "word"), [(0.8, "better"), (-0.8, "worse")])
def test_a_difference_at_every_temperature_is_told(gained, word):
    start = {1.0: 5.6, 0.7: 7.1, 0.5: 7.35, 0.0: 7.4}
    words = [
        control(*sides(seed, start, {t: m + gained for t, m in start.items()}), 1.0)["verdict"]
        for seed in range(50)
    ]
    assert words.count(word) >= 48


STEEP, FLAT = {1.0: 5.6, 0.7: 7.1, 0.5: 7.35, 0.0: 7.4}, dict.fromkeys(TEMPERATURES, 7.4)
PEAKED = {**dict.fromkeys(TEMPERATURES, 5.0), 0.0: 7.4}


@pytest.mark.parametrize(
    ("start", "trained"),
    [(STEEP, STEEP), (FLAT, FLAT), (PEAKED, FLAT), (FLAT, PEAKED)],
)
def test_the_interval_holds_the_true_gain(start, trained):
    """Whatever is chosen from: the best of four equal ones flatters itself most where the other
    side has one.
    """
    true = max(trained.values()) - max(start.values())
    told = [
        control(*sides(seed, start, trained, prompts=64), 1.0)["over_best_decoding"]
        for seed in range(300)
    ]
    wrong = [[gain["low"] > true for gain in told], [gain["high"] < true for gain in told]]
    wrong += [[gain["win_rate"]["low"] > 0.5 for gain in told]]
    # the level, and twice the error of 300
    assert all(np.mean(found) <= 0.025 + 2 * 0.009 for found in wrong)
    assert all(
        gain["low"] <= gain["value"] <= gain["high"]
        for found in told
        for gain in (found, found["win_rate"])
    )


UP, DOWN, NONE = ({"low": low, "high": low + 0.4} for low in (0.1, -0.5, -0.2))
SHARES = {"above": (0.6, 0.7), "below": (0.3, 0.4), "around": (0.4, 0.6), "unknown": (None, None)}


@pytest.mark.parametrize(
    ("share", "over", "words"),
    [
        ("above", UP, ["better"] * 3),
        ("above", NONE, ["better"] * 3),
        ("above", DOWN, ["better"] * 3),
        ("below", UP, ["worse"] * 3),
        ("below", NONE, ["worse"] * 3),
        ("below", DOWN, ["worse"] * 3),
        *(
            (share, over, words)
            for share in ("around", "unknown")
            for over, words in (
                (UP, ["undecided"] * 3),
                (NONE, ["sharper", "undecided", "undecided"]),
                (DOWN, ["undecided"] * 3),
            )
        ),
    ],
)
def test_the_win_rate_over_the_best_decoding_decides(share, over, words):
    """By the gain at the temperature of training: up, level, down."""
    low, high = SHARES[share]
    best = {**over, "win_rate": {"low": low, "high": high}}
    assert [verdict(gain, best) for gain in (UP, NONE, DOWN)] == words


def test_a_judge_that_gives_every_answer_the_same_decides_nothing():
    same = {t: [3.0] * 8 for t in TEMPERATURES}
    told = control(same, same, [str(n) for n in range(8)], 1.0)
    assert told["verdict"] == "undecided" and told["over_best_decoding"]["win_rate"]["value"] == 0.5


def test_failed_scores_are_left_out_and_none_left_is_no_control():
    known, none = [1.0, None, 2.0, 2.5], [None] * 4
    groups = ["a", "b", "c", "d"]
    assert control({1.0: known, 0.5: none}, {1.0: known, 0.5: none}, groups, 1.0)[
        "by_temperature"
    ].keys() == {"1"}
    assert control({1.0: none}, {1.0: none}, groups, 1.0) == {"by_temperature": {}}


class Counting:
    """An engine that says at which temperature it was asked, and how often."""

    def __init__(self):
        self.asked = []

    def generate(self, prompts, sampling, *, num_samples=1, seed=0, **_):
        self.asked.append((sampling.temperature, num_samples, seed))
        text = str(sampling.temperature)
        rollout = [
            Rollout((1,), (2,), (0.0,), StopReason.STOP_TOKEN, text, 0, 0, sampling, p)
            for p in prompts
        ]
        return [
            RolloutGroup(p, tuple([r] * num_samples)) for p, r in zip(prompts, rollout, strict=True)
        ]


def test_the_greedy_answer_is_drawn_once_and_counts_for_all():
    engine, prompts = Counting(), [Prompt((user(word),)) for word in "ab"]
    for temperature in other_temperatures(Sampling(8, 0.7), (0.7, 0.5, 0.0, 0.5)):
        texts = [
            r.text
            for r in answers_at(
                temperature,
                engine,
                prompts,
                Sampling(8, 0.7),
                num_samples=3,
                seed=5,
            )
        ]
        assert texts == [str(temperature)] * 6
    assert engine.asked == [(0.5, 3, 5), (0.0, 1, 5)]


class Toy:
    """Prompts with ten answers each. The start knows half of what scores are made of, and is better
    at a lower temperature.
    """

    def __init__(self, seed, prompts=128):
        self.generator = np.random.default_rng(seed)
        known, self.unknown, noise = self.generator.normal(size=(3, prompts, 10))
        self.scores, self.logits = known + self.unknown, known + 0.3 * noise
        self.groups = [str(n) for n in range(prompts)]

    def answered(self, logits, temperature):
        """(entropy, scores) of one answer a prompt."""
        scaled = logits / max(temperature, 1e-9)
        logprobs = scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)
        noise = self.generator.gumbel(size=logits.shape) if temperature else 0.0
        chosen = (logprobs + noise).argmax(1)
        places = np.arange(len(chosen))
        return -float(logprobs[places, chosen].mean()) if temperature else 0.0, self.scores[
            places,
            chosen,
        ].tolist()

    def compared(self, logits):
        start, now = (
            {t: self.answered(self.logits, t) for t in TEMPERATURES},
            self.answered(logits, 1.0),
        )
        self.gain = gain(start[1.0][1], now[1], self.groups)
        return sharpening(start, now, self.groups, 1.0)


def fires(found):
    """As the detector does, in the second half of a run."""
    return found["sure"] and found["share"] >= DETECTORS["sharpening"].threshold


def test_a_policy_that_only_became_surer_is_explained_by_a_temperature():
    """Ten policies that are their start at a lower temperature: what is found is that
    temperature.
    """
    found = [
        (t, Toy(seed).compared(Toy(seed).logits / t))
        for seed, t in enumerate(np.linspace(0.3, 0.6, 10))
    ]
    assert sum(fires(one) for _, one in found) >= 9
    assert all(abs(one["temperature"] - t) < 0.15 for t, one in found)


def test_a_policy_that_learnt_is_not_called_sharper():
    """Ten policies that took up what the start does not know, half of them at a temperature that
    keeps them unsure.
    """
    found, gains = [], []
    for seed, learnt in enumerate(np.linspace(0.6, 1.5, 10)):
        toy = Toy(seed)
        found.append(
            toy.compared(
                (toy.logits + learnt * toy.unknown) / ((1 + learnt**2) ** 0.5 if seed % 2 else 1.0),
            ),
        )
        gains.append(toy.gain)
        assert found[-1]["gain"] == toy.gain.value
    assert sum(fires(one) for one in found) <= 1 and sum(one.low > 0 for one in gains) >= 8


def test_an_unchanged_policy_has_no_gain_to_explain():
    assert sum(fires(Toy(seed).compared(Toy(seed).logits)) for seed in range(100)) <= 5


def test_the_detector_waits_for_the_second_half():
    fires_at = []
    watch = Watch(WatchConfig())
    for step in range(1, 11):
        row = {
            "sharpening/gain": 1.1,
            "sharpening/share": 0.9,
            "sharpening/temperature": 0.62,
            "sharpening/sure": 1.0,
        }
        alarms = watch.observe(
            step,
            {"run/share": step / 10, **(row if step % 2 == 0 else {})},
            [],
            [],
        )
        fires_at += [(step, alarm.message) for alarm in alarms if alarm.detector == "sharpening"]
    ((step, message),) = fires_at
    assert step == 6 and "held-out gain of 1.1" in message and "(limit 70%)" in message
