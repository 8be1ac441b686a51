"""Conversations become token ids, in one place: what is trained, scored and sampled from is encoded
by this file alone.

The prompt of every reply is the text that a model would continue: its template's prompt for the
turns before. So the ids of a prompt begin the ids of prompt + response. A reward model scores
exactly the text of its training.

History is exactly the template's text. A reply is the template's text behind the prompt for it, up to
the stop token that ends it. If the template writes none, one ends the trained reply alone.

Many published templates render an earlier reply differently from the last one. Qwen3 drops its
thought. Phi-3 ends a whole conversation, not a turn. `conversations` gives such replies their own
sequences. `conversation` counts them if the whole text has them as they were generated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

from tether.core.errors import DataError, ModelError
from tether.core.once import once
from tether.core.thoughts import is_mark
from tether.core.types import (
    Conversation,
    Facts,
    Ids,
    Json,
    Message,
    Rollout,
    Spans,
    Texts,
    assistant,
    user,
)
from tether.data.rendered import FAMILIES, Marks, Rendered, marks_of, unrendered
from tether.data.templates import ChatTemplate

_LOG = logging.getLogger("tether.data")
_NOTHING_TO_TRAIN = "no assistant turn to train: each is marked as not to be trained"


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each whether it counts (is trained, sampled or scored).

    At each of `forks` a segment begins that reads nothing of the tokens before it.
    """

    ids: Ids
    trained: tuple[bool, ...]
    forks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    @cached_property
    def prompt(self) -> Ids:
        """The tokens before the first that counts."""
        return self.ids[: self.trained.index(True)] if any(self.trained) else self.ids

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def segments(self) -> list[Encoded]:
        edges = pairwise((0, *self.forks, len(self)))
        return [Encoded(self.ids[a:b], self.trained[a:b]) for a, b in edges]


class ChatEncoder:
    """A tokenizer with its template, stop tokens and default system message.

    Args:
        tokenizer: a transformers tokenizer. Without a chat template, it gets a plain "User: /
            Assistant:" one.
        stop_ids: the ids that end a turn; the first one is appended where a template writes none.
        template: a Jinja chat template that replaces the tokenizer's own. Or several by name:
            `default`, and `tool_use` for conversations with tools.
        system_prompt: put before conversations that have no system message of their own; None
            leaves that to the template.
        rendered: treatment of texts that a template has rendered already, see `Rendered`.
        vocabulary: token ids that the model has an embedding for; a tokenizer may list more.
        arguments: of the template, see `ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Ids,
        template: str | Texts | None = None,
        system_prompt: str | None = None,
        rendered: Rendered = "auto",
        vocabulary: int = 2**31,
        context_length: int = 2**31,
        arguments: Facts = MappingProxyType({}),
    ) -> None:
        if not stop_ids:
            raise ModelError(
                "the tokenizer has no EOS token, so no response could ever end. Set "
                "model.stop_tokens.",
            )
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        stops = [tokenizer.decode([i], skip_special_tokens=False) for i in stop_ids]
        self.chat = ChatTemplate(tokenizer, template, stops, arguments)
        self.system_prompt = system_prompt
        self.rendered: Rendered = rendered
        self.vocabulary = vocabulary
        self.context_length = context_length

    @classmethod
    def described(cls, tokenizer: object, encoding: Facts) -> ChatEncoder:
        """The encoder that `describe` described."""
        named = {"default": encoding["template"]}
        if tool_use := encoding.get("tool_template"):
            named["tool_use"] = tool_use
        return cls(tokenizer, tuple(encoding["stop_ids"]), named, encoding["system_prompt"])

    @property
    def template(self) -> str:
        """The Jinja text of the template for conversations without tools."""
        return self.chat.text

    @property
    def templates(self) -> str | dict[str, str]:
        """The template as a tokenizer keeps it: several by name where conversations with tools have
        one of their own.
        """
        return (
            self.template
            if self.chat.for_tools is None
            else {"default": self.template, "tool_use": self.chat.for_tools}
        )

    @property
    def pad_id(self) -> int:
        """Any valid id, because padding is never read."""
        pad = self.tokenizer.pad_token_id
        return self.stop_ids[0] if pad is None or pad >= self.vocabulary else pad

    def describe(self) -> Json:
        """The settings that decide the encoding. Two roles with different values need different
        ids.
        """
        tools = {} if self.chat.for_tools is None else {"tool_template": self.chat.for_tools}
        return {
            "template": self.template,
            "system_prompt": self.system_prompt,
            "stop_ids": list(self.stop_ids),
        } | tools

    def prompt(self, messages: Conversation) -> Ids:
        """The ids of a conversation that waits for the assistant.

        Raises:
            DataError: it ends with an assistant turn, or the template refuses it or leaves out a
                part.
        """
        messages = self._prepared(messages)
        if not messages or messages[-1].role == "assistant":
            raise DataError("a prompt must end with a turn that the assistant can answer")
        text = self.chat.render(messages, waiting=True)
        self.chat.check_whole(messages, text)
        return tuple(self._tokenize(text))

    def conversation(
        self,
        messages: Conversation,
        train: Literal["all", "last"] = "all",
    ) -> Encoded:
        """The ids of a whole conversation; the assistant's turns count, each with the stop token
        that ends it.

        Turns whose `train` is False do not count. If the template renders an earlier turn
        differently from the generated text, the turn does not count; see `conversations`.

        Args:
            train: `all` assistant turns count, or the `last` alone.

        Raises:
            DataError: the conversation does not end on an assistant turn, or ends on an empty one.
                None of its turns is to be trained. The template refuses it or leaves out a part.
        """
        return self._sequence(*self._replies(messages, train))[0]

    def conversations(
        self,
        messages: Conversation,
        train: Literal["all", "last"] = "all",
    ) -> list[Encoded]:
        """The sequences that train every counted reply of a conversation once, each behind what a
        model would have seen.

        Templates that keep earlier replies as they were generated need one sequence. Others need
        one for every reply that they render differently later.

        Raises:
            DataError: as `conversation`.
        """
        messages, missing = self._replies(messages, train)
        sequences = []
        while missing:
            encoded, counted = self._sequence(messages[: max(missing) + 1], missing)
            sequences.append(encoded)
            missing -= counted
        if len(sequences) > 1:
            once(
                _LOG.warning,
                "the chat template renders earlier replies differently from the last one: each "
                "such reply is trained in a "
                "sequence of its own, behind the prompt that a model gets for it",
            )
        return sequences

    def rollout(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
        spans: Spans = (),
        forks: Sequence[int] = (),
    ) -> Encoded:
        """A response as it was sampled: the tokens of its spans count; none given: all of them."""
        counts = [not spans] * len(response_ids)
        for start, stop in spans:
            counts[start:stop] = [True] * (stop - start)
        length = len(prompt_ids)
        return Encoded(
            prompt_ids + response_ids,
            (False,) * length + tuple(counts),
            tuple(length + place for place in forks),
        )

    def sampled(self, rollout: Rollout) -> Encoded:
        """A rollout as it was sampled, with its spans and segments."""
        return self.rollout(
            rollout.prompt_ids,
            rollout.response_ids,
            rollout.spans,
            rollout.forks,
        )

    def rollout_for_scoring(
        self,
        prompt_ids: Ids,
        response_ids: Ids,
    ) -> Encoded:
        """A sampled response as the reward model was trained to see it: ended by a stop token,
        sampled or not.
        """
        ended = (
            response_ids
            if response_ids and response_ids[-1] in self.stop_ids
            else (*response_ids, self.end_id)
        )
        # there is no room behind the last token
        if len(prompt_ids) + len(ended) == self.context_length + 1:
            ended = (*ended[:-2], ended[-1])
        return self.rollout(prompt_ids, ended)

    def decode(self, ids: Ids | list[int]) -> str:
        """The text for people and judges: without special tokens, but with those marks of a thought
        that the template writes.
        """
        if not self._unspoken:
            return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()
        spoken = [token for token in ids if token not in self._unspoken]
        return self.tokenizer.decode(spoken, skip_special_tokens=False).strip()

    @cached_property
    def _unspoken(self) -> frozenset[int]:
        """The special tokens that are no marks of a thought; empty where none of them is one."""
        texts = f"{self.template}{self.chat.for_tools or ''}"
        added = self.tokenizer.added_tokens_decoder.items()
        special = {number: token.content for number, token in added if token.special}
        unspoken = {n for n, text in special.items() if not (is_mark(text) and text in texts)}
        return frozenset(unspoken if len(unspoken) < len(special) else ())

    @cached_property
    def end_id(self) -> int:
        """The stop token that ends a reply without calls."""
        try:
            return self.conversation((user("a"), assistant("b"))).ids[-1]
        except DataError:
            return self.stop_ids[0]

    def _sequence(self, messages: Conversation, wanted: set[int]) -> tuple[Encoded, set[int]]:
        """A conversation that ends with a reply; of the wanted turns those count that it has as
        they were generated.

        Returns the ids, and the places of the turns that count.

        Raises:
            DataError: none of them counts.
        """
        final = len(messages) - 1
        before, text = self.chat.reply(messages[:-1], messages[-1])
        ids = self._tokenize(before)
        spans = self._spans(before, ids, messages, wanted - {final})
        body = self.continued(before, text)
        body += [] if body and body[-1] in self.stop_ids else self.stop_ids[:1]
        if final in wanted:
            spans[final] = (len(ids), len(ids) + len(body))
        if not spans:
            raise DataError(_NOTHING_TO_TRAIN)
        trained = [False] * (len(ids) + len(body))
        for start, stop in spans.values():
            trained[start:stop] = [True] * (stop - start)
        return Encoded((*ids, *body), tuple(trained)), {*spans}

    def _spans(
        self,
        text: str,
        ids: Sequence[int],
        messages: Conversation,
        wanted: set[int],
    ) -> dict[int, tuple[int, int]]:
        """The first token and the last + 1 of every wanted turn that a prompt has as it was
        generated.
        """
        spans: dict[int, tuple[int, int]] = {}
        place = (0, 0)
        for index in sorted(wanted):
            before, reply = self.chat.reply(messages[:index], messages[index])
            start = self._place(text, ids, place, before)
            stop = start and self._place(text, ids, start, before + reply)
            if start and stop and ids[stop[1] - 1] in self.stop_ids:
                spans[index] = (start[1], stop[1])
                place = stop
        return spans

    def _place(
        self,
        text: str,
        ids: Sequence[int],
        other: tuple[int, int],
        part: str,
    ) -> tuple[int, int] | None:
        """The characters of a text's first part, and the number of ids that encode them, counted
        from another such place. None if the text begins otherwise, or an id lies on both sides.
        """
        for begin, place in (other, (0, 0)) if text.startswith(part) else ():
            piece = self._tokenize(part[begin:])
            if ids[place : place + len(piece)] == piece:
                return len(part), place + len(piece)
        return None

    def continued(self, before: str, text: str) -> list[int]:
        """The ids of a text that a model writes behind the ids of another one."""
        # an id of both texts may lie on both sides; behind other texts, none of this one does
        for other in (before, "\n", "a"):
            own = self._tokenize(other)
            both = self._tokenize(other + text)
            if both[: len(own)] == own:
                return both[len(own) :]
        return self._tokenize(text)

    def _prepared(self, messages: Conversation) -> Conversation:
        return self._with_system(unrendered(messages, self._marks, self.rendered))

    def _with_system(self, messages: Conversation) -> Conversation:
        if self.system_prompt is None or (messages and messages[0].role == "system"):
            return messages
        return (Message("system", self.system_prompt), *messages)

    def _replies(
        self,
        messages: Conversation,
        train: Literal["all", "last"],
    ) -> tuple[Conversation, set[int]]:
        """The turns of a conversation that ends with a reply, and the places of those to be
        trained.

        Raises:
            DataError: it ends on another turn or an empty one, or none is to be trained.
        """
        messages = self._prepared(messages)
        if not messages or messages[-1].role != "assistant":
            raise DataError("the conversation does not end with an assistant turn")
        if messages[-1].is_empty:
            raise DataError("the assistant's reply is empty")
        first = 0 if train == "all" else len(messages) - 1
        wanted = {
            place
            for place, message in enumerate(messages)
            if message.role == "assistant" and message.train and place >= first
        }
        if not wanted:
            raise DataError(_NOTHING_TO_TRAIN)
        return messages, wanted

    def _tokenize(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            DataError: it needs a token that the model has no embedding for.
        """
        ids = (
            self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if text
            else []
        )
        if max(ids, default=0) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise DataError(
                f"the model has no embedding for the token {token!r}, which its tokenizer lists",
            )
        return ids

    @cached_property
    def _marks(self) -> tuple[Marks, ...]:
        """Marks of rendered texts: the template's own first, then those of published families."""
        special = (self.tokenizer.bos_token, self.tokenizer.eos_token, *self.chat.stops)
        own = marks_of(self.chat.if_taken, tuple(filter(None, special)))
        return FAMILIES if own is None else (own, *FAMILIES)
