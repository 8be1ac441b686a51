"""Multiple choice by likelihood: the cost of alignment in what a model knows (the alignment tax).

Contexts and choices are plain text without a chat template, tokenized as lm-eval does it, so the
figures compare with published ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tether.core.errors import DataError
from tether.core.protocols import count_of
from tether.data.batches import batches_for
from tether.data.chat import Encoded
from tether.evaluation.calibration import bin_indices, expected_calibration_error
from tether.evaluation.questions import Question
from tether.evaluation.suite import Figures, MeasuredPolicy, by_row
from tether.models.trunk import Role
from tether.stats import Array, Estimate, grouped_share, in_accord, without_interval
from tether.stats.groups import student

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DELIMITER = " "
"""Text between a context and a choice."""
FEWEST_QUESTIONS = 100
"""Questions from which on a calibration error has an interval."""


class ChoiceLogprobs(NamedTuple):
    """Log-probabilities of each question's choices in nats, summed over their tokens; and how many
    tokens each has.
    """

    logprobs: tuple[Array, ...]
    tokens: tuple[Array, ...]


def encode_choice(tokenizer: PreTrainedTokenizerBase, context: str, choice: str) -> Encoded:
    """Token ids of a context and a choice, of which those of the choice count.

    White space at the end of the context moves to the choice. Its tokens are those of the whole
    text without as many as the context alone has. Behind an empty context they follow the BOS
    token, or EOS where there is none.

    Raises:
        DataError: the choice has no token of its own.
    """
    ending = len(context) - len(context.rstrip())
    if ending:
        context, choice = context[:-ending], context[-ending:] + choice
    if context:
        ids = tokenizer.encode(context + choice)
        length = len(tokenizer.encode(context))
    else:
        ids = tokenizer.encode(choice, add_special_tokens=False)
        start = first_token(tokenizer)
        ids = ids if ids[:1] == [start] else [start, *ids]
        length = 1
    if len(ids) <= length:
        raise DataError(f"no token of its own: {choice!r:.40} merges with its context")
    return Encoded(tuple(ids), tuple(place >= length for place in range(len(ids))))


def first_token(tokenizer: Any) -> int:
    """The token before a text that has no context."""
    start = tokenizer.bos_token_id
    return tokenizer.eos_token_id if start is None else start


def encode_question(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[Encoded]:
    """Its context with each of its choices."""
    return [
        encode_choice(tokenizer, question.context, DELIMITER + choice)
        for choice in question.choices
    ]


def check_question(
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    context_length: int,
) -> None:
    """Raises: DataError: a choice has no token, or the model's context is too short."""
    longest = max(map(len, encode_question(tokenizer, question)))
    if longest > context_length:
        raise DataError(
            f"does not fit the model's context of {context_length}: {longest} tokens with a choice",
        )


@torch.no_grad()
def choice_likelihoods(
    role: Role,
    tokenizer: PreTrainedTokenizerBase,
    pad_id: int,
    questions: Sequence[Question],
) -> ChoiceLogprobs:
    """Read every question with each of its choices; forward passes alone.

    Raises:
        DataError: a question cannot be encoded; `check_question` finds those before.
    """
    role.train_mode(False)
    encoded = [encode_question(tokenizer, question) for question in questions]
    sequences = [sequence for choices in encoded for sequence in choices]
    tell = count_of("reading choices", len(sequences))
    sums = np.zeros(len(sequences))
    read = 0
    for cut, batch in batches_for(role, sequences, pad_id, 2048):
        logprobs = batch.scatter(role.logprobs(batch)[0]).double().sum(-1)
        sums[cut] = logprobs.cpu().numpy()
        read += len(cut)
        tell(read)
    lengths = np.array([sequence.num_trained for sequence in sequences], dtype=np.float64)
    ends = np.cumsum([len(choices) for choices in encoded])[:-1]
    return ChoiceLogprobs(tuple(np.split(sums, ends)), tuple(np.split(lengths, ends)))


def right_choices(questions: Sequence[Question], read: ChoiceLogprobs) -> dict[str, list[float]]:
    """By accuracy: 1 for each question whose likeliest choice is the right one, else 0.

    `acc` compares sums of log-probabilities, `acc_norm` divides them by characters and `acc_bytes`
    by UTF-8 bytes, all as lm-eval names them; `acc_tokens` divides by tokens. Of equal ones the
    first counts.
    """
    rows: dict[str, list[float]] = {name: [] for name in ACCURACIES}
    for question, logprobs, tokens in zip(questions, read.logprobs, read.tokens, strict=True):
        sizes = {
            "acc": np.ones(len(logprobs)),
            "acc_norm": np.array([len(choice) for choice in question.choices], dtype=np.float64),
            "acc_bytes": np.array([len(choice.encode()) for choice in question.choices], float),
            "acc_tokens": tokens,
        }
        for name, size in sizes.items():
            rows[name].append(float(int((logprobs / size).argmax()) == question.answer))
    return rows


ACCURACIES = ("acc", "acc_norm", "acc_bytes", "acc_tokens")


def choice_probabilities(read: ChoiceLogprobs) -> Array:
    """The probability of each question's likeliest choice among its choices."""
    return np.array([1 / np.exp(logprobs - logprobs.max()).sum() for logprobs in read.logprobs])


def multiple_choice_figures(
    questions: Sequence[Question],
    read: ChoiceLogprobs,
) -> dict[str, Estimate]:
    """Accuracies with their intervals over questions, and `ece`.

    `ece` is the calibration error of the probability that the likeliest choice has among the
    choices.
    """
    right = right_choices(questions, read)
    figures = {name: grouped_share(np.array(column), None) for name, column in right.items()}
    return {
        **figures,
        "ece": calibration_estimate(
            choice_probabilities(read),
            np.array(right["acc"]),
        ),
    }


def calibration_estimate(
    probabilities: Array,
    outcomes: Array,
) -> Estimate:
    """The expected calibration error over ten bins, with an interval.

    Equation: ``e = Σ_b |D_b|`` with ``D_b = Σ_{i in b} (p_i − y_i) / n``. Upper bound: ``e + t se``,
        as noise only makes ``|D_b|`` larger on average. Lower bound: ``l − t √(1 + 2/π) se``, at
        least 0. l takes the sign of each D_b from the other half of the bin's rows
        (`stats.in_accord`). On average l is at most the true error. The root accounts for the
        spread that the two halves add by taking signs from each other. The variance of the rows is
        raised, bin by bin, to that of a share with two more hits and two more misses.
    Paper: Agresti and Coull 1998, https://doi.org/10.2307/2685469 (two hits and two misses): answers
        that are all right would else leave no error.
    Trap: the value itself is biased upwards, as everyone's is, and nearer to the upper bound.
    """
    value = expected_calibration_error(probabilities, outcomes)
    count = len(outcomes)
    if count < FEWEST_QUESTIONS:
        return without_interval(
            value,
            count,
            f"questions: {count}, and {FEWEST_QUESTIONS} are needed",
        )
    places, _ = bin_indices(probabilities)
    gaps = probabilities - outcomes
    sums, hits, sizes = (
        np.bincount(places, weights=rows, minlength=10) for rows in (gaps, outcomes, np.ones(count))
    )
    signed = gaps * np.sign(sums)[places]
    unseen = _variance((hits + 2) / (sizes + 4)) - _variance(hits / np.maximum(sizes, 1))
    spread = float(signed.var(ddof=1) + unseen[places].mean())
    reach = student(count - 1, 0.95) * math.sqrt(spread / count)
    least = float(in_accord(gaps, places.tolist()).mean()) - reach * math.sqrt(1 + 2 / math.pi)
    return Estimate(value, max(least, 0.0), value + reach, count)


def _variance(rates: Array) -> Array:
    return rates * (1 - rates)


@dataclass
class MultipleChoice:
    """Implements core.protocols.Evaluator: `acc`, `acc_norm`, `acc_bytes`, `acc_tokens` and `ece`.

    Args:
        questions: all of which fit the model's context.
    """

    name = "multiple_choice"

    questions: Sequence[Question]

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        encoder = policy.encoder
        read = choice_likelihoods(policy.role, encoder.tokenizer, encoder.pad_id, self.questions)
        ids = [question.id for question in self.questions]
        rows = by_row(ids, right_choices(self.questions, read))
        return Figures(multiple_choice_figures(self.questions, read), rows)
