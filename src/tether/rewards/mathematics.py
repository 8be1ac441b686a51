"""Equality of answers: numbers by their value, mathematics by math-verify
(https://github.com/huggingface/Math-Verify) behind one way of writing.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from tether.core.errors import DataError
from tether.rewards.latex import number_in, read_number, unstyled

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

DIGITS = 15
"""Digits of a constant without an exact form that have to agree, wherever its first digit is."""
_SIDES = re.compile(r"(?<![<>!\\:])=")
_LIST = re.compile(r",|;|\b(?:and|or)\b")
_ROUNDED = re.compile(r"\\(?:approx|simeq)(?![a-z])")
_COMMANDS = re.compile(r"\\(?!text|mathrm)[a-zA-Z]+|\b[ei]\b")
_CHOICE = re.compile(r"\s*(?:[Oo]ption|[Cc]hoice|[Aa]nswer)?\s*\(?([A-J])(?:\)|[.:](?=\s|$)|$)")
_BASE = re.compile(r"(?<=[\dA-F])_\d+$")
_KIND = re.compile(
    r"(?<=[\dA-F])_(\d+)$|\\text\s*\{[^{}]*\}\s*\^\s*\{?(\d)|\b([ap])\.?\s*m\b",
)
"""The base of a numeral, the power of a unit, the half of a day."""
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT = re.compile(
    r"(?<=[\w}!)\]])\s*(?:\\?%|\\text\s*\{(?![^}]*\b(?:is|are|was|not|or|and|if|when|wrong|incorrect"
    r"|false|[ap]\.?m|million|billion|thousand)\b)[^{}]*\}(?:\^\{?\d\}?)?)$",
)


def known_number(answer: object) -> Fraction:
    """The number that a known answer is.

    Raises:
        DataError: it is none.
    """
    if (number := read_number(str(answer))) is None:
        raise DataError(
            f"the known answer {answer!r:.80} is no number. Take kind = 'math', or 'exact' for words",
        )
    return number


def same_number(given: str, answer: object, tolerance: float = 0.0) -> float:
    right = known_number(answer)
    value = number_in(given)
    return float(value is not None and abs(value - right) <= tolerance * max(1, abs(right)))


def same_gsm8k(given: str, answer: object) -> float:
    """A number by its value, or LaTeX that means it."""
    return same_number(given, answer) or ("\\" in given and same_mathematics(given, answer))


def same_mathematics(given: str, answer: object) -> float:
    """Equal as written, as numbers, or in the judgement of math-verify."""
    given = unstyled(given)
    right = unstyled(str(answer))
    has_words = "\\text" in right
    if _squeezed(given, has_words=has_words) == _squeezed(right, has_words=has_words):
        return 1.0
    if (choice := _CHOICE.fullmatch(_TEXT.sub(r"\1", right))) is not None:
        chosen = _CHOICE.match(_TEXT.sub(r"\1", given))
        return float(chosen is not None and chosen[1] == choice[1])
    kinds = [set(_KIND.findall(text)) for text in (given, right)]
    if all(kinds) and kinds[0] != kinds[1]:
        return 0.0
    given = _BASE.sub("", given)
    right = _BASE.sub("", right)
    return float(any(_same_values(form, right) for form in _ROUNDED.split(given)))


def _squeezed(text: str, *, has_words: bool) -> str:
    text = re.sub(r"\s|\\(?:left|right)(?![a-z])", "", _TEXT.sub(r"\1", text))
    return text.lower() if has_words else text


def _same_values(given: str, right: str) -> bool:
    sides = _SIDES.split(given) if not _LIST.search(given) else []
    constant = [side for side in sides if not re.search("[A-Za-z]", _COMMANDS.sub("", side))]
    if any(re.match(r"\s*-?\d", side) for side in sides[:-1] if side not in constant):
        return False  # of 5x = 5 no side is the answer
    if len(sides) > 1 and constant and not _SIDES.search(right):
        return all(_same_values(side, right) for side in map(unstyled, constant))
    first = read_number(given)
    second = read_number(right)
    if first is None or second is None or ("=" in given and "=" in right):
        given = _UNIT.sub("", given)
        right = _UNIT.sub("", right)
        if not _meanings(right):
            raise ValueError(f"math-verify cannot read the known answer {right!r:.80}")
        return any(_same(a, b) for a in _meanings(right) for b in _meanings(given))
    percent = ("%" in right) - ("%" in given)  # 65% is 65 and .65 beside a number without the sign
    return first == second or (percent != 0 and first * Fraction(100) ** percent == second)


def _same(right: Basic | MatrixBase, given: Basic | MatrixBase) -> bool:
    from math_verify import verify
    from sympy import Expr

    if isinstance(right, Expr) and isinstance(given, Expr) and right.is_number and given.is_number:
        a = right.doit()
        b = given.doit()
        exact = b == 0 or a.is_infinite or b.is_infinite or (a.is_Rational and b.is_Rational)
        if exact or a == b:
            return a == b
        return bool(abs((a / b - 1).evalf(2 * DIGITS)) < 10**-DIGITS)
    return verify(
        right,
        given,
        numeric_precision=4 * DIGITS,
        timeout_seconds=None,
        allow_set_relation_comp=True,
        raise_on_error=True,
    )


@lru_cache(maxsize=512)
def _meanings(latex: str) -> tuple[Basic | MatrixBase, ...]:
    r"""The expressions in a LaTeX text, decimals as fractions.

    math-verify's other readings say too little: the text itself, some number in it, the number
    before letters. With them `\frac \pi4 + 2 - \sqrt2` reads as 2, and `2t` as 2.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import Float, Rational

    writing = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True)
    meanings = parse(
        rf"\boxed{{{latex}}}",
        [LatexExtractionConfig(normalization_config=writing)],
        fallback_mode="no_fallback",
        parsing_timeout=0,  # none: the worker's own limit holds
    )
    return tuple(
        meaning.replace(lambda part: isinstance(part, Float), lambda part: Rational(str(part)))
        for meaning in meanings
    )
