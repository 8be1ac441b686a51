"""Rules 1 to 4 of docs/dev/style.md, counted in docstrings and documents.

`python -m benchmarks.prose FILE ...` prints each sentence that breaks one, with the rule's number;
`benchmarks.house` holds the totals to their ceilings.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OF_THEIR_DAY = frozenset({"lab", "decisions"})
"""Records that are not rewritten: the lab book and the decisions."""
MOST_WORDS = 25
RULES = {
    "question_openings": re.compile(r"(?:What|Whatever|Who|Whoever|Whose|Whether|How)\b(?!.*\?$)"),
    "persons": re.compile(
        r"\b(?:told|tells|hears?|heard|speaks?|spoke|stands?|stood|lies in|strangers?"
        r"|nobody|somebody|whoever)\b",
        re.I,
    ),
    "negative_halves": re.compile(r",? (?:and|but) (?:no|not|nothing|never|nobody|none)\b"),
    "long_sentences": re.compile(rf"(?:\S+\s+){{{MOST_WORDS}}}\S"),
}
"""A pattern for each rule, in the order of the guide. A sentence breaks a rule once."""
AT_THE_START = frozenset({"question_openings", "long_sentences"})


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown or of a docstring: no code, tables, headings or comments.

    Each argument or error of a docstring's list is a text of its own.
    """
    text = re.sub(r"^[ \t]*(```|~~~).*?^[ \t]*\1[^\n]*$", "\n", text, flags=re.M | re.S)
    text = re.sub(r"(?<=\n\n)(?: {4}.*(?:\n|\Z))+", "\n", text)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.S)
    text = re.sub(r"^[ \t]*[|#].*$", "\n", text, flags=re.M)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`+[^`]*`+", "`code`", text)
    for block in re.split(
        r"\n[ \t]*\n|^[ \t]*(?:[-*]|\d+\.) |^ {4}(?=\w+(?:, \w+)*: )",
        text,
        flags=re.M,
    ):
        joined = " ".join(block.replace("**", "").split())
        yield from filter(None, re.split(r"(?:(?<=[.!?])|(?<=[.!?]\))) +(?![a-z])", joined))


def broken(sentence: str) -> Iterator[str]:
    """The names of the rules that a sentence breaks."""
    for name, pattern in RULES.items():
        find = pattern.match if name in AT_THE_START else pattern.search
        if find(sentence):
            yield name


def docstrings(source: str) -> Iterator[str]:
    """The texts that stand as statements of their own in Python."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield inspect.cleandoc(text)


def documents(repository: Path = REPOSITORY) -> list[Path]:
    """Pages that are kept true: those of the first folder, but the log of changes, and docs/."""
    pages = [path for path in repository.glob("*.md") if path.name != "CHANGELOG.md"]
    docs = (repository / "docs").rglob("*.md")
    return sorted(
        pages + [page for page in docs if not OF_THEIR_DAY & {page.stem, page.parent.name}],
    )


def _totals(kind: str, texts: Iterable[str]) -> dict[str, int]:
    totals = {f"{kind}_{name}": 0 for name in RULES}
    for text in texts:
        for sentence in sentences(text):
            for name in broken(sentence):
                totals[f"{kind}_{name}"] += 1
    return totals


def counts(sources: Iterable[str], pages: Iterable[Path]) -> dict[str, int]:
    """Sentences that break each rule, in docstrings of `sources` and in `pages`."""
    return {
        **_totals("docstring", (text for source in sources for text in docstrings(source))),
        **_totals("docs", (page.read_text(encoding="utf-8") for page in pages)),
    }


def main() -> None:
    """Print the sentences that break a rule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prose", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="without one: every document")
    count = 0
    for path in parser.parse_args().files or documents():
        text = path.read_text(encoding="utf-8")
        for part in docstrings(text) if path.suffix == ".py" else [text]:
            for sentence in sentences(part):
                for name in broken(sentence):
                    print(f"{path}: {name}: {sentence}")
                    count += 1
    print(f"{count} broken rules")


if __name__ == "__main__":
    main()
