# %% [markdown]
# # 6. PPO in 40 lines
#
# **Question:** How can 40 lines of PPO show that they are right?
#
# **Goal.** Read all of PPO for language models on one screen, and run it.
# See from its own log that it is put together rightly, and what too many epochs and a misplaced
# score do to it.
#
# **Chapter:** the whole RLHF loop: policy, reference, reward, value.
#
# **Time:** 6 seconds.

# %%
import inspect
from statistics import fmean as mean

import torch
from torch import Tensor

from tether.api.labs import Lab, level, line, ratio
from tether.api.labs.ppo import Step, shaped, train
from tether.api.labs.words import Shop, best_temperature, draw, exact_kl, gold, random_score

lab = Lab("06_ppo_in_40_lines")
luck = torch.Generator().manual_seed(lab.seed)
STEPS = 40
BETA = 0.3

# %% [markdown]
# ## All of it
#
# `game` has the four models of RLHF: a policy that samples, a frozen reference, a score, and a
# value that predicts the score. The losses are tether's own functions of tensors, and they serve
# any other loop as well.
#
# In TRL's PPO `beta` is `kl_coef`, `epochs` is `num_ppo_epochs`, and `clip_range` is `cliprange`.

# %%
lab.source(shaped)
lab.source(train)
lines = [text.strip() for text in inspect.getsource(train).splitlines()]
length = sum(1 for text in lines if text and not text.startswith("#"))
lab.expect("lines of train", length, 1, 40, "the title")

# %% [markdown]
# ## On a language model
#
# The game is a shop that answers in words (`labs/words.py`). The score is the truth itself: 1 point
# for a promise, 1 for thanks, and −1 for each repeated word. So we look at PPO alone, without the
# errors of a reward model. There are two controls. The first is the start at its best temperature:
# below 1, cooled, likely words get likelier, with no training. The second is PPO on a random reward.

# %%
logs: dict[str, list[Step]] = {}
shops: dict[str, Shop] = {}
for name, score in (("PPO", gold), ("PPO, random reward", random_score(lab.seed))):
    shops[name] = Shop(lab.seed, score)
    logs[name] = train(shops[name], steps=STEPS, beta=BETA)
temperature, cooled = best_temperature(gold, luck)


def truth(shop: Shop) -> float:
    """The mean truth of 2,000 fresh answers."""
    return float(gold(draw(shop.table.detach(), 2000, luck)).mean())


# %%
lab.plot(
    "The true reward of the answers",
    [
        *(line(shop.truth, name) for name, shop in shops.items()),
        level(cooled, f"the start at temperature {temperature:g}", [1, STEPS]),
    ],
    x="step",
    y="true reward",
    look_at="PPO climbs past the cooled start within ten steps. The random reward leads nowhere.",
    leads=True,
)
for name, shop in shops.items():
    lab.text(f"{name}: " + " / ".join(draw(shop.table.detach(), 4, luck).texts))

# %% [markdown]
# ## Is it put together rightly?
#
# Before the first update of a batch the policy is the one that sampled it: every ratio is 1. At the
# first step the policy is the reference, so the KL is 0. Later the log estimates the KL from 64
# answers. This model is so small that we can compare the estimate with the exact KL.

# %%
right = logs["PPO"]
estimates = [step.kl for step in right]
drift = shops["PPO"].drift

# %%
lab.plot(
    "KL to the reference",
    [line(estimates, "estimated from 64 answers"), line(drift, "exact")],
    x="step",
    y="KL, nats an answer",
    look_at="the estimate wavers around the exact curve, at times above and at times below.",
)
ratios = max(abs(step.first_ratio - 1) for step in right)
lab.expect("first ratio, largest distance from 1", ratios, 0, 1e-5, "theory: 0 but for rounding")
lab.expect("KL of the first step", estimates[0], -1e-5, 1e-5, "theory: 0 but for rounding")
last = ratio(mean(estimates[-20:]), mean(drift[-20:]))
lab.expect("estimated over exact KL, last 20 steps", last, 0.85, 1.15, "theory: 1")
gain = truth(shops["PPO"]) - cooled
control = truth(shops["PPO, random reward"]) - shops["PPO"].truth[0]
lab.expect("PPO minus the cooled start", gain, 0.6, 1.1, "seeds 0 to 4: 0.83 to 0.87")
lab.expect(
    "PPO on a random reward minus the start", control, -0.5, 0.4, "seeds 0 to 4: -0.14 to 0.09"
)

# %% [markdown]
# ## Too many epochs
#
# "Run 20 epochs on the same batch, and most tokens will be pinned at the clip", says a chapter; "4
# is canonical". Here are 1, 4 and 20.

# %%
epochs = {}
for count in (1, 4, 20):
    shop = Shop(lab.seed, gold)
    epochs[count] = (shop, train(shop, steps=STEPS, beta=BETA, epochs=count))

# %%
lab.plot(
    "The true reward by the number of epochs",
    [
        *(line(shop.truth, f"epochs: {count}") for count, (shop, _) in epochs.items()),
        level(cooled, f"the start at temperature {temperature:g}", [1, STEPS]),
    ],
    x="step",
    y="true reward",
    look_at="more epochs climb faster. 4 and 20 end at the same height, and 1 is still below it.",
)
lab.plot(
    "Tokens whose gradient the clip took away, in the last epoch of each step",
    [line([step.clip_fraction for step in log], f"epochs: {n}") for n, (_, log) in epochs.items()],
    x="step",
    y="share of tokens",
    look_at="with 1 epoch the clip has nothing to do, with 4 hardly anything, and with 20 it holds "
    "nearly a third of the tokens.",
)
clipped = {n: mean(step.clip_fraction for step in log) for n, (_, log) in epochs.items()}
ends = {n: truth(shop) for n, (shop, _) in epochs.items()}
lab.table(
    ["epochs", "true reward at the end", "KL, nats an answer", "share clipped"],
    [
        [n, ends[n], exact_kl(shop.table.detach(), shop.start), clipped[n]]
        for n, (shop, _) in epochs.items()
    ],
)
lab.expect("share clipped, 1 epoch", clipped[1], 0, 0, "theory: the ratio is 1")
lab.expect("share clipped, 4 epochs", clipped[4], 0.001, 0.03, "seeds 0 to 4: 0.006 to 0.008")
lab.expect("share clipped, 20 epochs", clipped[20], 0.2, 0.4, "seeds 0 to 4: 0.28 to 0.30")
lab.expect(
    "true reward, 20 epochs minus 4", ends[20] - ends[4], -0.2, 0.2, "seeds 0 to 4: -0.02 to 0.05"
)

# %% [markdown]
# The 20 epochs are wasteful. At their end nearly a third of the tokens, and not most of them, get no
# gradient. But nothing collapses. That is the clip's work, as lab 1 shows with the clip taken away.
#
# ## The last column is not the last word
#
# Two chapters write `rewards[:, -1] += scores`. In a batch of answers of different lengths the last
# column is padding for all but the longest ones. With the padding masked, as it must be, only these
# ever see their score.


# %%
def last_column(
    scores: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """The chapters' line: the score in the last column of the batch."""
    rewards = shaped(torch.zeros_like(scores), policy, reference, mask, beta)
    rewards[:, int(mask.sum(1).max()) - 1] += scores
    return rewards


misplaced = Shop(lab.seed, gold)
train(misplaced, steps=STEPS, beta=BETA, shape=last_column)

# %%
lab.plot(
    "The true reward with the score at the wrong place",
    [
        line(shops["PPO"].truth, "at the last word"),
        line(misplaced.truth, "in the last column"),
        level(cooled, f"the start at temperature {temperature:g}", [1, STEPS]),
    ],
    x="step",
    y="true reward",
    look_at="no error is raised, and nothing is learned: hardly any answer got its score.",
)
lost = truth(misplaced) - shops["PPO"].truth[0]
lab.expect(
    "score in the last column minus the start", lost, -0.4, 0.5, "seeds 0 to 4: -0.10 to 0.22"
)

# %% [markdown]
# **Question to try.** In the loop over epochs, call `train` with `lam=1.0`, then with `lam=0.0`.
# Which curve falls behind? Which of the two λ does without a good value, and which needs one?

# %%
lab.finish(
    "A right PPO shows it in its own log: the first ratios are 1, and the KL starts at 0. A "
    "score at the wrong token raises no error, and the policy learns nothing."
)
