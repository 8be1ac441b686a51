"""The distance of a policy from its reference against the models' own logits, one answer at a
time.
"""

import copy

import pytest
import torch

from tether.core.types import Prompt, Rollout, Sampling, StopReason, user
from tether.data.chat import ChatEncoder
from tether.evaluation.likelihood import kl_to_reference
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.model import LoraConfig


def rollout(text: str, response: tuple[int, ...]) -> Rollout:
    prompt = Prompt((user(text),), text)
    ids = ChatEncoder(tiny_tokenizer(), (1,)).prompt(prompt.messages)
    return Rollout(tuple(ids), response, (), StopReason.LENGTH, "", 0, 0, Sampling(8), prompt)


def total(model, answer: Rollout, temperature: float) -> float:
    """log pi(response | prompt) by the whole softmax."""
    ids = (*answer.prompt_ids, *answer.response_ids)
    with torch.no_grad():
        table = (model(input_ids=torch.tensor([ids])).logits[0].double() / temperature).log_softmax(
            -1,
        )
    start = len(answer.prompt_ids)
    return sum(float(table[t - 1, ids[t]]) for t in range(start, len(ids)))


@pytest.mark.parametrize(("last_layers", "temperature"), [(None, 1.0), (1, 1.0), (1, 0.6)])
def test_it_is_the_difference_of_both_log_probabilities_on_one_trunk_and_on_two(
    last_layers,
    temperature,
):
    base = tiny_model(3, layers=3).requires_grad_(False).eval()
    model = add_adapter(
        copy.deepcopy(base),
        "policy",
        LoraConfig(rank=4, last_layers=last_layers),
        seed=1,
    )
    policy = Role(model, "policy")
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05)
    answers = [
        rollout("one", (5, 9, 30)),
        rollout("one", (7,)),
        rollout("another question", (8, 8, 11, 12, 6)),
    ]
    policy.activate()
    ours = [total(policy.causal_model, answer, temperature) for answer in answers]
    expected = [
        mine - total(base, answer, temperature) for mine, answer in zip(ours, answers, strict=True)
    ]
    assert max(map(abs, expected)) > 0.01
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    for reference in (Role(model), Role(base)):
        found = kl_to_reference(
            policy,
            reference,
            answers,
            encoder,
            temperature,
            micro_batch_tokens=80,
        )
        assert found == pytest.approx(expected, abs=2e-5)
