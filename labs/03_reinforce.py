# %% [markdown]
# # 3. REINFORCE: do more of what earned reward
#
# **Question:** Can a model learn to be polite from rewards alone, without one example?
#
# **Goal.** See that sampled answers and their rewards are enough for the gradient of the expected
# reward. Then teach a language model to thank the customer, with rewards alone.
#
# **Chapter:** reinforcement learning for language models, the policy gradient.
#
# **Time:** 3 seconds.

# %%
import math

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, one_hot, pad

from tether.algorithms.policy_losses import reinforce_loss
from tether.api.labs import Lab, level, line
from tether.api.labs.words import (
    END,
    LENGTH,
    START,
    WORDS,
    Answers,
    Score,
    Shop,
    best_temperature,
    draw,
    fine_tuned,
    logprobs_of,
)

lab = Lab("03_reinforce")
luck = torch.Generator().manual_seed(lab.seed)
STEPS = 60
YOU, STOP = WORDS.index("you"), WORDS.index(END)

# %% [markdown]
# ## The reward
#
# A shop answers in words. Its model is a table of which word follows which (`labs/words.py`), and
# about a quarter of its answers end with "thank you". The reward is 1 for such an answer, else 0.


# %%
def polite(answers: Answers) -> Tensor:
    """1 for each answer whose last word is "you"."""
    rows = torch.arange(len(answers.tokens))
    last = answers.mask.sum(1) - 1
    ends = (answers.tokens[rows, last] == STOP) & (answers.before[rows, last] == YOU)
    return ends.float()


# %% [markdown]
# ## The policy gradient
#
# We want to raise the expected reward J = Σ_y π(y) r(y). Here y is an answer, π(y) its probability
# under the policy, and r(y) its reward. A sum over all texts is not possible. But the gradient
#
#     ∇J = E[ r(y) ∇ log π(y) ]     with log π(y) = Σ_t log π(y_t | y_<t)
#
# is a mean over samples. ∇ means: by every weight of the policy. y_t is the word at place t, and
# y_<t are the words before it. `reinforce_loss` is −r(y) log π(y). Each word of an answer has the
# same weight, since the reward does not say which word earned it.
#
# This model is so small that J can be computed exactly, word by word. So we can compute both sides
# of the equation.


# %%
def exact(table: Tensor) -> Tensor:
    """The expected reward of a table, without a single sample."""
    chances = table.softmax(1)
    word = one_hot(torch.tensor(START), len(WORDS) + 1).float()
    going_on = (torch.arange(len(WORDS) + 1) != STOP).float()
    total = torch.zeros(())
    for _ in range(LENGTH):
        total = total + word[YOU] * chances[YOU, STOP]
        word = pad(word @ chances, (0, 1)) * going_on
    return total


def sampled(count: int, offset: float = 0.0) -> Tensor:
    """The gradient of J by REINFORCE, from a number of answers; `offset` is added to rewards."""
    table = fine_tuned().requires_grad_()
    answers = draw(table.detach(), count, luck)
    logprobs = logprobs_of(table, answers)
    reward = (polite(answers) + offset)[:, None].expand_as(logprobs)
    loss = reinforce_loss(logprobs, reward, answers.mask, denominator=count)
    return -torch.autograd.grad(loss, table)[0]


table = fine_tuned().requires_grad_()
expected = exact(table)
(gradient,) = torch.autograd.grad(expected, table)
SIZES = (25, 100, 400, 1600, 6400)
errors = []
for size in SIZES:
    squares = [float((sampled(size) - gradient).square().sum()) for _ in range(20)]
    errors.append(math.sqrt(sum(squares) / len(squares)) / float(gradient.norm()))

# %%
steps = [1 / math.sqrt(size) for size in SIZES]
lab.plot(
    "The distance of the sampled gradient from the exact one",
    [
        line(errors, "REINFORCE", steps, mode="both"),
        line([0, errors[0]], "proportional to 1/√n", [0, steps[0]], dash="dot", colour="muted"),
    ],
    x="1/√n, with n the number of answers",
    y="error, as a share of the gradient",
    look_at="the points are near a line through 0. The rightmost point has 25 answers, the "
    "leftmost 6,400. The method is right on average. In one batch of 25 the noise is as large as "
    "the gradient.",
)
drop = math.log(errors[0] / errors[-1]) / math.log(SIZES[-1] / SIZES[0])
lab.expect("power of n at which the error falls", drop, 0.4, 0.6, "theory: 1/2")
lab.expect("error with 6,400 answers", errors[-1], 0.04, 0.12, "seeds 0 to 5: 0.065 to 0.077")

# %% [markdown]
# ## The training
#
# Each step draws 64 answers and makes one gradient step. There are two controls. The first is the
# start at its best temperature: a temperature below 1 makes likely words likelier, with no
# training. Here no temperature helps, so the best one is 1, the start as it is. The second control
# is the same training on a random reward.


# %%
def random_reward(answers: Answers) -> Tensor:
    """1 as often as the start earns it, whatever the answer is."""
    chance = float(expected.detach())
    return (torch.rand(len(answers.tokens), generator=luck) < chance).float()


def train(score: Score) -> tuple[Shop, list[float]]:
    """A trained shop, and the exact expected reward before each step."""
    shop = Shop(lab.seed, score)
    history = []
    for step in range(STEPS):
        history.append(float(exact(shop.table.detach())))
        answers, rewards = shop.sample(step)
        logprobs, _ = shop.evaluate(answers)
        weights = rewards[:, None].expand_as(logprobs)
        loss = reinforce_loss(logprobs, weights, answers.mask, denominator=len(rewards))
        shop.update(loss, step + 1)
    return shop, history


temperature, cooled = best_temperature(polite, luck)
shop, learned = train(polite)
control, aimless = train(random_reward)

# %%
lab.plot(
    "The share of answers that end with thanks",
    [
        line(learned, "REINFORCE"),
        line(aimless, "REINFORCE, random reward"),
        level(cooled, f"the start at its best temperature, {temperature:g}", [1, STEPS]),
    ],
    x="step",
    y="expected reward",
    look_at="REINFORCE climbs to nearly 1. With the random reward the curve drifts a little, up or "
    "down by the seed.",
    leads=True,
)
for name, game in {"start": None, "trained": shop, "random reward": control}.items():
    drawn = draw(game.table.detach() if game else fine_tuned(), 4, luck)
    lab.text(f"{name}: " + " / ".join(drawn.texts))

# %% [markdown]
# The KL measures how far the model has moved from its start. Its unit is the nat. Let the start
# thank with probability p, and the trained policy with probability q. Then the KL is at least
#
#     q log(q/p) + (1 − q) log((1 − q)/(1 − p))
#
# REINFORCE has no term that keeps the KL small. The trained policy still ends near this bound: the
# end of the answers has changed, which the reward measures, and little else.
#
# The table has the start twice. Its first row is exact, the second is a mean of 2,000 answers.

# %%
start, end = learned[0], float(exact(shop.table.detach()))
bound = end * math.log(end / start) + (1 - end) * math.log((1 - end) / (1 - start))
kl = shop.drift[-1]
lab.table(["", "expected reward", "KL, nats an answer"], [
    ["start", start, 0.0],
    [f"start at temperature {temperature:g}", cooled, "-"],
    ["REINFORCE", end, kl],
    ["REINFORCE, random reward", aimless[-1], control.drift[-1]],
])  # fmt: skip
lab.expect("reward at the end", end, 0.92, 1.0, "seeds 0 to 5: 0.963 to 0.970")
lab.expect(
    "best temperature of the start, its reward", cooled, 0.2, 0.27, "seeds 0 to 5: 0.226 to 0.236"
)
lab.expect("reward at the end, random reward", aimless[-1], 0.05, 0.5, "seeds 0 to 5: 0.19 to 0.35")
lab.expect(
    "KL over its bound", kl / bound, 1, 2.2, "theory: at least 1; seeds 0 to 5: 1.21 to 1.55"
)

# %% [markdown]
# ## "Low reward: push its probability down"?
#
# Textbooks explain the formula with this sentence. The formula does something else. An answer with
# reward 0 is not pushed at all. With rewards of 1 and 2 every answer is pushed up, the bad ones
# too. Bad answers still fall, because probabilities add up to 1 and good answers are pushed harder.
#
# A constant that is added to all rewards changes nothing on average, since E[∇ log π] = 0. In a
# single batch it adds noise. The table shows the mean of 20 batches of 100 answers each. A cosine
# of 1 means that a batch's gradient points in the exact direction.

# %%
OFFSETS = (-1.0, -0.5, 0.0, 1.0, 4.0)
agreements = {}
for offset in OFFSETS:
    drawn = torch.stack([sampled(100, offset).flatten() for _ in range(20)])
    agreements[offset] = float(cosine_similarity(drawn, gradient.flatten()[None]).mean())
lab.table(
    ["rewards", "the push on a bad answer", "cosine of a batch's gradient and the exact one"],
    [
        [f"{offset:g} and {1 + offset:g}", "down" if offset < 0 else "up" if offset else "none", cosine]
        for offset, cosine in agreements.items()
    ],
)  # fmt: skip
lab.expect("cosine, rewards 0 and 1", agreements[0.0], 0.8, 0.95, "seeds 0 to 5: 0.88 to 0.91")
lab.expect("cosine, rewards 4 and 5", agreements[4.0], 0.0, 0.4, "seeds 0 to 5: 0.15 to 0.26")

# %% [markdown]
# **Question to try.** Add more constants to `OFFSETS`, between −1 and 0. Which one gives the best
# cosine, as far as the noise of 20 batches lets you see? Lab 4 explains why: the constant is a baseline.

# %%
lab.finish(
    "Sampled answers and their rewards are enough for the gradient, and its error falls "
    "with the square root of their number. With a random reward the model only drifts."
)
