"""The way from a sampled reply to the prompt for the next one, in token ids.

What an environment says is appended to the ids that were sampled, and nothing that was sampled is
rendered again. The text between two replies is read off the chat template: two short conversations
that differ in the words of one reply alone have the same text behind that reply. So no family of
templates needs rules of its own, and the cost of a turn does not grow with the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from tether.core.errors import DataError
from tether.core.types import Conversation, Ids, Json, Message
from tether.data.chat import ChatEncoder

_WORDS = ("zqxa", "qjvb")
"""Words that no template writes, which end with different letters."""


class TurnBridge:
    """The text of a template between a reply and the prompt for the next reply.

    Args:
        encoder: of the model that samples.
        tools: the JSON text of the schemas of the functions that the model may call; empty: none.
    """

    def __init__(self, encoder: ChatEncoder, tools: str = "") -> None:
        self.encoder = encoder
        self.question = Message("user", "a", tools=tools)

    def after(
        self,
        last: int,
        calls: Sequence[Json],
        turns: Conversation,
        template: str = "",
    ) -> Ids:
        """The ids between a sampled reply and the next one: what the environment says, and the
        beginning of the next reply.

        Args:
            last: the reply's last id. A stop token is not repeated; behind another one, the end of
                the turn comes first.
            calls: the functions that the reply calls, in OpenAI's format with their ids.
            turns: of the environment, at least one.
            template: the arguments of the chat template for this conversation, as
                `Message.template` has them.

        Raises:
            DataError: the template refuses these turns, leaves one out, or has no mark between a
                reply and them.
        """
        question = replace(self.question, template=template)
        behind = self._behind(question, calls, turns)
        limit = _first_place(behind, turns)
        ended = last in self.encoder.stop_ids
        text = self._without_end(behind, limit) if ended else behind
        word = self.encoder.tokenizer.decode([last], skip_special_tokens=False)
        return tuple(self.encoder.continued(word, text))

    def _behind(self, question: Message, calls: Sequence[Json], turns: Conversation) -> str:
        """The text of the template behind the words of a reply, or behind the last value of its
        last call.
        """
        chat = self.encoder.chat
        if calls:  # of a template that knows none, what follows on a reply
            talks = [(question, _reply(word, calls), *turns) for word in _WORDS]
            one, other = (chat.if_taken(talk, waiting=True) for talk in talks)
            if one and other and one != other:
                return common_end(one, other)
        talks = [(question, _reply(word, ()), *turns) for word in _WORDS]
        one, other = (chat.render(talk, waiting=True) for talk in talks)
        if one == other:
            raise DataError(
                "the chat template leaves out earlier replies; set model.chat_template to one that "
                "keeps them",
            )
        return common_end(one, other)

    def _without_end(self, behind: str, limit: int) -> str:
        """The text behind the mark that ends a reply, which was sampled.

        Where a template ends an earlier reply with another mark than the last one, as gpt-oss's
        does, the sampled one stays in its place.
        """
        tokenizer = self.encoder.tokenizer
        end = self.encoder.chat.stop.search(behind)
        if end is not None and end.end() <= limit:
            return behind[end.end() :]
        first = tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
        if {*first} <= {*tokenizer.all_special_ids}:
            return behind.removeprefix(tokenizer.decode(first, skip_special_tokens=False))
        raise DataError(
            "the chat template has no mark between a reply and the turn behind it; set "
            "model.chat_template to one that ends replies",
        )


def common_end(one: str, other: str) -> str:
    """The longest text with which both texts end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return one[len(one) - length :]


def _reply(word: str, calls: Sequence[Json]) -> Message:
    """A reply of this word, or with the same calls whose last argument is this word."""
    if not calls:
        return Message("assistant", word)
    *others, last = calls
    probed = last | {"function": last["function"] | {"arguments": {"word": word}}}
    return Message("assistant", "", tool_calls=tuple(map(json.dumps, (*others, probed))))


def _first_place(text: str, turns: Conversation) -> int:
    """The place of the first turn's words in a text; results of tools may be written as JSON.

    Raises:
        DataError: the words of a turn are not there.
    """
    places = [0]
    for turn in turns:
        words = turn.content.strip()
        forms = words, json.dumps(words, ensure_ascii=False)[1:-1]
        places.append(max(text.find(form, places[-1]) for form in forms))
        if places[-1] < 0:
            raise DataError(
                f"the chat template leaves out or rewrites {turn.role} turns; set "
                "model.chat_template to one that keeps them",
            )
    return places[1]
