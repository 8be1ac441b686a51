# %% [markdown]
# # 4. The variance of the gradient, with and without a baseline
#
# **Question:** Why does the policy gradient need a baseline?
#
# **Goal.** Measure how noisy the policy gradient is, and what a baseline takes off.
# Compare no baseline, a running mean, and a value model, on the same answers.
#
# **Chapter:** REINFORCE with a baseline, and the reason that PPO has a value model.
#
# **Time:** 6 seconds.

# %%
import torch
from torch import Tensor

from tether.algorithms.advantages import returns_to_go
from tether.algorithms.policy_losses import reinforce_loss, value_loss
from tether.api.labs import Lab, line
from tether.api.labs.words import Answers, Shop, draw, gold

lab = Lab("04_gradient_variance")
luck = torch.Generator().manual_seed(lab.seed)
BATCHES = 200
ANSWERS = 32

# %% [markdown]
# The gradient is E[(r − b) ∇ log π]. For every b that does not look at the action the mean is the
# same, since E[∇ log π] = 0. The variance is not: it is about E[(r − b)² |∇ log π|²].
#
# A reward model is only defined up to a constant. So we add a constant c to all scores and look at
# three baselines, with the policy held still:
#
# - none: b = 0;
# - running mean: the mean score of earlier answers;
# - value: V(place, word before), the expected score from there on.

# %%
shop = Shop(lab.seed, gold, learning_rate=0.1)
shop.table.requires_grad_(False)
for _ in range(150):
    answers = draw(shop.start, 200, luck)
    target = gold(answers)[:, None].expand(answers.mask.shape) * answers.mask
    _, values = shop.evaluate(answers)
    loss, _ = value_loss(
        values, values, target, answers.mask, clip_range=None, denominator=int(answers.mask.sum())
    )
    shop.update(loss, 0)
average = float(gold(draw(shop.start, 5000, luck)).mean())


# %%
def gradients(baseline: str, offset: float) -> Tensor:
    """The gradient of each batch, as rows; every baseline sees the same answers."""
    same = torch.Generator().manual_seed(lab.seed + 1)
    table = shop.start.clone().requires_grad_()
    rows = []
    for _ in range(BATCHES):
        answers = draw(shop.start, ANSWERS, same)
        rewards = torch.zeros(answers.mask.shape)
        rewards[torch.arange(ANSWERS), answers.mask.sum(1) - 1] = gold(answers) + offset
        weights = returns_to_go(rewards, answers.mask) - expected(answers, baseline, offset)
        logprobs = table.log_softmax(1)[answers.before, answers.tokens]
        loss = reinforce_loss(logprobs, weights, answers.mask, denominator=ANSWERS)
        rows.append(torch.autograd.grad(loss, table)[0].flatten())
    return torch.stack(rows)


def expected(answers: Answers, baseline: str, offset: float) -> Tensor:
    """The baseline of each word."""
    if baseline == "none":
        return torch.zeros(answers.mask.shape)
    if baseline == "running mean":
        return torch.full(answers.mask.shape, average + offset)
    return shop.evaluate(answers)[1].detach() + offset


def variance(rows: Tensor) -> float:
    """The trace of the covariance."""
    return float(rows.var(0).sum())


BASELINES = ("none", "running mean", "value")
OFFSETS = (-1.0, 0.0, 1.0, 2.0, 4.0)
samples = {(name, offset): gradients(name, offset) for name in BASELINES for offset in OFFSETS}
spread = {key: variance(rows) for key, rows in samples.items()}

# %%
lab.plot(
    "Variance of the gradient over the constant in the score",
    [line([spread[name, c] for c in OFFSETS], name, OFFSETS, mode="both") for name in BASELINES],
    x="constant c added to every score",
    y="variance (trace of the covariance)",
    look_at="without a baseline the variance grows with the square of c, though the constant says "
    "nothing about the answers. With a baseline it does not notice c.",
    leads=True,
)
lab.table(
    ["baseline", *(f"c = {c:g}" for c in OFFSETS)],
    [[name, *(spread[name, c] for c in OFFSETS)] for name in BASELINES],
)

# %% [markdown]
# ## The mean stays
#
# A baseline must not move the mean gradient. We take the difference of the gradients with and
# without it, batch by batch: its mean should be 0. In units of its own noise,
# n |mean|² / trace of its covariance is 1 on average.


# %%
def bias(name: str) -> float:
    difference = samples[name, 0.0] - samples["none", 0.0]
    return BATCHES * float(difference.mean(0).square().sum()) / variance(difference)


theory = "theory: 1 on average"
lab.expect("bias of the running mean, in units of noise", bias("running mean"), 0.2, 3, theory)
lab.expect("bias of the value, in units of noise", bias("value"), 0.2, 3, theory)
slope = (spread["none", 1.0] - spread["none", -1.0]) / 2
bend = (spread["none", 1.0] + spread["none", -1.0]) / 2 - spread["none", 0.0]
growth = spread["none", 4.0] / (spread["none", 0.0] + 4 * slope + 16 * bend)
mean_gain = spread["none", 1.0] / spread["running mean", 1.0]
value_gain = spread["running mean", 1.0] / spread["value", 1.0]
lab.expect(
    "variance at c = 4, over the parabola through c = −1, 0 and 1",
    growth,
    0.99,
    1.01,
    "theory: 1, the weights are linear in c",
)
lab.expect("variance, none over running mean, c = 1", mean_gain, 4, 8, "seeds 0 to 2: 5.7 to 6.0")
lab.expect(
    "variance, running mean over value, c = 1", value_gain, 1.0, 1.2, "seeds 0 to 2: 1.06 to 1.10"
)
steady = spread["value", 4.0] / spread["value", 0.0]
lab.expect("variance with a value, c = 4 over c = 0", steady, 0.999, 1.001, "theory: 1")

# %% [markdown]
# Textbooks say that a baseline halves the variance. There is no such number: the constant decides.
# Near the c at which the scores are 0 on average, no baseline is nearly as good as a mean.
# And the value model takes off only a few percent more than a running mean here: one word of memory
# says little about the score that will come.
#
# **Question to try.** Make the baseline the mean of the batch itself, own answer included.
# Is the mean gradient still right? Look at it with 2 answers a batch.

# %%
lab.finish(
    "Without a baseline the variance grows with the square of a constant that carries no "
    "information. A running mean of the scores removes it, and here a value model removes "
    "only a few percent more."
)
