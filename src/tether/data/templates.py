"""A chat template turns conversations into text. For every reply it also gives the prompt that a
model would continue.

A template is a program of the model's author. Published ones drop thoughts, move system prompts,
end a conversation instead of a turn, or open a thought in the prompt alone. If a template leaves
out a part of a conversation, this is an error.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import Any

from tether.core.errors import DataError, ModelError
from tether.core.once import once
from tether.core.thoughts import thought_apart
from tether.core.types import Conversation, Facts, Json, Message, Texts, user
from tether.data.rendered import PIECES, common_start

_LOG = logging.getLogger("tether.data")
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'User: ', 'assistant': 'Assistant: "
    "'}.get(message['role'], message['role'] | capitalize ~ ': ') }}{{ message['content'] }}{% if "
    "message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which templates look for the thought before a reply."""
_PROBES = ("zqx", "qjv")
"""Words that no template writes."""


class ChatTemplate:
    """A tokenizer's way to write conversations.

    Args:
        tokenizer: a transformers tokenizer. Without a chat template, it gets a plain "User: /
            Assistant:" one.
        template: a Jinja chat template that replaces the tokenizer's own. Or several by name:
            `default`, and `tool_use` for conversations with tools.
        stops: the texts of the tokens that end a turn.
        arguments: values that the template has by default. They become a part of its text, so that
            a saved tokenizer has them too.

    Raises:
        ModelError: the template has no argument of such a name.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Texts | None,
        stops: Sequence[str],
        arguments: Facts = MappingProxyType({}),
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = tuple(filter(None, stops))
        self.stop = re.compile("|".join(map(re.escape, self.stops)) or "(?!)")
        self.text, self.for_tools = _templates(
            template or tokenizer.chat_template or _plain_template(tokenizer),
        )
        if fault := self._unknown(arguments, "the setting template"):
            raise ModelError(fault)
        self.text = _with_defaults(self.text, arguments)
        self.for_tools = self.for_tools and _with_defaults(self.for_tools, arguments)

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names that the template reads, beside those that transformers gives it."""
        given = {"messages", *inspect.signature(self.tokenizer.apply_chat_template).parameters}
        given |= {*self.tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        return frozenset(_read_names(self.text) | _read_names(self.for_tools or "")) - given

    @property
    def keeps_thoughts(self) -> bool:
        """True if the thought of an earlier reply is in the prompt for a later one."""
        thinking = Message("assistant", "b", reasoning=_PROBES[0])
        text = self.if_taken((user("a"), thinking, user("c")), waiting=True)
        return _PROBES[0] in (text or "")

    @cached_property
    def closing(self) -> str:
        """The text that the template writes between the thought and the words of a reply.

        Raises:
            DataError: it writes no thought.
        """
        thought, words = _PROBES
        _, text = self.reply((user("a"),), Message("assistant", words, reasoning=thought))
        between = text.partition(thought)[2].partition(words)[0]
        if not thought_apart(between)[1]:
            raise DataError("the chat template has no mark between a thought and an answer")
        return between

    def _unknown(self, arguments: Facts, key: str) -> str:
        """A sentence on names that the template does not read; empty where it reads all."""
        unknown = sorted(arguments.keys() - self.arguments) if arguments else ()
        if not unknown:
            return ""
        taken = ", ".join(sorted(self.arguments)) or "none"
        return f"{key} names {', '.join(unknown)}, and the chat template takes {taken}."

    def reply(self, earlier: Conversation, message: Message) -> tuple[str, str]:
        """The prompt for an assistant's turn, and what the template writes behind it, up to the
        stop token that ends the turn.

        Raises:
            DataError: the template refuses the turns or leaves out a part.
        """
        turns = (*earlier, message)
        before = self.render(earlier, waiting=True)
        after = self.render(turns, waiting=False)
        self.check_whole(earlier, before)
        text = (
            after.removeprefix(before)
            if after.startswith(before)
            else self._rewritten(earlier, message)
        )
        called = len(text) - self._behind_calls(turns, after, waiting=False)
        end = max(_behind_words(message, text), called if message.tool_calls else 0)
        stop = self.stop.search(text, end)
        return before, text[: stop.end()] if stop else text + self._stop_behind(earlier, message)

    def _rewritten(self, earlier: Conversation, message: Message) -> str:
        """The reply of a template that renders the turns before it differently once it is there.

        It is what the template writes behind the last turn, without what the prompt has written
        already. Mistral's templates, for example, write the system prompt into the last user turn.

        Raises:
            DataError: the last turn cannot be found, or see `_opened`.
        """
        probed = (*earlier[:-1], replace(earlier[-1], content=_PROBES[0])) if earlier else ()
        _, before, waiting = self.render(probed, waiting=True).rpartition(_PROBES[0])
        _, after, answered = self.render((*probed, message), waiting=False).rpartition(_PROBES[0])
        shared = common_start(waiting, answered)
        opening = waiting.removeprefix(shared)
        reply = answered.removeprefix(shared)
        repeated = _repeated(opening, reply)
        if not (before and after and (shared or repeated)):
            raise DataError(
                "the chat template does not keep earlier turns as they were, so prompt and "
                "response cannot be told apart; set model.chat_template to one that does",
            )
        reply = reply.removeprefix(repeated)
        return reply if repeated or not opening.strip() else _opened(message, opening, reply)

    def _behind_calls(self, messages: Conversation, text: str, *, waiting: bool) -> int:
        """The number of characters behind the arguments of the last call in a rendered text, or a
        few more; 0 where no turn calls anything.

        Raises:
            DataError: a call is not in it.
        """
        calls = [call for message in messages for call in message.tool_calls]
        if not calls:
            return 0
        other = self.if_taken(_with_probes(messages), waiting=waiting)
        if other is None:  # the template reads the arguments
            return len(text.rpartition(json.loads(calls[-1])["function"]["name"])[2])
        if any(f"{_PROBES[1]}{number}" not in other for number in range(len(calls))):
            raise DataError(
                "the chat template leaves out tool calls; set model.chat_template to "
                "one that writes them",
            )
        return len(other.rpartition(_PROBES[1])[2])

    def _stop_behind(self, earlier: Conversation, message: Message) -> str:
        """The text up to the stop token with which the template begins the turn behind a reply;
        nothing where it begins with another text.
        """
        later = user(_PROBES[0])
        for call in map(json.loads, message.tool_calls):
            later = Message("tool", _PROBES[0], tool_call_id=call.get("id", ""))
        # the thought of an earlier reply may go
        for turn in (message, replace(message, content=_kept(message), reasoning="")):
            alone = self.if_taken((*earlier, turn), waiting=False)
            longer = self.if_taken((*earlier, turn, later), waiting=False)
            if alone and longer and longer.startswith(alone):
                gap, _, _ = longer.removeprefix(alone).partition(_PROBES[0])
                stop = self.stop.search(gap)
                return gap[: stop.end()] if stop and not gap[: stop.start()].strip() else ""
        return ""

    def check_whole(self, messages: Conversation, text: str) -> None:
        """Raises a `DataError` where the prompt for these turns lacks what one says; thoughts of
        earlier replies may go.
        """
        self._behind_calls(messages, text, waiting=True)
        bare = tuple(replace(message, tools="") for message in messages)
        if (tools := _tools(messages)) and self.if_taken(bare, waiting=True) == text:
            raise DataError(
                f"the chat template leaves out {len(tools)} tools; set "
                "model.chat_template to one that writes them",
            )
        position = 0
        for message in messages:
            content = _kept(message)
            # some templates move these, or write a result as JSON
            moves = message.role in ("system", "tool")
            place = text.find(content, 0 if moves else position)
            if place < 0 and not (moves and json.dumps(content)[1:-1] in text):
                raise DataError(
                    f"the chat template leaves out or rewrites {message.role} turns; "
                    "set model.chat_template to one that keeps earlier turns",
                )
            position = position if moves else place + len(content)

    def if_taken(self, messages: Conversation, *, waiting: bool) -> str | None:
        """The text of turns that only serve a comparison; None where the template refuses them."""
        try:
            return self.render(messages, waiting=waiting)
        except DataError:
            return None

    def render(self, messages: Conversation, *, waiting: bool) -> str:
        tools = _tools(messages)
        arguments = next((json.loads(turn.template) for turn in messages if turn.template), {})
        if fault := self._unknown(arguments, "chat_template_kwargs"):
            raise DataError(f"{fault} Remove it from the row")
        template = self.for_tools if tools and self.for_tools is not None else self.text
        rows = [
            _for_template(
                message,
                template,
                self._reasoning_key[template],
                in_parts=self._wants_parts,
            )
            for message in messages
        ]
        try:
            return self.tokenizer.apply_chat_template(
                rows,
                tools=tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=waiting,
                **arguments,
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


def _templates(template: str | Texts) -> tuple[str, str | None]:
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


def _with_defaults(template: str, arguments: Facts) -> str:
    """A template with values for arguments that a call leaves out."""
    sets = (f"{{%- set {k} = {k} | default({arguments[k]!a}) %}}\n" for k in sorted(arguments))
    head = "".join(sets)
    return template if template.startswith(head) else head + template


def _read_names(template: str) -> set[str]:
    """The names that a template reads from its call, before it sets them itself."""
    from jinja2 import TemplateSyntaxError, meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    def names(node: nodes.Node) -> Iterator[nodes.Name]:
        """In the order in which they are evaluated."""
        if isinstance(node, nodes.Name):
            yield node
        parts = node.iter_child_nodes()
        for part in reversed([*parts]) if isinstance(node, nodes.Assign) else parts:
            yield from names(part)

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except TemplateSyntaxError:  # see models.loading
        return set()
    first: dict[str, str] = {}
    for node in names(tree):
        first.setdefault(node.name, node.ctx)
    return {name for name in meta.find_undeclared_variables(tree) if first[name] == "load"}


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


def _for_template(message: Message, template: str, reasoning_key: str, *, in_parts: bool) -> Json:
    """A turn with its reasoning under the key that the template reads, and without what no template
    reads.

    A template that writes the channel of answers refuses a text that holds one, or drops the
    thought. A reply that was sampled in two channels has its thought apart here.
    """
    thought, mark, answer = thought_apart(message.content)
    if (
        message.role == "assistant"
        and "channel" in mark
        and mark.removeprefix("assistant") in template
        and not (message.reasoning or "<|channel" in thought)
    ):
        message = replace(message, content=answer, reasoning=thought.lstrip("\n"))
    row = message.as_row()
    row.pop("train", None)
    if message.reasoning:
        row[reasoning_key] = row.pop("reasoning_content")
    return row | {"content": [{"type": "text", "text": message.content}]} if in_parts else row


def _behind_words(message: Message, text: str) -> int:
    """The place behind the words of a reply in its rendering.

    Raises:
        DataError: they are not in it, or the thought before them is not.
    """
    place = 0
    for thought in _thoughts(message):
        place = text.find(thought) + len(thought)
        if place < len(thought):
            raise DataError(
                "the chat template leaves out the reasoning of a reply; set "
                "model.chat_template to one that writes it",
            )
    content = _kept(message)
    if content not in text:
        raise DataError(
            "the chat template rewrites an assistant turn; set "
            "model.chat_template to one that keeps it",
        )
    return max(text.find(content, place), text.find(content)) + len(content)


def _opened(message: Message, opening: str, reply: str) -> str:
    """The reply behind a prompt that ends with an opening, with which the template's rendering of
    the reply does not begin.

    Templates of reasoning models end their prompt with <think>. A thought is written behind that,
    as a model generates it.

    Raises:
        DataError: the opening is none of the reply's thought.
    """
    mark = opening.strip()
    if mark[0].isalpha() or not _thoughts(message):
        once(
            _LOG.warning,
            "the chat template's prompt ends with %r and its replies do not begin so: they are "
            "trained and scored behind it, as they are sampled",
            opening,
        )
        return reply
    thought = message.content.strip().removesuffix(_kept(message))
    if message.reasoning:
        thought = f"{mark}\n{message.reasoning.strip()}\n{mark.replace('<', '</')}\n\n"
    if not (re.fullmatch(r"<\w+>", mark) and thought.startswith(mark)):
        raise DataError(
            f"no thought can follow the chat template's prompt, which ends with {mark!r}; set "
            "model.template or model.chat_template so that the model may think",
        )
    return thought.removeprefix(mark).lstrip("\n") + reply.lstrip()


def _repeated(waiting: str, answered: str) -> str:
    """The longest beginning of a text with which another one ends, whatever their white space."""
    prompt = "".join(waiting.split())
    again = ""
    repeated = 0
    for piece in PIECES.finditer(answered):
        again += piece[0].strip()
        if len(again) > len(prompt):
            break
        if piece[0].strip() and prompt.endswith(again):
            repeated = piece.end()
    # white space that the prompt ends with
    if repeated and waiting[-1:].isspace():
        repeated = len(answered) - len(answered[repeated:].lstrip())
    return answered[:repeated]


def _with_probes(messages: Conversation) -> Conversation:
    """The turns whose calls, which have numbers, have a word of that number for arguments."""
    numbers = count()

    def probed(call: Json) -> str:
        probe = f"{_PROBES[1]}{next(numbers)}"
        return json.dumps(call | {"function": call["function"] | {"arguments": {probe: probe}}})

    return tuple(
        replace(message, tool_calls=tuple(map(probed, map(json.loads, message.tool_calls))))
        for message in messages
    )


def _kept(message: Message) -> str:
    """The text of a turn that a template has to keep: of a reply, what follows its thought."""
    is_reply = message.role == "assistant"
    return (thought_apart(message.content)[2] if is_reply else message.content).strip()


def _thoughts(message: Message) -> list[str]:
    """The thoughts of a reply, kept apart or within its text."""
    thoughts = message.reasoning, thought_apart(message.content)[0]
    return [thought.strip() for thought in thoughts if thought.strip()]
