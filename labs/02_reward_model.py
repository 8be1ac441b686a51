# %% [markdown]
# # 2. From pairs to a reward model, and what noise in the labels does
#
# **Question:** What is left of a reward model when some labels are wrong at random?
#
# **Goal.** Train a reward model on compared answers, and test it on pairs that it has not seen.
# Then flip labels at random, and see how accuracy and confidence change.
#
# **Chapter:** reward modelling with Bradley-Terry, and its held-out accuracy.
#
# **Time:** 4 seconds.

# %%
import torch
from torch import Tensor

from tether.api.labs import Lab, level, line
from tether.api.labs.words import SHARPNESS, WORDS, Pairs, compare, fit_reward, gold
from tether.evaluation.calibration import expected_calibration_error, reliability_curve

lab = Lab("02_reward_model")
luck = torch.Generator().manual_seed(lab.seed)
NOISES = (0.0, 0.1, 0.2, 0.3, 0.4)

# %% [markdown]
# The answers are those of a shop, in eleven words ("sorry we mend it today"). A hidden truth, which
# no training sees, gives an answer 1 point for a promise ("mend" or "send"), 1 for "thank", and
# takes 1 off for each repeated word. Two answers of the start model are a pair.
#
# Bradley-Terry says P(first is preferred) = σ(r(first) − r(second)), and training minimises
# −log σ(r(chosen) − r(rejected)). Here r adds up a number for each word: a bag of words is the
# body, and the head is linear. Real reward models put the same head and the same loss on a
# transformer: `tether.reward(model, pairs)`.
#
# The labels themselves are drawn by Bradley-Terry on the hidden truth, at 2 log-odds a point. So
# even the best possible model is wrong at times: its accuracy is the mean of σ(|difference of
# truths|).

# %%
lab.source(fit_reward)
train = compare(1000, luck)
test = compare(4000, luck)
reward = fit_reward(train)
lab.table(["word", "reward"], [[word, float(reward[n])] for n, word in enumerate(WORDS)])


# %%
def chances(reward: Tensor, pairs: Pairs) -> Tensor:
    """The probability that the first answer is preferred, as the reward model sees it."""
    return torch.sigmoid((pairs.first.counts - pairs.second.counts) @ reward)


def accuracy(reward: Tensor, pairs: Pairs) -> float:
    """The share of labels that the model predicts; a tie counts half."""
    chance = chances(reward, pairs)
    right = (chance > 0.5) == pairs.first_wins
    return float(torch.where(chance == 0.5, 0.5, right.float()).mean())


truth = SHARPNESS * (gold(test.first) - gold(test.second))
ceiling = float(torch.sigmoid(truth.abs()).mean())
held_out = accuracy(reward, test)
lab.expect("held-out accuracy", held_out, 0.65, 0.75, "seeds 0 to 2: 0.69 to 0.71")
lab.expect("ceiling minus accuracy", ceiling - held_out, -0.01, 0.1, "seeds 0 to 2: 0.034 to 0.049")
lab.expect(
    "reward of thank + you",
    reward[WORDS.index("thank")] + reward[WORDS.index("you")],
    0.4,
    2.2,
    "seeds 0 to 2: 0.86 to 0.92",
)

# %% [markdown]
# ## Calibration
#
# A model that says 80% should be right in 80 of 100 cases.

# %%
curve = reliability_curve(chances(reward, test).tolist(), test.first_wins.tolist())
filled = [part for part in curve if part.count]
error = expected_calibration_error(chances(reward, test).tolist(), test.first_wins.tolist())

# %%
lab.plot(
    "Calibration on held-out pairs",
    [
        line(
            [part.frequency for part in filled],
            "labels",
            [part.mean_probability for part in filled],
            mode="both",
        ),
        line([0, 1], "perfect", [0, 1], dash="dot", colour="muted"),
    ],
    x="P(first is preferred) by the reward model",
    y="share of pairs where the first was preferred",
    look_at="the points lie near the diagonal: the difference of two rewards can be read as a "
    "probability. A difference of 1 means 73%.",
)
lab.expect("calibration error", error, 0, 0.08, "seeds 0 to 2: 0.032 to 0.036")

# %% [markdown]
# ## Noise in the labels
#
# Now a share ε of the training labels is flipped. On a test with such noisy labels, a model whose
# true accuracy is a has the accuracy a (1 − ε) + (1 − a) ε. Only the test with clean labels shows a.

# %%
clean = []
noisy = []
widths = []
for noise in NOISES:
    learned = fit_reward(compare(1000, luck, flipped=noise))
    clean.append(accuracy(learned, test))
    noisy.append(accuracy(learned, compare(4000, luck, flipped=noise)))
    widths.append(float(((test.first.counts - test.second.counts) @ learned).std()))
theory = [a * (1 - noise) + (1 - a) * noise for a, noise in zip(clean, NOISES, strict=True)]

# %%
lab.plot(
    "Held-out accuracy over the noise in the labels",
    [
        line(clean, "clean test labels", NOISES, mode="both"),
        line(noisy, "test labels with the same noise", NOISES, mode="both"),
        line(theory, "a (1 − ε) + (1 − a) ε", NOISES, dash="dot", colour="muted"),
        level(ceiling, "best possible on clean labels", NOISES, dash="dash"),
    ],
    x="share of labels turned round",
    y="accuracy",
    look_at="the two curves part. A low accuracy on noisy labels says little about the model: "
    "it is mostly the test that got worse.",
    leads=True,
)
lab.plot(
    "The spread of the differences of rewards",
    [line(widths, "deviation", NOISES, mode="both")],
    x="share of labels turned round",
    y="deviation of r(first) − r(second)",
    look_at="noise shrinks the rewards: the model learns to be less sure. A β that was tuned for "
    "one reward model holds tighter under a noisier one.",
)
gap = max(abs(seen - expected) for seen, expected in zip(noisy, theory, strict=True))
lab.expect(
    "noisy accuracy, largest distance from theory", gap, 0, 0.03, "theory: 4 standard errors"
)
lab.expect(
    "clean accuracy with 30% noise minus that with none",
    clean[3] - clean[0],
    -0.08,
    0.04,
    "seeds 0 to 2: -0.01 to 0.005",
)
lab.expect(
    "spread with 30% noise over that with none",
    widths[3] / widths[0],
    0.15,
    0.6,
    "theory: about 1 − 2ε = 0.4; seeds 0 to 2: 0.23 to 0.40",
)

# %% [markdown]
# **Question to try.** With 40% noise, train on 10,000 pairs instead of 1,000.
# Which of the three curves recovers, and which cannot?

# %%
lab.finish(
    "Random errors in the labels shrink the differences of rewards, but hardly change their "
    "order. With 30% wrong labels the model is nearly as right about clean pairs as before, "
    "although a noisy test makes it look much worse."
)
