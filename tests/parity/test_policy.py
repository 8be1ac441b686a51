"""GRPO's family and RLOO against TRL's own trainers: the same tiny models, token ids, old
log-probabilities and scores.

TRL comes with the `dev` extra; without it these tests are skipped. What TRL does otherwise on
purpose of ours stands in docs/methods/grpo.md and reinforce.md.
"""

from __future__ import annotations

import pytest
import torch
import trl

from tether.core.types import Prompt, Score, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.policy import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.rollouts import Experience

ENCODER = ChatEncoder(tiny_tokenizer(), (1, *range(40, 60)))
PROMPTS = [
    Prompt((user(text),), f"p{n}")
    for n, text in enumerate(["one", "two two", "three", "a longer one"])
]
GROUP, LENGTH, BETA = 4, 12, 0.3
TRAINING = {
    "use_cpu": True,
    "report_to": [],
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_dropout": True,
}


class Shares:
    """The share of even token ids."""

    name = "even"

    def score(self, rollouts):
        return [
            Score(sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids)) for r in rollouts
        ]


def ours(**settings):
    """A stage, its rollouts with old log-probabilities that have drifted, and the gradient of one
    pass over all of them.
    """
    values = {
        "samples_per_prompt": GROUP,
        "max_new_tokens": LENGTH,
        "micro_batch_tokens": 64,
        **settings,
    }
    config = PolicyConfig.model_validate(values)
    policy, reference = Role(tiny_model(0)), Role(tiny_model(7).requires_grad_(False))
    stage = PolicyGradient(
        config=config,
        policy=policy,
        reference=reference,
        value=None,
        reward=Shares(),
        engine=LocalEngine(policy, ENCODER),
        encoder=ENCODER,
    )
    groups = stage.engine.generate(PROMPTS, config.sampling, num_samples=GROUP, seed=3)
    rollouts = [r for g in groups for r in g.rollouts]
    experience = Experience(
        rollouts,
        stage.reward.score(rollouts),
        ENCODER,
        64,
        torch.device("cpu"),
    )
    stage.old_from_update = False  # the old policy is not the present one here
    stage.evaluate(experience)
    drift = 0.3 * torch.randn(experience.mask.shape, generator=torch.Generator().manual_seed(5))
    if config.surrogate != "reinforce":
        experience.logprobs += drift * experience.mask
    experience.rewards = stage.shape(experience)
    experience.advantages, _ = stage.advantages(experience)
    experience.weights = stage.weights(experience)
    tokens = int(experience.mask.sum())
    loss = sum(
        float(stage.accumulate(experience, n, tokens)["loss"])
        for n in range(len(experience.batches))
    )
    return stage, experience, loss


def theirs(experience, advantages):
    """The tensors that TRL's trainers take: prompts padded on the left, completions on the
    right.
    """
    prompts = [r.prompt_ids for r in experience.rollouts]
    width = max(map(len, prompts))
    lengths = experience.mask.sum(-1)
    completions = torch.zeros(experience.mask.shape, dtype=torch.long)
    for row, rollout in enumerate(experience.rollouts):
        completions[row, : len(rollout.response_ids)] = torch.tensor(rollout.response_ids)
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": completions,
        "completion_mask": experience.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": experience.logprobs,
        "ref_per_token_logps": experience.reference_logprobs,
        "old_logps": (experience.logprobs * experience.mask).sum(-1),
        "num_items_in_batch": lengths.sum(),
    }


def trainer_of(kind, config, tmp_path, beta=0.0, **settings):
    """A trainer of a tiny model. The KL's weight is set afterwards: with one, TRL would load a
    reference by the model's name.
    """
    from datasets import Dataset

    sizes = {
        "per_device_train_batch_size": 16,
        "num_generations": GROUP,
        "max_completion_length": LENGTH,
    }
    trainer = kind(
        model=tiny_model(0),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config(output_dir=str(tmp_path), beta=0.0, **sizes, **TRAINING, **settings),
        train_dataset=Dataset.from_list([{"prompt": "x"}]),
        processing_class=tiny_tokenizer(),
    )
    trainer.current_gradient_accumulation_steps, trainer.beta = 1, beta
    return trainer


def same_gradients(stage, model, factor=1.0):
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in stage.policy.model.named_parameters():
        limit = 2e-5 * float(grads[name].abs().max())
        assert limit > 0
        torch.testing.assert_close(
            parameter.grad * factor,
            grads[name],
            atol=max(limit, 1e-7),
            rtol=1e-3,
        )


def group_scores(experience, *, divided):
    """TRL's advantages, written down from its documentation: reward minus the group's mean, over
    its standard deviation.
    """
    scores = torch.tensor([s.value for s in experience.scores]).view(-1, GROUP)
    centred = scores - scores.mean(1, keepdim=True)
    return (centred / (scores.std(1, keepdim=True) + 1e-4) if divided else centred).flatten()


CASES = {
    "grpo": ({"normalize": "sequence"}, {"loss_type": "grpo"}),
    "grpo, k3": (
        {"normalize": "sequence", "kl": {"coefficient": BETA, "estimator": "k3"}},
        {"loss_type": "grpo", "beta": BETA, "use_bias_correction_kl": False},
    ),
    "grpo, corrected k3": (
        {"normalize": "sequence", "kl": {"coefficient": BETA, "estimator": "k3_corrected"}},
        {"loss_type": "grpo", "beta": BETA, "use_bias_correction_kl": True},
    ),
    "dapo": ({"clip_range_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": (
        {"scale_advantages": False, "normalize": "constant"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "gspo": (
        {"surrogate": "sequence", "normalize": "sequence", "clip_range": 0.05},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    ),
    # TRL's epsilon_high is the cap itself, ours (as the paper's) lies above 1.
    "cispo": (
        {"surrogate": "cispo", "clip_range_high": 0.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_grpo_and_its_kin(name, tmp_path):
    settings, options = CASES[name]
    stage, experience, loss = ours(
        algorithm="grpo",
        epochs=2,
        **{"kl": {"report": True}, **settings},
    )
    trainer = trainer_of(trl.GRPOTrainer, trl.GRPOConfig, tmp_path, **options)
    inputs = theirs(
        experience,
        group_scores(experience, divided=options.get("scale_rewards") != "none"),
    )
    trainer.args.steps_per_generation = 1
    their_loss = trainer._compute_loss(trainer.model.train(), inputs)
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), rel=2e-5, abs=2e-6)
    same_gradients(stage, trainer.model)


def test_rloo(tmp_path):
    """TRL averages over responses, we over tokens: one factor for the whole step, their mean
    length.
    """
    stage, experience, _ = ours(algorithm="rloo", normalize_scores=False, kl={"coefficient": BETA})
    scores = torch.tensor([s.value for s in experience.scores])
    kl = ((experience.logprobs - experience.reference_logprobs) * experience.mask).sum(-1)
    totals = (scores - BETA * kl).view(-1, GROUP)
    advantages = ((totals - totals.mean(1, keepdim=True)) * GROUP / (GROUP - 1)).flatten()
    trainer = trainer_of(trl.RLOOTrainer, trl.RLOOConfig, tmp_path)
    trainer._compute_loss(trainer.model.train(), theirs(experience, advantages)).backward()
    same_gradients(stage, trainer.model, float(experience.mask.sum()) / len(scores))
