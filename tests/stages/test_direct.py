"""Direct methods against autograd on the plain model, one response at a time; and a tiny model that learns what is preferred."""

import dataclasses
import math

import pytest
import torch

from tether.core.config import build
from tether.core.errors import ConfigError, DataError
from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.comparisons import encode_comparisons
from tether.data.sources import split_by_group
from tether.learner.config import OptimizerConfig
from tether.learner.local import LocalLearner
from tether.models.config import LoraConfig
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.stages.direct import Direct, DirectConfig

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
    return Comparison((user(prompt),), (assistant(chosen),), (assistant(rejected),), id=f"{prompt}-{number}", group=prompt)


ROWS = [
    comparison("a question", "yes", "no, never", 1),
    comparison("a question", "yes", "perhaps", 2),
    comparison("a question", "perhaps", "no, never", 3),
    comparison("another", "one two three", "four", 1),
    comparison("third?", "x", "a rather longer answer than x", 1),
]


def make(roles="lora", seed=0, **settings):
    base = tiny_model(seed).requires_grad_(False).eval()
    settings = {"optimizer": OptimizerConfig(learning_rate=3e-3), "heldout_fraction": 0.0, **settings}
    config = DirectConfig(**settings)
    free = config.loss in ("orpo", "simpo")
    if roles == "lora":
        model = add_adapter(base, "policy", LoraConfig(rank=8), seed=1)
        return Direct(config, Role(model, "policy"), None if free else Role(model), ENCODER)
    return Direct(config, Role(base.requires_grad_(True)), None if free else Role(tiny_model(seed + 7).eval()), ENCODER)


def plain_logprobs(model, encoded):
    table = model(input_ids=torch.tensor([encoded.ids])).logits[0].log_softmax(-1)
    return torch.stack([table[t - 1, encoded.ids[t]] for t, counts in enumerate(encoded.trained) if counts])


def plain_loss(model, reference, config, rows):
    """The paper's formula for every pair, from each response run alone."""
    total = 0.0
    for row in rows:
        sides = [ENCODER.conversation((*row.prompt, *side), "last") for side in (row.chosen, row.rejected)]
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
            value = -(1 - smoothing) * torch.log(torch.sigmoid(beta * h)) - smoothing * torch.log(torch.sigmoid(-beta * h))
        elif config.loss == "robust":
            value = (1 - smoothing) * -torch.log(torch.sigmoid(beta * h)) + smoothing * torch.log(torch.sigmoid(-beta * h))
            value = value / (1 - 2 * smoothing)
        elif config.loss == "ipo":
            value = (h - 1 / (2 * beta)) ** 2
        elif config.loss == "simpo":
            value = -torch.log(torch.sigmoid(beta * h - config.margin))
        else:
            odds = [p.exp() / (1 - p.exp()) for p in (better, worse)]
            value = -beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))) - policy[0].mean()
        if config.likelihood_weight:
            value = value - config.likelihood_weight * policy[0].mean()
        total = total + value / len(rows)
    return total


@pytest.mark.parametrize("name", SETTINGS)
def test_a_probable_label_counts_both_ways(name):
    """0.8 for one side is 0.8 of the pair and 0.2 of the pair turned round, whichever side is called chosen."""
    stage = make("whole", **SETTINGS[name])
    pair = comparison("a question", "yes", "no, never")
    losses = {}
    for key, row in {
        "sure": pair,
        "turned": pair.swap(),
        "soft": dataclasses.replace(pair, probability=0.8),
        "soft turned": dataclasses.replace(comparison("a question", "no, never", "yes"), probability=0.2),
    }.items():
        row = dataclasses.replace(row, probability=1.0) if key == "turned" else row
        rankings, _ = encode_comparisons([row], ENCODER, 500)
        losses[key] = stage.loss(rankings, 1)[0].item()
    assert losses["soft"] == pytest.approx(0.8 * losses["sure"] + 0.2 * losses["turned"], rel=1e-5)
    assert losses["soft turned"] == pytest.approx(losses["soft"], rel=1e-6) and losses["sure"] != losses["turned"]


def test_sides_of_several_turns_are_left_out_and_counted(tmp_path):
    row = dataclasses.replace(ROWS[0], chosen=(assistant("a"), user("b"), assistant("c")))
    summary = make().train([row, *ROWS[1:]], RunDirectory.open(tmp_path / "run", {}))
    assert summary["skipped"] == {"a side has several turns": 1} and summary["num_pairs"] == len(ROWS) - 1


@pytest.mark.parametrize("tokens", [40, 10_000])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient_are_the_formula_on_the_plain_model(name, tokens):
    stage = make("whole", micro_batch_tokens=tokens, **SETTINGS[name])
    model, reference = tiny_model(0), tiny_model(7)
    expected = plain_loss(model, reference, stage.config, ROWS)
    expected.backward()
    grabbed = {}
    rankings, _ = encode_comparisons(ROWS, ENCODER, 500)
    stage.learner = learner = LocalLearner(stage.policy.parameters(), stage.config.optimizer, 10)
    original = learner.step
    learner.step = lambda: (grabbed.update(g=[m.grad.clone() for m in learner.masters]), original())[1]
    metrics = stage.step(rankings)
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(grabbed["g"], model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, atol=max(3e-6, 1e-5 * float(theirs.grad.abs().max())), rtol=1e-3)


def test_before_any_update_the_policy_is_the_reference():
    stage = make(beta=0.5)
    rankings, _ = encode_comparisons(ROWS, ENCODER, 500)
    result = stage.evaluate(rankings)
    assert result["loss"] == pytest.approx(math.log(2), abs=1e-7) and result["margin_mean"] == 0.0


def preferences(count=48):
    """Answers of consonants are preferred; the random model happens to like vowels."""
    generator = torch.Generator().manual_seed(0)

    def text(letters):
        length = 4 + int(torch.randint(12, (1,), generator=generator))
        return "".join(letters[i] for i in torch.randint(len(letters), (length,), generator=generator).tolist())

    return [comparison(f"q{n % 16}", text("bcdfg"), text("aeiou"), n) for n in range(count)]


@pytest.mark.parametrize("name", SETTINGS)
def test_it_learns_what_is_preferred(name, tmp_path):
    settings = {**SETTINGS[name], "epochs": 6, "prompts_per_update": 4, "heldout_fraction": 0.2}
    stage = make(**settings, optimizer=OptimizerConfig(learning_rate=1e-2 if "ipo" not in name else 2e-3))
    held = encode_comparisons(split_by_group(preferences(), 0.2, 0)[1], ENCODER, 500)[0]
    before = stage.evaluate(held)
    summary = stage.train(preferences(), RunDirectory.open(tmp_path / "run", {}))
    assert summary["heldout_accuracy"]["value"] > 0.9 > before["accuracy"]["value"] + 0.15
    assert summary["heldout_margin_mean"] > before["margin_mean"] + 0.1
    assert summary["heldout_loss"] < before["loss"]


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def trained(folder, stop_at=None):
        stage = make(epochs=2, prompts_per_update=4, checkpoint_every=2, micro_batch_tokens=150)

        def progress(done, total, metrics):
            if done == stop_at:
                raise KeyboardInterrupt

        try:
            stage.train(preferences(), RunDirectory.open(folder, {}), progress)
        except KeyboardInterrupt:
            return trained(folder)
        return torch.cat([p.flatten() for p in stage.policy.parameters()])

    assert torch.equal(trained(tmp_path / "whole"), trained(tmp_path / "cut", stop_at=5))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss=ipo", "label_smoothing=0.1"], "no effect with direct.loss = 'ipo'"),
        (["margin=0.5"], "no effect with direct.loss = 'dpo'"),
        (["loss=simpo", "average=true"], "no effect with direct.loss = 'simpo'"),
        (["loss=robust"], "set direct.label_smoothing above 0"),
        (["loss=dpo2"], "key 'loss'"),
    ],
)
def test_wrong_settings_are_one_clear_message(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(DirectConfig, {}, overrides, where="recipe.toml")


def test_nothing_usable_is_an_error(tmp_path):
    with pytest.raises(DataError, match="none of 1 comparisons"):
        make().train([comparison("a", "same", "same")], RunDirectory.open(tmp_path / "run", {}))
