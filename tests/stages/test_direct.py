"""Direct methods against autograd on the plain model, one response at a time; and a tiny model that
learns what is preferred.
"""

import dataclasses
import gc
import math
import weakref

import pytest
import torch

from tether.core.errors import ConfigError, DataError, RunError
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.prepare import Limit, encode_comparisons
from tether.data.sources import split_by_group
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.supervised import DirectConfig
from tether.stages.direct import Direct
from tether.stages.learner.checkpoint import complete_checkpoints
from tether.stages.learner.local import LocalLearner
from tether.stages.reference import role_digest
from tether.stages.supervised import make_step

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
SETTINGS = {
    "dpo": {"beta": 0.3},
    "cdpo": {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.1},
    "rpo": {"loss": "dpo", "beta": 0.3, "likelihood_weight": 0.5},
    "robust": {"loss": "robust", "beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"loss": "ipo", "beta": 0.3},
    "ipo_average": {"loss": "ipo", "beta": 0.3, "average": True},
    "orpo": {"loss": "orpo", "beta": 0.3},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 0.5},
}


def comparison(prompt, chosen, rejected, number=0):
    return Comparison(
        (user(prompt),),
        (assistant(chosen),),
        (assistant(rejected),),
        id=f"{prompt}-{number}",
        group=prompt,
    )


ROWS = [
    comparison("a question", "yes", "no, never", 1),
    comparison("a question", "yes", "perhaps", 2),
    comparison("a question", "perhaps", "no, never", 3),
    comparison("another", "one two three", "four", 1),
    comparison("third?", "x", "a rather longer answer than x", 1),
]


def make(roles="lora", seed=0, **settings):
    base = tiny_model(seed).requires_grad_(False).eval()
    settings = {
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        "heldout_fraction": 0.0,
        **settings,
    }
    config = DirectConfig(**settings)
    free = config.loss in ("orpo", "simpo")
    if roles == "lora":
        model = add_adapter(base, "policy", LoraConfig(rank=8), seed=1)
        return Direct(config, Role(model, "policy"), None if free else Role(model), ENCODER)
    return Direct(
        config,
        Role(base.requires_grad_(True)),
        None if free else Role(tiny_model(seed + 7).eval()),
        ENCODER,
    )


def plain_logprobs(model, encoded):
    table = model(input_ids=torch.tensor([encoded.ids])).logits[0].log_softmax(-1)
    return torch.stack(
        [table[t - 1, encoded.ids[t]] for t, counts in enumerate(encoded.trained) if counts],
    )


def plain_loss(model, reference, config, rows):
    """The paper's formula for every pair, from each response run alone."""
    total = 0.0
    for row in rows:
        sides = [
            ENCODER.conversation((*row.prompt, *side), "last")
            for side in (row.chosen, row.rejected)
        ]
        policy = [plain_logprobs(model, side) for side in sides]
        with torch.no_grad():
            frozen = [plain_logprobs(reference, side) for side in sides]
        if config.loss in ("orpo", "simpo"):
            better, worse = (p.mean() for p in policy)
        elif config.average:
            better, worse = ((p - f).mean() for p, f in zip(policy, frozen, strict=True))
        else:
            better, worse = ((p - f).sum() for p, f in zip(policy, frozen, strict=True))
        h, beta, smoothing = better - worse, config.strength, config.label_smoothing
        if config.loss == "dpo":
            value = -(1 - smoothing) * torch.log(torch.sigmoid(beta * h)) - smoothing * torch.log(
                torch.sigmoid(-beta * h),
            )
        elif config.loss == "robust":
            value = (1 - smoothing) * -torch.log(torch.sigmoid(beta * h)) + smoothing * torch.log(
                torch.sigmoid(-beta * h),
            )
            value = value / (1 - 2 * smoothing)
        elif config.loss == "ipo":
            value = (h - 1 / (2 * beta)) ** 2
        elif config.loss == "simpo":
            value = -torch.log(torch.sigmoid(beta * h - config.margin))
        else:
            odds = [p.exp() / (1 - p.exp()) for p in (better, worse)]
            value = (
                -beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))) - policy[0].mean()
            )
        if config.likelihood_weight:
            value = value - config.likelihood_weight * policy[0].mean()
        total = total + value / len(rows)
    return total


def update_of(stage, rankings):
    """Metrics of one update, and the gradient that it took."""
    grabbed = []
    learner = LocalLearner(stage.role.parameters(), stage.config.optimizer, 10)
    original = learner.step
    learner.step = lambda: (grabbed.extend(m.grad.clone() for m in learner.masters), original())[1]
    return make_step(stage, learner, rankings), grabbed


@pytest.mark.parametrize("name", SETTINGS)
def test_a_probable_label_counts_both_ways(name):
    """0.8 for one side is 0.8 of the pair and 0.2 of the pair turned round, whichever side is
    called chosen.
    """
    stage = make("whole", **SETTINGS[name])
    pair = comparison("a question", "yes", "no, never")
    losses = {}
    for key, row in {
        "sure": pair,
        "turned": pair.swap(),
        "soft": dataclasses.replace(pair, probability=0.8),
        "soft turned": dataclasses.replace(
            comparison("a question", "no, never", "yes"),
            probability=0.2,
        ),
    }.items():
        row = dataclasses.replace(row, probability=1.0) if key == "turned" else row
        rankings, _ = encode_comparisons([row], ENCODER, Limit(500))
        losses[key] = stage.pairs(rankings, 1)[0].item()
    assert losses["soft"] == pytest.approx(0.8 * losses["sure"] + 0.2 * losses["turned"], rel=1e-5)
    assert (
        losses["soft turned"] == pytest.approx(losses["soft"], rel=1e-6)
        and losses["sure"] != losses["turned"]
    )


def test_sides_of_several_turns_are_left_out_and_counted(tmp_path):
    row = dataclasses.replace(ROWS[0], chosen=(assistant("a"), user("b"), assistant("c")))
    summary = make().train([row, *ROWS[1:]], RunDirectory.open(tmp_path / "run", {}))
    assert (
        summary["skipped"] == {"a side has several turns": 1}
        and summary["num_pairs"] == len(ROWS) - 1
    )


@pytest.mark.parametrize("tokens", [40, 10_000])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_the_formula_on_the_plain_model(name, tokens):
    stage = make("whole", micro_batch_tokens=tokens, **SETTINGS[name])
    model, reference = tiny_model(0), tiny_model(7)
    expected = plain_loss(model, reference, stage.config, ROWS)
    expected.backward()
    metrics, gradient = update_of(stage, encode_comparisons(ROWS, ENCODER, Limit(500))[0])
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(gradient, model.parameters(), strict=True):
        torch.testing.assert_close(
            ours,
            theirs.grad,
            atol=max(3e-6, 1e-5 * float(theirs.grad.abs().max())),
            rtol=1e-3,
        )


def exactly(stage, rankings):
    """Loss and gradient of an update in float64, micro-batch by micro-batch."""
    for role in (stage.role, stage.likelihoods.reference):
        if role is not None:
            role.model.double()
    cuts, num_pairs = (
        stage.likelihoods.micro_batches(rankings),
        sum(len(r.chosen) for r in rankings),
    )
    losses = [stage.pairs(micro, num_pairs)[0] for micro in cuts]
    for loss in losses:
        loss.backward()
    return (
        len(cuts),
        torch.stack([*losses]).sum().detach(),
        [p.grad for p in stage.role.parameters()],
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_padding_sharing_and_cuts_change_nothing(name, monkeypatch):
    """The same update in any order, one prompt a micro-batch or all, prompts shared or written
    out.
    """
    rankings, _ = encode_comparisons(ROWS, ENCODER, Limit(500))
    settings = SETTINGS[name]
    one, loss, gradient = exactly(make("whole", **settings), rankings)
    others = [
        exactly(make("whole", **settings), encode_comparisons(ROWS[::-1], ENCODER, Limit(500))[0]),
        exactly(make("whole", micro_batch_tokens=8, **settings), rankings),
    ]
    monkeypatch.setattr(Role, "document_tokens", lambda self, budget: 0)
    others.append(exactly(make("whole", **settings), rankings))
    assert [one, *(cuts for cuts, _, _ in others)] == [1, 1, 3, 1]
    for _, again, other in others:
        torch.testing.assert_close(again, loss, atol=0, rtol=1e-11)
        for ours, theirs in zip(other, gradient, strict=True):
            # Llama's norms compute in float32 whatever their input, and round each token's gradient
            # on its own.
            torch.testing.assert_close(ours, theirs, atol=1e-6 * float(theirs.abs().max()), rtol=0)


def test_before_any_update_the_policy_is_the_reference():
    stage = make(beta=0.5)
    rankings, _ = encode_comparisons(ROWS, ENCODER, Limit(500))
    result = stage.evaluate(rankings)
    assert result["loss"] == pytest.approx(math.log(2), abs=1e-7) and result["margin_mean"] == 0.0


def preferences(count=48):
    """Answers of consonants are preferred; the random model happens to like vowels."""
    generator = torch.Generator().manual_seed(0)

    def text(letters):
        length = 4 + int(torch.randint(12, (1,), generator=generator))
        return "".join(
            letters[i] for i in torch.randint(len(letters), (length,), generator=generator).tolist()
        )

    return [comparison(f"q{n % 16}", text("bcdfg"), text("aeiou"), n) for n in range(count)]


@pytest.mark.parametrize("name", SETTINGS)
def test_it_learns_what_is_preferred(name, tmp_path):
    settings = {**SETTINGS[name], "epochs": 6, "prompts_per_update": 4, "heldout_fraction": 0.2}
    stage = make(
        **settings,
        optimizer=OptimizerConfig(learning_rate=1e-2 if "ipo" not in name else 2e-3),
    )
    held = encode_comparisons(split_by_group(preferences(), 0.2, 0)[1], ENCODER, Limit(500))[0]
    before = stage.evaluate(held)
    summary = stage.train(preferences(), RunDirectory.open(tmp_path / "run", {}))
    assert summary["heldout_accuracy"]["value"] > 0.9 > before["accuracy"]["value"] + 0.15
    assert summary["heldout_margin_mean"] > before["margin_mean"] + 0.1
    assert summary["heldout_loss"] < before["loss"]


def trained(folder, stop_at=None, stage=None, rows=None, **settings):
    settings = {
        "epochs": 2,
        "prompts_per_update": 4,
        "checkpoint_every": 2,
        "micro_batch_tokens": 150,
        **settings,
    }
    stage = stage or make(**settings)

    def progress(done, total, metrics):
        if done == stop_at:
            raise KeyboardInterrupt

    try:
        stage.train(rows or preferences(), RunDirectory.open(folder, {}), progress)
    except KeyboardInterrupt:
        return trained(folder, rows=rows, **settings)
    return torch.cat([p.detach().flatten() for p in stage.role.parameters()])


@pytest.mark.parametrize("asked", ["each_update", "precomputed"])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, asked):
    settings = {"reference_logprobs": asked}
    assert torch.equal(
        trained(tmp_path / "whole", **settings),
        trained(tmp_path / "cut", stop_at=5, **settings),
    )


def spied(stage):
    """Counts how often the stage's reference is asked."""
    calls, reference = [], stage.likelihoods.reference
    original = reference.logprobs
    reference.logprobs = lambda *arguments: (calls.append(1), original(*arguments))[1]
    return calls


@pytest.mark.parametrize("roles", ["lora", "whole"])
def test_a_reference_asked_beforehand_says_the_same(roles, tmp_path):
    asked, known = (
        make(roles),
        make(roles, reference_logprobs="precomputed", micro_batch_tokens=100),
    )
    rankings = encode_comparisons(preferences(), ENCODER, Limit(500))[0]
    sequences = [s for ranking in rankings for s in ranking.sequences]
    role = known.likelihoods.reference
    known.likelihoods.begin(sequences, tmp_path / "table.safetensors")
    assert known.likelihoods.reference is None
    with torch.no_grad():
        for ranking in rankings:
            sums = [stage.likelihoods(ranking.sequences)[2] for stage in (asked, known)]
            alone = (
                torch.stack([plain_logprobs(role.causal_model, s).sum() for s in ranking.sequences])
                if roles == "whole"
                else sums[0]
            )
            torch.testing.assert_close(sums[0], sums[1], atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(alone, sums[1], atol=1e-5, rtol=1e-6)
    once = trained(tmp_path / "once", reference_logprobs="precomputed")
    torch.testing.assert_close(trained(tmp_path / "each"), once, atol=1e-4, rtol=1e-4)


def test_a_resumed_run_reads_the_table_and_asks_nobody(tmp_path):
    settings = {
        "prompts_per_update": 4,
        "reference_logprobs": "precomputed",
        "heldout_fraction": 0.3,
    }
    for number in range(2):
        stage = make(**settings)
        calls = spied(stage)
        stage.train(preferences(), RunDirectory.open(tmp_path / "run", {}))
        assert bool(calls) == (number == 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("reference", r"for another reference model \(was \w+ in float32, is \w+ in float32\)"),
        ("encoding", "for another chat template, system prompt or stop tokens"),
        ("data", "for another data"),
    ],
)
def test_a_table_of_something_else_is_refused(changed, message, tmp_path):
    encoders = {"encoding": ChatEncoder(tiny_tokenizer(), (1, 2))}
    make(reference_logprobs="precomputed").train(
        preferences(),
        RunDirectory.open(tmp_path / "run", {}),
    )
    stage = make(seed=5 if changed == "reference" else 0, reference_logprobs="precomputed")
    other = Direct(
        stage.config,
        stage.role,
        stage.likelihoods.reference,
        encoders.get(changed, ENCODER),
    )
    with pytest.raises(RunError, match=message):
        other.train(
            preferences(47 if changed == "data" else 48),
            RunDirectory.open(tmp_path / "run", {}),
        )


def test_trained_whole_the_untrained_policy_can_be_its_own_reference(tmp_path):
    def stage(reference, **settings):
        policy = Role(tiny_model(0).eval())
        config = DirectConfig(
            optimizer=OptimizerConfig(learning_rate=3e-3),
            prompts_per_update=4,
            **settings,
        )
        return Direct(config, policy, reference or policy, ENCODER)

    apart = trained(tmp_path / "apart", stage=stage(Role(tiny_model(0).eval())))
    own = trained(tmp_path / "own", stage=stage(None, reference_logprobs="precomputed"))
    # A weight moves by 3e-3 an update, and where its gradient is near zero Adam makes rounding
    # visible.
    torch.testing.assert_close(apart, own, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="is the policy itself"):
        trained(tmp_path / "wrong", stage=stage(None))


def test_a_reference_of_its_own_is_let_go_before_training(tmp_path):
    stage = make(
        "whole",
        reference_logprobs="precomputed",
        prompts_per_update=4,
        heldout_fraction=0.0,
    )
    model, alive = weakref.ref(stage.likelihoods.reference.model), []

    def progress(done, total, metrics):
        gc.collect()
        alive.append(model() is not None)

    stage.train(preferences(), RunDirectory.open(tmp_path / "run", {}), progress)
    assert alive and not any(alive)


def test_the_digest_of_a_bare_trunk_is_that_of_the_model_whatever_stands_on_it():
    loaded = open_model(ModelConfig(source="tiny", dtype="float32"))
    model = add_adapter(loaded.model, "policy", LoraConfig(rank=4), seed=1)
    assert role_digest(Role(model)) == loaded.digest != role_digest(Role(model, "policy"))


def observed(tmp_path, **settings):
    """All that an option may change: weights, metrics, checkpoints, and how often the reference was
    asked.
    """
    stage = make(
        **{
            "heldout_fraction": 0.3,
            "prompts_per_update": 4,
            "checkpoint_every": 2,
            "keep_checkpoints": 9,
            **settings,
        },
    )
    calls = spied(stage) if stage.likelihoods.reference else []
    run = RunDirectory.open(tmp_path, {})
    summary = stage.train(preferences(), run)
    kept = [path.name for path in complete_checkpoints(run.path / "checkpoints")]
    weights = [round(float(p.detach().abs().sum()), 4) for p in stage.role.parameters()]
    metrics = [(round(row["loss"], 6), sorted(row)) for row in run.metrics()]
    return weights, metrics, kept, len(calls), summary["updates"], summary["num_prompts"]


EFFECTS = {
    "loss": ({}, {"loss": "ipo"}),
    "beta": ({}, {"beta": 0.5}),
    "label_smoothing": ({}, {"label_smoothing": 0.2}),
    "margin": ({"loss": "simpo"}, {"loss": "simpo", "margin": 1.0}),
    "average": ({"loss": "ipo"}, {"loss": "ipo", "average": True}),
    "likelihood_weight": ({}, {"likelihood_weight": 0.5}),
    "reference_logprobs": ({}, {"reference_logprobs": "precomputed"}),
    "micro_batch_tokens": ({}, {"micro_batch_tokens": 64}),
    "epochs": ({}, {"epochs": 2}),
    "prompts_per_update": ({}, {"prompts_per_update": 8}),
    "max_length": ({}, {"max_length": 14}),
    "too_long": ({"max_length": 14}, {"max_length": 14, "too_long": "truncate"}),
    "heldout_fraction": ({}, {"heldout_fraction": 0.6}),
    "evaluate_every": ({}, {"evaluate_every": 2}),
    "checkpoint_every": ({}, {"checkpoint_every": 1}),
    "keep_checkpoints": ({}, {"keep_checkpoints": 1}),
    "seed": ({}, {"seed": 5}),
    "optimizer": ({}, {"optimizer": OptimizerConfig(learning_rate=1e-3)}),
}


def test_every_option_has_an_effect(tmp_path):
    assert EFFECTS.keys() == DirectConfig.model_fields.keys()
    known = {}
    for option, (plain, changed) in EFFECTS.items():
        if str(plain) not in known:
            known[str(plain)] = observed(tmp_path / f"{option}-plain", **plain)
        assert observed(tmp_path / option, **changed) != known[str(plain)], option


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss=ipo", "label_smoothing=0.1"], "no effect with direct.loss = 'ipo'"),
        (["margin=0.5"], "no effect with direct.loss = 'dpo'"),
        (["loss=simpo", "average=true"], "no effect with direct.loss = 'simpo'"),
        (["loss=robust"], "set direct.label_smoothing above 0"),
        (["loss=dpo2"], "key 'loss'"),
        (
            ["loss=orpo", "reference_logprobs=precomputed"],
            "reference_logprobs has no effect with direct.loss = 'orpo'",
        ),
    ],
)
def test_wrong_settings_are_one_clear_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(DirectConfig, {}, overrides, where="recipe.toml")


def test_nothing_usable_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"none of 1 rows of \[direct\]"):
        make().train([comparison("a", "same", "same")], RunDirectory.open(tmp_path / "run", {}))
