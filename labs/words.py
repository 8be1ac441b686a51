"""The game of most labs: a shop answers in words, by a table of what follows what.

The policy is a language model with a memory of one word: logits over the next word for each word
before it. It is small enough that everything about it can be computed exactly, and its answers can
be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tether.algorithms.preference_losses import bradley_terry_loss

END = "."
WORDS = ("hello", "sorry", "we", "mend", "send", "it", "today", "thank", "you", "wait", END)
START = len(WORDS)
"""The row of the table for the first word, which has no word before it."""
TEMPERATURES = (0.1, 0.3, 0.5, 0.7, 1.0)
LENGTH = 12
"""The most words of an answer, its full stop among them."""
GRAMMAR: Mapping[str, Mapping[str, float]] = {
    "": {"hello": 30, "sorry": 30, "we": 30, "wait": 10},
    "hello": {"we": 60, "wait": 15, "sorry": 20, "thank": 5},
    "sorry": {"we": 80, "wait": 20},
    "we": {"mend": 45, "send": 45, "wait": 10},
    "mend": {"it": 98, END: 2},
    "send": {"it": 98, END: 2},
    "it": {"today": 30, END: 52, "thank": 18},
    "today": {END: 70, "thank": 28, "we": 2},
    "thank": {"you": 100},
    "you": {END: 94, "wait": 3, "thank": 3},
    "wait": {END: 80, "today": 10, "thank": 10},
}
"""By word what the demonstrations say next, in percent."""
LEAST = 0.002
"""The probability of every other word, in a model that learned from them."""

SHARPNESS = 2.0
"""Log-odds of a right label for each point of truth."""

Tokens = Int64[Tensor, "answers time"]
PerWord = Float[Tensor, "answers time"]
Table = Float[Tensor, "before word"]


class Answers(NamedTuple):
    """Answers as numbers of words; the mask is True up to the full stop.

    A prompt is the word that an answer goes on from; without one an answer begins by itself.
    """

    tokens: Tokens
    mask: Bool[Tensor, "answers time"]
    prompts: Int64[Tensor, " answers"] | None = None

    @property
    def before(self) -> Tokens:
        """The word before each word."""
        first = torch.full_like(self.tokens[:, :1], START)
        if self.prompts is not None:
            first = self.prompts[:, None]
        return torch.cat([first, self.tokens[:, :-1]], dim=1)

    @property
    def counts(self) -> Float[Tensor, "answers words"]:
        """The number of times that each word is said."""
        said = torch.nn.functional.one_hot(self.tokens, len(WORDS)).float()
        return (said * self.mask[..., None]).sum(1)

    @property
    def texts(self) -> list[str]:
        rows = zip(self.tokens.tolist(), self.mask.sum(1).tolist(), strict=True)
        return [" ".join(WORDS[word] for word in row[:length]) for row, length in rows]


def fine_tuned() -> Table:
    """The table of a model that has learned the grammar: the start of all training here."""
    table = torch.full((len(WORDS) + 1, len(WORDS)), LEAST)
    for before, followers in GRAMMAR.items():
        row = WORDS.index(before) if before else START
        for word, percent in followers.items():
            table[row, WORDS.index(word)] += percent / 100
    table[WORDS.index(END)] = 1.0
    return (table / table.sum(1, keepdim=True)).log()


def base() -> Table:
    """The table of a model that knows words and no answers: every word may follow every other."""
    return torch.full((len(WORDS) + 1, len(WORDS)), 1 / len(WORDS)).log()


def draw(
    table: Table,
    count: int,
    luck: torch.Generator,
    temperature: float = 1.0,
    *,
    prompts: Int64[Tensor, " answers"] | None = None,
) -> Answers:
    """Draw answers word by word; with prompts each goes on from its own."""
    chances = (table / temperature).softmax(1)
    word = torch.full((count,), START) if prompts is None else prompts
    words = []
    for _ in range(LENGTH):
        word = torch.multinomial(chances[word], 1, generator=luck)[:, 0]
        words.append(word)
    tokens = torch.stack(words, dim=1)
    ended = (tokens == WORDS.index(END)).cumsum(1)
    mask = (ended == 0) | ((ended == 1) & (tokens == WORDS.index(END)))
    return Answers(tokens, mask, prompts)


def logprobs_of(table: Table, answers: Answers) -> PerWord:
    """The log-probability of each word, given the word before it."""
    return table.log_softmax(1)[answers.before, answers.tokens]


def exact_kl(table: Table, reference: Table, prompt: int = START) -> float:
    """KL(policy || reference) in nats an answer, summed over all answers that there can be.

    Equation: Σ_t Σ_w P(w is the word before t) KL(π(· | w) || π_ref(· | w)).
    """
    log_policy = table.log_softmax(1)
    gap = (log_policy.exp() * (log_policy - reference.log_softmax(1))).sum(1)
    chances = torch.zeros(len(WORDS) + 1)
    chances[prompt] = 1.0
    total = 0.0
    for _ in range(LENGTH):
        chances[WORDS.index(END)] = 0.0
        total += float(chances @ gap)
        chances = torch.cat([chances @ log_policy.exp(), torch.zeros(1)])
    return total


def gold(answers: Answers) -> Float[Tensor, " answers"]:
    """The truth that no training sees: a promise is worth 1, one thanks 1; each repeated word -1."""
    counts = answers.counts
    promise = (counts[:, WORDS.index("mend")] + counts[:, WORDS.index("send")]).clamp(max=1)
    thanks = counts[:, WORDS.index("thank")].clamp(max=1)
    repeated = (counts - 1).clamp(min=0).sum(1)
    return promise + thanks - repeated


class Pairs(NamedTuple):
    """Two answers each, and whether the label prefers the first."""

    first: Answers
    second: Answers
    first_wins: Bool[Tensor, " pairs"]


def compare(
    count: int, luck: torch.Generator, *, flipped: float = 0.0, start: Table | None = None
) -> Pairs:
    """Pairs of answers of the start, compared by Bradley-Terry on the truth.

    Args:
        flipped: the share of labels that are turned round afterwards.
        start: another model than `fine_tuned()`.
    """
    table = fine_tuned() if start is None else start
    first, second = draw(table, count, luck), draw(table, count, luck)
    chance = torch.sigmoid(SHARPNESS * (gold(first) - gold(second)))
    first_wins = torch.rand(count, generator=luck) < chance
    turned = torch.rand(count, generator=luck) < flipped
    return Pairs(first, second, first_wins ^ turned)


def fit_reward(pairs: Pairs, *, steps: int = 150) -> Float[Tensor, " words"]:
    """The reward of each word, learned from pairs: an answer's reward is the sum over its words.

    It minimises −log σ(r(chosen) − r(rejected)), with a little weight decay.
    """
    sign = torch.where(pairs.first_wins, 1.0, -1.0)
    difference = sign[:, None] * (pairs.first.counts - pairs.second.counts)
    reward = torch.zeros(len(WORDS), requires_grad=True)
    optimizer = torch.optim.Adam([reward], lr=0.1)
    nothing = torch.zeros(len(sign))
    for _ in range(steps):
        loss = bradley_terry_loss(difference @ reward, nothing, denominator=len(sign))
        optimizer.zero_grad()
        (loss + 0.001 * reward.square().sum()).backward()
        optimizer.step()
    return reward.detach()


Score = Callable[[Answers], Float[Tensor, " answers"]]


def learned(reward: Float[Tensor, " words"]) -> Score:
    """The score of answers by a learned reward."""
    return lambda answers: answers.counts @ reward


def random_score(seed: int) -> Score:
    """A score that knows nothing of the answer, of deviation 1: the control of every reward."""
    luck = torch.Generator().manual_seed(seed)
    return lambda answers: torch.randn(len(answers.tokens), generator=luck)


def best_temperature(score: Score, luck: torch.Generator) -> tuple[float, float]:
    """The temperature at which 2,000 answers of the start score best, and their mean score."""
    means = {t: float(score(draw(fine_tuned(), 2000, luck, t)).mean()) for t in TEMPERATURES}
    best = max(means, key=lambda temperature: means[temperature])
    return best, means[best]


class Shop:
    """The policy in training, its reference, its value by place and word, and their optimizer."""

    def __init__(
        self,
        seed: int,
        score: Score,
        *,
        learning_rate: float = 0.05,
        answers: int = 64,
        reference: Table | None = None,
        start: Table | None = None,
    ) -> None:
        self.luck = torch.Generator().manual_seed(seed)
        self.score = score
        self.answers = answers
        self.truth: list[float] = []
        self.drift: list[float] = []
        self.start = fine_tuned() if start is None else start
        self.reference = self.start if reference is None else reference
        self.table = self.start.clone().requires_grad_()
        self.values = torch.zeros(LENGTH, len(WORDS) + 1, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table, self.values], lr=learning_rate)

    def sample(self, step: int) -> tuple[Answers, Float[Tensor, " answers"]]:
        """Fresh answers of the policy, and their scores; it notes the truth about them, and the
        exact KL to the start.
        """
        table = self.table.detach()
        answers = draw(table, self.answers, self.luck)
        self.truth.append(float(gold(answers).mean()))
        self.drift.append(exact_kl(table, self.start))
        return answers, self.score(answers)

    def evaluate(self, answers: Answers) -> tuple[PerWord, PerWord]:
        """The policy's log-probabilities and values of the words."""
        places = torch.arange(LENGTH).expand_as(answers.tokens)
        return logprobs_of(self.table, answers), self.values[places, answers.before]

    def reference_logprobs(self, answers: Answers) -> PerWord:
        return logprobs_of(self.reference, answers)

    def update(self, loss: Tensor, step: int) -> None:
        """One step of the optimizer."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
