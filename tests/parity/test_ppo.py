"""PPO against TRL's, as TRL last had it (1.12), in an environment of its own: `make peers` makes
it; without it this is skipped.

TRL's trainer runs two epochs on one batch of its own samples. Our step takes those samples and
scores, and has to find the same log-probabilities, values, rewards, returns, advantages, losses and
gradients. What TRL does otherwise stands in docs/methods/ppo.md.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification

from tether.algorithms.advantages import gae
from tether.algorithms.masked import whiten
from tether.algorithms.policy_losses import ppo_clip_loss, value_loss
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.policy import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.rollouts import Experience

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".bench" / "trl-ppo" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.is_file(),
    reason=("no environment with TRL 1.12: `make peers` makes .bench/trl-ppo"),
)

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
PROMPTS = [Prompt((user(text),), text) for text in ("one", "two", "ten", "six")]
LENGTH, BETA, LAM, GAMMA, CRITIC = 10, 0.3, 0.9, 0.97, 0.1
SETTINGS = {
    "response_length": LENGTH,
    "kl_coef": BETA,
    "lam": LAM,
    "gamma": GAMMA,
    "vf_coef": CRITIC,
    "num_ppo_epochs": 2,
}
SETTINGS |= {"cliprange": 0.2, "cliprange_value": 0.2, "learning_rate": 1e-2, "seed": 5}


def run(folder, **more):
    for seed, name in enumerate(("policy", "reference")):
        tiny_model(seed).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    for seed, name in enumerate(("scorer", "critic"), start=2):
        torch.manual_seed(seed)
        config = tiny_model(seed).config
        config.num_labels = 1
        LlamaForSequenceClassification(config).save_pretrained(folder / name)
    task = {
        "prompts": [ENCODER.prompt(p.messages) for p in PROMPTS],
        "settings": {**SETTINGS, **more},
    }
    (folder / "task.json").write_text(json.dumps(task))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    script = Path(__file__).with_name("trl_ppo_side.py")
    command = [str(PYTHON), str(script), str(folder)]
    done = subprocess.run(
        command,
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, load_file(folder / "kept.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Responses without an end."""
    return run(tmp_path_factory.mktemp("ppo"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, whole):
    """The same samples, but that the first response's fifth token is what ends a response."""
    return run(tmp_path_factory.mktemp("ppo-stopped"), stop_token_id=int(responses(whole[1])[0, 4]))


def responses(kept):
    return kept["rollout/query_responses"][:, -LENGTH:]


def lengths(kept):
    return (~kept["rollout/padding_mask"]).sum(-1).tolist()


def ours(folder, kept):
    """Our step on TRL's samples and scores, up to and with its gradient; nothing has moved yet."""
    config = PolicyConfig(
        normalize_scores=False, max_new_tokens=LENGTH, lam=LAM, gamma=GAMMA, value_coefficient=CRITIC, epochs=2,
        kl={"coefficient": BETA},
    )  # fmt: skip
    policy, reference, critic = tiny_model(0), tiny_model(1).requires_grad_(False), tiny_model(3)
    weights = load_file(folder / "critic" / "model.safetensors")
    critic.load_state_dict({k: v for k, v in weights.items() if k != "score.weight"}, strict=False)
    head = ScalarHead(critic.config.hidden_size)
    head.linear.weight.data.copy_(kept["critic/head"])
    stage = PolicyGradient(
        config=config,
        policy=Role(policy),
        reference=Role(reference),
        value=Role(critic, None, head),
        reward=None,
        engine=None,
        encoder=ENCODER,
    )
    rows = []
    # in TRL's order
    for ids, length in zip(kept["rollout/query_responses"].tolist(), lengths(kept), strict=True):
        asked, said = tuple(ids[:-LENGTH]), tuple(ids[-LENGTH:][:length])
        rows.append(
            Rollout(
                asked,
                said,
                (),
                StopReason.LENGTH,
                "",
                0,
                0,
                Sampling(max_new_tokens=LENGTH),
                PROMPTS[0],
            ),
        )
    scores = [Score(float(value)) for value in kept["rollout/scores"]]
    experience = Experience(rows, scores, ENCODER, 256, torch.device("cpu"))
    stage.evaluate(experience)
    experience.rewards = stage.shape(experience)
    experience.advantages, experience.returns = stage.advantages(experience)
    experience.weights = stage.weights(experience)
    return stage, experience


def close(found, expected, limit=2e-5):
    torch.testing.assert_close(found, expected, atol=limit, rtol=1e-4)


def test_the_samples_are_what_they_should_be(whole, stopped):
    assert lengths(whole[1]) == [LENGTH] * 4
    assert lengths(stopped[1])[0] == 5


@pytest.mark.parametrize("name", ["whole", "stopped"])
def test_log_probabilities_values_and_kl(name, request):
    folder, kept = request.getfixturevalue(name)
    _, experience = ours(folder, kept)
    mask, width = experience.mask, experience.mask.shape[1]
    for mine, name in (
        ("logprobs", "logprobs"),
        ("reference_logprobs", "ref_logprobs"),
        ("values", "values"),
    ):
        close(getattr(experience, mine)[mask], kept[f"rollout/{name}"][:, :width][mask])
    without_score = experience.rewards - experience.at_last(
        torch.tensor([s.value for s in experience.scores]),
    )
    kl = kept["rollout/logprobs"] - kept["rollout/ref_logprobs"]
    close(without_score[mask], -BETA * kl[:, :width][mask])


def test_a_whole_step(whole):
    folder, kept = whole
    stage, experience = ours(folder, kept)
    close(experience.rewards, kept["rollout/rewards"])
    close(experience.returns, kept["rollout/returns"])
    tokens = int(experience.mask.sum())
    sample_deviation = ((tokens - 1) / tokens) ** 0.5  # TRL whitens with n - 1
    close(experience.advantages * sample_deviation, kept["rollout/advantages"])
    experience.advantages = experience.advantages * sample_deviation
    for number in range(len(experience.batches)):
        stage.accumulate(experience, number, tokens)
    found = {f"policy.{n}": p.grad for n, p in stage.policy.model.named_parameters()}
    found |= {
        f"value_model.{n}": p.grad
        for n, p in stage.value.model.named_parameters()
        if not n.startswith("lm_head")
    }
    found["value_model.score.weight"] = stage.value.head.linear.weight.grad
    expected = {
        name.removeprefix("grad/"): value
        for name, value in kept.items()
        if name.startswith("grad/")
    }
    assert len(expected) > 40 and expected.keys() <= found.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(
            found[name],
            value,
            atol=2e-5 * float(value.abs().max()) + 1e-8,
            rtol=1e-3,
            msg=name,
        )


@pytest.mark.parametrize("name", ["whole", "stopped"])
@pytest.mark.parametrize("epoch", [0, 1])
def test_losses_and_their_gradients(name, epoch, request):
    """In the second epoch ratios and values have moved, and both clips bite."""
    _, kept = request.getfixturevalue(name)
    at = {
        key.removeprefix(f"{epoch}/"): value
        for key, value in kept.items()
        if key.startswith(f"{epoch}/")
    }
    order = [
        int((kept["rollout/advantages"] == row).all(-1).nonzero()[0]) for row in at["mb_advantage"]
    ]
    mask, longer = (~kept[f"rollout/{n}"][order] for n in ("padding_mask", "padding_mask_p1"))
    logprobs, values = (at[n].clone().requires_grad_() for n in ("new_logprobs", "vpred"))
    policy, told = ppo_clip_loss(
        logprobs,
        at["mb_logprobs"],
        at["mb_advantage"],
        mask,
        clip_range=0.2,
        denominator=int(mask.sum()),
    )
    critic, clipped = value_loss(
        values,
        at["mb_values"],
        at["mb_return"],
        longer,
        clip_range=0.2,
        denominator=int(longer.sum()),
    )
    (policy + CRITIC * critic).backward()
    close(policy, at["pg_loss"])
    close(critic, at["vf_loss"])
    close(logprobs.grad, torch.where(mask, at["new_logprobs.grad"], 0), 1e-7)
    close(values.grad, at["vpred.grad"], 1e-7)
    assert (float(told.clip_fraction) > 0, float(clipped) > 0) == (epoch == 1, epoch == 1)


def test_where_the_score_lands_in_a_response_that_ended(stopped):
    """A deviation. TRL pays the score one position after the end, at a padding token, and values
    that position too; we pay it at the token that ended the response. Its estimate over its own
    mask is ours.
    """
    folder, kept = stopped
    _, experience = ours(folder, kept)
    end, score = lengths(kept)[0] - 1, float(kept["rollout/scores"][0])
    kl = BETA * (kept["rollout/logprobs"] - kept["rollout/ref_logprobs"])[0]
    close(kept["rollout/rewards"][0, end + 1], torch.tensor(score))
    close(kept["rollout/rewards"][0, end], -kl[end])
    close(experience.rewards[0, end], score - kl[end])
    longer, mask = ~kept["rollout/padding_mask_p1"], ~kept["rollout/padding_mask"]
    advantages, returns = gae(kept["rollout/rewards"], kept["rollout/values"], longer, GAMMA, LAM)
    close(returns[longer], kept["rollout/returns"][longer])
    count = int(mask.sum())
    close(
        (whiten(advantages, mask) * ((count - 1) / count) ** 0.5)[mask],
        kept["rollout/advantages"][mask],
    )
