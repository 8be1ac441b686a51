"""Numbers for people, with one printer for the page and the terminal, and the sentences that
contain them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from tether.core.tables import table_beside
from tether.core.types import Facts
from tether.stats import TOO_FEW
from tether.watch.report.reading import Estimate, estimate, mapping

SENTENCES: dict[str, dict[str, str]] = table_beside(__file__, "sentences.toml")
"""The sentences of the page, by section and name."""
Show = Callable[[float], str]
HeadAndRows = tuple[list[str], list[list[str]]]
"""The cells of a table."""
FEW = 10
"""Below this number a share is shown as a count."""
BOOKKEEPING = frozenset(
    {
        "seconds",
        "budget",
        "peak_rss_bytes",
        "peak_gpu_bytes",
        "quarantine",
        "columns_not_used",
        "alarms",
        "reliability",
        "slices",
        "measured",
        "kl_noise",
    },
)
"""Entries of a summary that are no result, or one of many that the page draws."""


def has_interval(value: Estimate) -> bool:
    """True if both bounds are known."""
    return math.isfinite(value.low) and math.isfinite(value.high)


def too_few(value: Estimate) -> bool:
    """True if an estimate has no interval because of too few observations, rather than because none
    was recorded.
    """
    return not has_interval(value) and value.reason.startswith(TOO_FEW)


def decimal(value: float, signed: bool = False) -> str:
    """About three digits, all of a large number, with a real minus sign."""
    value = value if abs(value) > 1e-12 else 0.0  # what is left of a difference of equals
    size = abs(value)
    places = 4 if size < 1e-3 else 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    text = "0" if size == 0 else (f"{size:.1e}" if size < 1e-4 else f"{size:,.{places}f}")
    return ("−" if value < 0 else "+" if signed and value > 0 else "") + text


def signed(value: float) -> str:
    return decimal(value, True)


def thousands(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{value:.1%}".replace("-", "−")


def few(value: Estimate, show: Show) -> bool:
    """True for a share of fewer than FEW, which is shown as a count in place of a percentage."""
    return show is percent and 0 < value.count < FEW


def centre(value: Estimate, show: Show) -> str:
    """The value without its interval; a share of few in words, `2 of 2`."""
    return (
        f"{value.value * value.count:.3g} of {value.count}"
        if few(value, show)
        else show(value.value)
    )


def share_in_words(share: Estimate) -> str:
    """`74.2% of` or `2 of 2`, before the name of what is counted."""
    return centre(share, percent) + ("" if few(share, percent) else " of")


MOVED = (
    (0.1, "the answers are those of the start model"),
    (1.0, "the answers are nearly those of the start model"),
    (3.0, "the answers differ, but the start model could still give them"),
    (10.0, "the start model would rarely give such answers"),
)
"""Upper ends of the KL in nats a response, and their meaning. After e^3 = 20 an answer is one in
twenty of the start's.
"""


def moved_in_words(kl: float) -> str:
    """The meaning of a KL in nats a response."""
    return next(
        (words for bound, words in MOVED if kl < bound),
        "the start model would practically never give such answers",
    )


def interval(value: Estimate, show: Show = decimal) -> str:
    """`95% interval low to high`, or the reason why too few give none; empty where none was
    recorded, and for a share of few.
    """
    if few(value, show):
        return ""
    if too_few(value):
        return f"no 95% interval, {value.reason}"
    return f"95% interval {show(value.low)} to {show(value.high)}" if has_interval(value) else ""


def bracketed(value: object, show: Show = decimal) -> str:
    """`value [low, high]` or `value [too few]` of an estimate, also as files have it.

    Without a recorded interval, only the value is shown. Without a value the text is empty.
    """
    if (parts := estimate(value)) is None:
        return ""
    if not interval(parts, show):
        return centre(parts, show)
    bounds = f"{show(parts.low)}, {show(parts.high)}" if has_interval(parts) else TOO_FEW
    return f"{centre(parts, show)} [{bounds}]"


def versus(stored: object) -> tuple[str, ...]:
    """Both sides, gain and win rate of what a file has of a comparison; empty where one of them is
    missing.
    """
    row = mapping(stored)
    ends = [decimal(side.value) for name in ("before", "after") if (side := estimate(row, name))]
    texts = (*ends, bracketed(row.get("gain"), signed), bracketed(row.get("win_rate"), percent))
    return texts if len(texts) == 4 and all(texts) else ()


def listing(summary: Facts, before: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Names and texts of the numbers in a summary, in brackets their 95% intervals; of two compared
    sides one line.
    """
    for key, value in summary.items():
        # a key with spaces is a sentence
        name = f"{before}{key if ' ' in key else key.replace('_', ' ')}"
        if key in BOOKKEEPING:
            continue
        if (parts := estimate(value)) is not None:
            whole = not (has_interval(parts) or parts.reason) and parts.value == round(parts.value)
            yield (
                name,
                bracketed(parts, thousands if whole else decimal)
                + (f" (n = {parts.count:,})" if parts.count else ""),
            )
        elif compared := versus(value):
            yield name, "{} to {}; gain {}; win rate {}".format(*compared)
        elif isinstance(value, Mapping) and "value" not in value and depth < 2:
            yield from listing(value, f"{name}: ", depth + 1)
