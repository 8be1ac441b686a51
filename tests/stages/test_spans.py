"""Responses of several spans, between which an environment speaks: its tokens are read, and carry
no loss, no KL and no advantage. The oracle is a pass of the whole model, and sums by hand.
"""

import itertools
import json
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.stages.test_ppo import PROMPTS, EvenReward

from tether.core.types import Rollout, Sampling, Score, StopReason
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder
from tether.data.prepare import Limit
from tether.evaluation.likelihood import kl_to_reference
from tether.models.heads import ScalarHead
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.rollout.local import LocalEngine
from tether.runner.methods import rounds
from tether.settings.policy import PolicyConfig
from tether.stages.online_direct import SampledPair
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.token_numbers import token_rows

PROMPT_IDS = (70, 71)
RESPONSE, SPANS, WRITTEN = (7, 8, 90, 91, 92, 9, 1), ((0, 2), (5, 7)), (0, 1, 5, 6)


def rollout(ids, spans=(), logprobs=(), forks=()):
    how = (StopReason.STOP_TOKEN, "", 0, 0, Sampling(), PROMPTS[0])
    return Rollout(PROMPT_IDS, ids, logprobs, *how, spans, forks)


NUMBERS = (-1.0, -2.0, -3.0, -4.0)
TWO_SPANS, WHOLE = rollout(RESPONSE, SPANS, NUMBERS), rollout((11, 12, 13))
FORKED = rollout(RESPONSE, SPANS, NUMBERS, (2,))
"""What it reads before its second reply is that reply's whole prompt."""
SEVERAL = pytest.mark.parametrize("several", [TWO_SPANS, FORKED], ids=["one segment", "two"])


def by_hand(model, one):
    """The log-probability of each token that the policy wrote, each segment by itself."""
    numbers = []
    edges = [0, *one.forks, len(one.response_ids)]
    for begin, end in itertools.pairwise(edges):
        ids = [*(one.prompt_ids if begin == 0 else ()), *one.response_ids[begin:end]]
        rows = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        numbers += [
            rows[len(ids) - end + place - 1, one.response_ids[place]]
            for start, stop in one.spans
            for place in range(start, stop)
            if begin <= place < end
        ]
    return torch.stack(numbers)


def gathered(several=TWO_SPANS, **settings):
    """A stage whose reference differs from its policy, and its matrices of both rollouts."""
    common = {"temperature": 1.0, "epochs": 1, "normalize_scores": False}
    config = PolicyConfig.model_validate({"samples_per_prompt": 1, **common, **settings})
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    policy, reference = (Role(tiny_model(0).eval()) for _ in range(2))
    value = Role(tiny_model(0).eval(), head=ScalarHead(64)) if config.critic else None
    engine = LocalEngine(policy, encoder)
    stage = PolicyGradient(
        config=config,
        policy=policy,
        reference=reference,
        value=value,
        reward=EvenReward(),
        engine=engine,
        encoder=encoder,
    )
    with torch.no_grad():
        for parameter in stage.reference.model.parameters():
            parameter += 0.03 * torch.randn(
                parameter.shape,
                generator=torch.Generator().manual_seed(parameter.numel()),
            )
    scores = [Score(1.0, steps=((3, 0.25), (6, 0.5))), Score(-2.0, steps=((2, 0.75),))]
    experience = stage.gather([several, WHOLE], scores, 0)
    stage.evaluate(experience)
    return stage, experience


def test_a_response_without_spans_is_one():
    assert WHOLE.spans == ((0, 3),) and WHOLE.written == WHOLE.response_ids
    assert TWO_SPANS.written == (7, 8, 9, 1) and TWO_SPANS.num_written == 4
    assert [TWO_SPANS.written_before(place) for place in range(8)] == [0, 1, 2, 2, 2, 2, 3, 4]
    assert rollout(()).spans == ()


@pytest.mark.parametrize("spans", [((0, 2), (1, 3)), ((0, 9),), ((2, 2),), ((-1, 2),)])
def test_spans_that_no_policy_can_have_written(spans):
    with pytest.raises(ValueError, match="do not fit a response of 7 tokens"):
        rollout(RESPONSE, spans)


def test_log_probabilities_belong_to_written_tokens():
    with pytest.raises(ValueError, match="7 log-probabilities for 4 tokens"):
        rollout(RESPONSE, SPANS, (-1.0,) * 7)


def test_the_tokens_of_spans_count():
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    mask = encoder.rollout(PROMPT_IDS, RESPONSE, SPANS).trained
    assert [place - 2 for place, counts in enumerate(mask) if counts] == [*WRITTEN]
    assert encoder.rollout(PROMPT_IDS, RESPONSE).trained == (False,) * 2 + (True,) * 7
    pair = SampledPair(TWO_SPANS, WHOLE, 1.0, 0.0).ranking(encoder, "one")
    assert [side.num_trained for side in pair.sequences] == [4, 3]


@SEVERAL
def test_log_probabilities_kl_rewards_and_advantages_by_hand(several):
    both = (several, WHOLE)
    stage, experience = gathered(
        several,
        kl={"coefficient": 0.3},
        gamma=0.9,
        lam=0.8,
        whiten_advantages=False,
    )
    rows = [(by_hand(stage.policy.model, one), by_hand(stage.reference.model, one)) for one in both]
    assert experience.mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert experience.rollout_logprobs[0].tolist() == [-1.0, -2.0, -3.0, -4.0]
    rewards = stage.shape(experience)
    experience.values = torch.tensor([[0.5, 0.1, -0.2, 0.3], [0.2, -0.1, 0.4, 0.0]])
    experience.rewards = rewards
    advantages, returns = stage.advantages(experience)
    for row, (score, (ours, theirs)) in enumerate(zip((1.0, -2.0), rows, strict=True)):
        count = len(ours)
        torch.testing.assert_close(experience.logprobs[row, :count], ours, atol=2e-5, rtol=0)
        expected = -0.3 * (ours - theirs)
        expected[-1] += score
        torch.testing.assert_close(rewards[row, :count], expected, atol=2e-5, rtol=0)
        assert (ours - theirs).abs().min() > 1e-3
        running, following = 0.0, 0.0
        for t in reversed(range(count)):
            value = float(experience.values[row, t])
            running = float(expected[t]) + 0.9 * following - value + 0.9 * 0.8 * running
            following = value
            assert float(advantages[row, t]) == pytest.approx(running, abs=1e-4)
            assert float(returns[row, t]) == pytest.approx(running + value, abs=1e-4)
    kl = kl_to_reference(
        stage.policy,
        stage.reference,
        both,
        stage.encoder,
        temperature=1.0,
    )
    assert kl == pytest.approx([float((a - b).sum()) for a, b in rows], abs=1e-4)


@SEVERAL
def test_the_gradient_by_hand(several):
    """-(1/7) sum A log pi + (beta/7) sum (log pi - log pi_ref)^2 / 2 over the seven tokens that the
    policy wrote.
    """
    stage, experience = gathered(
        several,
        algorithm="grpo",
        samples_per_prompt=2,
        normalize="token",
        scale_advantages=False,
        kl={"coefficient": 0.2, "place": "loss", "estimator": "k2"},
    )
    experience.rewards = stage.shape(experience)
    experience.advantages, experience.returns = stage.advantages(experience)
    gradients, original = [], stage.learner.step

    def step():
        gradients.extend(master.grad.clone() for master in stage.learner.masters)
        return original()

    stage.learner.step = step
    total = 0.0
    for one, advantage in zip((several, WHOLE), (1.5, -1.5), strict=True):
        logprobs, reference = (by_hand(r.model, one) for r in (stage.policy, stage.reference))
        total += (-advantage * logprobs + 0.1 * (logprobs - reference.detach()) ** 2).sum() / 7
    expected = torch.autograd.grad(total, stage.learner.parameters)
    metrics = stage.update(experience, 0)
    assert metrics["policy/updates"] == 1
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-3)


def test_a_step_that_an_environment_ends_is_credited_to_the_token_before():
    stage, experience = gathered(step_rewards=True, baseline="none", kl={"coefficient": 0.0})
    assert stage.shape(experience).tolist() == [[0.0, 0.25, 0.0, 0.5], [0.0, 0.0, 0.75, 0.0]]


def test_tokens_that_were_read_alone_have_no_numbers():
    stage, experience = gathered()
    (row, other) = token_rows(experience, stage.encoder, [0, 1], 0)
    assert row["counted"] == len(RESPONSE) and other["counted"] == 3
    assert [place for place, kl in enumerate(row["kl"]) if kl is not None] == [*WRITTEN]
    assert len(row["tokens"]) == len(row["kl"]) == len(RESPONSE)


@pytest.mark.parametrize("limit", [0, 64])
def test_segments_in_rows_of_their_own_and_beside_others(limit):
    encoder, role = ChatEncoder(tiny_tokenizer(), (1,)), Role(tiny_model(0).eval())
    again = replace(FORKED, response_ids=(7, 8, 70, 71, 92, 9, 1))
    rollouts = [WHOLE, FORKED, again]
    batch = make_batch([encoder.sampled(r) for r in rollouts], 0, document_tokens=limit)
    assert len(batch.ids) == (3 if limit else 5)
    rows = batch.scatter(role.logprobs_of(role.hidden(batch), batch)[0])
    for row, one in zip(rows, rollouts, strict=True):
        expected = by_hand(role.model, one)
        torch.testing.assert_close(row[: len(expected)], expected, atol=2e-5, rtol=0)


def test_a_reward_model_reads_the_last_segment():
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    head = ScalarHead(64)
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(0))
    role = Role(tiny_model(0).eval(), head=head)
    alone = replace(WHOLE, prompt_ids=(90, 91, 92), response_ids=(9, 1), spans=())
    for per_token in (False, True):
        reward = LearnedReward(role, encoder, per_token=per_token)
        one, other = reward.score([FORKED, alone])
        assert one.value == pytest.approx(other.value, abs=1e-5) and one.value
        moved = [(place + 5, value) for place, value in other.steps]
        assert [place for place, _ in one.steps] == [place for place, _ in moved]
        assert [v for _, v in one.steps] == pytest.approx([v for _, v in moved], abs=1e-5)


def test_segments_of_a_saved_pair():
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    row = json.loads(json.dumps(rounds._row(FORKED, WHOLE)))
    assert "rejected_forks" not in row
    sides = rounds._ranking(row, encoder, Limit(100)).sequences
    assert [part.ids for part in sides[0].segments] == [(70, 71, 7, 8), (90, 91, 92, 9, 1)]
    assert sides == (encoder.sampled(FORKED), encoder.sampled(WHOLE))
    cut = rounds._ranking(row, encoder, Limit(3, "", Counter())).sequences[0]
    assert cut.segments == [cut] and cut.ids == (70, 71, 7)


def test_saved_pairs_with_and_without_spans():
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    row = json.loads(json.dumps(rounds._row(TWO_SPANS, WHOLE)))
    assert "rejected_spans" not in row
    sides = rounds._ranking(row, encoder, Limit(100)).sequences
    assert [side.num_trained for side in sides] == [4, 3]
    del row["chosen_spans"]
    sides = rounds._ranking(row, encoder, Limit(100)).sequences
    assert [side.num_trained for side in sides] == [7, 3]


def test_a_cut_between_replies_that_adds_nothing_changes_nothing():
    """Ten thousand random cuts of a response into spans without a gap."""
    encoder, draw = ChatEncoder(tiny_tokenizer(), (1,)), random.Random(0)
    for _ in range(10_000):
        ids = tuple(draw.choices(range(5, 200), k=draw.randrange(1, 30)))
        places = sorted(draw.sample(range(1, len(ids)), draw.randrange(len(ids))))
        cuts = (*zip((0, *places), (*places, len(ids)), strict=True),)
        numbers = tuple(-draw.random() for _ in ids)
        one, other = rollout(ids, logprobs=numbers), rollout(ids, cuts, numbers)
        assert encoder.sampled(one) == encoder.sampled(other)
        assert one.written == other.written == ids
