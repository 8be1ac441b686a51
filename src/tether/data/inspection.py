"""A look at data before anything is trained on it: what it is, how long, how clean, and how far length explains the choices.

One pass. What is kept of a row are two hashes of 8 bytes, and the votes where there are annotators, never its text.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.errors import DataError
from tether.core.types import Comparison, Conversation, Demonstration, Feedback, Problem, StepLabels
from tether.data.formats.conversions import prompt_of
from tether.data.formats.fields import digest
from tether.data.formats.format import KINDS
from tether.data.formats.registry import named
from tether.data.sources import Quarantine, detect_formats, read

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Votes = tuple[tuple[str, int], ...]
"""Who voted on a pair, and for which side."""

_SEED = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in words; `p95` is the length that 95% of the texts do not exceed."""

    count: int
    mean: float
    median: float
    p95: int
    maximum: int


@dataclass(frozen=True, slots=True)
class Share:
    """A share of `count` cases with its 95% interval (Wilson)."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often two annotators of one pair say the same (win, tie or loss), over all pairs of annotators.

    `count` pairs of votes on `num_pairs` pairs of responses. Chance is not taken out; equal responses, on which all
    agree, and an annotator's second vote on a pair do not count.
    """

    value: float
    count: int
    num_pairs: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a file, folder or hub data set holds.

    `rows` are records that can be used (one row of a file may give several), `prompts` the different prompts among
    them, `duplicate_prompts` and `duplicate_rows` the records that repeat an earlier one (prompts without regard to
    case and white space). `longer_chosen` is the share of pairs, ties and equal lengths aside, whose chosen side has
    more words. `labels` counts verdicts of responses or steps.
    """

    source: str
    format: str
    kind: type
    rows: int
    quarantined: int
    reasons: Mapping[str, int]
    prompts: int
    duplicate_prompts: int
    duplicate_rows: int
    lengths: Mapping[str, Lengths]
    ties: int
    longer_chosen: Share | None
    labels: Mapping[str, int]
    agreement: Agreement | None
    examples: tuple[Mapping[str, str], ...]


def inspect(
    path: str | Path, *, format: str = "auto", kind: type | None = None, limit: int | None = None, num_examples: int = 3
) -> Inspection:
    """Read a source once (its first `limit` records) and describe it; `kind` defaults to the format's own.

    The examples are a uniform sample with a fixed seed.

    Raises:
        MissingFileError: the path does not exist.
        DataError: nothing in it can be read, see `read`.
    """
    layouts = detect_formats(path) if format == "auto" else [named(format)]
    wanted = kind or layouts[0].kind
    if wanted not in KINDS:
        raise DataError(f"cannot inspect {wanted!r}: it is not one of {', '.join(k.__name__ for k in KINDS)}.")
    quarantine = Quarantine(keep=0)
    tally = _Tally(num_examples)
    for record in read(path, wanted, format=format, quarantine=quarantine, limit=limit):
        tally.add(record)
    return Inspection(
        source=str(path),
        format=", ".join(layout.name for layout in layouts),
        kind=wanted,
        rows=tally.rows,
        quarantined=quarantine.count,
        reasons=dict(quarantine.reasons.most_common()),
        prompts=len(tally.prompts),
        duplicate_prompts=tally.rows - len(tally.prompts),
        duplicate_rows=tally.rows - len(tally.contents),
        lengths={name: summarise(counts) for name, counts in tally.words.items()},
        ties=tally.ties,
        longer_chosen=share(tally.longer_chosen, tally.unequal),
        labels=dict(tally.labels),
        agreement=_agreement(tally.votes),
        examples=tuple(tally.examples),
    )


@dataclass(slots=True)
class _Tally:
    """All that is kept of the rows that went by."""

    num_examples: int
    rows: int = 0
    ties: int = 0
    unequal: int = 0
    longer_chosen: int = 0
    prompts: set[int] = field(default_factory=set)
    contents: set[int] = field(default_factory=set)
    words: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    labels: Counter[str] = field(default_factory=Counter)
    votes: dict[int, Votes] = field(default_factory=dict)
    examples: list[Mapping[str, str]] = field(default_factory=list)
    draw: random.Random = field(default_factory=lambda: random.Random(_SEED))

    def add(self, record: Any) -> None:
        self.rows += 1
        prompt = prompt_of(record)
        texts = {"prompt": _words(prompt), **_responses(record)}
        self.prompts.add(int(digest(prompt), 16))
        self.contents.add(_hash(*texts.values()))
        lengths = {name: len(text.split()) for name, text in texts.items()}
        for name, length in lengths.items():
            self.words[name][length] += 1
        self.labels.update(_labels(record))
        if isinstance(record, Comparison):
            self._compare(record, lengths["chosen"], lengths["rejected"], texts)
        self._sample(texts)

    def _compare(self, record: Comparison, chosen: int, rejected: int, texts: Mapping[str, str]) -> None:
        self.ties += record.tie
        if not record.tie and chosen != rejected:
            self.unequal += 1
            self.longer_chosen += chosen > rejected
        if not record.annotations or record.chosen == record.rejected:
            return
        # One key for (a, b) and (b, a); votes count for the side that sorts first.
        flip = texts["chosen"] > texts["rejected"]
        key = _hash(texts["prompt"], *sorted((texts["chosen"], texts["rejected"])))
        votes = dict(self.votes.get(key, ()))
        for annotation in record.annotations:
            lean = -annotation.preference if flip else annotation.preference
            votes.setdefault(annotation.annotator, (lean > 0) - (lean < 0))
        self.votes[key] = tuple(votes.items())

    def _sample(self, texts: Mapping[str, str]) -> None:
        if len(self.examples) < self.num_examples:
            self.examples.append(texts)
        elif (place := self.draw.randrange(self.rows)) < self.num_examples:
            self.examples[place] = texts


def _responses(record: Any) -> dict[str, str]:
    match record:
        case Comparison():
            return {"chosen": _words(record.chosen), "rejected": _words(record.rejected)}
        case Feedback():
            return {"response": _words(record.response)}
        case Demonstration():
            return {"response": _words(record.messages[len(prompt_of(record)) :])}
        case StepLabels():
            return {"response": "\n".join(record.steps)}
        case Problem():
            return {"answer": record.answer} | ({"solution": record.solution} if record.solution else {})
        case _:
            return {}


def _labels(record: Any) -> list[str]:
    if isinstance(record, Feedback):
        return ["desirable" if record.desirable else "undesirable"]
    if isinstance(record, StepLabels):
        return [{True: "right steps", False: "wrong steps", None: "unjudged steps"}[label] for label in record.labels]
    return []


def _words(messages: Conversation) -> str:
    return "\n\n".join(turn.content for turn in messages)


def _hash(*texts: str) -> int:
    return int.from_bytes(hashlib.blake2b("\x1f".join(texts).encode(), digest_size=8).digest(), "big")


def summarise(counts: Mapping[int, int]) -> Lengths:
    """Mean, median, 95th percentile (nearest rank) and maximum of lengths that are given as length -> how often."""
    total = sum(counts.values())
    ordered = sorted(counts.items())

    def ranked(rank: int) -> int:
        for length, count in ordered:
            rank -= count
            if rank <= 0:
                return length
        return ordered[-1][0]

    return Lengths(
        count=total,
        mean=sum(length * count for length, count in ordered) / total,
        median=(ranked((total + 1) // 2) + ranked(total // 2 + 1)) / 2,
        p95=ranked(math.ceil(0.95 * total)),
        maximum=ordered[-1][0],
    )


def share(successes: int, count: int) -> Share | None:
    """successes / count with the Wilson score interval at 95%; None of nothing.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), z = 1.96 (https://doi.org/10.1080/01621459.1927.10502953)
    """
    if not count:
        return None
    z = 1.959963984540054
    p = successes / count
    middle = p + z * z / (2 * count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return Share(p, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale), count)


def _agreement(votes: Mapping[int, Votes]) -> Agreement | None:
    repeated = [cast for cast in votes.values() if len(cast) > 1]
    total = sum(math.comb(len(cast), 2) for cast in repeated)
    same = sum(one == other for cast in repeated for (_, one), (_, other) in combinations(cast, 2))
    return Agreement(same / total, total, len(repeated)) if total else None


def render(inspection: Inspection) -> RenderableType:
    """The inspection as rich tables; texts from the data are shortened and cannot act as markup."""
    from rich.console import Group

    parts = [_table(inspection.source, _overview(inspection))]
    if inspection.lengths:
        told = [
            (name, f"{x.mean:,.1f}", f"{x.median:,.1f}", f"{x.p95:,}", f"{x.maximum:,}") for name, x in inspection.lengths.items()
        ]
        parts.append(_table("words", told, "", "mean", "median", "95%", "longest"))
    if inspection.reasons:
        parts.append(_table("quarantined", [(why, f"{count:,}") for why, count in inspection.reasons.items()], "reason", "rows"))
    for number, texts in enumerate(inspection.examples, 1):
        parts.append(_table(f"example {number}", [(name, _shortened(words)) for name, words in texts.items()]))
    return Group(*parts)


def _overview(inspection: Inspection) -> list[tuple[str, str]]:
    rows = [
        ("format", f"{inspection.format} ({KINDS[inspection.kind][0]})"),
        ("usable rows", f"{inspection.rows:,}"),
        ("quarantined", f"{inspection.quarantined:,}"),
        ("different prompts", f"{inspection.prompts:,} ({inspection.duplicate_prompts:,} rows repeat one)"),
        ("duplicate rows", f"{inspection.duplicate_rows:,}"),
    ]
    if inspection.kind is Comparison:
        rows.append(("ties", f"{inspection.ties:,}"))
    if (bias := inspection.longer_chosen) is not None:
        rows.append(("longer side chosen", f"{bias.value:.1%} of {bias.count:,} (95%: {bias.low:.1%} to {bias.high:.1%})"))
    if (votes := inspection.agreement) is not None:
        rows.append(("votes that agree", f"{votes.value:.1%} of {votes.count:,}, on {votes.num_pairs:,} pairs"))
    return rows + [(label, f"{count:,}") for label, count in inspection.labels.items()]


def _table(title: str, rows: Sequence[Sequence[str]], *header: str) -> Table:
    """Names down the left; numbers to the right where there is a header over them."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_header=bool(header), title_justify="left")
    for place, name in enumerate(header or ("", "")):
        numbers = bool(header and place)
        table.add_column(name, style="" if header or place else "bold", justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _shortened(words: str, longest: int = 400) -> str:
    """One paragraph without control characters, cut in its middle: a reply shows its worth at both ends."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(words.split()))
    return line if len(line) <= longest else f"{line[: longest // 2]} … {line[-longest // 2 :]}"
