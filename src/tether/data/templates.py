"""A chat template turns conversations into text. For every reply it also gives the prompt that a
model would continue.

A template is a program of the model's author. Published ones drop thoughts, move system prompts,
end a conversation instead of a turn, or open a thought in the prompt alone. If a template leaves
out a part of a conversation, this is an error.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tether.core.errors import DataError, ModelError
from tether.core.once import once
from tether.core.types import Conversation, Json, Message
from tether.data.rendered import common_start

_LOG = logging.getLogger("tether.data")
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'User: ', 'assistant': 'Assistant: "
    "'}.get(message['role'], message['role'] | capitalize ~ ': ') }}{{ message['content'] }}{% if "
    "message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which templates look for the thought before a reply."""
_MARK = re.compile(r"<[^<>\s]+>")
_PROBES = ("zqx", "qjv")
"""Replies that begin differently: what their renderings share is the template's own text."""


@dataclass(frozen=True)
class RenderedReply:
    """A reply as a model would generate it: the text before it, and its own text up to the stop
    token that ends it.
    """

    before: str
    text: str
    train: bool

    @property
    def whole(self) -> str:
        return self.before + self.text


class ChatTemplate:
    """A tokenizer's way to write conversations.

    Args:
        tokenizer: a transformers tokenizer. Without a chat template, it gets a plain "User: /
            Assistant:" one.
        template: a Jinja chat template that replaces the tokenizer's own. Or several by name:
            `default`, and `tool_use` for conversations with tools.
        stops: the texts of the tokens that end a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Mapping[str, str] | None,
        stops: Sequence[str],
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(stop for stop in stops if stop)
        self.text, self.for_tools = _templates(
            template or tokenizer.chat_template or _plain_template(tokenizer),
        )

    def replies(self, messages: Conversation) -> list[RenderedReply]:
        return [
            self.reply(messages, index)
            for index, message in enumerate(messages)
            if message.role == "assistant"
        ]

    def reply(self, messages: Conversation, index: int) -> RenderedReply:
        """The assistant's turn at `index`, behind the template's prompt for the turns before it."""
        earlier, message = messages[:index], messages[index]
        before = self.render(earlier, waiting=True)
        after = self.render(messages[: index + 1], waiting=False)
        if message.tool_calls and after == self.render(
            (*earlier, replace(message, tool_calls=())),
            waiting=False,
        ):
            raise DataError(
                "the chat template leaves out tool calls; set model.chat_template to "
                "one that writes them",
            )
        if after.startswith(before):
            text = after[len(before) :]
        else:
            before, text = self._behind_last_turn(earlier, message, before, after)
        self.check_whole(earlier, before)
        reply = self._up_to_stop(text, message)
        if any(thought not in reply for thought in _thoughts(message)):
            raise DataError(
                "the chat template leaves out the reasoning of a reply; set model.chat_template "
                "to one that writes it",
            )
        if _kept(message) not in reply:
            raise DataError(
                "the chat template rewrites an assistant turn; set "
                "model.chat_template to one that keeps it",
            )
        return RenderedReply(before, reply, message.train)

    def _behind_last_turn(
        self,
        earlier: Conversation,
        message: Message,
        before: str,
        after: str,
    ) -> tuple[str, str]:
        """Context and reply where the template renders earlier turns differently once they have
        been answered.

        The context is what a model gets that is to write the reply; the reply is what the template
        writes behind the last turn. Mistral's templates, for example, write the system prompt into
        the last user turn.

        Raises:
            DataError: the last turn cannot be found.
        """
        last = _kept(earlier[-1]) if earlier else ""
        if not last or last not in before or last not in after:
            raise DataError(
                "the chat template does not keep earlier turns as they were, so prompt and "
                "response cannot be told apart; set model.chat_template to one that does",
            )
        waiting = _behind(before, last)
        answered = self._answered(after, last, message)
        if answered.startswith(waiting):
            return before, answered[len(waiting) :]
        return self._opened(earlier, message, before, answered)

    def _answered(self, text: str, last: str, message: Message) -> str:
        """The text behind the last turn before a reply, which may repeat that turn's words."""
        end = text.rfind(_kept(message)) if _kept(message) else len(text)
        return text[text.rindex(last, 0, max(end, text.index(last) + len(last))) + len(last) :]

    def _opened(
        self,
        earlier: Conversation,
        message: Message,
        before: str,
        answered: str,
    ) -> tuple[str, str]:
        """Context and reply where the template's prompt opens something that its rendering of the
        reply does not begin with.

        Templates of reasoning models end their prompt with <think>. A reply with a thought of its
        own is written behind that, as a model generates it. A reply without one follows what prompt
        and rendering share; behind a thought that the prompt closes, too, it follows the whole
        prompt.
        """
        last = _kept(earlier[-1])
        probes = [replace(message, content=probe, reasoning="") for probe in _PROBES]
        others = [
            self._answered(self.render((*earlier, probe), waiting=False), last, probe)
            for probe in probes
        ]
        waiting = _behind(before, last)
        shared = common_start(waiting, answered, *others)
        opening, mark = waiting[len(shared) :], waiting[len(shared) :].strip()
        content = _kept(message)
        # white space, or a thought that is closed already
        if not mark or len(_MARK.findall(mark)) > 1:
            return before, answered[len(shared) :].lstrip()
        ending = answered[answered.rindex(content) + len(content) :] if content in answered else ""
        thought = message.content.lstrip()
        if mark and thought.startswith(mark):
            return before, thought.removeprefix(mark).lstrip("\n") + ending
        if message.reasoning and (tag := re.fullmatch(r"<(\w+)>", mark)):
            return before, f"{message.reasoning.strip()}\n</{tag[1]}>\n\n{message.content}{ending}"
        once(
            _LOG.warning,
            "the chat template's prompt ends with %r and its replies do not begin so: such "
            "replies are trained and scored after %r, but sampled after the whole prompt",
            opening,
            shared[-24:],
        )
        return before.removesuffix(opening), answered[len(shared) :]

    def _up_to_stop(self, text: str, message: Message) -> str:
        """A reply's text up to and with the first stop token behind its content; all of it where
        none follows.
        """
        content = _kept(message)
        start = max(text.find(content), 0) + len(content)
        ends = [place + len(stop) for stop in self.stops if (place := text.find(stop, start)) >= 0]
        return text[: min(ends)] if ends else text

    def check_whole(self, messages: Conversation, text: str) -> None:
        """Raises a `DataError` where a rendered text lacks what a turn says; thoughts of earlier
        replies may go.
        """
        if (tools := _tools(messages)) and text == self.render(
            tuple(replace(message, tools="") for message in messages),
            waiting=True,
        ):
            raise DataError(
                f"the chat template leaves out {len(tools)} tools; set "
                "model.chat_template to one that writes them",
            )
        position = 0
        for message in messages:
            content = _kept(message)
            # some templates move these, or write a result as JSON
            if message.role in ("system", "tool"):
                if content not in text and json.dumps(content)[1:-1] not in text:
                    raise DataError(
                        f"the chat template leaves out a {message.role} turn; set "
                        "model.chat_template to one that keeps it",
                    )
                continue
            place = text.find(content, position)
            if place < 0:
                raise DataError(
                    f"the chat template leaves out or rewrites {message.role} turns; "
                    "set model.chat_template to one that keeps earlier turns",
                )
            position = place + len(content)

    def render(self, messages: Conversation, *, waiting: bool) -> str:
        tools = _tools(messages)
        template = self.for_tools if tools and self.for_tools is not None else self.text
        rows = [
            _for_template(message, self._reasoning_key[template], in_parts=self._wants_parts)
            for message in messages
        ]
        try:
            return self.tokenizer.apply_chat_template(
                rows,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=waiting,
            )
        except Exception as error:
            # a template is a program of the model's author: anything can come out of it
            raise DataError(f"the chat template refuses this conversation: {error}") from error

    @cached_property
    def _reasoning_key(self) -> dict[str, str]:
        """The key under which each template looks for a reply's thought."""
        return {
            template: next(
                (key for key in _REASONING if re.search(rf"\b{key}\b", template)),
                _REASONING[0],
            )
            for template in (self.text, self.for_tools)
            if template is not None
        }

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template reads a turn's content as a list of parts alone, as those of models
        that also see images do.
        """

        def is_written(content: object) -> bool:
            rows = [{"role": "user", "content": content}]
            try:
                return _PROBES[0] in self.tokenizer.apply_chat_template(
                    rows,
                    chat_template=self.text,
                    tokenize=False,
                )
            except Exception:  # noqa: BLE001  (see `render`)
                return False

        return not is_written(_PROBES[0]) and is_written([{"type": "text", "text": _PROBES[0]}])


def _templates(template: str | Mapping[str, str]) -> tuple[str, str | None]:
    """The template of conversations without tools, and the template of those with tools, if it is
    another one.

    Raises:
        ModelError: there are several without a default.
    """
    if isinstance(template, str):
        return template, None
    if "default" not in template:
        raise ModelError(
            f"the tokenizer has the chat templates {', '.join(sorted(template))} and no default "
            "one. Set model.chat_template.",
        )
    return template["default"], template.get("tool_use")


def _plain_template(tokenizer: Any) -> str:
    """The template of a model that has none; it begins with the BOS where the tokenizer begins
    every text with one.
    """
    begin = tokenizer("a")["input_ids"][:1]
    return (
        "{{ bos_token }}" + PLAIN_TEMPLATE if begin == [tokenizer.bos_token_id] else PLAIN_TEMPLATE
    )


def _tools(messages: Conversation) -> list[Json] | None:
    return next((json.loads(message.tools) for message in messages if message.tools), None)


def _for_template(message: Message, reasoning_key: str, *, in_parts: bool) -> Json:
    """A turn with its reasoning under the key that the template reads, and without what no template
    reads.
    """
    row = {
        reasoning_key if name == "reasoning_content" else name: value
        for name, value in message.as_row().items()
    }
    row.pop("train", None)
    return row | {"content": [{"type": "text", "text": message.content}]} if in_parts else row


def _behind(text: str, content: str) -> str:
    """The text after the last occurrence of a content in a rendered text."""
    return text[text.rindex(content) + len(content) :]


def _kept(message: Message) -> str:
    """The text of a turn that a template has to keep: of a reply, what follows its thought."""
    content = (
        message.content.rpartition("</think>")[2]
        if message.role == "assistant"
        else message.content
    )
    return content.strip()


def _thoughts(message: Message) -> list[str]:
    """The thoughts of a reply, kept apart or within its text."""
    inline = message.content.rpartition("</think>")[0].strip().removeprefix("<think>").strip()
    return [thought for thought in (message.reasoning.strip(), inline) if thought]
