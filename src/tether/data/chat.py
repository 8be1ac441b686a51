"""Conversations become token ids, in one place: what is trained, scored and sampled from is encoded by this file alone.

A conversation is cut into segments at the borders of its assistant turns, and each segment is tokenized on its own.
So a prompt's ids are by construction a prefix of the ids of prompt + response, and what a reward model was trained on
is exactly what it scores.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from tether.core.errors import DataError, ModelError
from tether.core.types import Conversation, Message, assistant, user

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ {'user': 'User: ', 'assistant': 'Assistant: '}.get(message['role'], message['role'] | capitalize ~ ': ') }}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


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
        tokenizer: a transformers tokenizer; one without a chat template gets a plain "User: / Assistant:" one.
        stop_ids: the ids that end a turn; the first one is appended where a template writes none.
        template: a Jinja chat template that replaces the tokenizer's own.
        system_prompt: put before conversations that have no system message of their own; None leaves that to the template.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: tuple[int, ...], template: str | None = None, system_prompt: str | None = None
    ) -> None:
        if not stop_ids:
            raise ModelError("the tokenizer has no EOS token, so no response could ever end. Set model.stop_tokens.")
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids
        self.template = template or tokenizer.chat_template or PLAIN_TEMPLATE
        self.system_prompt = system_prompt

    @property
    def pad_id(self) -> int:
        """Any valid id: nothing ever reads what stands on padding."""
        pad = self.tokenizer.pad_token_id
        return self.stop_ids[0] if pad is None else pad

    def describe(self) -> dict[str, Any]:
        """The settings that decide the encoding; two roles that differ here do not speak the same language."""
        return {"template": self.template, "system_prompt": self.system_prompt, "stop_ids": list(self.stop_ids)}

    def prompt(self, messages: Conversation) -> tuple[int, ...]:
        """The ids of a conversation that waits for the assistant."""
        messages = self._with_system(messages)
        if not messages or messages[-1].role == "assistant":
            raise DataError("a prompt must end with a turn that the assistant can answer")
        ids, position, text = [], 0, self._render(messages, waiting=True)
        for context, reply in self._segments(messages):
            ids += self._tokenize(context) + self._ended(reply)[0]
            position += len(context) + len(reply)
        return tuple(ids + self._tokenize(text[position:]))

    def conversation(self, messages: Conversation, train: Literal["all", "last"] = "all") -> Encoded:
        """The ids of a whole conversation; the assistant's turns count, each with the stop token that ends it.

        Args:
            train: `all` assistant turns count, or the `last` alone.

        Raises:
            DataError: there is no assistant turn, it is empty, or the template rewrites earlier turns.
        """
        messages = self._with_system(messages)
        if not messages or messages[-1].role != "assistant":
            raise DataError("the conversation does not end with an assistant turn")
        if messages[-1].is_empty:
            raise DataError("the assistant's reply is empty")
        ids: list[int] = []
        trained: list[bool] = []
        segments = self._segments(messages)
        for number, (context, reply) in enumerate(segments):
            counts = train == "all" or number == len(segments) - 1
            context_ids, (reply_ids, end) = self._tokenize(context), self._ended(reply)
            if number == len(segments) - 1:
                reply_ids = reply_ids[:end]
            ids += context_ids + reply_ids
            trained += [False] * len(context_ids) + [counts] * end + [False] * (len(reply_ids) - end)
        return Encoded(tuple(ids), tuple(trained))

    def rollout(self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Encoded:
        """A sampled response as it was sampled."""
        return Encoded(prompt_ids + response_ids, (False,) * len(prompt_ids) + (True,) * len(response_ids))

    def rollout_for_scoring(self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...]) -> Encoded:
        """A sampled response as the reward model was trained to see it: ended by a stop token, sampled or not."""
        ended = response_ids if response_ids and response_ids[-1] in self.stop_ids else (*response_ids, self.stop_ids[0])
        return self.rollout(prompt_ids, ended)

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        """The text for people and judges: without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    def _with_system(self, messages: Conversation) -> Conversation:
        if self.system_prompt is None or (messages and messages[0].role == "system"):
            return messages
        return (Message("system", self.system_prompt), *messages)

    def _segments(self, messages: Conversation) -> list[tuple[str, str]]:
        """(context, reply) texts, one pair an assistant turn; their concatenation is the rendered conversation."""
        segments, position = [], 0
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._render(messages[:index], waiting=True)
            after = self._render(messages[: index + 1], waiting=False)
            if not after.startswith(before) or len(before) < position:
                raise DataError(
                    "the chat template does not keep earlier turns as they were, so prompt and response cannot be told apart; "
                    "train with a template that does (model.chat_template), or on the last turn of single-turn data"
                )
            if message.tool_calls and after == self._render((*messages[:index], replace(message, tool_calls=())), waiting=False):
                raise DataError("the chat template leaves out tool calls; set model.chat_template to one that writes them")
            segments.append((before[position:], after[len(before) :]))
            position = len(after)
        return segments

    def _render(self, messages: Conversation, *, waiting: bool) -> str:
        rows = [message.as_row() for message in messages]
        tools = next((json.loads(message.tools) for message in messages if message.tools), None)
        try:
            return self.tokenizer.apply_chat_template(
                rows, tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=waiting
            )
        except Exception as error:  # a template is a program of the model's author: anything can come out of it
            raise DataError(f"the chat template refuses this conversation: {error}") from error

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    @property
    def adds_stops(self) -> bool:
        """True if the template writes no stop token after a reply, so that one is added."""
        _, reply = next(iter(self._segments(self._with_system((user("a"), assistant("b"))))))
        return not any(i in self.stop_ids for i in self._tokenize(reply))

    def _ended(self, reply: str) -> tuple[list[int], int]:
        """A reply's ids, with a stop token where the template writes none, and the place after its last stop token."""
        ids = self._tokenize(reply)
        if not any(i in self.stop_ids for i in ids):
            ids.append(self.stop_ids[0])
        return ids, max(place for place, i in enumerate(ids, 1) if i in self.stop_ids)
