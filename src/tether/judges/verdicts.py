"""The option that a judge's reply decides for, and how probably."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

from tether.core.protocols import Verdict
from tether.core.thoughts import answer_start
from tether.judges.grammar import verdict_in

LEAST = 1e-9
"""The least probability of a named option outside the likeliest ones."""
UNASKABLE, NO_OPTION, NOT_A_NUMBER = "cannot be asked", "no option at the beginning", "not a number"
"""Reasons for a missing verdict that the same question to the same model meets again."""
CUT_OFF = "the reply was cut off"
"""Reason for a missing verdict that only a greater length mends."""
SPENT, DOWN, QUOTA = "budget spent", "the server gave no answers", "the account has no quota left"
"""Reasons to send a server no more requests."""
_MARKS = re.compile(r"^[\W_]+|[\W_]+$")

Likeliest = Sequence[Sequence[tuple[str, float]]]
"""For each token of a reply: the one that was drawn, then the likeliest ones, each with its
log-probability in nats.
"""


def normalised(logprobs: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """(log-probabilities among the options, in nats; what they had together, as a probability)."""
    highest = max(logprobs)
    total = highest + math.log(sum(math.exp(value - highest) for value in logprobs))
    return tuple(value - total for value in logprobs), min(1.0, math.exp(total))


def soft_verdict(logprobs: Sequence[float], options: Sequence[str]) -> Verdict:
    """The verdict in the log-probabilities of the options; none where one is not a number, as of
    weights that overflow.
    """
    shares, mass = normalised(logprobs)
    if any(map(math.isnan, shares)):
        numbers = ", ".join(
            f"{option!r} {value:.3g}" for option, value in zip(options, logprobs, strict=True)
        )
        return Verdict(
            None,
            reason=f"{NOT_A_NUMBER}: log-probabilities {numbers}. Mend the "
            "weights, or name another model",
        )
    return Verdict(shares, mass)


def read_verdict(
    text: str,
    likeliest: Likeliest,
    options: Sequence[str],
    *,
    finished: bool = True,
) -> Verdict:
    """The verdict of a reply: softly by the token that names the option, where there are
    log-probabilities, else by its words.

    An option's probability is a sum over tokens at that place. It includes each token that reads as
    the option, or as a beginning of this option alone. White space and punctuation are ignored. An
    option without such a token gets its highest possible value. This is at most that of the least
    likely listed one, and at most its equal part of the unlisted rest. A reply that was read and
    names no option is no verdict, but `parsed`.

    Args:
        text: the reply, with the thought before it where there is one.
        likeliest: the tokens of the reply; empty where the server gives none.
        finished: False where the reply was cut off at its greatest length.
    """
    verdict = verdict_in(text, options)
    if verdict is None:
        return _no_verdict(text, finished)
    option, position = verdict
    if (tokens := _place_of(text, position, likeliest, options, option)) is not None:
        listed = {token: logprob for token, logprob in tokens if logprob < 1e-3}  # which NaN is not
        chances = [min(1.0, math.exp(logprob)) for logprob in listed.values()]
        shares = [0.0] * len(options)
        for token, chance in zip(listed, chances, strict=True):
            if (fitting := _option_of(token, options)) is not None:
                shares[fitting] += chance
        if shares[option]:
            left = max(LEAST, min(*chances, (1.0 - sum(chances)) / max(1, shares.count(0.0))))
            logprobs, _ = normalised([math.log(share or left) for share in shares])
            return Verdict(logprobs, min(1.0, sum(shares)))
    return Verdict(
        tuple(0.0 if i == option else -math.inf for i in range(len(options))),
        parsed=True,
    )


def _no_verdict(text: str, finished: bool) -> Verdict:
    """The reason why a reply has no verdict."""
    if not finished:
        where = (
            "while it was thinking"
            if answer_start(text) is None or not _MARKS.sub("", text)
            else "before it named an option"
        )
        return Verdict(
            None,
            reason=f"{CUT_OFF} {where}: raise reply_tokens (--reply-tokens), its greatest length",
        )
    if not _MARKS.sub("", text):  # it may have been cut off before its first word
        return Verdict(None, reason="no word in the reply")
    return Verdict(None, parsed=True, reason=f"{NO_OPTION}: {' '.join(text.split())[:60]!r}")


def _place_of(
    text: str,
    position: int,
    likeliest: Likeliest,
    options: Sequence[str],
    option: int,
) -> Sequence[tuple[str, float]] | None:
    """The likeliest tokens at a position of the reply; where the tokens spell another text, those
    of the first such option.
    """
    drawn = [tokens[0][0] if tokens else "" for tokens in likeliest]
    start = "".join(drawn).find(text)
    ends = list(itertools.accumulate(map(len, drawn)))
    for tokens, token, end in zip(likeliest, drawn, ends, strict=True):
        if start >= 0:
            if end > start + position:
                return tokens
        elif _option_of(token, options) == option:
            return tokens
    return None


def _option_of(token: str, options: Sequence[str]) -> int | None:
    word = _MARKS.sub("", token)
    fitting = [i for i, option in enumerate(options) if word and option.startswith(word)]
    return fitting[0] if len(fitting) == 1 else None
