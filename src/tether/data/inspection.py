"""A look at data before anything is trained on it: what it is, how long, how clean, and how far
length explains the choices.

One pass. It keeps two hashes of 8 bytes for each row, and the votes of annotators, never the row's
text.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Feedback,
    Problem,
    Prompt,
    Record,
    StepLabels,
    Texts,
)
from tether.core.visible import visible
from tether.data.formats.containers import left_out, places
from tether.data.formats.conversions import prompt_of
from tether.data.formats.fields import prompt_digest, short_hash
from tether.data.formats.registry import Format, format_named
from tether.data.formats.table import KINDS
from tether.data.rendered import family_of
from tether.data.sources import Quarantine, detect_format, group_of, read
from tether.stats import Estimate, grouped_share

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Votes = dict[str, int]
"""Votes on a pair: the annotator of each, and the side."""


@dataclass(frozen=True)
class Agreement:
    """The share of agreement: how often two annotators of one pair say the same (win, tie or loss),
    over all pairs of annotators.

    `count` pairs of votes on `num_pairs` pairs of responses. Chance is not taken out; equal
    responses, on which all agree, and an annotator's second vote on a pair do not count.
    """

    value: float
    count: int
    num_pairs: int


@dataclass
class Inspection:
    """The contents of a file, folder or hub data set, as far as its records went by.

    `files` are those that were read, each with its format. `unread` are those of a folder that hold
    no known format, or another kind. `rows` are usable records (one row of a file may give
    several). `labels` counts verdicts of responses or steps. `rendered` counts prompts that a chat
    template has rendered already, by the family of its marks. `quarantine` also has the columns
    that no reader uses.
    """

    source: str
    kind: type
    files: Mapping[str, Format]
    unread: Texts
    _: KW_ONLY
    num_examples: int
    quarantine: Quarantine = field(default_factory=Quarantine)
    rows: int = 0
    ties: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    rendered: Counter[str] = field(default_factory=Counter)
    examples: list[Texts] = field(default_factory=list)
    _prompts: set[int] = field(default_factory=set)
    _contents: set[int] = field(default_factory=set)
    _words: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _longer: list[tuple[float, str]] = field(default_factory=list)
    _votes: dict[int, Votes] = field(default_factory=dict)
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def format(self) -> str:
        """The names of the files' formats."""
        return ", ".join(dict.fromkeys(layout.name for layout in self.files.values()))

    @property
    def prompts(self) -> int:
        """Different prompts, without regard to case and white space."""
        return len(self._prompts)

    @property
    def duplicate_rows(self) -> int:
        """Records that repeat an earlier one with its verdict."""
        return self.rows - len(self._contents)

    @property
    def lengths(self) -> dict[str, NDArray[np.int64]]:
        """Words of the prompts, and of each kind of response, the shortest first."""
        return {
            name: np.repeat(*np.array(sorted(counts.items())).T)
            for name, counts in self._words.items()
        }

    @property
    def longer_chosen(self) -> Estimate | None:
        """The share of pairs, ties and equal lengths aside, whose preferred side has more words."""
        return _share_of(self._longer)

    @property
    def agreement(self) -> Agreement | None:
        repeated = [cast for cast in self._votes.values() if len(cast) > 1]
        total = sum(math.comb(len(cast), 2) for cast in repeated)
        same = sum(
            one == other for cast in repeated for one, other in combinations(cast.values(), 2)
        )
        return Agreement(same / total, total, len(repeated)) if total else None

    def add(self, record: Record) -> None:
        """Take in what counts of a record."""
        self.rows += 1
        prompt = prompt_of(record)
        texts = {"prompt": _words(prompt), **RESPONSES[type(record)](record)}
        self._prompts.add(int(prompt_digest(prompt), 16))
        verdicts = [str(record.probability)] if isinstance(record, Comparison) else _labels(record)
        self._contents.add(short_hash(*texts.values(), *verdicts))
        lengths = {name: len(text.split()) for name, text in texts.items()}
        for name, length in lengths.items():
            self._words[name][length] += 1
        self.labels.update(_labels(record))
        spoken = [turn.content for turn in prompt if turn.role == "user"]
        if len(spoken) == 1 and (marks := family_of(spoken[0])) is not None:
            self.rendered[marks.name] += 1
        if isinstance(record, Comparison):
            self._compare(record, lengths["chosen"], lengths["rejected"], texts)
        self._sample(record, texts)

    def _compare(
        self,
        record: Comparison,
        chosen: int,
        rejected: int,
        texts: Texts,
    ) -> None:
        self.ties += record.tie
        if not record.tie and chosen != rejected:
            self._longer.append(_longer_side(record, chosen > rejected))
        if not record.annotations or record.chosen == record.rejected:
            return
        # One key for (a, b) and (b, a); votes count for the side that sorts first.
        flip = texts["chosen"] > texts["rejected"]
        key = short_hash(texts["prompt"], *sorted((texts["chosen"], texts["rejected"])))
        votes = self._votes.setdefault(key, {})
        for annotation in record.annotations:
            lean = -annotation.preference if flip else annotation.preference
            votes.setdefault(annotation.annotator, (lean > 0) - (lean < 0))

    def _sample(
        self,
        record: Record,
        texts: Texts,
    ) -> None:
        if len(self.examples) < self.num_examples:
            self.examples.append(_example(record, texts))
        elif (place := self._draw.randrange(self.rows)) < self.num_examples:
            self.examples[place] = _example(record, texts)


def inspect_data(
    path: str | Path,
    *,
    format: str = "auto",
    kind: type | None = None,
    limit: int | None = None,
    num_examples: int = 3,
    columns: Texts | None = None,
) -> Inspection:
    """Read a source once (its first `limit` records) and describe it; `kind` defaults to the
    format's own.

    `columns` as in `read`.

    The examples are a uniform sample with a fixed seed.

    Raises:
        MissingFileError: the path does not exist.
        DataError: nothing in it can be read, see `read`.
    """
    files, unread = (
        _layouts(path, columns)
        if format == "auto"
        else ({str(path): format_named(format)}, left_out(path))
    )
    wanted = kind or next(iter(files.values())).kind
    inspection = Inspection(str(path), wanted, files, unread, num_examples=num_examples)
    aside = inspection.quarantine
    for record in read(
        list(files),
        wanted,
        format=format,
        quarantine=aside,
        limit=limit,
        columns=columns,
    ):
        inspection.add(record)
    return inspection


def _layouts(
    path: str | Path,
    columns: Texts | None,
) -> tuple[dict[str, Format], dict[str, str]]:
    """The format of a file, or of a folder's files that hold the first one's kind of row, and why
    the others are left out.
    """
    layouts: dict[str, Format] = {}
    unread = left_out(path)
    for place in places(path):
        try:
            layouts[place.name] = detect_format(place.name, columns)
        except DataError as error:
            if not Path(path).is_dir():
                raise
            unread[place.name] = str(error).removeprefix(f"{place.name}: ")
    if not layouts:
        raise DataError(f"{path}: no file in it can be read. {next(iter(unread.values()))}")
    first = next(iter(layouts.values())).kind
    others = {name: layouts.pop(name) for name in list(layouts) if layouts[name].kind is not first}
    return layouts, unread | {
        name: f"holds {KINDS[other.kind].name}, inspect it by itself"
        for name, other in others.items()
    }


RESPONSES: dict[type, Callable[[Any], dict[str, str]]] = {
    Prompt: lambda record: {},
    Comparison: lambda record: {
        "chosen": _words(record.chosen),
        "rejected": _words(record.rejected),
    },
    Feedback: lambda record: {"response": _words(record.response)},
    Demonstration: lambda record: {"response": _words(record.messages[len(prompt_of(record)) :])},
    StepLabels: lambda record: {"response": "\n".join(record.steps)},
    Problem: lambda record: {
        "answer": record.answer,
        **({"solution": record.solution} if record.solution else {}),
    },
}
"""The texts of a record of each kind beside its prompt."""


def _example(record: Record, texts: Texts) -> Texts:
    """The texts of a record as people read them: who says what, and which verdict a response or a
    step has.
    """
    shown = dict(texts)
    turns = prompt_of(record)
    if len(turns) > 1:
        shown["prompt"] = "\n".join(f"{turn.role}: {turn.spoken}" for turn in turns)
    if isinstance(record, Feedback):
        shown["label"] = "desirable" if record.desirable else "undesirable"
    if isinstance(record, StepLabels):
        verdicts = zip(record.steps, _labels(record), strict=True)
        shown["response"] = "\n".join(
            f"{step} ({label.removesuffix(' steps')})" for step, label in verdicts
        )
    return shown


def _labels(record: object) -> list[str]:
    if isinstance(record, Feedback):
        return ["desirable" if record.desirable else "undesirable"]
    names = {True: "right steps", False: "wrong steps", None: "unjudged steps"}
    return [names[label] for label in record.labels] if isinstance(record, StepLabels) else []


def _words(messages: Conversation) -> str:
    return "\n\n".join(turn.spoken for turn in messages)


def longer_chosen(pairs: Sequence[Comparison]) -> Estimate | None:
    """The share of the pairs whose preferred side has more words, among those of unequal length
    without ties.

    A label that is unsure counts as it says: preferred with 0.1 is a tenth of a pair whose longer
    side is chosen. The interval is over prompts.
    """
    sides = [
        (pair, *(len(_words(side).split()) for side in (pair.chosen, pair.rejected)))
        for pair in pairs
        if not pair.tie
    ]
    return _share_of(
        [
            _longer_side(pair, chosen > rejected)
            for pair, chosen, rejected in sides
            if chosen != rejected
        ],
    )


def _longer_side(pair: Comparison, chosen_is_longer: bool) -> tuple[float, str]:
    """The probability that the longer side is the preferred one, and the group of the pair."""
    return pair.probability if chosen_is_longer else 1 - pair.probability, group_of(pair)


def _share_of(labelled: Sequence[tuple[float, str]]) -> Estimate | None:
    """The mean of the probabilities with its interval over groups; None of nothing."""
    if not labelled:
        return None
    probabilities, groups = zip(*labelled, strict=True)
    return grouped_share(np.array(probabilities, dtype=np.float64), groups)


def summarise(lengths: NDArray[np.int64]) -> tuple[str, str, str, str]:
    """Mean, median, 95th percentile (nearest rank) and maximum, as texts."""
    p95 = np.quantile(lengths, 0.95, method="inverted_cdf")
    return f"{lengths.mean():,.1f}", f"{np.median(lengths):,.1f}", f"{p95:,}", f"{lengths.max():,}"


def inspection_tables(inspection: Inspection) -> RenderableType:
    """The inspection as rich tables; texts from the data are shortened and cannot act as markup."""
    from rich.console import Group

    parts: list[RenderableType] = [
        _table("", [("source", inspection.source), *_overview(inspection)]),
    ]
    if inspection.lengths:
        rows = [(name, *summarise(lengths)) for name, lengths in inspection.lengths.items()]
        parts.append(
            _table(
                "lengths in words, not tokens",
                rows,
                "",
                "mean",
                "median",
                "95% at most",
                "longest",
            ),
        )
    if inspection.quarantine.count:
        first = {
            bad["reason"].partition(": ")[0]: f"line {bad['line']}"
            for bad in reversed(inspection.quarantine.examples)
        }
        reasons = [
            (why, f"{count:,}", first.get(why, ""))
            for why, count in inspection.quarantine.reasons.most_common()
        ]
        parts.append(_table("quarantined", reasons, "reason", "rows", "first at"))
    if inspection.unread:
        parts.append(_table("files left out", list(inspection.unread.items())))
    for number, texts in enumerate(inspection.examples, 1):
        parts.append(
            _table(
                f"example {number}",
                [(name, _shortened(words)) for name, words in texts.items()],
            ),
        )
    path = json.dumps(
        list(inspection.files) if inspection.unread else inspection.source,
        ensure_ascii=False,
    )
    parts.append(
        f"Use it in {KINDS[inspection.kind].read_by}:\n  data = {{ path = {path} }}".replace(
            "[",
            "\\[",
        ),
    )
    return Group(*parts)


def _overview(inspection: Inspection) -> list[tuple[str, str]]:
    rows = [
        ("format", f"{inspection.format} ({KINDS[inspection.kind].name})"),
        ("usable rows", f"{inspection.rows:,}"),
        ("quarantined", f"{inspection.quarantine.count:,}"),
        (
            "different prompts",
            f"{inspection.prompts:,} ({inspection.rows - inspection.prompts:,} rows repeat one)",
        ),
        ("duplicate rows", f"{inspection.duplicate_rows:,}"),
    ]
    if inspection.kind is Comparison:
        rows.append(("ties", f"{inspection.ties:,}"))
    if (bias := inspection.longer_chosen) is not None:
        bounds = bias.reason or f"95%: {bias.low:.1%} to {bias.high:.1%}"
        rows.append(("longer side chosen", f"{bias.value:.1%} of {bias.count:,} ({bounds})"))
    if (votes := inspection.agreement) is not None:
        rows.append(
            (
                "votes that agree",
                f"{votes.value:.1%} of {votes.count:,}, on {votes.num_pairs:,} pairs",
            ),
        )
    for family, count in inspection.rendered.items():
        rows.append(
            (
                "rendered already",
                f"{count:,} prompts (marks of {family}): read as turns, see model.rendered_texts",
            ),
        )
    if inspection.quarantine.unused:
        rows.append(("columns not used", inspection.quarantine.unused_columns(40)))
    return rows + [(label, f"{count:,}") for label, count in inspection.labels.items()]


def _table(
    title: str,
    rows: Sequence[Sequence[str]],
    *header: str,
) -> Table:
    """Names down the left; numbers to the right where there is a header over them."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_header=bool(header), title_justify="left")
    for place, name in enumerate(header or ("", "")):
        numbers = bool(header and place)
        table.add_column(
            name,
            style="" if header or place else "bold",
            justify="right" if numbers else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _shortened(words: str, longest: int = 400) -> str:
    """One paragraph without control characters, cut in its middle: a reply shows its worth at both
    ends.
    """
    line = visible("\n".join(" ".join(line.split()) for line in words.splitlines() if line.strip()))
    return line if len(line) <= longest else f"{line[: longest // 2]} … {line[-longest // 2 :]}"
