"""Conversations become token ids, in one place: what is trained, scored and sampled from is encoded
by this file alone.

The prompt of every reply is the text that a model would continue: its template's prompt for the
turns before. So the ids of a prompt begin the ids of prompt + response. A reward model scores
exactly the text of its training.

Many published templates render an earlier reply differently from the last one. Qwen3 drops its
thought. Phi-3 ends a whole conversation, not a turn. `conversations` gives such replies their own
sequences. `conversation` counts them if the whole text has them as they were generated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tether.core.errors import DataError, ModelError
from tether.core.once import once
from tether.core.types import Conversation, Facts, Json, Message, Rollout, Spans, assistant, user
from tether.data.rendered import FAMILIES, Marks, Rendered, marks_of, unrendered
from tether.data.templates import ChatTemplate, RenderedReply

_LOG = logging.getLogger("tether.data")
_ANCHORS = ("\n", "a")
"""Texts behind which a fragment is tokenized by tokenizers that begin every text with a space of
their own.
"""
_NOTHING_TO_TRAIN = "no assistant turn to train: each is marked as not to be trained"


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each whether it counts (is trained, sampled or scored)."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first that counts."""
        return self.ids[: self.trained.index(True)] if any(self.trained) else self.ids

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)


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
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: tuple[int, ...],
        template: str | Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        rendered: Rendered = "auto",
        vocabulary: int = 2**31,
        context_length: int = 2**31,
    ) -> None:
        if not stop_ids:
            raise ModelError(
                "the tokenizer has no EOS token, so no response could ever end. Set "
                "model.stop_tokens.",
            )
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        stops = [tokenizer.decode([i], skip_special_tokens=False) for i in stop_ids]
        self.chat = ChatTemplate(tokenizer, template, stops)
        self.system_prompt = system_prompt
        self.rendered: Rendered = rendered
        self.vocabulary, self.context_length = vocabulary, context_length

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
        settings: Json = {
            "template": self.template,
            "system_prompt": self.system_prompt,
            "stop_ids": list(self.stop_ids),
        }
        return (
            settings
            if self.chat.for_tools is None
            else settings | {"tool_template": self.chat.for_tools}
        )

    def prompt(self, messages: Conversation) -> tuple[int, ...]:
        """The ids of a conversation that waits for the assistant.

        Raises:
            DataError: it ends with an assistant turn, or the template refuses it or leaves out a
                part.
        """
        messages = self._prepared(messages)
        if not messages or messages[-1].role == "assistant":
            raise DataError("a prompt must end with a turn that the assistant can answer")
        text = self._render(messages, waiting=True)
        self.chat.check_whole(messages, text)
        return tuple(self._context(text, self.chat.replies(messages))[0])

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
        replies = self._answered_replies(messages)
        wanted = range(len(replies)) if train == "all" else [len(replies) - 1]
        encoded, _ = self._sequence(replies, {number for number in wanted if replies[number].train})
        return encoded

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
        replies = self._answered_replies(messages)
        wanted = range(len(replies)) if train == "all" else [len(replies) - 1]
        missing = {number for number in wanted if replies[number].train}
        if not missing:
            raise DataError(_NOTHING_TO_TRAIN)
        sequences = []
        while missing:
            encoded, counted = self._sequence(replies[: max(missing) + 1], missing)
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
        prompt_ids: tuple[int, ...],
        response_ids: tuple[int, ...],
        spans: Spans = (),
    ) -> Encoded:
        """A response as it was sampled: the tokens of its spans count; none given: all of them."""
        counts = [not spans] * len(response_ids)
        for start, stop in spans:
            counts[start:stop] = [True] * (stop - start)
        return Encoded(prompt_ids + response_ids, (False,) * len(prompt_ids) + tuple(counts))

    def sampled(self, rollout: Rollout) -> Encoded:
        """A rollout as it was sampled, with its spans."""
        return self.rollout(rollout.prompt_ids, rollout.response_ids, rollout.spans)

    def rollout_for_scoring(
        self,
        prompt_ids: tuple[int, ...],
        response_ids: tuple[int, ...],
    ) -> Encoded:
        """A sampled response as the reward model was trained to see it: ended by a stop token,
        sampled or not.
        """
        ended = (
            response_ids
            if response_ids and response_ids[-1] in self.stop_ids
            else (*response_ids, self.stop_ids[0])
        )
        # there is no room behind the last token
        if len(prompt_ids) + len(ended) == self.context_length + 1:
            ended = (*ended[:-2], ended[-1])
        return self.rollout(prompt_ids, ended)

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        """The text for people and judges: without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    @property
    def adds_stops(self) -> bool:
        """True if the template writes no stop token after a reply, so that one is added."""
        reply = self.chat.reply(
            self._with_system((user("a"), assistant("b"))),
            1 if self.system_prompt is None else 2,
        )
        return not any(i in self.stop_ids for i in self._tokenize(reply.text))

    def _render(self, messages: Conversation, *, waiting: bool) -> str:
        return self.chat.render(messages, waiting=waiting)

    def _sequence(
        self,
        replies: Sequence[RenderedReply],
        wanted: set[int],
    ) -> tuple[Encoded, set[int]]:
        """The conversation up to the last of these replies; of the wanted ones those count that it
        has as they were generated.

        Returns the ids, and the numbers of the replies that count.

        Raises:
            DataError: none of them counts.
        """
        final = replies[-1]
        ids, spans = self._context(final.before, replies[:-1])
        spans[len(replies) - 1] = (len(ids), len(ids) + len(body := self._ended(final.text)))
        ids += body
        trained = [False] * len(ids)
        counted = wanted & spans.keys()
        if not counted:
            raise DataError(_NOTHING_TO_TRAIN)
        for number in counted:
            start, stop = spans[number]
            trained[start:stop] = [True] * (stop - start)
        return Encoded(tuple(ids), tuple(trained)), counted

    def _context(
        self,
        text: str,
        replies: Sequence[RenderedReply],
    ) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """The ids of a rendered text, and the first and last place + 1 of each reply that is in it
        as it was generated.
        """
        ids: list[int] = []
        spans: dict[int, tuple[int, int]] = {}
        position = 0
        for number, reply in enumerate(replies):
            if len(reply.before) < position or not text.startswith(reply.whole):
                continue
            ids += self._tokenize(text[position : len(reply.before)], begins=position == 0)
            body = self._ended(reply.text)
            spans[number] = (len(ids), len(ids) + len(body))
            ids += body
            position = len(reply.whole)
        return ids + self._tokenize(text[position:], begins=position == 0), spans

    def _prepared(self, messages: Conversation) -> Conversation:
        return self._with_system(unrendered(messages, self._marks, self.rendered))

    def _with_system(self, messages: Conversation) -> Conversation:
        if self.system_prompt is None or (messages and messages[0].role == "system"):
            return messages
        return (Message("system", self.system_prompt), *messages)

    def _answered_replies(self, messages: Conversation) -> list[RenderedReply]:
        """The replies of a conversation that ends with one.

        Raises:
            DataError: it ends on another turn or an empty one, or see `ChatTemplate.reply`.
        """
        messages = self._prepared(messages)
        if not messages or messages[-1].role != "assistant":
            raise DataError("the conversation does not end with an assistant turn")
        if messages[-1].is_empty:
            raise DataError("the assistant's reply is empty")
        return self.chat.replies(messages)

    def _tokenize(self, text: str, *, begins: bool = False) -> list[int]:
        """The ids of a text, or of a fragment that follows another text.

        Raises:
            DataError: it needs a token that the model has no embedding for.
        """
        ids = self._ids(text, begins) if text else []
        if max(ids, default=0) >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise DataError(
                f"the model has no embedding for the token {token!r}, which its tokenizer lists",
            )
        return ids

    def _ids(self, text: str, begins: bool) -> list[int]:
        if begins or self._anchor is None:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        anchor = self.tokenizer(self._anchor, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(self._anchor + text, add_special_tokens=False)["input_ids"]
        if ids[: len(anchor)] == anchor:
            return ids[len(anchor) :]
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def _anchor(self) -> str | None:
        """A text behind which a fragment gets no space of its own; None where the tokenizer adds
        none (SentencePiece does).
        """

        def pieces(text: str) -> list[str]:
            return self.tokenizer.convert_ids_to_tokens(
                self.tokenizer(text, add_special_tokens=False)["input_ids"],
            )

        if not pieces("The")[:1] or not pieces("The")[0].startswith("▁"):
            return None
        behind = ((anchor, pieces(anchor), pieces(f"{anchor}The")) for anchor in _ANCHORS)
        return next(
            (
                a
                for a, own, both in behind
                if both[: len(own)] == own and both[len(own) :][0][:1] != "▁"
            ),
            None,
        )

    def _ended(self, reply: str) -> list[int]:
        """A reply's ids, with a stop token where the template writes none."""
        ids = self._tokenize(reply)
        return ids if ids and ids[-1] in self.stop_ids else [*ids, self.stop_ids[0]]

    @cached_property
    def _marks(self) -> tuple[Marks, ...]:
        """Marks of rendered texts: the template's own first, then those of published families."""
        if self.rendered == "keep":
            return ()
        special = (self.tokenizer.bos_token, self.tokenizer.eos_token, *self.chat.stops)
        own = marks_of(
            lambda messages, waiting: self._render(messages, waiting=waiting),
            tuple(filter(None, special)),
        )
        return FAMILIES if own is None else (own, *FAMILIES)
