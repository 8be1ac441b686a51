"""Texts that a chat template has rendered already: recognised by the marks of the template, and
read back as turns.

People bring prompts such as "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n". A
template must not render them again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Literal

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.tables import table_beside
from tether.core.types import ChatRole, Conversation, Message, assistant, user

PIECES = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|\w+|.", re.DOTALL)
"""Marks, runs of white space, words and other characters."""
_LOG = logging.getLogger("tether.data")
Rendered = Literal["auto", "split", "keep"]
"""Treatment of rendered texts: `auto` splits those that begin as a rendered conversation does,
`split` all that hold marks.
"""

_QUESTION = "qzjxk"
_ANSWER = "zkqvj"
_RULES = "jqxvz"
"""Words that no template writes."""
_ROLES: tuple[ChatRole, ...] = ("user", "assistant", "system")
_NO_REPLY = re.compile(r"(<think>\s*(</think>)?)?")
"""Content of a last turn that only waits for a reply."""
_PREFACE = re.compile(r"\s*Below is an instruction[^\n]*\n\s*")
"""The sentence before the first header of an Alpaca prompt."""
_LLAMA_2_SYSTEM = re.compile(r"\s*<<SYS>>\n?(?P<system>.*?)\n?<</SYS>>\s*(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True)
class Marks:
    """The texts that a template writes around turns, without the white space around them.

    Attributes:
        name: the family or template, for messages.
        headers: the text before a turn's content, by role.
        ends: texts that may follow a turn's content, and texts that may precede the first header,
            such as a BOS.
    """

    name: str
    headers: tuple[tuple[ChatRole, str], ...]
    ends: tuple[str, ...] = ()

    @cached_property
    def _header(self) -> re.Pattern[str]:
        names = sorted({text for _, text in self.headers}, key=len, reverse=True)
        return re.compile("|".join(_flexible(name) for name in names))

    @cached_property
    def _roles(self) -> dict[str, ChatRole]:
        return {_squeezed(text): role for role, text in self.headers}

    @cached_property
    def _edge(self) -> re.Pattern[str]:
        ends = "|".join(map(_flexible, sorted(self.ends, key=len, reverse=True)))
        return re.compile(rf"(?:\s|{ends})*" if ends else r"\s*")

    @property
    def is_strong(self) -> bool:
        """True if a header holds a character that prose seldom has, so that its place at the start
        of a text proves enough.
        """
        return all(re.search(r"[<\[|#]", text) for _, text in self.headers)

    def begins(self, text: str) -> bool:
        """True if a text begins with a user's or a system's header, and an assistant's header
        follows.

        Weak headers such as "User:" need the assistant's header at the very end.
        """
        text = self._edge.sub("", _PREFACE.sub("", text.rstrip(), count=1), count=1)
        first = self._header.match(text)
        if first is None or self._role(first) == "assistant":
            return False
        return any(
            self._role(match) == "assistant" and (match.end() == len(text) or self.is_strong)
            for match in self._header.finditer(text, first.end())
        )

    def holds(self, text: str) -> bool:
        """True if a header occurs anywhere in a text."""
        return self._header.search(text) is not None

    def turns(self, text: str) -> Conversation:
        """The turns of a rendered text; a header at the end that waits for a reply gives none.

        Raises:
            DataError: words precede the first header.
        """
        text = _PREFACE.sub("", text, count=1)
        headers = list(self._header.finditer(text))
        before = self.bare(text[: headers[0].start()]) if headers else text
        if before:
            raise DataError(
                f"not a rendered conversation: {before[:40]!r} stands before the "
                f"first mark of {self.name}",
            )
        messages: list[Message] = []
        for header, following in zip(headers, [*headers[1:], None], strict=True):
            content = self.bare(text[header.end() : following.start() if following else len(text)])
            role = self._role(header)
            if following is None and role == "assistant" and _NO_REPLY.fullmatch(content):
                break
            messages += _with_system_apart(Message(role, content))
        return _joined(messages)

    def bare(self, text: str) -> str:
        """A text without white space and end marks around it."""
        return self._edge.sub("", self._cut(text), count=1).rstrip()

    def _cut(self, text: str) -> str:
        """A text without the end marks behind it; without any, it keeps its white space."""
        while end := next((end for end in self.ends if text.rstrip().endswith(end)), ""):
            text = text.rstrip().removesuffix(end).rstrip()
        return text

    def ended(self, text: str) -> str:
        """A reply without the assistant's header before it and the end marks behind it; its own
        white space stays.
        """
        header = self._header.match(text, len(text) - len(text.lstrip()))
        if self.is_strong and header is not None and self._role(header) == "assistant":
            text = text[header.end() :].lstrip("\n")
        return self._cut(text)

    def _role(self, match: re.Match[str]) -> ChatRole:
        return self._roles[_squeezed(match[0])]


def _joined(messages: list[Message]) -> Conversation:
    """The turns, of which neighbours of one speaker are one turn: Alpaca's instruction and
    input.
    """
    turns: list[Message] = []
    for message in messages:
        if turns and turns[-1].role == message.role:
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    return tuple(turns)


def _flexible(mark: str) -> str:
    """A pattern of a mark whose white space may differ."""
    return r"\s*".join(map(re.escape, mark.split()))


def _squeezed(mark: str) -> str:
    return "".join(mark.split())


def _with_system_apart(message: Message) -> Iterator[Message]:
    """Llama 2 writes the system prompt into the first user turn."""
    match = _LLAMA_2_SYSTEM.fullmatch(message.content) if message.role == "user" else None
    if match is None:
        yield message
        return
    yield Message("system", match["system"])
    yield replace(message, content=match["rest"])


_TABLE: dict[str, dict[str, list[str]]] = table_beside(__file__, "rendered.toml")
FAMILIES: tuple[Marks, ...] = tuple(
    Marks(
        name,
        tuple((role, text) for role in _ROLES for text in own.get(role, ())),
        tuple(own["ends"]),
    )
    for name, own in _TABLE.items()
)
"""Marks of published templates, by which rendered texts are recognised without a tokenizer."""


def family_of(text: str) -> Marks | None:
    """The published family whose marks a text begins with."""
    return _found(text, FAMILIES, "auto")


def unrendered(
    messages: Conversation,
    known_marks: Sequence[Marks],
    mode: Rendered,
) -> Conversation:
    """The conversation with the texts that a template has rendered already as turns, each such text
    named once in the log.

    Args:
        known_marks: the marks to look for; the first are those of the template that will render the
            turns.

    Raises:
        DataError: a reply repeats another conversation than its prompt.
    """
    if mode == "keep":
        return messages
    places = [index for index, message in enumerate(messages) if message.role == "user"]
    if (
        len(places) == 1
        and (marks := _found(messages[places[0]].content, known_marks, mode)) is not None
    ):
        messages = _with_turns(messages, places[0], marks)
    if messages and messages[-1].role == "assistant":
        messages = (*messages[:-1], *_bare_reply(messages[-1], messages[:-1], known_marks, mode))
    return messages


def _found(
    text: str,
    known_marks: Sequence[Marks],
    mode: Rendered,
) -> Marks | None:
    return next(
        (
            marks
            for marks in known_marks
            if (marks.holds if mode == "split" else marks.begins)(text)
        ),
        None,
    )


def _with_turns(
    messages: Conversation,
    place: int,
    marks: Marks,
) -> Conversation:
    """The conversation whose turn at `place` is a rendered one."""
    _report(marks)
    turns = marks.turns(messages[place].content)
    rest = messages[place + 1 :]
    if turns:
        given = messages[place]
        turns = (replace(turns[0], tools=given.tools, template=given.template), *turns[1:])
    # the prompt begins the reply
    if rest and turns and turns[-1].role == rest[0].role == "assistant":
        rest = (replace(rest[0], content=turns[-1].content + rest[0].content), *rest[1:])
        turns = turns[:-1]
    return (*messages[:place], *turns, *rest)


def _bare_reply(
    message: Message,
    earlier: Conversation,
    known_marks: Sequence[Marks],
    mode: Rendered,
) -> Conversation:
    """A reply without a template's marks around it, or the turns behind the prompt that it
    repeats.
    """
    if (marks := _found(message.content, known_marks, mode)) is not None and marks.begins(
        message.content,
    ):
        turns = marks.turns(message.content)
        before = [turn.content.strip() for turn in earlier]
        if turns and turns[0].role == "user" and earlier and earlier[0].role == "system":
            before = before[1:]  # the system prompt stands beside the conversation alone
        if [turn.content for turn in turns[: len(before)]] != before or len(turns) == len(before):
            raise DataError(
                "a reply holds a rendered conversation that does not begin with its "
                "prompt; see model.rendered_texts",
            )
        _report(marks)
        *between, last = turns[len(before) :]
        return (
            *between,
            replace(message, content=last.content) if last.role == "assistant" else last,
        )
    bare = known_marks[0].ended(message.content)
    if bare == message.content:
        return (message,)
    _report(known_marks[0])
    return (replace(message, content=bare),)


def _report(marks: Marks) -> None:
    once(
        _LOG.warning,
        "texts of the data were rendered by a chat template already (marks of %s): they are read "
        "as turns and rendered once. "
        'To keep such texts as they are, set model.rendered_texts = "keep"',
        marks.name,
    )


def marks_of(render: Callable[..., str | None], ends: tuple[str, ...]) -> Marks | None:
    """The marks of a template, learned from what it writes around words that it cannot know.

    Args:
        render: (conversation, waiting=for the assistant) -> text; None where the template refuses.
        ends: the tokens that end turns or begin texts.

    Returns:
        None where the template refuses such a conversation or writes no header.
    """
    text = render((user(_QUESTION), assistant(_ANSWER), user(_QUESTION)), waiting=True)
    pieces = re.split(f"{_QUESTION}|{_ANSWER}", text or "")
    if len(pieces) != 4:
        return None
    start, to_answer, to_question, waiting = pieces
    backwards = (PIECES.findall(text)[::-1] for text in (start, to_question))
    asks = _without_ends("".join(_shared(*backwards)[::-1]), ends)
    end = to_question.removesuffix(asks)
    answers = _without_ends(to_answer.removeprefix(common_start(to_answer, end)), ends)
    waits = _without_ends(waiting.removeprefix(common_start(waiting, end)), ends)
    headers: list[tuple[ChatRole, str]] = [("user", asks.strip()), ("assistant", answers.strip())]
    # an answer may begin with the mark of a channel, or an empty thought
    if opening := common_start(answers, waits).strip():
        headers.append(("assistant", opening))
    if min(len(header) for _, header in headers) < 3 or len({header for _, header in headers}) < 2:
        return None
    rules = render((Message("system", _RULES), user(_QUESTION)), waiting=True) or ""
    before, _, behind = rules.partition(_RULES)
    system = _without_ends(before, ends).strip()
    # some templates have none, or write the system text into the user's turn
    if len(system) >= 3 and not system.startswith(asks.strip()) and asks.strip() in behind:
        headers.append(("system", system))
        ends = (*ends, behind.partition(asks.strip())[0].strip())
    spare = {
        start.removesuffix(asks).strip(),
        end.strip(),
        to_answer.removesuffix(answers).strip(),
        *ends,
    } - {""}
    return Marks("the model's chat template", tuple(headers), tuple(sorted(spare)))


def _without_ends(text: str, ends: tuple[str, ...]) -> str:
    """A text without the end marks before it."""
    while end := next((end for end in ends if end and text.lstrip().startswith(end)), ""):
        text = text.lstrip()[len(end) :]
    return text.lstrip()


def common_start(one: str, other: str) -> str:
    """Common beginning of both texts, in whole marks, words and runs of white space."""
    return "".join(_shared(PIECES.findall(one), PIECES.findall(other)))


def _shared(one: list[str], other: list[str]) -> list[str]:
    pairs = zip(one, other, strict=False)
    return [piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
