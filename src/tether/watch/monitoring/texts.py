"""Measures of texts: what they repeat, what they borrow, how they are dressed up. Words and signs,
no tokenizer.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from tether.stats.groups import by_group, influence_on_mean

Columns = dict[str, list[float]]
"""Numbers by the name of their measure."""
# Chinese and Japanese write no spaces: there a sign stands for a word.
_WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|\w+(?:['’]\w+)*|[^\w\s]")
_MARKS = re.compile(
    r"^[ \t]*(?:[-*•+]|\d{1,3}[.)])[ \t]+\S"  # list items
    r"|^#{1,6}[ \t]+\S"  # headers
    r"|\*\*[^*\n]+\*\*|__[^_\n]+__"  # bold
    r"|\\boxed\b"
    r"|^```|^\|.*\|[ \t]*$|^(?:---+|\*\*\*+)[ \t]*$"  # code, tables, rules
    r"|</?[A-Za-z][\w-]*>",  # tags
    re.MULTILINE,
)
_HEDGES = re.compile(
    r"\b(?:i think|i believe|i guess|i'm not sure|i am not sure|i'm not certain|i can't say|it "
    r"seems|it appears|it may be"
    r"|it might be|it could be|it depends|that depends|in my opinion|to some extent|in some "
    r"cases|perhaps|possibly|maybe"
    r"|presumably|arguably|probably|generally speaking|as an ai|language model|consult "
    r"(?:a|an|your)|seek professional"
    r"|it's important to note|it is important to note|keep in mind that|there is no "
    r"(?:single|one|right))\b",
)


def word_tokens(text: str) -> list[str]:
    """Words and single signs, in small letters."""
    return _WORD.findall(text.lower())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def repetition(tokens: Sequence[str], n: int = 3) -> float:
    """The share of n-grams that occurred earlier in the response.

    Equation: 1 - distinct n-grams / n-grams; 0 for a response of fewer than n words.
    """
    grams = ngrams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def parroting(tokens: Sequence[str], prompt: Sequence[str], n: int = 3) -> float:
    """The share of the response's n-grams that occur in the prompt; 0 for a response of fewer than
    n words.
    """
    grams = ngrams(tokens, n)
    given = set(ngrams(prompt, n))
    return sum(gram in given for gram in grams) / len(grams) if grams else 0.0


def format_marks(text: str, num_words: int) -> float:
    """Marks of format (list items, headers, bold, boxes, code, tables, tags) per 100 words, of a
    text of at least 10.
    """
    return 100 * len(_MARKS.findall(text)) / max(10, num_words)


def hedges(text: str, num_words: int) -> float:
    """Hedging phrases (English) per 100 words, of a text of at least 10."""
    return 100 * len(_HEDGES.findall(text.lower().replace("’", "'"))) / max(10, num_words)


def similarity(texts: Sequence[Sequence[str]]) -> float:
    """Mean overlap (Jaccard) of the sets of pairs of words over all pairs of texts; 0 for fewer
    than two texts.

    Equation: |A ∩ B| / |A ∪ B|, 0 where both are empty.
    """
    sets = [set(ngrams(tokens, 2)) for tokens in texts]
    overlaps = [len(a & b) / max(1, len(a | b)) for a, b in combinations(sets, 2)]
    return float(np.mean(overlaps)) if overlaps else 0.0


OPENING = "\n"
"""Before a phrase that opens a text: no word holds it."""


def phrases(tokens: Sequence[str], longest: int = 3) -> set[str]:
    """The n-grams of up to `longest` words, and the opening of `longest` words, marked by
    `OPENING`; every number as 0.
    """
    tokens = ["0" if token.isdecimal() else token for token in tokens]
    grams = {" ".join(gram) for n in range(1, longest + 1) for gram in ngrams(tokens, n)}
    return grams | {OPENING + " ".join(tokens[:longest])}


MOMENTS = tuple(f"length_score/{name}" for name in ("freedom", "sxx", "syy", "sxy"))
"""The names of the co-moments of length and score."""


def co_moments(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """[degrees of freedom, Sxx, Syy, Sxy] about the means: those of several batches add up to a
    pooled correlation. All are 0 of fewer than two values, and of values whose squares are beyond
    float64.
    """
    a = np.asarray(x, dtype=np.float64)
    b = np.asarray(y, dtype=np.float64)
    if len(a) < 2:
        return [0.0, 0.0, 0.0, 0.0]
    with np.errstate(over="ignore", invalid="ignore"):
        a = a - a.mean()
        b = b - b.mean()
        moments = [float(a @ a), float(b @ b), float(a @ b)]
    return [float(len(a) - 1), *moments] if np.isfinite(moments).all() else [0.0] * 4


def pooled_correlation(parts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Pearson's correlation of batches about their own means, and the chance of one as high; (0, 1)
    where a side does not vary.

    Equation: r = ΣSxy / √(ΣSxx ΣSyy), t = r √((d - 1) / (1 - r²)) with d = Σ(n - 1).
    """
    from scipy.special import stdtr  # loading it takes a second

    freedom, sxx, syy, sxy = np.sum(
        np.asarray(parts, dtype=np.float64).reshape(-1, 4),
        axis=0,
    ).tolist()
    if freedom < 3 or sxx <= 0 or syy <= 0:
        return 0.0, 1.0
    r = max(-1.0, min(1.0, sxy / (sxx * syy) ** 0.5))
    t = r * ((freedom - 1) / max(1e-9, 1 - r * r)) ** 0.5
    return r, float(stdtr(freedom - 1, -t))


class Text(NamedTuple):
    """One response and its score. `spread` is the standard deviation of an ensemble's scores, None
    without one.
    """

    prompt: str
    response: str
    length: int
    score: float | None
    finished: bool
    spread: float | None = None


def score_of(text: Text) -> float:
    """For ordering: a text without a score comes last."""
    return -math.inf if text.score is None else text.score


Tokens = Sequence[Sequence[str]]
"""The `word_tokens` of each response, in the order of the texts."""


def measure_texts(texts: Sequence[Text], tokens: Tokens) -> Columns:
    """One number a text under the name of each measure, in the order of `texts`."""
    prompts = {text.prompt: word_tokens(text.prompt) for text in texts}
    pairs = list(zip(texts, tokens, strict=True))
    return {
        "repetition": [repetition(row) for row in tokens],
        "parroting": [parroting(row, prompts[text.prompt]) for text, row in pairs],
        "format": [format_marks(text.response, len(row)) for text, row in pairs],
        "hedging": [hedges(text.response, len(row)) for text, row in pairs],
        "failed": [float(text.score is None) for text in texts],
    }


def length_advantage(texts: Sequence[Text]) -> tuple[float, float] | None:
    """Spearman's correlation of score and length inside each prompt's responses, where both vary:
    the mean, and its variance by chance.

    Equation: 1 / (n - 1) for n responses whose scores know nothing of length.
    """
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for text in texts:
        if text.score is not None:
            groups[text.prompt].append((text.length, text.score))
    varying = [
        rows
        for rows in groups.values()
        if all(len(set(side)) > 1 for side in zip(*rows, strict=True))
    ]
    if not varying:
        return None
    moments = [co_moments(*map(_ranks, zip(*rows, strict=True))) for rows in varying]
    correlations = [sxy / math.sqrt(sxx * syy) for _, sxx, syy, sxy in moments]
    chance = sum(1 / (len(rows) - 1) for rows in varying)
    return sum(correlations) / len(varying), chance / len(varying) ** 2


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [(bisect_left(ordered, x) + bisect_right(ordered, x) + 1) / 2 for x in values]


def across_prompts(texts: Sequence[Text], tokens: Tokens) -> float | None:
    """`similarity` of one response each of at most 32 prompts; None for fewer than 4 prompts."""
    first = {text.prompt: row for text, row in zip(reversed(texts), reversed(tokens), strict=True)}
    return similarity(list(first.values())[:32]) if len(first) >= 4 else None


def phrase_table(texts: Sequence[Text], tokens: Tokens) -> Columns:
    """The share of responses that hold each frequent phrase, the co-moments of its presence with
    the score, and the share's squared standard error.

    Frequent: held by at least two texts and a tenth of all; the 200 most frequent ones.
    """
    held = [phrases(row) for row in tokens]
    scores = {i: text.score for i, text in enumerate(texts) if text.score is not None}
    counts = Counter(phrase for holder in held for phrase in holder)
    least = max(2.0, 0.1 * len(texts))
    frequent = [phrase for phrase, count in counts.items() if count >= least]
    prompts = [text.prompt for text in texts]
    table = Columns()
    for phrase in sorted(frequent, key=lambda phrase: (-counts[phrase], phrase))[:200]:
        holds = [float(phrase in holder) for holder in held]
        moments = co_moments([holds[i] for i in scores], list(scores.values()))
        table[phrase] = [counts[phrase] / len(texts), *moments, variance_of_mean(holds, prompts)]
    return table


def variance_of_mean(values: Sequence[float], prompts: Sequence[str]) -> float:
    """The squared standard error of a mean of texts, with prompts as the units."""
    return influence_on_mean(*by_group(np.asarray(values, dtype=np.float64), prompts)).error ** 2
