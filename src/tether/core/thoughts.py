"""The thought before an answer, in the marks of the families that write one."""

from __future__ import annotations

import re

_NAME = r"(?:\w+[:_])?(?:think(?:ing)?|thought|reasoning)"
_NAMED = r"(?!\s*(?:tags?|tokens?|marks?|blocks?)\b)"
_OPENED = re.compile(
    rf"(?<![`\"'‘“])(?:<{_NAME}>|\[THINK\]|◁think▷|<\|channel\|?>(?:analysis|thought)(?:<\|message\|>)?"
    rf"|<\|(?:START_THINKING|begin_of_thought|inner_prefix)\|>|\Aanalysis(?=[A-Z])){_NAMED}",
    re.IGNORECASE,
)
_ENDED = re.compile(
    rf"</{_NAME}>|\[/THINK\]|◁/think▷|(?:assistant)?<\|channel\|>final<\|message\|>|<channel\|>"
    r"|<\|(?:END_THINKING|end_of_thought|inner_suffix)\|>|assistantfinal(?=\S)",
    re.IGNORECASE,
)
# a text without gpt-oss's special tokens says "analysis" and "assistantfinal"
_PART = re.compile(r"<\|channel\|?>|<\|message\|>")


def is_mark(token: str) -> bool:
    """True if a token is a mark of a thought, or a part of one."""
    return any(kind.fullmatch(token) for kind in (_OPENED, _ENDED, _PART))


def thought_apart(text: str) -> tuple[str, str, str]:
    """The text before the last mark that ends a thought, without the mark with which it begins;
    that ending mark; and the text behind it. Without a mark all of it is behind.
    """
    if not (marks := list(_ENDED.finditer(text))):
        return "", "", text
    thought = text[: marks[-1].start()].lstrip()
    opened = _OPENED.match(thought)
    return thought[opened.end() if opened else 0 :], marks[-1][0], text[marks[-1].end() :]


def answer_start(text: str) -> int | None:
    """The place where the answer begins, behind the last thought; None if a thought never ends."""
    answer = thought_apart(text)[2]
    return None if _OPENED.search(answer) else len(text) - len(answer)


def opened_by(prompt: str) -> str:
    """The mark of a thought that a prompt ends with; empty if it ends otherwise."""
    marks = list(_OPENED.finditer(prompt))
    return marks[-1][0] if marks and not prompt[marks[-1].end() :].strip() else ""


def with_opening(text: str) -> str:
    """A response with the mark before its thought, where only its prompt holds that mark."""
    end = _ENDED.search(text)
    if end is None or "/" not in end[0] or _OPENED.search(text[: end.start()]):
        return text
    return end[0].replace("/", "") + text
