"""`python -m benchmarks.figures [PAGE ...]`: every figure of the pages beside its record.

Prints page, line, figure, record and key, and how many figures of each page have a record. Exits
with 1 where a page and its record differ, and names both. Tables and blocks that programs write are
written anew from their records.

figures.toml holds the sentences that people write. A figure is `{key:format}`, the parts of its key
separated by `/`; `each` names a list whose items fill one row each. Pages under `whole` have no
other figures but the settings that are listed there, which nobody measured.
"""

from __future__ import annotations

import argparse
import json
import re
import string
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import benchmarks.__main__ as contests
import benchmarks.learning.__main__ as experiments
from tools.dev import record

from tether.watch.report.numbers import decimal, signed

ROOT = Path(__file__).resolve().parent.parent
SENTENCES = Path(__file__).with_suffix(".toml")
NUMBER = r"(?<![\w.-])[−+-]?(?:\d(?:[\d,]*\d)?(?:\.\d+)?|\.\d+)(?:e[+-]\d+)?(?!\w|\.\d)"
UNREAD = re.compile(
    r"<!--.*?-->|```.*?```|`[^`\n]*`|\]\([^)\n]*\)|^#.*?$|^\d+\. ",
    re.DOTALL | re.MULTILINE,
)
"""Parts of a page whose numbers are no figures: comments, code, targets of links, headings,
numbers of lists."""
LEARNING = Path("docs/results/learning/results.json")


class Sentence(NamedTuple):
    """Literals and figures in turn, a literal first and last, with a key for each figure."""

    page: str
    record: str
    parts: Sequence[str]
    keys: Sequence[str]


class Claim(NamedTuple):
    """A sentence with a figure in words, and whether the records bear it out."""

    page: str
    record: str
    text: str
    holds: bool


class Shown(NamedTuple):
    """A figure in a page, its place there, and what the record has for it."""

    sentence: Sentence
    key: str
    span: tuple[int, int]
    figure: str
    recorded: str


def printed(page: str, source: str, text: str, name: str) -> Iterator[Sentence]:
    """The lines with figures of a text that a program writes."""
    for row in text.splitlines():
        parts = re.split(f"({NUMBER})", row)
        if len(parts) > 1:
            label = row.strip("| ").partition(" | ")[0]
            key = f"{name}: {label}" if row.startswith("|") else name
            yield Sentence(page, source, parts, [key] * (len(parts) // 2))


def written(entry: Mapping[str, str], values: Mapping[str, Any]) -> Sentence:
    """A sentence of figures.toml with the figures of its record."""
    parts, keys = [""], []
    for literal, key, form, _ in string.Formatter().parse(entry["text"]):
        parts[-1] += literal
        if key is not None:
            value = _at(values, key)
            show = {"signed": signed, "decimal": decimal}.get(form or "")
            parts += [show(value) if show else format(value, form or "").replace("-", "−"), ""]
            keys.append(key)
    return Sentence(entry["page"], entry["record"], parts, keys)


def _at(values: Any, key: str) -> Any:
    for part in key.split("/"):
        values = values[int(part) if isinstance(values, list) else part]
    return values


def _read(source: str | Path) -> Any:
    return json.loads((ROOT / source).read_text(encoding="utf-8"))


def _entries() -> Any:
    return tomllib.loads(SENTENCES.read_text(encoding="utf-8"))


def settings(page: str) -> Sequence[str] | None:
    """The settings that a page names; None where it may have other figures."""
    return _entries()["whole"].get(page)


def sentences() -> Iterator[Sentence]:
    """All sentences and rows whose figures are recorded."""
    source = record.RECORD.relative_to(ROOT).as_posix()
    for path, blocks in record.texts(_read(source)).items():
        for name, text in blocks.items():
            yield from printed(path.relative_to(ROOT).as_posix(), source, text, name)
    folder = contests.RESULTS.relative_to(ROOT)
    results = {name: _read(folder / f"{name}.json") for name in contests.BENCHMARKS}
    fastest = max(result["matrix"] for result in results.values())
    for name, result in results.items():
        source = f"{folder.as_posix()}/{name}.json"
        yield from printed(
            "docs/results/benchmarks.md",
            source,
            contests.table(result, fastest),
            name,
        )
    head = contests.page(list(results.values())).partition("\n\n## ")[0].splitlines()[-1]
    yield from printed("docs/results/benchmarks.md", f"{folder.as_posix()}/*.json", head, "machine")
    for name, arms in _read(LEARNING).items():
        text = experiments.section(name, arms)
        yield from printed("docs/results/learning.md", LEARNING.as_posix(), text, name)
    source = "benchmarks/results/tables.json"
    for table in _read(source)["tables"]:
        text = "\n".join(table["rows"])
        yield from printed(table["page"], source, text, table["entry"] or table["command"])
    for entry in _entries()["sentence"]:
        values = _read(entry["record"])
        for row in values[entry["each"]] if "each" in entry else [values]:
            yield written(entry, row)


def claims() -> Iterator[Claim]:
    """Sentences that compare, without a figure of their own."""
    source = record.RECORD.relative_to(ROOT).as_posix()
    _, most = record.minutes(_read(source))
    text = "takes less than a quarter of an hour on two CPU cores"
    yield Claim("README.md", source, text, most < 15)
    for name in ("sft", "dpo", "reward"):
        source = f"benchmarks/results/{name}.json"
        sides = _read(source)["sides"]
        (peer,) = sides.keys() - {"tether"}
        least, *_ = contests.ratio(sides, "tether", peer)
        text = "are more than three times as fast as in TRL"
        yield Claim("README.md", source, text, least > 3)
        text = "need less than half the memory that TRL needs"
        yield Claim("README.md", source, text, sides["tether"]["peak"] < sides[peer]["peak"] / 2)


def located(sentence: Sentence, text: str) -> list[Shown]:
    """The figures of a sentence as the page shows them; where the page has several sentences of
    these words, those of the one with most figures in common.
    """
    words = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in sentence.parts[::2]]
    pattern = words[0] + "".join(f"({NUMBER}){word}" for word in words[1:])
    recorded = sentence.parts[1::2]
    places = list(re.finditer(pattern, text))
    if not places:
        return []
    best = max(places, key=lambda p: sum(a == b for a, b in zip(p.groups(), recorded, strict=True)))
    return [
        Shown(sentence, key, best.span(place), best[place], figure)
        for place, (key, figure) in enumerate(zip(sentence.keys, recorded, strict=True), start=1)
    ]


def others(text: str, shown: Sequence[Shown], known: Sequence[str]) -> Iterator[re.Match[str]]:
    """The figures of a page that have no record and are no settings."""
    taken = {span for figure in shown for span in range(*figure.span)}
    for pattern in [UNREAD, *map(re.compile, map(re.escape, known))]:
        taken.update(span for match in pattern.finditer(text) for span in range(*match.span()))
    return (match for match in re.finditer(NUMBER, text) if match.start() not in taken)


def check(page: str, text: str, rows: Sequence[Sentence], known: Sequence[str] | None) -> list[str]:
    """Print a page's figures; what differs from the records, a line each. With `known` settings, which
    are not measured, any other figure is one too many.
    """
    faults, shown = [], []
    for sentence in rows:
        figures = located(sentence, text)
        if not figures:
            faults.append(f"{page}: not there: {''.join(sentence.parts)!r} ({sentence.record})")
        shown += figures
    for sentence, key, span, figure, recorded in shown:
        place = f"{page}:{text.count(chr(10), 0, span[0]) + 1}: {figure}"
        print(f"{place}  {sentence.record}  {key}")
        if figure != recorded:
            faults.append(f"{place} is {recorded} in {sentence.record} ({key})")
    rest = list(others(text, shown, known or ()))
    covered = len({figure.span for figure in shown})
    print(f"{page}: {covered} figures of {covered + len(rest)} have a record", file=sys.stderr)
    for match in rest if known is not None else ():
        line = text.count("\n", 0, match.start()) + 1
        faults.append(f"{page}:{line}: {match[0]} has no record: name it in {SENTENCES.name}")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="only these")
    parser.add_argument("--smoke", action="store_true", help="nothing else: it is quick")
    chosen = parser.parse_args(arguments).pages
    folders = (ROOT / "docs" / "results", ROOT / "docs" / "trust")
    pages = [path for folder in folders for path in sorted(folder.glob("*.md"))]
    by_page: dict[str, list[Sentence]] = {"README.md": []}
    by_page |= {path.relative_to(ROOT).as_posix(): [] for path in pages}
    for sentence in sentences():
        by_page.setdefault(sentence.page, []).append(sentence)
    faults = [
        fault
        for page, rows in by_page.items()
        if not chosen or page in chosen
        for fault in check(page, (ROOT / page).read_text(encoding="utf-8"), rows, settings(page))
    ]
    for page, source, text, holds in claims():
        if text not in (ROOT / page).read_text(encoding="utf-8"):
            faults.append(f"{page}: not there: {text!r} ({source})")
        elif not holds:
            faults.append(f"{page}: {text!r} is not so in {source}")
    print(*faults, sep="\n", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
