"""Every check of the doctor on a planted bug and on a set-up without one, and the promise that an
examination leaves no trace.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import tether
from tether.cli.examine import doctor as command
from tether.cli.examine import findings_table
from tether.cli.tools.doctor import examine_recipe, examine_stage
from tether.cli.tools.doctor_run import examine_run
from tether.core.errors import ConfigError, RunError
from tether.core.types import Prompt, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.learned import TextReward
from tether.rollout.local import LocalEngine
from tether.runner.run import run_recipe
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.policy import PolicyConfig
from tether.settings.reading import build, load_recipe
from tether.settings.recipe import Recipe
from tether.stages.policy_gradient import PolicyGradient
from tether.watch.monitoring import doctor
from tether.watch.monitoring.doctor import Finding, Healthy, Unexamined
from tether.watch.monitoring.doctor_log import check_rows, check_samples

PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]
OTHER = TEMPLATE.replace("<|{{ message['role'] }}|>", "{{ message['role'] }}: ").replace(
    "<|assistant|>",
    "assistant: ",
)


SETTINGS = {
    "normalize_scores": True,
    "kl": {"place": "token", "coefficient": 0.05},
    "missing_stop_penalty": 0.5,
}
KL = "kl/policy_reference_k1"


class Variety:
    """The number of distinct tokens: neither an empty nor an endless answer has many."""

    name = "variety"

    def score(self, rollouts):
        return [Score(float(len(set(r.response_ids)))) for r in rollouts]


def make(
    kind=PolicyGradient,
    *,
    reward=None,
    engine=None,
    reference=None,
    stop_ids=(1,),
    dropout=0.0,
    **settings,
):
    """A healthy set-up but for what is said: PPO on the tiny model with adapters on one trunk."""
    settings = {
        "samples_per_prompt": 4,
        "max_new_tokens": 16,
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        **settings,
    }
    config = PolicyConfig.model_validate(settings)
    encoder = ChatEncoder(tiny_tokenizer(), stop_ids)
    model = tiny_model(0).requires_grad_(False).eval()
    model = add_adapter(model, "policy", LoraConfig(rank=8, dropout=dropout), seed=1)
    policy = Role(model, "policy")
    value = Role(model, "policy", ScalarHead(64)) if config.critic else None
    engine = (engine or LocalEngine)(policy, encoder)
    reference = Role(model) if reference is None else reference(model)
    return kind(
        config=config,
        policy=policy,
        reference=reference,
        value=value,
        reward=reward or Variety(),
        engine=engine,
        encoder=encoder,
    )


def findings(stage, **more):
    results = examine_stage(stage, PROMPTS, **more)
    return {r.check: r for r in results if isinstance(r, Finding)}


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "ppo"},
        {"algorithm": "ppo", "kl": {"place": "sequence"}, "temperature": 0.7},
        {"algorithm": "rloo"},
        {"algorithm": "grpo", "kl": {"report": True}},
        {"algorithm": "grpo", "kl": {"coefficient": 0.1, "estimator": "k3"}},
        {"algorithm": "dapo", "kl": {"coefficient": 0.1, "estimator": "k3_corrected"}},
        {"algorithm": "reinforce++", "missing_stop_penalty": 1.0},
    ],
)
def test_a_healthy_set_up_raises_nothing(settings):
    results = examine_stage(make(**settings), PROMPTS)
    assert [r for r in results if isinstance(r, Finding)] == []
    examined = {"temperature", "stop tokens", "scores", "empty or endless answers", "epochs"}
    assert examined <= {r.check for r in results if isinstance(r, Healthy)}


def test_an_examination_leaves_everything_as_it_was():
    stage = make(algorithm="ppo", kl={"coefficient": 0.1})
    loss_too = make(algorithm="grpo", kl={"coefficient": 0.1})
    noisy = make(dropout=0.3)
    noisy.policy.model.model.model.layers[0].train(True)  # what is on stays on
    for each in (stage, loss_too, noisy):
        modules = {n: m.training for n, m in each.policy.model.named_modules()}
        weights = {n: p.detach().clone() for n, p in each.policy.model.named_parameters()}
        wanted = {n: p.requires_grad for n, p in each.policy.model.named_parameters()}
        random, state, optimizer = (
            torch.random.get_rng_state(),
            each.state(),
            each.learner.optimizer.state_dict(),
        )
        examine_stage(each, PROMPTS)
        assert {n: m.training for n, m in each.policy.model.named_modules()} == modules
        assert all(torch.equal(p, weights[n]) for n, p in each.policy.model.named_parameters())
        assert all(p.grad is None for p in [*each.policy.model.parameters(), *each.learner.masters])
        assert {n: p.requires_grad for n, p in each.policy.model.named_parameters()} == wanted
        assert torch.equal(torch.random.get_rng_state(), random)
        assert (
            each.state() == state
            and each.learner.optimizer.state_dict() == optimizer
            and each.learner.updates == 0
        )
        assert each.engine.policy_version == 0


def test_an_examined_stage_trains_as_one_that_was_not():
    stages = [make(algorithm="ppo", prompts_per_step=4, epochs=2) for _ in range(2)]
    examine_stage(stages[0], PROMPTS)
    for stage in stages:
        stage.step(PROMPTS, 0)
    pairs = zip(*(s.policy.model.parameters() for s in stages), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_reference_that_is_not_the_start_is_found():
    policy = torch.full((2, 3), -1.0)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    padding = (~mask) * 9.0
    assert isinstance(doctor.wrong_reference(policy, policy - padding, mask), Healthy)
    assert doctor.wrong_reference(policy, policy - 0.05, mask).severity == "error"


@pytest.mark.parametrize(
    ("change", "place", "says"),
    [
        (-0.5, "reward", None),
        (0.5, "reward", "wrong sign"),
        (0.5, "loss", None),
        (-0.5, "loss", "wrong sign"),
        (0.0, "loss", "is missing in the loss"),
    ],
)
def test_a_kl_of_the_wrong_sign_or_none_is_found(change, place, says):
    result = doctor.kl_sign(change, 0.1, place)
    assert isinstance(result, Healthy) if says is None else says in result.message


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]], None),
        ([[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]], "more tokens than the last"),
        ([[2.0, 2.0, 2.0], [1.0, 1.0, 0.0]], "more tokens than the last"),
        ([[0.0] * 3] * 2, "missing in the rewards"),
    ],
)
def test_a_score_that_is_not_at_the_last_token_once_is_found(rewards, says):
    result = doctor.score_once(torch.tensor(rewards), [3, 2])
    assert isinstance(result, Healthy) if says is None else says in result.message


@pytest.mark.parametrize("settings", [{"epochs": 50}, {"epochs": 10, "minibatches": 16}])
def test_many_epochs_are_found(settings):
    assert findings(make(**settings))["epochs"].severity == "warning"
    assert "epochs" not in findings(make(**settings, target_kl=0.02))


@pytest.mark.parametrize(
    ("template", "stop_ids", "vocabulary"),
    [(OTHER, (1,), False), (TEMPLATE, (5,), False), (TEMPLATE, (1,), True)],
)
def test_a_reward_model_of_another_encoding_is_found(template, stop_ids, vocabulary):
    tokenizer = tiny_tokenizer()
    assert "encoding" not in findings(make(), reward_encoder=ChatEncoder(tokenizer, (1,)))
    if vocabulary:
        tokenizer.add_tokens(["one"])
    assert "encoding" in findings(make(), reward_encoder=ChatEncoder(tokenizer, stop_ids, template))


def test_a_reward_model_that_reads_text_has_the_encoding_of_its_training():
    tokenizer = tiny_tokenizer()
    own, policys = ChatEncoder(tokenizer, (1,), OTHER), ChatEncoder(tokenizer, (1,))

    def result(encoder):
        stage = make(reward=TextReward(Variety(), encoder))
        results = examine_stage(stage, PROMPTS, reward_encoder=own)
        return next(one for one in results if one.check == "encoding")

    assert isinstance(result(own), Healthy) and "as text" in result(own).evidence
    assert isinstance(wrong := result(policys), Finding)
    assert "TextReward(LearnedReward(role, encoder), encoder)" in wrong.advice


@pytest.mark.parametrize(
    ("kind", "score"),
    [("empty", lambda ids: -len(ids)), ("endless", lambda ids: len(ids) - len(set(ids)))],
)
def test_a_reward_that_prefers_odd_answers_is_found(kind, score):
    """One that pays for brevity, and one that pays for repetition."""
    reward = SimpleNamespace(
        name="planted",
        score=lambda rollouts: [Score(float(score(r.response_ids))) for r in rollouts],
    )
    found = findings(make(reward=reward, stop_ids=tuple(range(1, 10))))
    assert (
        set(found) == {"empty or endless answers"}
        and f"prefers {kind}" in found["empty or endless answers"].message
    )


def test_the_ninetieth_percentile_decides_what_is_preferred():
    ordinary = [float(n) for n in range(11)]
    below, above = doctor.empty_or_endless(ordinary, {"empty": [8.0, 9.9], "endless": [9.0, 9.2]})
    assert isinstance(below, Healthy) and isinstance(above, Finding)


def test_a_penalty_for_answers_without_end_counts():
    """Every token more is paid, so the endless answer is best, unless what it is fined is more than
    that.
    """
    stops = tuple(range(1, 60))
    reward = SimpleNamespace(
        name="length",
        score=lambda rollouts: [Score(0.5 * len(r.response_ids)) for r in rollouts],
    )
    common = {"algorithm": "rloo", "reward": reward, "stop_ids": stops, "max_new_tokens": 32}
    assert "prefers endless" in findings(make(**common))["empty or endless answers"].message
    assert "empty or endless answers" not in findings(make(**common, missing_stop_penalty=20.0))


class Hotter(LocalEngine):
    """Samples at another temperature than it is asked to, and says so in its log-probabilities."""

    def generate(self, prompts, sampling, **more):
        return super().generate(prompts, replace(sampling, temperature=0.5), **more)


class Silent(Hotter):
    """The same without log-probabilities."""

    def generate(self, prompts, sampling, **more):
        groups = super().generate(prompts, sampling, **more)
        return [
            replace(g, rollouts=tuple(replace(r, logprobs=()) for r in g.rollouts)) for g in groups
        ]


class Truncating(LocalEngine):
    def generate(self, prompts, sampling, **more):
        return super().generate(prompts, replace(sampling, top_k=10), **more)


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (Hotter, "temperature 0.5 would fit"),
        (Silent, "surprisal minus entropy -"),
        (Truncating, "temperature"),
    ],
)
def test_samples_of_another_distribution_are_found(engine, says):
    found = findings(make(engine=engine))
    assert set(found) == {"temperature"} and says in found["temperature"].evidence


def test_an_engine_that_does_not_stop_where_turns_end_is_found():
    assert findings(make(stop_ids=(40,)))["stop tokens"].message.startswith(
        "The engine does not stop",
    )
    stage = make()
    stage.engine.encoder = ChatEncoder(tiny_tokenizer(), (1, 40))
    assert findings(stage)["stop tokens"].message.startswith("Engine and learner end turns")


@pytest.mark.parametrize(
    ("values", "severity"),
    [
        ([2.0] * 16, "error"),
        ([1.0, None, 2.0, 3.0] * 4, "warning"),
        ([None, None, None, 1.0] * 4, "error"),
        ([float("nan")] * 16, "error"),
    ],
)
def test_scores_that_teach_nothing_are_found(values, severity):
    reward = SimpleNamespace(
        name="planted",
        score=lambda rollouts: [Score(v) for v in values[: len(rollouts)]],
    )
    assert findings(make(reward=reward))["scores"].severity == severity
    assert doctor.scores([Score(0.0)] * 4, checked=True).severity == "warning"


@pytest.mark.parametrize("coefficient", [5.0, 1e-6])
def test_a_kl_out_of_scale_is_found(coefficient):
    assert findings(make(kl={"coefficient": coefficient}))["KL scale"].severity == "warning"


@pytest.mark.parametrize(
    ("settings", "dear"),
    [
        ({}, False),
        ({"normalize_scores": False}, True),
        ({"normalize_scores": False, "factor": 20}, False),
    ],
)
def test_a_nat_that_costs_half_a_deviation_is_found_before_training(settings, dear):
    """Scores between 0 and 0.1 against the default coefficient, as they are and on a scale of their
    own.
    """
    settings, factor = (
        {k: v for k, v in settings.items() if k != "factor"},
        settings.get("factor", 1),
    )
    reward = SimpleNamespace(
        name="planted",
        score=lambda rs: [Score(factor * (n % 5) / 50) for n, _ in enumerate(rs)],
    )
    found = findings(make(algorithm="reinforce", reward=reward, **settings))
    assert ("KL scale" in found) == dear


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"kl/price": lambda r, n: 0.05}, False),
        ({"kl/price": lambda r, n: 1.0}, True),
        ({"kl/policy_reference_k1": lambda r, n: 0.1 * n}, False),
        ({"reward/proxy": lambda r, n: 0.3 + 0.004 * n}, False),
    ],
)
def test_a_penalty_that_held_the_policy_is_found_in_a_log(changes, held):
    """A nat costs 0.05 / 0.04 deviations where the log does not say what it costs."""
    plain = {
        "reward/proxy": lambda r, n: 0.3,
        "reward/proxy_std": lambda r, n: 0.04,
        KL: lambda r, n: 0.05,
    }
    assert ("held_back" in found_in(log(20, **plain | changes))) == held


def log(steps=10, **changes):
    """The rows of a healthy PPO run, made of its equations; `changes`: of a key, a function of
    (row, index).
    """
    rows = []
    for n in range(steps):
        row = {
            "step": n + 1,
            "kl/policy_reference_k1": 0.8 * n,
            "kl/coefficient": 0.05,
            "reward/kl": -0.04 * n,
        }
        row |= {
            "reward/proxy": 0.3 + 0.2 * n,
            "reward/proxy_std": 2.0,
            "reward/failed": 0.0,
            "grad_norm": 1.0,
        }
        row |= {
            "response/stop_rate": 0.9,
            "response/length": 30.0,
            "policy/clip_fraction": 0.03,
            "policy/approximate_kl": 0.003,
        }
        row |= {"policy/engine_gap": 0.04, "policy/first_ratio_deviation": 0.0}
        rows.append(row)
        row.update({key: change(dict(row), n) for key, change in changes.items()})
    return rows


def found_in(rows, settings=SETTINGS):
    """The severity of each finding by its check."""
    found = [r for r in check_rows(rows, settings) if isinstance(r, Finding)]
    return {r.check: r.severity for r in found}


def test_an_accident_in_a_long_log_is_no_error_and_a_habit_is_one():
    """One step of four hundred holds a token that rounding moved far, and another met a reward
    server that was away.
    """

    def severities(share):
        seldom = {
            "policy/first_ratio_deviation": lambda row, n: 0.3 if n % 400 < 400 * share else 0.0,
            "reward/proxy": lambda row, n: None if n % 400 < 400 * share else row["reward/proxy"],
            KL: lambda row, n: 5.0 * n / 400,
        }
        return found_in(log(400, **seldom))

    assert severities(0) == {}
    assert severities(1 / 400) == {"scores": "warning"}
    assert severities(0.2) == {"first_ratio": "error", "scores": "error"}


PLANTED = {
    "another reference": (
        {KL: lambda r, n: 4.0 + n, "reward/kl": lambda r, n: -0.05 * (4 + n)},
        {"wrong_reference": "error"},
    ),
    "a reference that follows": (
        {KL: lambda r, n: 0.0, "reward/kl": lambda r, n: 0.0},
        {"moving_reference": "error"},
    ),
    "negative KL": (
        {KL: lambda r, n: -r[KL], "reward/kl": lambda r, n: 0.04 * n},
        {"kl_negative": "error"},
    ),
    "clipped": ({"policy/clip_fraction": lambda r, n: 0.5}, {"long_updates": "warning"}),
    "moved far": ({"policy/approximate_kl": lambda r, n: 0.08}, {"far_updates": "warning"}),
    "dropout": ({"policy/first_ratio_deviation": lambda r, n: 0.15}, {"first_ratio": "error"}),
    "temperature": ({"policy/engine_gap": lambda r, n: 0.4}, {"engine_gap": "error"}),
    "cut off": ({"response/stop_rate": lambda r, n: 0.0}, {"cut_off": "warning"}),
    "endless": (
        {"response/stop_rate": lambda r, n: 0.9 - 0.1 * n},
        {"truncation": "warning", "cut_off": "warning"},
    ),
    "empty": (
        {"response/length": lambda r, n: max(1.0, 30.0 - 4 * n)},
        {"shrunk_answers": "warning"},
    ),
    "no score": ({"reward/proxy": lambda r, n: None}, {"scores": "error"}),
    "equal scores": ({"reward/proxy_std": lambda r, n: 0.0}, {"scores": "error"}),
    "failed scores": ({"reward/failed": lambda r, n: 2.0}, {"scores": "warning"}),
    "heavy": (
        {"kl/coefficient": lambda r, n: 10.0, "reward/kl": lambda r, n: -8.0 * n},
        {"dear_kl": "warning"},
    ),
}


def test_a_healthy_log_raises_nothing():
    assert found_in(log()) == found_in(log(2), {}) == found_in([{"step": 1}], {}) == {}
    healthy = {r.check for r in check_rows(log(), SETTINGS) if isinstance(r, Healthy)}
    assert healthy >= {check for _, checks in PLANTED.values() for check in checks}


def test_a_log_is_judged_by_the_limits_of_its_run():
    rows = log(**{"policy/clip_fraction": lambda r, n: 0.35})
    own = {"watch": {"thresholds": {"long_updates": 0.4}}}
    assert found_in(rows, {}) == {"long_updates": "warning"} and found_in(rows, own) == {}
    assert found_in(rows, {"algorithm": "gspo"}) == {}
    assert found_in(rows, {"watch": {"silent": ["long_updates"]}}) == {}


def test_a_log_that_begins_later_does_not_show_the_start():
    rows = log(**PLANTED["another reference"][0])
    assert found_in([{**row, "step": row["step"] + 5} for row in rows]) == {}


@pytest.mark.parametrize(("answers", "shows"), [(8, False), (512, True)])
def test_a_log_of_few_answers_a_step_names_the_alarms_that_noise_hides(answers, shows):
    """Of 8 answers a window of 6 has 48: by a binomial's deviation of 0.072 a fall by 0.25 to 0.6
    shows.
    """
    rng = random.Random(1)
    shares = [sum(rng.random() < 0.5 for _ in range(answers)) / answers for _ in range(40)]
    rows = log(40, **{"response/stop_rate": lambda row, n: shares[n], KL: lambda row, n: 4.0})
    (result,) = (r for r in check_rows(rows, SETTINGS) if r.check == "truncation")
    if shows:
        assert isinstance(result, Healthy)
    else:
        assert isinstance(result, Unexamined)
        least = float(re.search(r"from ([\d.]+)", result.reason).group(1))
        assert 0.25 < least < 0.6


def test_the_age_of_samples_is_no_disagreement_of_the_engine():
    ages = {
        "policy/staleness": lambda r, n: float(n > 3),
        "policy/engine_gap": lambda r, n: 0.4 if n > 3 else 0.01,
    }
    assert found_in(log(**ages)) == {}
    ages["policy/engine_gap"] = lambda r, n: 0.4
    assert found_in(log(**ages)) == {"engine_gap": "error"}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_bug_shows_in_the_log(planted):
    changes, checks = PLANTED[planted]
    assert found_in(log(**changes)) == checks


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe on the tiny model with prompts of its own and no other data."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": w}) + "\n" for w in ("one", "two", "three", "four")),
    )
    text = f"""
run = "{folder / "run"}"
model = {{ source = "tiny", dtype = "float32" }}
[ppo]
data = {{ path = "{folder / "prompts.jsonl"}" }}
steps = 3
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 8
reward_source = "random"
"""
    (folder / "recipe.toml").write_text(text)
    return load_recipe(folder / "recipe.toml", Recipe), folder / "recipe.toml"


def test_a_recipe_is_examined_before_anything_is_trained(recipe, tmp_path):
    results = examine_recipe(recipe[0])["ppo"]
    assert [r for r in results if isinstance(r, Finding)] == [] and sum(
        isinstance(r, Healthy) for r in results
    ) >= 3
    pairs = [{"prompt": f"Say {n}", "chosen": f"{n}", "rejected": "no"} for n in range(8)]
    talks = [{"prompt": row["prompt"], "response": row["chosen"]} for row in pairs]
    for name, rows in (("pairs", pairs), ("talks", talks)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    waiting = recipe[0].model_dump(exclude_unset=True) | {
        "run": str(tmp_path / "run"),
        "reward": {"data": {"path": str(tmp_path / "pairs.jsonl")}},
        "sft": {"data": {"path": str(tmp_path / "talks.jsonl")}},
    }
    waiting["ppo"]["reward_source"] = "learned"
    notes = [
        r.reason
        for r in examine_recipe(build(Recipe, waiting))["ppo"]
        if isinstance(r, doctor.Unexamined)
    ]
    assert any("the base model stands in" in note for note in notes) and any(
        ("random reward stands in") in note for note in notes
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="no stage that samples at every step"):
        examine_recipe(build(Recipe, {"run": "x", "model": {"source": "tiny"}}))


def test_a_reward_model_on_a_base_of_its_own_is_no_finding(recipe, tmp_path):
    """The reward model has another template, so tether gives it the text of the answers."""
    tokenizer, base = tiny_tokenizer(), tmp_path / "base"
    tokenizer.chat_template = OTHER
    tiny_model(3).save_pretrained(base)
    tokenizer.save_pretrained(base)
    pairs = [{"prompt": f"q{n}", "chosen": "aeiou", "rejected": "bcdfg"} for n in range(12)]
    model = {"source": str(base), "dtype": "float32"}
    judge = tether.reward(model, pairs, run=str(tmp_path / "rm"), epochs=1, prompts_per_update=8)
    values = recipe[0].model_dump(exclude_unset=True) | {"run": str(tmp_path / "run")}
    scored = {"reward_source": "learned", "reward_model": str(judge.path), "roles": "separate"}
    values["ppo"] |= scored

    def encoding(results):
        return next(one for one in results["ppo"] if one.check == "encoding")

    made = build(Recipe, values)
    assert isinstance(before := encoding(examine_recipe(made)), Healthy)
    assert "as text" in before.evidence
    run_recipe(made, ["ppo"])
    folder = tmp_path / "run"
    assert isinstance(after := encoding(examine_run(folder)), doctor.Unexamined)
    assert "reads text" in after.reason
    config = folder / "ppo" / "config.json"
    config.write_text(config.read_text().replace('"separate"', '"shared"'))
    assert isinstance(encoding(examine_run(folder)), Finding)


@pytest.mark.filterwarnings("error")
def test_a_long_damaged_log_with_huge_values_is_read_without_a_warning_of_numpys(recipe, tmp_path):
    """2,000 steps; every number of one step near the largest of float64, three lines damaged."""
    config = recipe[0].model_copy(update={"run": str(tmp_path / "run")})
    run_recipe(config, ["ppo"])
    path = Path(f"{config.run}/ppo/metrics.jsonl")
    (row, *_) = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{**row, "step": step} for step in range(1, 2001)]
    for place, huge in ((1000, 1e308), (1500, -1e308)):
        rows[place] |= {key: huge for key, value in row.items() if isinstance(value, float)}
    lines = [json.dumps(one) for one in rows]
    lines[500], lines[600], lines[700] = lines[500][:40], "\0garbage", "[1, 2]"
    path.write_text("\n".join(lines) + "\n")
    (found,) = examine_run(path.parent)["records"]
    assert isinstance(found, Finding) and found.severity == "warning"
    assert found.evidence == "ppo/metrics.jsonl: 3 damaged line(s) left out."


def test_the_command_reads_recipes_and_runs_and_exits_with_2_on_an_error(recipe, tmp_path, capsys):
    config, path = recipe
    command(str(path), [])
    short = " ".join(capsys.readouterr().out.split())
    assert re.fullmatch(
        r"No faults found\. \d+ checks are healthy, \d+ could not be made \(--all "
        r"lists them\)\.",
        short,
    )
    run_recipe(config, ["ppo"])
    folder = f"{config.run}/ppo"
    assert not [r for r in examine_run(Path(folder))["ppo"] if isinstance(r, Finding)]
    command(config.run, [])
    with pytest.raises(ConfigError, match="overrides such as 'a=1' have no effect"):
        command(folder, ["a=1"])
    planted = tmp_path / "ppo"
    planted.mkdir()
    (planted / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in log(**PLANTED["another reference"][0])),
    )
    (planted / "config.json").write_text(json.dumps({"ppo": SETTINGS}))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        command(str(planted), [], everything=True)
    told = capsys.readouterr().out
    assert stop.value.code == 2 and told.index("wrong_reference") < told.index("healthy")
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "summary.json").write_text('{"train_loss": 2.0}')
    with pytest.raises(RunError, match="no steps of a stage"):
        command(str(tmp_path / "sft"), [])


def test_a_warning_is_no_error():
    warning = Finding("epochs", "warning", "Many [updates]", "50", "fewer")
    console = Console(record=True, width=120)
    console.print(findings_table({"ppo": [Healthy("bf16", "ok"), warning]}))
    assert "0 errors, 1 warning" in (text := console.export_text()) and text.index(
        "Many [updates]",
    ) < text.index("ok")


def test_odd_answers_are_what_they_are_called():
    stage = make()
    rollout = stage.engine.generate(PROMPTS[:1], stage.config.sampling)[0].rollouts[0]
    odd = doctor.odd_answers([rollout], stage.encoder, 20)
    assert (
        odd["empty"][0].response_ids == (1,)
        and odd["empty"][0].text == ""
        and odd["empty"][0].finished
    )
    endless = odd["endless"][0]
    assert len(endless.response_ids) == 20 and endless.stop_reason is StopReason.LENGTH
    assert endless.response_ids[:8] == endless.response_ids[8:16] == rollout.response_ids[:8]


@pytest.mark.parametrize(
    ("rate", "cut"),
    [(0.0, True), (0.15, True), (0.6, False)],
)
@pytest.mark.parametrize("rounds", [1, 20])
def test_samples_at_the_token_limit(rounds, rate, cut):
    rows = [{"response/stop_rate": rate, "reward/proxy": 1.0}] * rounds
    found = {r.check: r for r in check_samples(rows)}
    assert isinstance(found["stop tokens"], Finding if cut else Healthy)
