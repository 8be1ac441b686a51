"""The study of overoptimisation on the tiny model, and what it says of made-up courses whose peak
and fall are known.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from studies.overopt import OveroptConfig, chosen_from, course_of, labels, overopt
from studies.overopt_page import write_page

from studies import overopt as study
from tether.core.errors import ConfigError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Comparison, assistant, user
from tether.evaluation.peaks import peak_interval
from tether.settings.reading import load_recipe

STUDIES = Path(study.__file__).parent


def smoke(*overrides):
    return load_recipe(STUDIES / "overopt-smoke.toml", OveroptConfig, overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("overopt") / "run"
    config = smoke(f"run={root}")
    return config, root, overopt(config, [1])


def test_every_proxy_chooses_from_one_pool_and_some_train_policies(finished):
    _, root, summary = finished
    proxies = summary["proxies"]
    assert [list(proxy["policies"]) for proxy in proxies.values()] == [["0", "0.1"], ["0"], [], []]
    for proxy in proxies.values():
        curve = proxy["seeds"]["1"]
        assert curve["sizes"] == [1, 2, 4, 8] and curve["gold"][0] == curve["proxy"][0] == 0.0
        assert curve["proxy"] == sorted(curve["proxy"]) and all(
            gold <= best + 1e-9 for gold, best in zip(curve["gold"], curve["ceiling"], strict=True)
        )
    assert len({json.dumps(proxy["seeds"]["1"]["ceiling"]) for proxy in proxies.values()}) == 1
    trained = {path.name for path in (root / "seed-1" / "rewards").iterdir()}
    assert trained == {
        "pairs-20-flipped-0-members-1",
        "pairs-30-flipped-0.25-members-2",
        "pairs-30-flipped-0.25-members-2-averaged",
    }
    course = proxies["small"]["policies"]["0"]["1"]
    assert (
        course["steps"] == [0, 2, 4]
        and course["kl"][0] == pytest.approx(0.0, abs=1e-5)
        and course["kl"][-1] > 0
    )
    lines = (root / course["folder"] / "heldout.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if not row.keys() & {"temperature", "best_of"}]
    assert [np.mean(row["scores"]["score"]) for row in rows] == pytest.approx(course["gold"])
    assert [np.mean(row["scores"]["proxy"]) for row in rows] == pytest.approx(course["proxy"])


def test_the_kl_of_held_out_answers_is_that_of_the_training(finished):
    _, root, summary = finished
    folder = root / summary["proxies"]["small"]["policies"]["0"]["1"]["folder"]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all("gold/kl" in row for row in metrics if row["step"] % 2 == 0)


@pytest.mark.slow
def test_it_starts_again_for_free_and_takes_up_a_new_proxy(finished, monkeypatch):
    config, _, summary = finished
    for name in ("learned_reward", "local_engine", "open_model", "score_judge"):
        monkeypatch.setattr(study, name, None)
    assert overopt(config, [1]) == summary
    fewer = config.model_copy(update={"proxies": {"mean": config.proxies["mean"]}})
    assert overopt(fewer, [1])["proxies"]["mean"] == summary["proxies"]["mean"]
    overopt(config, [1])


@pytest.mark.slow
@pytest.mark.parametrize("calls", [0, 2])
def test_interrupted_at_a_reward_model_or_a_policy_it_ends_with_the_same_numbers(
    finished,
    tmp_path,
    monkeypatch,
    calls,
):
    _, _, summary = finished
    config, run_stage, begun = (
        smoke(f"run={tmp_path / 'run'}", "proxies.worst.policies=[]"),
        study.run_stage,
        [],
    )

    def interrupted(job):
        begun.append(job.folder)
        if len(begun) > calls:
            raise KeyboardInterrupt
        return run_stage(job)

    monkeypatch.setattr(study, "run_stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        overopt(config, [1])
    assert (
        not (tmp_path / "run" / "summary.json").exists()
        and not (tmp_path / "run" / "report.html").exists()
    )
    monkeypatch.setattr(study, "run_stage", run_stage)
    again = overopt(config, [1])["proxies"]
    assert all(again[name] == summary["proxies"][name] for name in ("small", "mean", "averaged"))


def test_its_page_tells_proxies_and_policies(finished):
    _, root, _ = finished
    text = write_page(root).read_text()
    assert text == (root / "report.html").read_text()
    assert all(
        f'id="{name}"' in text
        for name in ("bon-gold", "bon-proxy", "rl-gold", "rl-proxy", "rl-steps")
    )
    assert (
        "small, β\u00a0=\u00a00.1" in text
        and ("Samples from the policy that fell furthest") in text
    )


def pairs(count):
    return [
        Comparison((user("q"),), (assistant("yes"),), (assistant("no"),), id=str(i), group=str(i))
        for i in range(count)
    ]


def test_fewer_labels_are_a_part_of_more_and_about_a_share_is_flipped():
    rows = pairs(4000)
    many, few = labels(rows, 2000, 0.25, 0), labels(rows, 200, 0.25, 0)
    assert few == many[:200] and len({row.id for row in many}) == 2000
    flipped = [row for row in many if row.chosen[0].content == "no"]
    assert 0.22 < len(flipped) / 2000 < 0.28 and all(row.probability == 1.0 for row in many)
    assert labels(rows, 2000, 0.0, 0) != labels(rows, 2000, 0.0, 1)
    assert {row.id for row in labels(rows, 200, 0.0, 0)} == {row.id for row in few}
    with pytest.raises(ConfigError, match="4001 pairs are asked for, and 4000"):
        labels(rows, 4001, 0.0, 0)


def test_best_of_n_by_a_proxy_that_is_gold_is_the_ceiling_and_by_noise_is_nothing():
    generator = torch.Generator().manual_seed(0)
    gold = torch.randn(200, 64, generator=generator, dtype=torch.float64)
    right = chosen_from(gold, 3 * gold + 1)
    assert right["gold"] == pytest.approx(right["ceiling"])
    # the mean of the largest of 32 normal draws
    assert right["gold"][right["sizes"].index(32)] == pytest.approx(2.07, abs=0.05)
    noise = chosen_from(gold, torch.randn(200, 64, generator=generator, dtype=torch.float64))
    assert max(map(abs, noise["gold"])) < 0.1 and noise["proxy"][-1] == pytest.approx(2.07, abs=0.1)


def course(levels, noise=0.3, prompts=200, seed=0):
    generator = np.random.default_rng(seed)
    ease = generator.normal(size=prompts)
    measured = {
        4 * i: {
            "score": (level + ease + noise * generator.normal(size=prompts)).tolist(),
            "kl": [float(i * i)] * prompts,
            "proxy": [float(i)] * prompts,
        }
        for i, level in enumerate(levels)
    }
    return measured, [str(i) for i in range(prompts)]


def test_a_course_that_rises_and_falls():
    found = course_of(*course([5.0, 6.0, 7.0, 6.5, 6.0]))
    assert (
        found["best_step"] == 8
        and found["best_step_interval"] == (8, 8)
        and found["fallen_at"] == 12
    )
    assert found["fall"]["value"] == pytest.approx(-1.0, abs=0.1) and found["fall"]["high"] < 0
    assert found["gain"]["value"] == pytest.approx(1.0, abs=0.1) and found[
        "kept_share"
    ] == pytest.approx(1.0)
    assert found["kl"] == [0, 1, 4, 9, 16] and found["fit"]["peak"] is not None


def test_a_course_without_a_fall_is_not_said_to_fall():
    """The highest of noisy equals always lies above the last; judged on the other half, it does
    not.
    """
    falls = [course_of(*course([5.0] * 8, noise=1.0, prompts=60, seed=seed)) for seed in range(40)]
    assert abs(np.mean([found["fall"]["value"] for found in falls])) < 3 * 1.0 * math.sqrt(
        2 / 60 / 40,
    )
    naive = [max(found["gold"]) - found["gold"][-1] for found in falls]
    assert np.mean(naive) > 0.1
    assert np.mean([found["fall"]["high"] < 0 for found in falls]) < 0.15


def test_the_peak_is_told_as_widely_as_it_is_known():
    sharp, vague = (
        course([5.0, 7.0, 6.0]),
        course([5.0, 6.0, 6.02, 6.01, 6.0], noise=1.0, prompts=50),
    )
    assert peak_interval(*sharp) == (4, 4)
    low, high = peak_interval(*vague)
    assert high - low >= 8
    gaps = {step: {"score": [None, *rows["score"][1:]]} for step, rows in sharp[0].items()}
    assert peak_interval(gaps, sharp[1]) == (4, 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.kl.coefficient=0.1", "the coefficients stand in each proxy's policies"),
        ("ppo.evaluate={every=2}", "ppo.evaluate says when"),
        ("ppo.evaluate.judge=reward", "and by which judge"),
        ("ppo.evaluate.stop=true", "leave ppo.evaluate.keep and stop out"),
        ("reward.test_share=0.2", "would take labels from the proxies"),
        ("reward.members=3", "reward.members has no effect: set it in the proxy"),
        ("proxies.x={pairs=20, combine='worst'}", "combine has no effect on one model"),
        ("proxies.x={pairs=20, average=true}", "average has no effect on one model"),
        ("ppo.seed=3", "ppo.seed has no effect"),
        ("seed=3", "unknown key 'seed'"),
    ],
)
def test_wrong_studies_are_one_clear_message(override, message):
    with pytest.raises(ConfigError, match=message):
        smoke(override)


def test_the_recipe_is_whole():
    config = load_recipe(STUDIES / "overopt.toml", OveroptConfig)
    assert {proxy.pairs for proxy in config.proxies.values()} >= {250, 1000, 8000}
    assert any(0.0 in proxy.policies for proxy in config.proxies.values())
    assert {config.recipe(seed).run for seed in (0, 2)} == {
        "runs/overopt/seed-0",
        "runs/overopt/seed-2",
    }


OWN = """
run = "run"
[model]
source = "tiny"
[reward]
data = { path = "pairs.jsonl" }
prompts_per_update = 4
[best_of_n]
prompts = 2
samples = 8
[ppo]
data = { path = "questions.txt" }
steps = 2
prompts_per_step = 4
samples_per_prompt = 2
max_new_tokens = 8
evaluate = { every = 1, data = { path = "others.txt" }, judge = { call = "short.py:short" } }
[proxies.few]
pairs = 8
policies = [0.1]
"""


@pytest.mark.slow
def test_ones_own_comparisons_prompts_judge_and_model(tmp_path):
    """As a program; labels of people have no true order, so the page has no accuracy."""
    (tmp_path / "own.toml").write_text(OWN)
    rows = (
        {"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea at all."}
        for i in range(24)
    )
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "questions.txt").write_text("".join(f"What is {i} and {i}?\n" for i in range(8)))
    (tmp_path / "others.txt").write_text("".join(f"What comes after {i}?\n" for i in range(4)))
    (tmp_path / "short.py").write_text(
        "def short(prompts, responses):\n    return [-len(r) for r in responses]\n",
    )
    command = [sys.executable, "-m", "studies.overopt", "own.toml", "--seeds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(study.__file__).parent.parent)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    proxy = read_json(tmp_path / "run" / "summary.json")["proxies"]["few"]
    assert proxy["seeds"]["0"]["gold_accuracy"] is None and proxy["policies"]["0.1"]["0"][
        "steps"
    ] == [0, 1, 2]
    assert {row["id"] for row in read_jsonl(tmp_path / "run/seed-0/pool/answers.jsonl")}
    assert "chosen by gold itself" in (tmp_path / "run" / "report.html").read_text()
