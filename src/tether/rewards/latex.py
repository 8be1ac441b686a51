r"""Answers in one way of writing, and the numbers among them.

Of `\approx \textbf{36}\,\%`, `36°` and `$36$` the plain form is `36\%`, `36` and `36`. Of
`16!`, `10:30`, `4 or 5` and `1,5` no number is read.
"""

from __future__ import annotations

import re
from fractions import Fraction
from unicodedata import normalize

from tether.core.errors import DataError
from tether.data.formats.solved import boxed_answer

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–﹣－", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2007", "~"),
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "°": r"^\circ ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≈": r"\approx ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "²": "^2",
        "³": "^3",
    },
)
_GROUP = r"(?<=\d)(?:\{,\}|,?(?:\\[,!:; ]|~)+,?)(?=\d{3}(?!\d))"
_STYLES = (
    r"boldsymbol|mathbf|mathit|mathsf|bm|pmb|emph|underline|textcolor\{\w+\}|color(?:box)?\{\w+\}"
    r"|bf|rm|it|sf|[lL]arge|LARGE|small"
)
_REPLACED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(?<![\w*)])\*\*([^*\n]+)\*\*(?![\w*])", r"\1"),  # bold of Markdown
        (r"(?<=[\w)])\s*\*\*\s*(?=[\w({])", "^"),
        (_GROUP, ","),
        (
            r"(?<!\\)\\[,:;!> ]|~|\\q?quad(?![a-z])|\\hspace\{[^{}]*\}|\\(?:displaystyle|textstyle)",
            " ",
        ),
        (r"\\(?:mathrm|text|operatorname)\{([ei])\}", r"\1"),
        (r"\\imath(?![a-z])", "i"),
        (r"\\(?:mathrm|mbox|hbox|operatorname|text(?:bf|it|rm|normal|sf|tt))\s*\{", r"\\text{"),
        (rf"\\(?:{_STYLES})(?![a-z])\s*", ""),
        (r"\\(?:[dtcs]|nice)frac", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"(?<![\\a-z])sqrt\s*\(([^()]*)\)|√\s*\(([^()]*)\)", r"\\sqrt{\1\2}"),
        (r"√\s*(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"^(\s*[(\[][^;]*);([^;]*[)\]]\s*)$", r"\1,\2"),
        (r"\\(?:degrees?|deg)(?![a-z])|\^\{\\(?:circ|degree)\}", r"^\\circ"),
        (r"\\\\\s*\[[^\]]*\]", r"\\\\"),  # the height of a matrix's row
        (r"(?<![\d.])1(?=i(?![a-z]))", ""),
        (r"(?<=\d)(?:\s*\\cdot\s*)?i(?![a-z])", " i"),
        (r"\\langle", "("),
        (r"\\rangle", ")"),
        (r"(?<=[\dA-F])_\s*\{\(?(\d+)\)?\}", r"_\1"),
        (r"\\varnothing", r"\\emptyset"),
        (r"^\s*\](.*)\[\s*$", r"(\1)"),
        (
            r"^\s*\\\{\s*[a-z]\s*(?:\\in[^:|]*?)?(?::|\||\\mid)(.*)\\\}\s*$",
            r"\1",
        ),  # the set of all x with
        (r"^\s*\\text\s*\{(?:[Tt]he|[Ff]inal|[Aa]nswer|is|about|approximately|[\s:])+\}", ""),
        (r"(?<=\d)[eE]([-+]?\d{1,3})(?!\d)", r"\\times 10^{\1}"),
        (r"\\infin(?:ity)?(?![a-z])", r"\\infty"),
    )
]
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_EDGES = re.compile(
    r"^(?:[\s*$]|\\[()\[\]]|\\?(?:approx|sim|simeq|equiv)(?![a-z])|=|:)+"
    r"|(?:[\s*.;,]|(?<!\\)\$|\\[()\[\]]|\\+$)+$",
)
_BRACES = re.compile(r"^\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}$")
_ANGLES = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|cis|angle)|[FCK]\b")


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed in a text."""
    try:
        return boxed_answer(text)
    except DataError:
        return None


def unstyled(answer: str) -> str:
    """An answer without the marks of a sentence, of Markdown and of style around its values."""
    text = (boxed(answer) or answer).translate(_SIGNS)
    text = _VULGAR.sub(lambda sign: f" {normalize('NFKC', sign[0])}".replace("⁄", "/"), text)
    for pattern, by in _REPLACED:
        text = pattern.sub(by, text)
    if not _ANGLES.search(text):
        text = re.sub(r"\s*\^\s*\\circ(?![a-z])", "", text)
    text = _REPEATING.sub(_fraction, text)
    while (bare := _BRACES.sub(r"\1", _EDGES.sub("", text))) != text:
        text = bare
    return text


def _fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1666... is (16 - 1) / 90."""
    whole, start, period = match.groups()
    below = (10 ** len(period) - 1) * 10 ** len(start)
    above = int(whole + start + period) - int(whole + start or 0)
    return rf"\frac{{{above}}}{{{below}}}"


_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?(?![\d,]*\d)|\.\d+"
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_GLUED = "cm|mm|km|kg|mg|ml|mL|lbs?|oz|ft|mph|kph|hrs?|mins?|secs?|am|pm"
_NO_UNIT = (
    r"[b-fijkn-rt-z]\b|a\b(?!\.?\s*[a-z])|(?:and|or|to|by|over|out|in)\b[^.]*\d"
    r"|(?:plus|minus|times|pi|sqrt|squared|cubed|factorial|mod|choose|divided|multiplied|hal(?:f|ves)"
    r"|thirds?|quarters?|fourths?|fifths?|point|percentage\s+points?|base)\b"
    r"|[^,.;]*\b(?:wrong|incorrect|false|not)\b"
)
_UNIT = re.compile(
    rf"(?:\s*\\?%)?(?:\s*[€£¥₹]|(?:(?:{_GLUED})(?![a-z])|\s*/\s*[a-z]+|-[a-z]{{3,}}"
    rf"|\s+\(?(?!{_NO_UNIT})[a-z]+)(?:\^\{{?[23]\}}?)?(?![\w^_(])"
    r"(?!,?\s+(?:(?:and|or)\s+)?[-+$]?\d)(?:[\s,.;:/()'-].*)?"
    r"|[.,;:]\s+\(?(?!(?:and|or)\b[^.]*\d|[b-z]\b)[a-z].*)?[\s.,;:)]*",
    re.IGNORECASE | re.DOTALL,
)
"""A text that may follow a number without changing it."""
_VALUE = re.compile(
    r"(?:(?P<sign>[-+])\s*)?(?:(?:(?:[A-Z]{1,2})?\\?[$€£¥₹]|(?:USD|EUR|GBP|INR|Rs\.?)(?![a-z]))\s*(?P<minus>-?))?"
    rf"(?:(?P<whole>\d+)\s+(?=\d+/))?(?P<above>{_NUMERAL})(?:\s*/\s*(?P<below>{_NUMERAL}))?"
    r"(?:\s*(?:\\times|\\cdot|[x*])\s*10\s*\^\s*\{?(?P<power>[-+]?\d{1,3})\}?(?!\d))?"
    rf"(?:\s*(?P<scale>{'|'.join(_SCALES)})\b)?",
)
_GLUE = re.compile(r"(?:[\w)}\].^_]|\w[ \t]*[-+*/<>^][ \t]*|\d:|\\\w+\s*\{|[\^_]\{)$")
"""The end of a text that makes the next number a part of something else."""
_WORDS = re.compile(r"(?:(?:[a-z][a-z'’-]+|[ai]),?\s+)+(?=[-+]?[$€£.\d\\])", re.IGNORECASE)
_LABEL = re.compile(
    r"\b(?:step|part|case|note|option|method|question|problem|example|equation|section)\s+$",
    re.IGNORECASE,
)


def read_number(text: str) -> Fraction | None:
    r"""The number that a text is, whatever unit follows: 1,000 and -$5 and \frac{3}{4} and 1 1/2.
    None where it could be another, or none.

    Of an equation it is the right side, unless another side is another number.
    """
    values = [_value(side) for side in re.split(r"(?<![<>!\\])=|\\approx", unstyled(text))]
    others = {value for value in values if value is not None}
    return values[-1] if len(others) == 1 else None


def number_in(text: str) -> Fraction | None:
    """The number of a text, or the only one behind its first words, as in "a total of 5"."""
    number = read_number(text)
    text = unstyled(text)
    words = _WORDS.match(text)
    if number is not None or words is None or _LABEL.search(words[0]):
        return number
    rest = text[words.end() :]
    return None if re.search(r"(?<!\\)[a-z][^\n]*\d", rest) else read_number(rest)


def last_number(text: str) -> str | None:
    """The line from its last number on; None where that is a part of something else."""
    text = _inline(unstyled(text))
    number = max(_VALUE.finditer(text), key=lambda match: match.start(), default=None)
    if number is None or _GLUE.search(text[: number.start()]):
        return None
    return text[number.start() :].partition("\n")[0]


def _inline(text: str) -> str:
    """With words and fractions as they are written without LaTeX."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1", text)
    return re.sub(r"\\frac\s*\{\s*(-?)([\d.,]+)\s*\}\s*\{\s*([\d.,]+)\s*\}", r" \1\2/\3", text)


def _value(text: str) -> Fraction | None:
    text = _inline(text).strip()
    text = re.sub(r"^10\s*\^\s*(?=[\d{-])", "1*10^", text)
    match = _VALUE.match(text)
    if match is None or not _UNIT.fullmatch(text, match.end()):
        return None
    parts = {name: re.sub("[, ]", "", part or "") for name, part in match.groupdict().items()}
    try:
        value = Fraction(parts["above"]) / Fraction(parts["below"] or 1)
        value += Fraction(parts["whole"] or 0)
    except (ValueError, ZeroDivisionError):
        return None
    negative = (parts["sign"] + parts["minus"]).count("-") == 1
    scale = _SCALES.get(parts["scale"], 1) * Fraction(10) ** int(parts["power"] or 0)
    return (-value if negative else value) * scale
