"""Numbers and traps of code that is widely copied, each beside what tether does;
docs/guides/classic.md has the common ones.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, pipeline

from tether.algorithms.advantages import gae, group_relative
from tether.algorithms.policy_losses import ppo_clip_loss
from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.models.heads import ScalarHead
from tether.models.tiny import tiny_model
from tether.models.trunk import Role

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(("ratio", "advantage", "gain"), [(1.5, 0.4, 0.48), (0.6, -0.3, -0.24)])
def test_the_clip_walk_through(ratio, advantage, gain):
    """Both cases are cut off: the printed number is right, and nothing flows back."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, _ = ppo_clip_loss(
        logprobs,
        torch.zeros(1, 1),
        torch.tensor([[advantage]]),
        ONE,
        clip_range=0.2,
        denominator=1,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-gain) and logprobs.grad.item() == 0.0


def test_the_bandits_first_update_passes_the_clip():
    """One logit, rate 0.5, advantage 1: printed as 1.082, it is 1.2449, so the loop ends after its
    second line.
    """
    logit, ratios = 0.0, []
    for _ in range(5):
        ratios.append(1 / (1 + math.exp(-logit)) / 0.5)
        if ratios[-1] >= 1.2:
            break
        logit += 0.5
    assert ratios == pytest.approx([1.0, 1.2449187], abs=1e-6)


def test_group_advantages_and_a_printed_deviation_that_none_has():
    advantages = group_relative(
        torch.tensor([0.8, 0.2, 0.9, 0.1]),
        torch.zeros(4, dtype=torch.long),
        scale=True,
    )
    deviation = math.sqrt((0.3**2 + 0.3**2 + 0.4**2 + 0.4**2) / 3)
    expected = torch.tensor([0.3, -0.3, 0.4, -0.4]) / deviation
    torch.testing.assert_close(advantages, expected, atol=1e-3, rtol=0)
    # "mean=0.45, std=0.2217, advantages=[-1.13 1.58 0.23 -0.68]" is printed under a PPO step; these
    # rewards lead to it:
    rewards = torch.tensor([0.45 + 0.2217 * a for a in (-1.13, 1.58, 0.23, -0.68)])
    assert [round(r, 2) for r in rewards.tolist()] == [0.2, 0.8, 0.5, 0.3]
    assert float(rewards.std(correction=0)) == pytest.approx(0.229, abs=1e-3)
    assert float(rewards.std(correction=1)) == pytest.approx(0.265, abs=1e-3)


def test_the_last_column_is_padding_for_all_but_the_longest():
    """`rewards[:, -1] += score`, and the score of the shorter response never reaches its
    advantage.
    """
    mask = torch.tensor([[True, True, True], [True, False, False]])
    wrong, right = torch.zeros(2, 3), torch.zeros(2, 3)
    wrong[:, -1] += torch.tensor([1.0, 5.0])
    right[[0, 1], [2, 0]] += torch.tensor([1.0, 5.0])
    assert gae(wrong, torch.zeros(2, 3), mask, lam=1.0)[0][1].tolist() == [0.0, 0.0, 0.0]
    assert gae(right, torch.zeros(2, 3), mask, lam=1.0)[0][1].tolist() == [5.0, 0.0, 0.0]


def test_the_last_position_of_a_padded_batch_is_no_response():
    """`head(h[:, -1])` scores the padding: a response's score then depends on the length of its
    neighbour.
    """
    model, head = tiny_model(0).eval(), ScalarHead(64, zero=False)
    short, long = (
        Encoded((70, 71, 72), (False, True, True)),
        Encoded(tuple(range(80, 96)), (False,) + (True,) * 15),
    )
    with torch.no_grad():
        alone, together = (make_batch(rows, 0) for rows in ([short], [short, long]))
        naive = [
            head(model.model(batch.ids).last_hidden_state[:, -1])[0] for batch in (alone, together)
        ]
        role = Role(model, head=head)
        ours = [role.scores(batch)[0] for batch in (alone, together)]
    assert abs(naive[0] - naive[1]) > 0.05 and abs(ours[0] - ours[1]) < 1e-5


def test_decoding_the_first_element_of_a_flat_response_is_one_token(tokenizer):
    response = torch.tensor(tokenizer.encode("hello"))
    assert tokenizer.decode(response[0]) == "h" and tokenizer.decode(response) == "hello"


def test_a_pipeline_squashes_a_reward_unless_the_model_says_regression(
    reward_folder,
    tokenizer,
    tmp_path,
):
    model, text = AutoModelForSequenceClassification.from_pretrained(reward_folder), "some text"
    with torch.no_grad():
        logit = float(model(**tokenizer(text, return_tensors="pt")).logits)
    assert pipeline("text-classification", model=reward_folder)(text)[0]["score"] == pytest.approx(
        1 / (1 + math.exp(-logit)),
    )
    model.config.problem_type = "regression"  # as RewardTrainer saves it
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert pipeline("text-classification", model=str(tmp_path))(text)[0]["score"] == pytest.approx(
        logit,
        abs=1e-5,
    )


def test_rewards_that_carry_the_policys_graph_break_the_second_epoch():
    """Shaped from log-probabilities that were never detached, the advantages hold the first forward
    pass.
    """
    weight = torch.nn.Parameter(torch.zeros(5))
    tokens, reference = torch.tensor([1, 2, 3]), torch.full((3,), -1.0)

    def logprobs():
        return weight.log_softmax(0)[tokens]

    def epochs(detach):
        old = logprobs()
        advantages = -0.1 * (old - reference)
        advantages = advantages.detach() if detach else advantages
        for _ in range(2):
            (-((logprobs() - old.detach()).exp() * advantages).mean()).backward()

    epochs(detach=True)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        epochs(detach=False)


def test_values_that_keep_their_last_dimension_do_not_fit_the_returns():
    returns, values = torch.zeros(2, 3), torch.nn.Linear(4, 1)(torch.zeros(2, 3, 4))
    with pytest.raises(RuntimeError, match="must match"):
        returns - values
    # and where it fits it is worse
    assert (torch.zeros(3, 3) - torch.zeros(3, 3, 1)).shape == (3, 3, 3)


def test_a_kl_term_with_its_sides_exchanged_rewards_whatever_was_sampled():
    """beta * mean(log ref - log policy) as a loss: its gradient raises every sampled token, however
    far the policy has gone.
    """
    logprobs, reference = torch.tensor([-0.1, -5.0], requires_grad=True), torch.tensor([-3.0, -1.0])
    (0.1 * (reference - logprobs).mean()).backward()
    assert (logprobs.grad < 0).all()


def test_a_ratio_to_the_reference_stops_at_the_clip_for_good():
    """Once past 1.2 times the reference a good token has no gradient; the ratio to the old policy
    starts anew at 1.
    """
    reference, old = torch.tensor([[math.log(0.1)]]), torch.tensor([[math.log(0.3)]])
    gradients = []
    for anchor in (reference, old):
        logprobs = old.clone().requires_grad_()
        loss, _ = ppo_clip_loss(
            logprobs,
            anchor,
            torch.ones(1, 1),
            ONE,
            clip_range=0.2,
            denominator=1,
        )
        loss.backward()
        gradients.append(logprobs.grad.item())
    assert gradients == [0.0, -1.0]


def test_a_value_taught_the_rewards_does_not_learn_what_is_to_come():
    """With one score at the end the return of every token is that score; the reward of all but the
    last is 0.
    """
    rewards = torch.tensor([[0.0, 0.0, 2.0]])
    returns = gae(rewards, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), lam=1.0)[1]
    assert returns.tolist() == [[2.0, 2.0, 2.0]] and F.mse_loss(returns, rewards) > 2.0


def test_nucleus_samples_are_likelier_under_their_sampler_than_under_the_policy():
    """top_p = 0.9 keeps at least 0.9 of the mass and divides by it: log-probabilities are off by
    the same amount for all kept.
    """
    full = torch.tensor([0.5, 0.3, 0.15, 0.05])
    kept = torch.where(full.cumsum(0) - full < 0.9, full, 0.0)
    gap = (kept / kept.sum()).log() - full.log()
    torch.testing.assert_close(gap[:3], torch.full((3,), math.log(1 / 0.95)))
    # and what was cut off can never be sampled, nor its probability corrected
    assert gap[3] == -math.inf
