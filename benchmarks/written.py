r"""Right and wrong answers to GSM8K and MATH in many ways of writing: false refusals and acceptances.

    TETHER_DATA=... python -m benchmarks.written [--rows 60] [--by math_verify] [--show]

Every known answer is written in each way that fits it, and so is a wrong answer: the known one with a
number raised by one, a sign changed, an edge opened, another letter or word. math-verify alone gets
the whole response, by its defaults. A check that fails, or needs more than ten seconds, refuses.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from tether.data.formats.solved import boxed_answer, gsm8k_answer
from tether.rewards.verifiable import make_check
from tether.settings.rewards import Kind, VerifiableConfig

KINDS: tuple[Kind, ...] = ("math", "gsm8k")
SMOKE = ([r"\frac{3}{4}", "36"], ["72"])
"""Answers of a smoke run, which needs no data."""
Way = Callable[[str], str | None]
_INTEGER, _FRACTION = re.compile(r"-?\d+"), re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_DECIMAL = re.compile(r"-?\d*\.\d+")
_INTERVAL = re.compile(r"(?:\\left)?\s*([(\[])([^,()\[\]]+),([^,()\[\]]+?)\s*(?:\\right)?([)\]])")
_DEGREES = re.compile(r"(-?\d+)\^\{?\\circ\}?")
_CHOICE = re.compile(r"\\text\{\(([A-F])\)\}|([A-F])")
_WORD = re.compile(r"\\text\{([A-Za-z ]+)\}")
_PLAIN = re.compile(r"-?\d+(?:,\\!\d{3})*")


def _match(pattern: re.Pattern[str], write: Callable[[re.Match[str]], str | None]) -> Way:
    def way(answer: str) -> str | None:
        match = pattern.fullmatch(answer.strip())
        return write(match) if match else None

    return way


def _number(write: Callable[[str], str | None]) -> Way:
    return _match(re.compile(r"-?\d+(?:\.\d+)?"), lambda match: write(match[0]))


def _replace(pattern: str, by: str) -> Way:
    def way(answer: str) -> str | None:
        written = re.sub(pattern, by.replace("\\", "\\\\") if "\\g" not in by else by, answer)
        return written if written != answer else None

    return way


def _grouped(mark: str) -> Way:
    def write(match: re.Match[str]) -> str | None:
        digits = match[0].replace(",\\!", "")
        return f"{int(digits):,}".replace(",", mark) if abs(int(digits)) > 999 else None

    return _match(_PLAIN, write)


def _mixed(form: str) -> Way:
    def write(match: re.Match[str]) -> str | None:
        above, below = int(match[2]), int(match[3])
        whole, rest = divmod(above, below)
        return match[1] + form.format(whole, rest, below) if whole and rest else None

    return _match(_FRACTION, write)


def _decimal(match: re.Match[str]) -> str | None:
    value = Fraction(int(match[2]), int(match[3]))
    exact = Fraction(str(float(value))) == value
    return f"{match[1]}{float(value)}" if exact else None


def _repeating(match: re.Match[str]) -> str | None:
    value = Fraction(int(match[2]), int(match[3]))
    whole, rest = divmod(value, 1)
    for length in (1, 2, 3, 6):
        period = rest * (10**length - 1)
        if rest and period.denominator == 1:
            return f"{match[1]}{whole}.\\overline{{{int(period):0{length}}}}"
    return None


def _scientific(form: str) -> Way:
    def write(match: re.Match[str]) -> str | None:
        digits = match[0].lstrip("-").rstrip("0")
        power = len(match[0].lstrip("-")) - 1
        mantissa = digits[0] + ("." + digits[1:] if digits[1:] else "")
        sign = "-" if match[0][0] == "-" else ""
        return form.format(sign + mantissa, power) if power >= 3 else None

    return _match(_INTEGER, write)


def _inequality(match: re.Match[str]) -> str | None:
    left, low, high, right = (part.strip() for part in match.groups())
    below, above = "<" if left == "(" else r"\le", "<" if right == ")" else r"\le"
    if ("infty" in low and "infty" in high) or ("infty" not in low + high and left + right == "()"):
        return None
    if "infty" in low:
        return f"x {above} {high}"
    if "infty" in high:
        return f"x {below.replace('<', '>').replace('le', 'ge')} {low}"
    return f"{low} {below} x {above} {high}"


def _pair(match: re.Match[str]) -> str | None:
    return None if "infty" in match[0] or match[1] + match[4] != "()" else match[0]


def _list(form: str, mark: str) -> Way:
    def way(answer: str) -> str | None:
        parts = answer.split(",")
        if len(parts) < 2 or any(not re.fullmatch(r"\s*-?[\d\\{}a-z]+\s*", part) for part in parts):
            return None
        if "\\text" in answer or ",\\!" in answer:
            return None
        return mark.join(form.format(part.strip()) for part in reversed(parts))

    return way


def _complex(form: str) -> Way:
    return _match(
        re.compile(r"(-?\d+)\s*([+-])\s*(\d*)i"),
        lambda m: form.format(m[1], m[2], m[3] or "1", "-" if m[2] == "-" else ""),
    )


WAYS: dict[str, Way] = {
    "as known": lambda a: a,
    "in dollars": lambda a: f"${a}$",
    "in \\( \\)": lambda a: f"\\({a}\\)",
    "full stop": lambda a: f"{a}.",
    "space behind": lambda a: f"{a}\\ ",
    "thin space behind": lambda a: f"{a}\\,",
    "displaystyle": lambda a: f"\\displaystyle {a}",
    "boldsymbol": lambda a: f"\\boldsymbol{{{a}}}",
    "mathbf": lambda a: f"\\mathbf{{{a}}}",
    "bold of Markdown": lambda a: f"**{a}**",
    "color{red}{}": lambda a: f"\\color{{red}}{{{a}}}",
    "textcolor": lambda a: f"\\textcolor{{blue}}{{{a}}}",
    "{color red}": lambda a: f"{{\\color{{red}} {a}}}",
    "in braces": lambda a: f"{{{a}}}",
    "dfrac": _replace(r"\\frac", r"\dfrac"),
    "tfrac": _replace(r"\\frac", r"\tfrac"),
    "equals": lambda a: None if re.search(r"[=<>]|\\[lg]e", a) else f"= {a}",
    "approx": _number(lambda a: f"\\approx {a}"),
    "x equals": lambda a: (
        f"x = {a}"
        if re.fullmatch(r"[-\d\\{}a-z. ]+", a)
        and "text" not in a
        and not re.search(r"[a-z]", re.sub(r"\\[a-z]+", "", a))
        else None
    ),
    "unit in text": _number(lambda a: f"{a} \\text{{ cm}}"),
    "unit with ~": _number(lambda a: f"{a}~\\text{{cm}}"),
    "unit with thin space": _number(lambda a: f"{a}\\,\\mathrm{{km}}"),
    "square unit": _number(lambda a: f"{a} \\text{{ cm}}^2"),
    "unit of words": _number(lambda a: f"{a}\\text{{ square units}}"),
    "bare unit": _number(lambda a: f"{a} meters"),
    "dollar sign": _number(lambda a: f"\\${a}"),
    "percent": _number(lambda a: f"{a}\\%"),
    "percent with ~": _number(lambda a: f"{a}~\\%"),
    "point zero": _match(_INTEGER, lambda m: f"{m[0]}.0"),
    "plus sign": _match(re.compile(r"\d+"), lambda m: f"+{m[0]}"),
    "minus of unicode": _replace("-", "−"),
    "thousands ,": _grouped(","),
    "thousands {,}": _grouped("{,}"),
    "thousands \\,": _grouped("\\,"),
    "thousands ,\\!": _grouped(",\\!"),
    "thousands space": _grouped(" "),
    "no thousands": _replace(r",\\!", ""),
    "e notation": _scientific("{0}e{1}"),
    "times ten to": _scientific(r"{0} \times 10^{{{1}}}"),
    "slash": _match(_FRACTION, lambda m: f"{m[1]}{m[2]}/{m[3]}"),
    "decimal": _match(_FRACTION, _decimal),
    "repeating decimal": _match(_FRACTION, _repeating),
    "mixed in LaTeX": _mixed(r"{0}\frac{{{1}}}{{{2}}}"),
    "mixed": _mixed("{0} {1}/{2}"),
    "minus in fraction": _match(_FRACTION, lambda m: m[1] and f"\\frac{{-{m[2]}}}{{{m[3]}}}"),
    "degree sign": _match(_DEGREES, lambda m: f"{m[1]}°"),
    "degree command": _match(_DEGREES, lambda m: f"{m[1]}\\degree"),
    "degrees in words": _match(_DEGREES, lambda m: f"{m[1]} \\text{{ degrees}}"),
    "degrees dropped": _match(_DEGREES, lambda m: m[1]),
    "degrees added": _match(_INTEGER, lambda m: f"{m[0]}^\\circ"),
    "inequality": _match(_INTERVAL, _inequality),
    "x in": _match(_INTERVAL, lambda m: f"x \\in {m[0]}" if "infty" in m[0] else None),
    "infinity of unicode": _replace(r"\\infty", "∞"),
    "left and right": _match(_INTERVAL, lambda m: f"\\left{m[1]}{m[2]},{m[3]}\\right{m[4]}"),
    "pair with spaces": _match(_INTERVAL, lambda m: m[0].replace(",", " , ")),
    "list in braces": _list("{}", ", ")
    and (lambda a: (w := _list("{}", ", ")(a)) and f"\\{{{w}\\}}"),
    "list turned": _list("{}", ", "),
    "list with and": _list("{}", r" \text{ and } "),
    "list of equations": _list("x = {}", r", "),
    "list with or": _list("x = {}", r" \text{ or } "),
    "root of unicode": _replace(r"\\sqrt\{?(\d)\}?(?!\d)", r"√\g<1>"),
    "root in words": _replace(r"\\sqrt\{(\d+)\}", r"sqrt(\g<1>)"),
    "root with cdot": _replace(r"(\d) ?\\sqrt", r"\g<1> \\cdot \\sqrt"),
    "pi of unicode": _replace(r"\\pi", "π"),
    "complex with 1i": _complex("{0} {1} {2}i"),
    "complex turned": _complex("{3}{2}i + {0}"),
    "complex upright": _complex(r"{0} {1} {2}\mathrm{{i}}"),
    "bmatrix": _replace("pmatrix", "bmatrix"),
    "wide rows": _replace(r" \\\\ ", r"\\[1ex] "),
    "choice": _match(_CHOICE, lambda m: m[1] or m[2]),
    "choice bold": _match(_CHOICE, lambda m: f"\\textbf{{({m[1] or m[2]})}}"),
    "choice in brackets": _match(_CHOICE, lambda m: f"({m[1] or m[2]})"),
    "choice with its value": _match(_CHOICE, lambda m: f"\\text{{({m[1] or m[2]}) }} 5"),
    "choice with a dot": _match(_CHOICE, lambda m: f"{m[1] or m[2]}. 5"),
    "word": _match(_WORD, lambda m: m[1]),
    "word in mathrm": _match(_WORD, lambda m: f"\\mathrm{{{m[1]}}}"),
    "word in bold": _match(_WORD, lambda m: f"\\textbf{{{m[1]}}}"),
    "word in small letters": _match(_WORD, lambda m: f"\\text{{{m[1].lower()}}}"),
}
RESPONSES: dict[str, Way] = {
    "####": lambda a: f"so it is\n#### {a}",
    "#### with dollars": lambda a: f"#### ${a}",
    "#### with a unit": lambda a: f"#### {a} eggs",
    "#### in bold": lambda a: f"#### **{a}**",
    "#### boxed": lambda a: f"#### \\boxed{{{a}}}",
    "#### with thousands": lambda a: f"#### {int(a):,}" if _INTEGER.fullmatch(a) else None,
    "#### {,}": lambda a: (
        f"#### {f'{int(a):,}'.replace(',', '{,}')}" if _INTEGER.fullmatch(a) else None
    ),
    "#### \\,": lambda a: (
        f"#### {f'{int(a):,}'.replace(',', chr(92) + ',')}" if _INTEGER.fullmatch(a) else None
    ),
    "#### as sum": lambda a: f"#### 2 + 3 = {a}",
    "#### point zero": lambda a: f"#### {a}.00" if _INTEGER.fullmatch(a) else None,
    "the answer is": lambda a: f"We add. The answer is {a}.",
    "the answer is, in LaTeX": lambda a: f"The final answer is \\( {a} \\).",
    "the answer is boxed": lambda a: f"The final answer is $\\boxed{{{a}}}$.",
    "Answer:": lambda a: f"Adding up.\n\n**Answer:** {a} dollars",
    "headings and a phrase": lambda a: (
        f"#### Step 1: Add\n7 and 9.\n\n#### Step 2: Conclude\nThe answer is {a}."
    ),
    "headings and a box": lambda a: (
        f"#### Step 1: Add\n7 and 9.\n\n#### Step 2: Conclude\n$$\\boxed{{{a}}}$$"
    ),
    "heading of the answer": lambda a: f"#### Step 1\n7 and 9.\n\n#### Final Answer\n{a}",
    "note behind": lambda a: f"The answer is {a}.\n\n#### Note\nThe 2 numbers were added.",
    "thought": lambda a: f"<think>Is it \\boxed{{12345}}? #### 12345</think>\n#### {a}",
    "opened thought": lambda a: f"It is 12345.\n#### 12345\n</think>\nThe answer is {a}.",
}


def wrong(answer: str, words: list[str]) -> str | None:
    """The answer with one thing changed."""
    if match := _CHOICE.fullmatch(answer):
        letter = match[1] or match[2]
        return answer.replace(letter, "ABCDEF"[("ABCDEF".index(letter) + 1) % 6])
    if match := _WORD.fullmatch(answer):
        other = next(word for word in words if word != match[1])
        return f"\\text{{{other}}}"
    if (match := _INTERVAL.fullmatch(answer)) and "infty" in answer and "-" not in match[3]:
        start = "[" if match[1] == "(" and "infty" not in match[2] else match[1]
        stop = "]" if match[4] == ")" and "infty" not in match[3] else match[4]
        if start + stop != match[1] + match[4]:
            return f"{start}{match[2]},{match[3]}{stop}"
    if digits := list(re.finditer(r"\d+", answer)):
        last = digits[-1]
        return f"{answer[: last.start()]}{int(last[0]) + 1:0{len(last[0])}}{answer[last.end() :]}"
    return f"2{answer}" if "pi" in answer else None


def negated(answer: str) -> str | None:
    if not (_FRACTION.fullmatch(answer) or re.fullmatch(r"-?\d+(\.\d+)?", answer)) or answer == "0":
        return None
    return answer.removeprefix("-") if answer[0] == "-" else f"-{answer}"


def known(rows: int) -> tuple[list[str], list[str]]:
    """Answers of MATH, at most a third of them whole numbers, and of GSM8K."""
    data = Path(os.environ["TETHER_DATA"])
    with gzip.open(data / "math" / "test.jsonl.gz", "rt") as lines:
        answers = [boxed_answer(json.loads(line)["solution"]) for line in lines]
    with gzip.open(data / "gsm8k" / "test.jsonl.gz", "rt") as lines:
        problems = sorted({gsm8k_answer(json.loads(line)["answer"]) for line in lines})
    draw = random.Random(0)
    others = sorted({answer for answer in answers if not _INTEGER.fullmatch(answer)})
    whole = sorted({answer for answer in answers if _INTEGER.fullmatch(answer)})
    for group in (others, whole, problems):
        draw.shuffle(group)
    return others[: 4 * rows] + whole[: 2 * rows], problems[:rows]


def ours(kind: Kind) -> Callable[[str, str], bool]:
    config = VerifiableConfig(kind=kind)
    check = make_check(config.kind, config.marks, config.pattern, config.tolerance)
    return lambda text, answer: check(text, answer=answer)[0]["correct"] == 1.0


def alone(_: Kind) -> Callable[[str, str], bool]:
    from math_verify import parse, verify

    untimed: Any = None  # this benchmark has a limit of its own
    return lambda text, answer: bool(
        verify(
            parse(f"${answer}$", parsing_timeout=untimed),
            parse(text, parsing_timeout=untimed),
            timeout_seconds=None,
        ),
    )


def cases(rows: int) -> Iterator[tuple[Kind, str, str, str, bool]]:
    """Kind, way, response, known answer, and whether it is right."""
    mathematics, problems = known(rows) if rows else SMOKE
    words = [match[1] for answer in mathematics if (match := _WORD.fullmatch(answer))]
    for kind, answers, ways in zip(KINDS, (mathematics, problems), (WAYS, RESPONSES), strict=True):
        for answer in answers:
            for other, right in (
                (answer, True),
                (wrong(answer, words), False),
                (negated(answer), False),
            ):
                for way, write in ways.items():
                    written = write(other) if other else None
                    if written:
                        yield (
                            kind,
                            way,
                            rf"So \boxed{{{written}}}" if kind == "math" else written,
                            answer,
                            right,
                        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--by", choices=["tether", "math_verify"], default="tether")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="two answers, without data")
    options = parser.parse_args()
    logging.disable()
    make = ours if options.by == "tether" else alone
    checks = {kind: make(kind) for kind in KINDS}
    asked, missed = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()

    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    for kind, way, text, answer, right in cases(0 if options.smoke else options.rows):
        signal.alarm(10)
        try:
            found = checks[kind](text, answer)
        except Exception as error:  # noqa: BLE001 - a check that fails refuses
            found, text = False, f"{text}  ({type(error).__name__}: {error})"
        finally:
            signal.alarm(0)
        asked[way, right] += 1
        if found != right:
            missed[way, right] += 1
            if options.show:
                print(
                    "refused" if right else "ACCEPTED",
                    f"{way:24}",
                    answer,
                    "|",
                    text.replace("\n", "\\n"),
                )
    print(f"{'way':28}{'right':>7}{'refused':>9}{'wrong':>7}{'accepted':>9}")
    ways = list(dict.fromkeys(way for way, _ in asked))
    for way in ways:
        row = asked[way, True], missed[way, True], asked[way, False], missed[way, False]
        print(f"{way:28}{row[0]:7}{row[1]:9}{row[2]:7}{row[3]:9}")
    for side, words in ((True, "right answers refused"), (False, "wrong answers accepted")):
        of, bad = (sum(n for (_, right), n in c.items() if right is side) for c in (asked, missed))
        print(f"{len(ways)} ways: {bad} of {of} {words} ({bad / of:.2%})")


if __name__ == "__main__":
    main()
