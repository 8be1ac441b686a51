"""The grammar of written verdicts: which statements of a reply decide for an option.

An explicit verdict counts: "B", "Winner: B", "[[A]]", "I prefer B", "B is better", "So B." A
mention does not: "Answer A: poor". A reply that decides for two options, relates them ("A < B"), or
calls them equal is unclear, and unclear is no verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from tether.core.thoughts import answer_start

_NOUN = r"(?:(?i:answer|option|response|assistant|reply|candidate|model|choice)\s+)?"
"""A name of what is compared, before an option."""
_RESULT = (
    r"(?i:answer|verdict|winner|choice|decision|judge?ment|conclusion|preference|score|rating"
    r"|grade|pick|vote|result|option)"
)
"""A name of a verdict."""
_ADVERBS = r"(?:(?i:clearly|slightly|much|far|marginally|significantly|overall|still|definitely|the|a|by|bit|little|more)\s+)*"
_BETTER = r"(?i:better|best|winner|superior|preferable|preferred|stronger|helpful)\b"
_EQUAL = re.compile(
    r"\b(?:ties?|tied|draw|neither|equally|equal|no (?:clear )?winner|both (?:are|answers are))\b",
    re.IGNORECASE,
)
_DOUBTED = re.compile(
    r"(?:\bnot|n['’]t|\bcannot|\bnever|\bno(?:body|ne)?|\bunable|\bhard|\bdifficult|\bimpossible|\brefuse"
    r"|\bcould|\bmight|\bmay|\bsome|\bothers|\bpeople)\b(?:(?!\bbut\b|\bso\b)[^.!?;\n])*\b(?:say|claim|think|believe"
    r"|sure|certain|clear|conclude|argue|tell|decide|determine|know|convinced|agree|reason|case|true)\b"
    r"|\b(?:whether|(?<!no )(?<!without )doubt|deny|unclear|unsure|uncertain|false that)\b",
    re.IGNORECASE,
)
"""Beginnings of a sentence that leave open, or deny, what follows."""
_UNDECIDED = re.compile(
    r"\b(?:undecided|abstain|too close to call|(?:cannot|can['’]t|unable to|not able to|impossible to"
    r"|hard to|difficult to)\s+(?:\w+\s+)?(?:decide|choose|pick|say which|tell which|determine))\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?;\n]|\b(?:but|so)\b", re.IGNORECASE)
_QUOTES = r"[\s*_`\"'“”‘’(\[<{$\\]*"


class Statement(NamedTuple):
    """An option that a reply decides for, and the place of its name in the text."""

    option: int
    place: int


def verdict_in(text: str, options: Sequence[str]) -> Statement | None:
    """The verdict of a written reply; None where it has none, or is unclear. A thought before the
    verdict is not read.
    """
    if (start := answer_start(text)) is None:
        return None
    grammar = _grammar(tuple(options))
    for read in (grammar.marked, grammar.stated):
        statements = list(read(text, start))
        if statements:
            return (
                statements[0] if len({statement.option for statement in statements}) == 1 else None
            )
    return None


def _is_asserted(text: str, start: int, end: int) -> bool:
    """True if the words from `start` to `end` are said to be so: the sentence neither denies nor
    doubts nor asks them.
    """
    before = _SENTENCE_END.split(text[:start])[-1]
    return not (_DOUBTED.search(before) or re.match(r"[^.!?\n]*\?", text[end:]))


class _Grammar:
    """Patterns of the statements that decide for one of these options; option names are read as
    they are written.
    """

    def __init__(self, options: tuple[str, ...]) -> None:
        self.options = options
        self.are_numbers = all(option.isdigit() for option in options)
        names = "|".join(re.escape(option) for option in sorted(options, key=len, reverse=True))
        scale = (
            rf"(?!\s*(?:/|(?i:out of))\s*(?!{re.escape(options[-1])}\b)\d)"
            if self.are_numbers
            else ""
        )
        named = rf"(?<![\w’'./-])(?P<option>{names})(?![\w’'-]|[.,]\d){scale}"
        ended = r"(?=[\s*_`\"'”’)\]}$]*(?:[.!;\n]|$))"
        other = rf"(?<![\w’'./-])(?:{names})(?![\w’'-])"
        self._marked = re.compile(
            rf"\\boxed\{{\s*(?:\\text\{{)?{named}|\[\[\s*{named.replace('<option>', '<second>')}\s*\]\]"
            rf"|<(?i:answer|verdict|winner)>\s*{named.replace('<option>', '<third>')}"
            rf"|\"(?i:answer|verdict|winner|choice|preferred|score|rating)\"\s*:\s*\"?{named.replace('<option>', '<fourth>')}",
        )
        connector = r"(?:\s*(?:[:=→]|->|=>)|\s+(?i:is|was|would\s+be|goes\s+to)\b(?:\s*:)?)"
        self._stated = [
            re.compile(
                rf"{_RESULT}\b{_QUOTES}{connector}{_QUOTES}{_NOUN}{_QUOTES}{named}(?!\s+(?i:is|was|has)\b)",
            ),
            re.compile(
                r"\b(?i:I|we)(?:\s+(?i:would)|['’]d|\s+(?i:will)|['’]ll)?\s+"
                r"(?i:choose|prefer|pick|select|vote\s+for|go\s+with|favou?r|"
                rf"rate\s+(?:it|this)|give\s+(?:it|this)(?:\s+an?)?)\s+(?:(?i:the|a|it|as)\s+)*{_QUOTES}{_NOUN}{_QUOTES}{named}",
            ),
            re.compile(
                rf"\b(?i:I|we)\s+(?i:think|say)\s+(?:(?i:it\s+is|it['’]s)\s+)?{_QUOTES}{_NOUN}{_QUOTES}{named}{ended}",
            ),
            re.compile(
                rf"{_NOUN}{_QUOTES}{named}[*_`\"'”’)\]]*\s+(?:(?i:is|was|seems)\s+{_ADVERBS}{_BETTER}|(?i:wins)\b)",
            ),
            re.compile(
                rf"\b(?i:so|therefore|thus|hence|overall)\b,?\s+(?:(?i:it\s+is|it['’]s)\s+)?{_QUOTES}{_NOUN}{_QUOTES}{named}{ended}",
            ),
            re.compile(
                rf"(?:^|(?<=\n)){_QUOTES}{_NOUN}{_QUOTES}{named}[*_`\"'”’)\]}}>$.!]*[ \t]*(?=\n|\Z)",
            ),
        ]
        self._first = re.compile(rf"[\W_]*{_NOUN}{_QUOTES}{named}(?P<rest>.*)", re.DOTALL)
        self._related = re.compile(
            rf"[\s*_`)\]]*(?:[/=<>&+~≈≥≤|]+|\s(?i:and|or|vs\.?|versus)\s)\s*{_NOUN}{_QUOTES}{other}",
        )
        self._relation = re.compile(rf"{other}{self._related.pattern}")
        self._heading = re.compile(
            rf"(?:^|\n|[.;]\s+){_QUOTES}{_NOUN}{_QUOTES}{other}[*_`)\]]*\s*[:.)]\s+\w",
        )

    def marked(self, text: str, start: int) -> Iterator[Statement]:
        """Verdicts in the marks of usual instructions: [[A]], \\boxed{A}, <answer>A</answer>,
        {"winner": "A"}.
        """
        for match in self._marked.finditer(text, start):
            name = next(
                group
                for group in ("option", "second", "third", "fourth")
                if match[group] is not None
            )
            yield Statement(self.options.index(match[name]), match.start(name))

    def stated(self, text: str, start: int) -> Iterator[Statement]:
        """Verdicts in words, and an option that the reply begins with or is."""
        statements = [
            Statement(self.options.index(match["option"]), match.start("option"))
            for pattern in self._stated
            for match in pattern.finditer(text, start)
            if _is_asserted(text[start:], match.start() - start, match.end() - start)
        ]
        if not statements and (_EQUAL.search(text, start) or self._relation.search(text, start)):
            return
        if any(
            self._related.match(text, place + len(self.options[option]))
            for option, place in statements
        ):
            return
        last = max((statement.place for statement in statements), default=start)
        if _UNDECIDED.search(text, last):
            return
        yield from statements
        first = self._first.match(text, start)
        if first is None or not _is_asserted(text[start:], 0, first.end("option") - start):
            return
        rest = first["rest"]
        if self._related.match(rest) or self._heading.search(rest):
            return
        ended = r"[*_`\"'”’)\]}>]*\s*(?:\Z|\n|[.,:;)(–—-]|(?i:because|since|as|is better|wins)\b)"
        if self.are_numbers:  # "1. First, ..." begins a list
            ended = r"[*_`\"'”’)\]]*\s*(?:\Z|\n|[(:,;–—-]|/|(?i:out of)|\.\s*(?:\Z|\n))"
        if re.match(ended, rest):
            yield Statement(self.options.index(first["option"]), first.start("option"))


_grammar = cache(_Grammar)
