"""Runs that went nowhere are told from those that moved, however slowly: on simulated logs, and on
real ones of a tiny model.
"""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import scipy.stats
from tests.watch.monitoring.replay import replay

from tether.cli.tools.doctor_run import examine_run
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.watch.monitoring.doctor import Finding, Healthy, Unexamined
from tether.watch.monitoring.doctor_log import check_movement
from tether.watch.monitoring.trends import drift
from tether.watch.monitoring.watch import Watch
from tether.watch.report.page import write_report

pytestmark = pytest.mark.audit
KL = "kl/policy_reference_k1"


def sampled_log(
    seed: int,
    steps: int,
    samples: int,
    *,
    gain: float = 0.0,
    cooling: float = 0.0,
    kl: float | None = None,
    rounding: float = 0.0,
):
    """A stage that samples: `gain` deviations of the score and `cooling` of the entropy over the
    run, the noise of its samples.

    kl: nats a response at the end; the estimate from n samples of a KL of d deviates by sqrt(2 d /
        n).
    rounding: what bfloat16 adds to a response's log ratio, once a weight has changed: 0.3 for the
        twenty tokens of a real run.
    """
    rng, rows = random.Random(seed), []
    for n in range(steps):
        share, error = n / (steps - 1), 1 / math.sqrt(samples)
        row = {
            "step": n + 1,
            "learning_rate": min(1.0, (n + 1) / 2) * 1e-5,
            "grad_norm": 1.0,
            "reward/proxy_std": 2.0,
        }
        row["reward/proxy"] = rng.gauss(-0.5 + 2.0 * gain * share, 2.0 * error)
        row["policy/entropy"] = rng.gauss(2.5 * (1 - cooling * share), 0.5 * error)
        row["response/length"] = rng.gauss(30.0, 8.0 * error)
        if kl is not None:
            now = kl * share**2
            row[KL] = rng.gauss(now, math.sqrt((2 * now + rounding**2 * (n > 0)) / samples))
        rows.append(row)
    return rows


def pair_log(seed: int, updates: int, margin: float, beta: float = 0.1):
    """A stage on pairs against its reference: the mean margin grows from 0, and each of 16 pairs
    has one of its own.
    """
    rng, rows = random.Random(seed), []
    for n in range(updates):
        now = margin * n / (updates - 1)
        margins = [rng.gauss(now, 1.5 * abs(now)) for _ in range(16)]
        loss = sum(math.log1p(math.exp(-m)) for m in margins) / 16
        rows.append(
            {
                "step": n + 1,
                "loss": loss,
                "margin": sum(margins) / 16,
                "learning_rate": 1e-6,
                "grad_norm": 1.0,
            },
        )
    return rows, {"loss": "dpo", "beta": beta}


def share_found(logs, settings=None) -> float:
    results = [check_movement(rows, settings or {}) for rows in logs]
    return sum(isinstance(result, Finding) for result in results) / len(results)


def test_the_trend_of_a_series_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    for size in (5, 30, 200):
        values = (0.01 * np.arange(size) + rng.normal(size=size)).tolist()
        line, found = scipy.stats.linregress(range(size), values), drift(values)
        assert found.change == pytest.approx(
            line.slope * (size - 1),
        ) and found.error == pytest.approx(line.stderr * (size - 1))
    assert drift([1.0] * 30).change == 0 and not drift([1.0] * 30).sure
    at_once = [3.0] * 4 + [1.0] * 396  # moves at first, rests for the hundred times that
    assert drift([v + rng.normal(0, 0.3) for v in at_once]).sure


@pytest.mark.parametrize("samples", [16, 64, 512])
def test_dead_runs_are_found_and_slow_ones_left_alone_without_a_kl(samples: int):
    """GRPO asks no reference: trends are all there is. A slow run gains half a deviation and cools
    by a sixth in 40 steps.
    """
    dead = [sampled_log(seed, 40, samples) for seed in range(200)]
    slow = [sampled_log(seed, 40, samples, gain=0.5, cooling=0.16) for seed in range(200)]
    assert share_found(dead) >= 0.75
    assert share_found(slow) <= 0.02


@pytest.mark.parametrize(("rounding", "least"), [(0.0, 0.98), (0.3, 0.85)])
def test_a_kl_near_0_is_found_and_a_small_one_left_alone(rounding: float, least: float):
    """In bfloat16 the KL of a policy at rest is far from 0 in every step: ±0.08 nats with 12
    samples.
    """
    dead = [sampled_log(seed, 25, 12, kl=0.001, rounding=rounding) for seed in range(200)]
    slow = [
        sampled_log(seed, 25, 12, kl=0.5, gain=0.3, cooling=0.05, rounding=rounding)
        for seed in range(200)
    ]
    assert share_found(dead) >= least
    assert share_found(slow) <= 0.01


def test_margins_at_0_are_found_and_small_ones_left_alone():
    """A margin of 0.013 is what three epochs over 28 pairs left at the rate of a whole model."""
    for updates in (6, 60):
        dead = [pair_log(seed, updates, 0.013) for seed in range(100)]
        slow = [pair_log(seed, updates, 0.25) for seed in range(200)]
        assert all(share_found([rows], settings) for rows, settings in dead)
        assert sum(share_found([rows], settings) for rows, settings in slow) <= 4
    rows, settings = pair_log(0, 6, 0.013)
    finding = check_movement(rows, settings)
    assert isinstance(finding, Finding)
    assert (
        "0.008" in finding.evidence
        and "6 steps" in finding.evidence
        and "learning_rate" in finding.advice
    )
    verdicts = [
        {"step": r["step"], "reward_desirable": r["margin"], "reward_undesirable": 0.0}
        for r in rows
    ]
    assert isinstance(check_movement(verdicts, {"beta": 0.1}), Finding)
    # its margins are no log ratios
    assert not isinstance(check_movement(rows, {"loss": "simpo", "beta": 2.5}), Finding)


def test_a_held_out_loss_speaks_for_demonstrations():
    rows = [{"step": n, "loss": 2.0 + (-1) ** n * 0.4, "learning_rate": 1e-6} for n in range(1, 9)]
    assert isinstance(
        check_movement(rows, {}, {"eval_loss_before": 2.0, "eval_loss": 1.999}),
        Finding,
    )
    assert isinstance(
        check_movement(rows, {}, {"eval_loss_before": 2.0, "eval_loss": 1.96}),
        Healthy,
    )
    assert isinstance(check_movement(rows, {}), Unexamined)


def test_a_reward_model_that_beats_a_coin_for_sure_has_moved():
    """Its loss of one epoch, new pairs in every update, may show no trend: a real one of 66%
    accuracy did not.
    """
    noise = np.random.default_rng(3).normal(size=(64, 2))
    rows = [
        {"step": n + 1, "loss": 0.66 + 0.1 * a, "accuracy": 0.62 + 0.1 * b}
        for n, (a, b) in enumerate(noise)
    ]
    at_rest, learned = (
        {"heldout_accuracy": {"value": v, "low": v - 0.07, "high": v + 0.07}} for v in (0.53, 0.64)
    )
    assert isinstance(check_movement(rows, {}), Finding) and isinstance(
        check_movement(rows, {}, at_rest),
        Finding,
    )
    healthy = check_movement(rows, {}, learned)
    assert isinstance(healthy, Healthy) and "64.0% of held-out pairs" in healthy.evidence


def test_nobody_is_judged_in_the_warm_up_or_after_a_few_steps():
    rising = [
        {**row, "learning_rate": 1e-7 * row["step"]} for row in sampled_log(0, 40, 64, kl=0.0001)
    ]
    assert isinstance(check_movement(rising, {}), Unexamined) and isinstance(
        check_movement(rising[:5], {}),
        Unexamined,
    )
    assert isinstance(check_movement([], {}), Unexamined)


def live(rows) -> list[int]:
    """The steps at which the detector fires while the run goes."""
    watch, found = Watch(), []
    for place, row in enumerate(rows, 1):
        watch.load_state(json.loads(json.dumps(watch.state())))  # as if every step were resumed
        found += [
            a.step
            for a in watch.observe(place, {**row, "run/share": place / len(rows)}, [], [])
            if a.detector == "unmoved"
        ]
    return found


def test_the_detector_fires_once_when_half_of_a_dead_run_is_over():
    dead = [live(sampled_log(seed, 60, 64)) for seed in range(12)]
    assert sum(bool(steps) for steps in dead) >= 9 and {
        step for steps in dead for step in steps[:1]
    } <= set(range(30, 61))
    slow = [live(sampled_log(seed, 60, 64, gain=1.0, cooling=0.3)) for seed in range(12)]
    assert not any(slow)
    rounded = [live(sampled_log(seed, 60, 12, kl=0.0001, rounding=0.3)) for seed in range(12)]
    assert sum(bool(steps) for steps in rounded) >= 9
    # of that kl_stuck has told
    assert not live(sampled_log(0, 60, 64, kl=0.5)) and not live(sampled_log(0, 60, 64, kl=0.00001))
    assert [a.step for a in replay(sampled_log(1, 60, 64)) if a.detector == "unmoved"] == dead[1]


def test_the_course_of_a_long_run_is_that_of_all_its_steps():
    """Values that rise by one a step: the mean of each piece of the run is known."""
    watch = Watch()
    for step in range(1, 2001):
        watch.observe(step, {KL: float(step), "reward/proxy": 7.0}, [], [])
        kls = watch.course[KL]
        assert len(kls) <= 400
        assert kls[-1] > step - 8
        if step in (400, 401, 402, 800, 1600, 2000):
            stride = {400: 1, 401: 2, 402: 2, 800: 2, 1600: 4, 2000: 8}[step]
            pieces = [range(n, min(n + stride, step + 1)) for n in range(1, step + 1, stride)]
            assert kls == pytest.approx([sum(piece) / len(piece) for piece in pieces])
            watch.load_state(json.loads(json.dumps(watch.state())))
    kls = watch.course[KL]
    assert sum(kls[len(kls) // 2 :]) / (len(kls) // 2) == pytest.approx(1500.5, abs=8)
    assert set(watch.course["reward/proxy"]) == {7.0}


def test_an_alarm_of_a_long_run_gives_its_number_of_steps():
    watch, rows, found = Watch(), sampled_log(0, 1001, 64), []
    for place, row in enumerate(rows, 1):
        found += watch.observe(place, {**row, "run/share": 0.5 * (place > 1000)}, [], [])
    (alarm,) = found
    assert alarm.detector == "unmoved" and alarm.value == 1000
    assert alarm.message.endswith("after 1000 steps")


def test_the_thirds_of_a_long_run_are_thirds_of_its_steps():
    """The score rises by 0.8 deviations after 300 of 1000 steps. A course in which old steps weigh
    less than new ones hides the rise.
    """
    watch, found = Watch(), []
    rng = random.Random(0)
    for step in range(1, 1001):
        metrics = {
            "reward/proxy": 0.8 * (step > 300) + rng.gauss(0, 0.01),
            "reward/proxy_std": 1.0,
            KL: 0.2,
            "kl/coefficient": 0.05,
            "kl/price": 1.25,
            "run/share": step / 1000,
        }
        found += watch.observe(step, metrics, [], [])
    assert not found


def recipe(folder, rate: float, section: str):
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    rows = [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in words]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.py").write_text(
        "def share(prompts, texts):\n    return [t.count('e') / max(1, len(t)) for t in texts]\n",
    )
    common = {"data": {"path": str(folder / "rows.jsonl")}, "optimizer": {"learning_rate": rate}}
    sampling = {
        "steps": 24,
        "prompts_per_step": 6,
        "samples_per_prompt": 4,
        "max_new_tokens": 12,
        "reward_source": "function",
    }
    sampling |= {"function": {"call": f"{folder / 'letters.py'}:share"}}
    more = {
        "direct": {"epochs": 6, "prompts_per_update": 4, "heldout_fraction": 0.0},
        "grpo": sampling,
        "ppo": sampling,
    }
    values = {
        "run": str(folder / "run"),
        "model": {"source": "tiny", "dtype": "float32"},
        section: {**common, **more[section]},
    }
    return build(Recipe, values)


@pytest.mark.parametrize("section", ["direct", "grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_real_run_at_a_dead_rate_is_told_of_and_one_that_learns_is_not(section: str, tmp_path):
    for name, rate in (("dead", 1e-7), ("alive", 2e-2)):
        folder = tmp_path / name
        folder.mkdir()
        summary = run_recipe(recipe(folder, rate, section), [section])[section]
        told = {alarm["detector"] for alarm in summary["alarms"]} & {"unmoved", "kl_stuck"}
        found = [
            r
            for r in examine_run(folder / "run")[{"direct": "dpo"}.get(section, section)]
            if isinstance(r, Finding) and r.check == "movement"
        ]
        assert bool(told) == bool(found) == (name == "dead"), (name, summary["alarms"], found)
        shown = write_report(folder / "run" / section).read_text(encoding="utf-8")
        assert any(detector.replace("_", " ") in shown for detector in told) == (name == "dead")
