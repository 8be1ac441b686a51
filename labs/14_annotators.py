# %% [markdown]
# # 14. Annotators: agreement, majority, experts, and what a reward model inherits
#
# **Question:** Which faults of annotators does a reward model inherit?
#
# **Goal.** Let seven people, some careful and some not, compare the same pairs, and measure how
# reliable they are. Then train reward models on their labels: noise fades, and a shared taste
# stays.
#
# **Chapter:** preference data, the agreement of annotators, and guidelines that become behaviour.
#
# **Time:** 5 seconds.

# %%
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tether.api.labs import Lab, level, line, points
from tether.api.labs.crowd import accuracy_of, ballots, decided, in_theory, log_odds
from tether.api.labs.words import WORDS, Pairs, fit_reward, gold
from tether.people.labels.aggregation import Label, dawid_skene, majority
from tether.people.labels.agreement import fleiss_kappa, raw_agreement
from tether.people.labels.quality import suspicious

lab = Lab("14_annotators")
luck = torch.Generator().manual_seed(lab.seed)
ITEMS = 400

# %% [markdown]
# ## The pairs and the people
#
# The pairs are answers of the shop (lab 2), of which one is truly better. A person of accuracy a
# names the better one with probability a. Gus reads nothing: he clicks on the left answer.
# `labs/crowd.py` draws the pairs and turns choices into votes.
#
# In the code True means "the first answer". `truth` says if the first answer is the better one.
# `chosen` is the choice of a person: the truth with probability a, else its opposite. `sides` says
# if the first answer was shown on the left.

# %%
first, second = decided(ITEMS, luck)
truth = gold(first) > gold(second)
PEOPLE = {"Finn": 0.6, "Gus": 0.5, "Anna": 0.8, "Hugo": 0.6, "Ben": 0.8, "Cleo": 0.8, "Eva": 0.95}


def coin(chance: float, count: int = ITEMS) -> Tensor:
    return torch.rand(count, generator=luck) < chance


sides = {name: coin(0.5) for name in PEOPLE}
chosen = {name: truth ^ ~coin(accuracy) for name, accuracy in PEOPLE.items()}
chosen["Gus"] = sides["Gus"]
votes = ballots(chosen, sides)

# %% [markdown]
# ## Agreement
#
# Textbooks report that annotators agree in 65 to 75 of 100 pairs. Two people of accuracy a agree in
# a share a² + (1 − a)² of the pairs. So if people agree in 70% of the pairs, each is right in 82%.
# Two who click at random still agree in 50%. Fleiss' kappa corrects for this: κ = (p − c) / (1 − c).
# Here p is the agreement, and c the agreement by chance, 1/2. κ is 0 by chance and 1 for full
# agreement.

# %%
ACCURACIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
raws: list[float] = []
kappas: list[float] = []
for accuracy in ACCURACIES:
    two = {name: truth ^ ~coin(accuracy) for name in ("one", "two")}
    cast = ballots(two, dict.fromkeys(two, truth))
    raws.append(raw_agreement(cast).value or 0.0)
    kappas.append(fleiss_kappa(cast).value or 0.0)
expected = [a * a + (1 - a) ** 2 for a in ACCURACIES]

# %%
lab.plot(
    "Agreement of two people over their accuracy",
    [
        points(raws, "raw agreement", ACCURACIES),
        points(kappas, "Fleiss' kappa", ACCURACIES),
        line(expected, "a² + (1 − a)²", ACCURACIES, dash="dot", colour="muted"),
        line([2 * e - 1 for e in expected], "(2a − 1)²", ACCURACIES, dash="dash", colour="muted"),
    ],
    x="accuracy a of each person",
    y="agreement: share of pairs, or κ",
    look_at="both curves are flat at the left: people who are right in 60% of the pairs hardly agree "
    "more than coins do. In theory raw agreement is never below one half.",
)
gap = max(abs(seen - e) for seen, e in zip(raws, expected, strict=True))
whole = raw_agreement(votes)
kappa = fleiss_kappa(votes)
lab.text(
    f"All seven: raw agreement {whole.value:.3f} [{whole.low:.3f}, {whole.high:.3f}], "
    f"Fleiss' kappa {kappa.value:.3f} [{kappa.low:.3f}, {kappa.high:.3f}]."
)
pairs_of_two = list(itertools.combinations(PEOPLE.values(), 2))
mean_agreement = sum(a * b + (1 - a) * (1 - b) for a, b in pairs_of_two) / len(pairs_of_two)
lab.expect("raw agreement of two, largest distance", gap, 0, 0.09, "theory: 3.5 standard errors")
lab.expect(
    "raw agreement of all seven minus theory",
    (whole.value or 0.0) - mean_agreement,
    -0.025,
    0.025,
    "theory: the mean over pairs of ab + (1 − a)(1 − b)",
)

# %% [markdown]
# ## Reliable people
#
# The method of Dawid and Skene (1979) estimates the labels and each person's accuracy together. It
# needs no known answer: a person who often differs from the weighted vote of all gets less weight.
# `suspicious` tests each person, and names those whose votes chance does not explain. Its kind
# `one_side` means: this person clicks too often on one side.

# %%
fit = dawid_skene(votes)
suspects = {suspect.annotator: suspect for suspect in reversed(suspicious(votes))}
shares = {name: float((row == truth).float().mean()) for name, row in chosen.items()}
lab.table(
    ["person", "accuracy", "right here", "by Dawid and Skene", "suspicion"],
    [
        [
            name,
            accuracy,
            shares[name],
            fit.accuracy[name],
            suspects[name].kind if name in suspects else "",
        ]
        for name, accuracy in PEOPLE.items()
    ],
)
for suspect in suspects.values():
    lab.text(f"{suspect.annotator} {suspect.reason}.")
off = max(abs(fit.accuracy[name] - share) for name, share in shares.items())
lab.expect(
    "Dawid and Skene's accuracies, largest error", off, 0, 0.05, "seeds 0 to 4: 0.010 to 0.021"
)
lab.expect("Gus is a suspect", "Gus" in suspects, 1, 1, "theory: 400 clicks on the left")
careful = sum(name in suspects for name in ("Anna", "Ben", "Cleo", "Eva"))
lab.expect("careful people among the suspects", careful, 0, 0, "theory: 5% of crowds at most")

# %% [markdown]
# ## One label from many votes
#
# The majority counts every vote alike. The best weight of a vote is log(a / (1 − a)): Eva's vote
# weighs a little more than two of Anna's, and that of Gus nothing. Dawid and Skene come near to
# this without knowing any a.
#
# The plot adds people in the order of the table: Finn alone, then Gus and Anna, then Hugo and Ben,
# then Cleo and Eva.


# %%
CROWDS = (1, 3, 5, 7)
names = list(PEOPLE)
counted: list[float] = []
weighed: list[float] = []
for size in CROWDS:
    some = [vote for vote in votes if vote.annotator in names[:size]]
    counted.append(accuracy_of(majority(some, undecided="soft"), truth))
    weighed.append(accuracy_of(dawid_skene(some).labels, truth))
parts = [[PEOPLE[name] for name in names[:size]] for size in CROWDS]
alike = [in_theory(part, [1.0] * len(part)) for part in parts]
ideal = [in_theory(part, [log_odds(accuracy) for accuracy in part]) for part in parts]

# %%
lab.plot(
    "Right labels over the number of votes on a pair",
    [
        line(counted, "majority", CROWDS, mode="both"),
        line(weighed, "Dawid and Skene", CROWDS, mode="both"),
        line(alike, "majority, in theory", CROWDS, dash="dot", colour="muted"),
        line(ideal, "best weights, in theory", CROWDS, dash="dash", colour="muted"),
        level(PEOPLE["Eva"], "Eva alone", CROWDS, colour=""),
    ],
    x="votes on a pair",
    y="share of right labels",
    look_at="with seven votes the weights add some points to the majority. But all seven together "
    "are hardly better than Eva alone: one expert can be worth a crowd.",
)
close = [label for label in majority(votes) if label.confidence < 0.6]
lab.expect(
    "majority of seven minus theory",
    counted[-1] - alike[-1],
    -0.06,
    0.06,
    "theory: 3.5 standard errors",
)
lab.expect(
    "Dawid and Skene of seven minus best weights",
    weighed[-1] - ideal[-1],
    -0.06,
    0.04,
    "theory: at most 0, but for 3.5 standard errors",
)
lab.expect(
    "seven, Dawid and Skene minus majority",
    weighed[-1] - counted[-1],
    0.0,
    0.1,
    "theory: 0.054; seeds 0 to 4: 0.030 to 0.068",
)

# %% [markdown]
# ## Experts for the doubtful pairs
#
# Chapters say: remove pairs without a majority, or give them to experts. Seven votes without ties
# always have a majority. The doubtful pairs are those with 4 votes against 3.

# %%
doubtful = {label.item for label in close}
settled = [
    Label(label.item, "first" if chosen["Eva"][int(label.item)] else "second", {}, 1)
    if label.item in doubtful
    else label
    for label in majority(votes)
]
lab.table(
    ["labels", "pairs", "right"],
    [
        ["majority", ITEMS, counted[-1]],
        ["of these, 4 to 3", len(close), accuracy_of(close, truth)],
        ["4 to 3 settled by Eva", ITEMS, accuracy_of(settled, truth)],
        ["Dawid and Skene", ITEMS, weighed[-1]],
    ],
)
lab.expect(
    "share of 4 to 3", len(close) / ITEMS, 0.19, 0.38, "theory: 0.284, with 4 standard errors"
)
lab.expect(
    "right among 4 to 3",
    accuracy_of(close, truth),
    0.58,
    0.91,
    "theory: 0.747, with 4 standard errors",
)
lab.expect(
    "settled minus majority",
    accuracy_of(settled, truth) - counted[-1],
    0.01,
    0.09,
    "seeds 0 to 4: 0.035 to 0.058",
)

# %% [markdown]
# ## The reward model inherits
#
# First noise. We train a reward model on the labels of one person, then of the majority, then on
# the truth itself. Each is tested on the truth about 3,000 fresh pairs.


# %%
fresh = decided(3000, luck)
fresh_truth = gold(fresh[0]) > gold(fresh[1])


def learned(labels: Tensor) -> tuple[float, Tensor]:
    """Accuracy against the truth of a reward model that learned from these labels; its rewards."""
    reward = fit_reward(Pairs(first, second, labels))
    difference = (fresh[0].counts - fresh[1].counts) @ reward
    right = torch.where(difference == 0, 0.5, ((difference > 0) == fresh_truth).float())
    return float(right.mean()), reward


def labels_of(labels: Sequence[Label]) -> Tensor:
    return torch.tensor([label.probability > 0.5 for label in labels])


sources = {
    "Finn": chosen["Finn"],
    "Anna": chosen["Anna"],
    "majority": labels_of(majority(votes)),
    "Dawid and Skene": labels_of(fit.labels),
    "the truth": truth,
}
inherited = {name: learned(labels)[0] for name, labels in sources.items()}
lab.table(
    ["labels of", "right labels", "reward model, held out"],
    [
        [name, float((labels == truth).float().mean()), inherited[name]]
        for name, labels in sources.items()
    ],
)
noise_cost = inherited["the truth"] - inherited["Anna"]
lab.expect(
    "reward model: the truth minus Anna", noise_cost, -0.03, 0.05, "seeds 0 to 4: -0.006 to 0.020"
)

# %% [markdown]
# Labels that are right in 80% cost next to nothing. Those of 60% depend on luck with 400 pairs:
# other seeds give 0.64 to 0.88 for Finn's. Noise hits all words alike, so more labels would remove
# it.
#
# Then taste. A guideline says "be polite". Seven people have accuracy 0.8, and some of them now
# choose the answer with "sorry" whenever only one of the two has it. The truth gives no point for
# "sorry". `KNOWN` is the number of pairs whose truth we tell to the method of Dawid and Skene.

# %%
says_sorry = [answers.counts[:, WORDS.index("sorry")] > 0 for answers in (first, second)]
only_one = says_sorry[0] ^ says_sorry[1]
tastes = range(8)
KNOWN = 0
known = {f"{pair:03d}": "first" if truth[pair] else "second" for pair in range(KNOWN)}
agreement: list[float] = []
right_labels: list[float] = []
models: list[float] = []
sorry: list[float] = []
by_skene: list[float] = []
honest = [truth ^ ~coin(0.8) for _ in range(7)]
for number in tastes:
    crowd = {
        f"person {k}": torch.where(only_one, says_sorry[0], row) if k < number else row
        for k, row in enumerate(honest)
    }
    cast = ballots(crowd, dict.fromkeys(crowd, truth))
    labels = majority(cast)
    score, reward = learned(labels_of(labels))
    agreement.append(fleiss_kappa(cast).value or 0.0)
    right_labels.append(accuracy_of(labels, truth))
    by_skene.append(accuracy_of(dawid_skene(cast, gold=known).labels, truth))
    models.append(score)
    sorry.append(float(reward[WORDS.index("sorry")] - reward[WORDS.index("hello")]))

# %%
lab.plot(
    "A taste that part of the crowd shares",
    [
        line(agreement, "Fleiss' kappa", tastes, mode="both"),
        line(right_labels, "right labels, majority", tastes, mode="both"),
        line(by_skene, "right labels, Dawid and Skene", tastes, mode="both"),
        line(models, "reward model against the truth", tastes, mode="both"),
    ],
    x="people of seven with the taste",
    y="agreement, or share that is right",
    look_at="the crowd that agrees most is wrong most often. Agreement means that people say the "
    "same, not that they are right. Three of seven are enough to mislead Dawid and Skene: where "
    "the three differ from the others they always agree with each other, and so count as reliable.",
    leads=True,
)
lab.plot(
    'Reward of "sorry" above that of "hello"',
    [line(sorry, "reward model of the majority", tastes, mode="both")],
    x="people of seven with the taste",
    y="difference of rewards, in log-odds",
    look_at="the reward model has learned the guideline: the more people share the taste, the more "
    'a "sorry" earns. More labels from the same people would not change that.',
)
lab.expect(
    "kappa, all with the taste minus none",
    agreement[-1] - agreement[0],
    0.15,
    0.42,
    "seeds 0 to 4: 0.25 to 0.31",
)
lab.expect(
    "right labels, all minus none",
    right_labels[-1] - right_labels[0],
    -0.31,
    -0.12,
    "seeds 0 to 4: -0.23 to -0.19",
)
lab.expect(
    "Dawid and Skene, all minus none",
    by_skene[-1] - by_skene[0],
    -0.31,
    -0.12,
    "seeds 0 to 4: -0.23 to -0.19",
)
lab.expect(
    "three with the taste: Dawid and Skene minus majority",
    by_skene[3] - right_labels[3],
    -0.2,
    -0.03,
    "seeds 0 to 4: -0.14 to -0.11",
)
lab.expect(
    "reward of sorry over hello, all with the taste", sorry[-1], 3, 7, "seeds 0 to 4: 4.6 to 5.2"
)
lab.expect(
    "reward of sorry over hello, none", sorry[0], -1, 1, "theory: 0; seeds 0 to 4: -0.42 to 0.23"
)

# %% [markdown]
# ## Comparisons or ratings
#
# Chapters prefer comparisons to ratings of single answers, for two reasons: people use a scale
# differently, and their own use of it drifts during a long session. Both add a shift to a rating.
# In a comparison one person sees both answers at once, and the shift cancels.
#
# Here a person sees the worth of an answer, the truth, with noise of standard deviation 1. Each
# person has a zero point of the scale. It differs between people by a standard deviation s, and
# drifts by s/2 between two ratings of one person.

# %%
SHIFTS = (0.0, 0.5, 1.0, 2.0, 4.0)
dice = torch.Generator().manual_seed(lab.seed + 1)
worth = torch.stack([gold(first), gold(second)]).repeat(1, 20)
distance = (worth[0] - worth[1]).abs()


def in_order(shift: float) -> float:
    """The share of pairs that are judged in the right order; each answer has its own shift."""
    noise, shifts = (torch.randn(worth.shape, generator=dice) for _ in range(2))
    seen = worth + noise + shift * shifts
    return float(((seen[0] > seen[1]) == (worth[0] > worth[1])).float().mean())


def in_order_by_theory(shift: float) -> float:
    """The mean over pairs of Φ(distance / √(2 + 2 shift²)), with Φ the normal distribution."""
    return float(torch.special.ndtr(distance / (2 + 2 * shift**2) ** 0.5).mean())


ways = {
    "one comparison": [0.0 for _ in SHIFTS],
    "two ratings by one person": [shift / 2 for shift in SHIFTS],
    "two ratings by two people": list(SHIFTS),
}
ordered = {name: [in_order(shift) for shift in row] for name, row in ways.items()}

# %%
lab.plot(
    "Pairs in the right order",
    [
        *(line(row, name, SHIFTS, mode="both") for name, row in ordered.items()),
        level(in_order_by_theory(0), "theory, one comparison", SHIFTS),
        line(
            [in_order_by_theory(shift) for shift in SHIFTS],
            "theory, two people",
            SHIFTS,
            dash="dash",
            colour="muted",
        ),
    ],
    x="standard deviation s of the zero points, in points of truth",
    y="share of pairs",
    look_at="the comparison does not depend on s. Ratings by two people fall towards 0.5, a "
    "coin. Ratings by one person fall later, since a drift is the smaller shift here.",
)
farthest = max(
    abs(seen - in_order_by_theory(shift))
    for name, row in ways.items()
    for shift, seen in zip(row, ordered[name], strict=True)
)
lab.expect(
    "share in the right order, largest distance from theory",
    farthest,
    0,
    0.025,
    "theory: 4 standard errors",
)

# %% [markdown]
# **Question to try.** Set `KNOWN` to 20, and look at the method of Dawid and Skene where five of seven
# people share the taste. Do 20 known answers help with the other pairs? Do 60?

# %%
lab.finish(
    "Random errors fade as more people vote, but a taste that many people share stays in "
    "the labels and in the reward model. High agreement is no sign of right labels: the "
    "crowd that agrees most can be wrong most often."
)
