"""A model behind an OpenAI-compatible address that is asked:
https://platform.openai.com/docs/api-reference/chat.

vLLM, SGLang, llama.cpp, Ollama and most paid services implement it, each with fields of its own. A
request leaves out, or renames, the field that a server's refusal names. Log-probabilities are those
of the first tokens of the reply; where a server gives none, the reply itself is read. Every
request, a repeated one too, passes a meter that keeps the budget.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import re
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import httpx2
from pydantic import Field, TypeAdapter

from tether.core.errors import ModelError
from tether.core.once import once
from tether.core.protocols import AnswerT, PlacedAnswers, Reply, Told, Verdict
from tether.core.received import Count, Received, received
from tether.core.types import Conversation, Facts, Json, Sampling
from tether.judges.verdicts import DOWN, QUOTA, SPENT, Likeliest, read_verdict
from tether.scale.servers.client import EXCHANGES, HttpClient, HttpReply
from tether.settings.judges import JudgeServerConfig

_LOG = logging.getLogger("tether.judges")

LADDER = (20, 5, 0)
"""Numbers of likeliest tokens to ask for. If a server refuses one, the next smaller number is
tried, and at last none.
"""
FORM = ("max_tokens", "logprobs", "top_logprobs")
OPTIONAL = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "tool_choice")
"""Fields of a request that change their form, and those that are left out, where a server refuses
them.
"""
REFUSALS = 400, 403, 404, 422
BUSY = 408, 409, 429
"""Statuses below 500 of a request that is repeated."""
LARGEST = 32 << 20
"""Bytes of an answer."""
MARGIN_TOKENS = 256
"""Tokens that a template may add to a conversation, for the upper bound of a request's cost.
Answers correct the number.
"""
WAIT, LONGEST_WAIT, LONGEST_ASKED = 0.5, 8.0, 60.0
"""Seconds before the first repetition, which double up to a limit, and the longest wait that a
server may ask for.
"""
NO_ANSWER = "no answer in time"
NO_CONNECTION = "no connection"
UNREADABLE = "unreadable answer"
CONTROL = re.compile(
    r"<(?=[|｜][^\s<>]{1,40}[|｜]>|/?s>|/?think>|(?:start|end)_of_turn>|[be]os>)|\[(?=/?INST\])",
)
"""Beginnings of control tokens in the usual templates. The tokens of the server's own tokenizer are
unknown here.
"""


class StoppedError(Exception):
    """Nothing more is asked, and why."""


class LostError(Exception):
    """A request got no chat completion, and why."""


class ServedChat:
    """Implements core.protocols.ChatModel.

    Requests to busy servers (429), failing ones (5xx) and silent ones are repeated, after a wait
    that grows, or that the server's reply names. In three cases no further request is sent. The
    budget does not cover a request, the account is empty (402), or many questions in a row got no
    answer. The case is then the reason of all remaining failures. If a server has answered before,
    a refusal (403) concerns that one question.

    Args:
        template: arguments of the model's chat template.

    Attributes:
        requests, tokens: what was spent of the budget, by all questions together.

    Raises:
        ConfigError: there is no key in the variable that should hold it.
    """

    def __init__(self, config: JudgeServerConfig, template: Facts = MappingProxyType({})) -> None:
        self.config = config
        self._key = config.key()
        self.template = template
        given = f" with {json.dumps({**template}, sort_keys=True)}" if template else ""
        self.name = f"{config.model} at {config.url}{given}"
        self.spent: Counter[str] = Counter()
        self.requests = 0
        self.tokens = 0
        self.margin = MARGIN_TOKENS
        self.stopped = ""
        self._level = 0
        self._length_name = "max_tokens"
        self._left_out = set[str]()
        self._fruitless = 0
        self._answered = False
        self._reserved = 0
        self._settled = asyncio.Condition()
        key = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = HttpClient(key, LARGEST)

    def usage(self) -> Mapping[str, int]:
        return self.spent

    def verdicts(
        self,
        talks: Sequence[Conversation],
        options: Sequence[str],
        *,
        told: Told[Verdict] = None,
    ) -> list[Verdict]:
        """See core.protocols.ChatModel.

        Raises:
            ModelError: the server refuses the key, or knows no such model.
        """

        async def ask(place: int) -> Verdict:
            length = self.config.reply_tokens
            completion, reason = await self._complete(
                talks[place],
                length,
                {"temperature": 0.0},
                likeliest=True,
            )
            if completion is None:
                return Verdict(None, reason=reason)
            return read_verdict(
                completion.text,
                completion.likeliest,
                options,
                finished=completion.finished,
            )

        return self._all(len(talks), ask, told)

    def replies(
        self,
        talks: Sequence[Conversation],
        sampling: Sampling,
        *,
        seed: int,
        ordinals: Sequence[int],
        told: Told[Reply] = None,
    ) -> list[Reply]:
        """See core.protocols.ChatModel; whether seed and ordinal decide the reply is up to the
        server.
        """
        fixed: Json = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        more = {"top_k": sampling.top_k, "min_p": sampling.min_p, "stop": sampling.stop_strings}
        fixed |= {name: value for name, value in more.items() if value}

        async def ask(place: int) -> Reply:
            how = {**fixed, "seed": random.Random(f"{seed}/{ordinals[place]}").getrandbits(31)}
            completion, reason = await self._complete(
                talks[place],
                sampling.max_new_tokens,
                how,
            )
            return (
                Reply(None, False, reason)
                if completion is None
                else Reply(completion.text.strip(), completion.finished)
            )

        return self._all(len(talks), ask, told)

    def _all(
        self,
        count: int,
        ask: Callable[[int], Awaitable[AnswerT]],
        told: Told[AnswerT],
    ) -> list[AnswerT]:
        """Every question once, `concurrency` of them under way at a time."""
        answers = PlacedAnswers(told)
        places = iter(range(count))

        async def work() -> None:
            for place in places:
                answers[place] = await ask(place)

        async def all_of_them() -> None:
            many = min(count, self.config.concurrency)
            workers = [asyncio.create_task(work()) for _ in range(many)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()

        self._client.run(all_of_them())
        return answers.in_order()

    async def _send(self, body: Json, length: int, *, again: bool) -> Completion | HttpReply:
        """A completion, or the server's answer that it gives none. Within the budget: the highest
        possible cost of a request is set aside before it is sent.

        Raises:
            StoppedError: the budget does not cover it, the account is empty, or the server has
                given no answers for long.
            LostError: there was no answer, or no chat completion.
        """
        # no token is less than a byte
        sent = body["messages"] + body.get("tools", [])
        size = len(json.dumps(sent, ensure_ascii=False).encode(errors="replace")) + length
        most = cost = size + self.margin
        await self._reserve(most)
        self.spent.update(["requests", "retries"] if again else ["requests"])
        failure = ""
        try:
            answer = await self._client.send(
                "POST",
                f"{self.config.url}/chat/completions",
                self.config.time_limit,
                json.dumps(body).encode(),
            )
            if 200 <= answer.status < 300:
                completion = read_completion(answer.content)
                # a server that does not say may have taken all that was set aside
                cost = sum(completion.tokens.values()) or most
                self.margin = max(self.margin, cost - size)
                self.spent.update(completion.tokens)
                return completion
            cost, failure = 0, f"HTTP {answer.status}"
            if answer.status == 402 or b"insufficient_quota" in answer.content:
                failure = self.stopped = QUOTA
                raise StoppedError(QUOTA)
            return answer
        except EXCHANGES as error:
            late = isinstance(error, TimeoutError | httpx2.TimeoutException)
            garbled = isinstance(error, ValueError | zlib.error)
            cost = 0 if isinstance(error, httpx2.ConnectError) else most
            failure = NO_ANSWER if late else UNREADABLE if garbled else NO_CONNECTION
            raise LostError(failure) from error
        finally:
            if failure:
                self.spent[f"failed: {failure}"] += 1
            async with self._settled:
                self._reserved, self.tokens = self._reserved - most, self.tokens + cost
                self._settled.notify_all()

    async def _reserve(self, most: int) -> None:
        """Take one request, and the most tokens that it can cost, from the budget."""
        requests = self.config.max_requests
        tokens = self.config.max_tokens
        async with self._settled:
            while (
                tokens is not None
                and self.tokens + self._reserved + most > tokens
                and not self.stopped
            ):
                if not self._reserved:
                    raise StoppedError(SPENT)
                # a request under way may cost less than was set aside for it
                await self._settled.wait()
            if self.stopped or (requests is not None and self.requests >= requests):
                raise StoppedError(self.stopped or SPENT)
            self.requests, self._reserved = self.requests + 1, self._reserved + most

    async def _complete(
        self,
        conversation: Conversation,
        length: int,
        how: Json,
        *,
        likeliest: bool = False,
    ) -> tuple[Completion | None, str]:
        """A completion, or None and why; a refusal may change the wording, so that it is asked once
        more.

        Raises:
            ModelError: every other request would meet the same, and the user can mend it.
        """
        tools = conversation[0].tools
        # a reply is text: the model knows its tools and calls none
        how = how | ({"tools": json.loads(tools), "tool_choice": "none"} if tools else {})
        arguments = {**self.template, **json.loads(conversation[0].template or "{}")}
        how |= {"chat_template_kwargs": arguments} if arguments else {}
        messages = _wire_rows(conversation)
        failures = 0
        reason = ""
        while failures < self.config.attempts:
            body = self._body(messages, length, how, likeliest=likeliest)
            wait = min(LONGEST_WAIT, WAIT * 2**failures) * random.uniform(0.75, 1.0)
            try:
                answer = await self._send(body, length, again=failures > 0)
            except StoppedError as stop:
                return None, str(stop)
            except LostError as lost:
                reason = str(lost)
            else:
                if isinstance(answer, Completion):
                    self._fruitless = 0
                    self._answered = True
                    return answer, ""
                if self._reworded(answer, body):
                    continue
                reason = self._refused(answer)
                if answer.status < 500 and answer.status not in BUSY:
                    return None, reason
                wait = _wait_asked(answer) or wait
            failures += 1
            if failures < self.config.attempts:
                await asyncio.sleep(wait)
        self._fruitless += 1
        if self._fruitless > 2 * self.config.concurrency:
            self.stopped = f"{DOWN}: {reason}, {self._fruitless} times in a row"
        return None, reason

    def _body(self, messages: list[Json], length: int, how: Json, *, likeliest: bool) -> Json:
        """A request in the words that this server takes."""
        most = LADDER[self._level] if likeliest else 0
        words = {
            "model": self.config.model,
            "messages": messages,
            self._length_name: length,
            **how,
            **({"logprobs": True, "top_logprobs": most} if most else {}),
        }
        return {name: value for name, value in words.items() if name not in self._left_out}

    def _refused(self, answer: HttpReply) -> str:
        """The reason of an answer that is no completion.

        Raises:
            ModelError: every other request would meet the same, and the user can mend it.
        """
        code = answer.status
        words = self._words(answer)
        # Some services refuse a single prompt so, which their moderation has flagged:
        # https://openrouter.ai/docs/errors.
        of_one = code == 403 and (self._answered or "flagged" in words)
        if code in (401, 403, 404) and not of_one:
            raise ModelError(
                f"{self.name} refuses (HTTP {code}): {words}. Mend the address, the model's name "
                "or the key",
            )
        return f"HTTP {code}" if code >= 500 or code in BUSY else f"HTTP {code}: {words}"

    def _words(self, answer: HttpReply) -> str:
        """The server's own words, shortened and without the key, which some repeat."""
        words = answer.words.rstrip(".")
        return (words.replace(self._key, "(key)") if self._key else words)[:200]

    def _reworded(self, answer: HttpReply, sent: Json) -> bool:
        """Change the form of the next requests by what a refusal names: fewer likeliest tokens,
        another name for the length, or a field less. False if there is no other form.
        """
        if answer.status not in REFUSALS:
            return False
        others = re.findall(r"\bmax_[a-z_]*tokens\b", answer.words)
        other = next((name for name in others if name not in sent), "max_completion_tokens")
        # as a field is written, or with other signs between
        patterns = {
            name: rf"(?<![a-z_]){name.replace('_', '[_ -]?')}(?![a-z_])"
            for name in (*FORM, *OPTIONAL)
        }
        named = [
            name
            for name, pattern in patterns.items()
            if re.search(pattern, answer.words, re.IGNORECASE)
        ]
        if "max_tokens" in sent and (others or "max_tokens" in named):
            change = f"{other} in place of max_tokens"
            self._length_name = other
        elif "logprobs" in sent and {"logprobs", "top_logprobs"} & {*named}:
            level = LADDER.index(sent["top_logprobs"]) + 1
            change = f"top_logprobs = {LADDER[level]}"
            self._level = max(self._level, level)
        elif field := next((name for name in named if name in OPTIONAL and name in sent), ""):
            change = f"no {field}"
            self._left_out.add(field)
        else:
            return False
        words = self._words(answer)
        once(_LOG.warning, "%s is asked with %s: it said %r.", self.name, change, words)
        return True


def _wire_rows(conversation: Conversation) -> list[Json]:
    """The turns as OpenAI's requests have them. The arguments of a call are text there, and control
    tokens are broken up.

    A tool's result names the call that it answers. Results without that name are taken in the order
    of the calls.
    """
    rows = []
    unanswered = list[str]()
    number = itertools.count()
    for turn in conversation:
        row = turn.as_row() | {"content": CONTROL.sub(r"\g<0> ", turn.content)}
        calls = row.get("tool_calls", ())
        for call in calls:
            call.setdefault("id", f"call_{next(number)}")
            call["function"]["arguments"] = CONTROL.sub(
                r"\g<0> ",
                json.dumps(call["function"]["arguments"], ensure_ascii=False),
            )
        if turn.role == "tool":
            if turn.tool_call_id in unanswered:
                unanswered.remove(turn.tool_call_id)
            elif unanswered and not turn.tool_call_id:
                row["tool_call_id"] = unanswered.pop(0)
        else:
            unanswered = [call["id"] for call in calls]
        rows.append(row)
    return rows


def _wait_asked(answer: HttpReply) -> float:
    """Seconds that a busy server asks for; 0 where it names none that can be waited."""
    text = answer.headers.get("retry-after", "")
    return min(float(text), LONGEST_ASKED) if re.fullmatch(r"\d{1,3}", text) else 0.0


class Completion(NamedTuple):
    """A reply, whether it ended by itself, the likeliest tokens at each of its places, and what it
    cost.
    """

    text: str
    finished: bool
    likeliest: Likeliest
    tokens: dict[str, int]


class _Part(Received):
    type: str
    text: str | None = None


class _Said(Received):
    content: str | list[_Part] | None = None


class _Likelihood(Received):
    token: str
    logprob: float | None


class _Place(_Likelihood):
    top_logprobs: list[_Likelihood] | None = None


class _Places(Received):
    content: list[_Place] | None = None


class _Choice(Received):
    message: _Said
    finish_reason: str | None = None
    logprobs: _Places | None = None


class _Usage(Received):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class _Answer(Received):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


_ANSWER = TypeAdapter(_Answer)


def read_completion(content: bytes) -> Completion:
    """The parts of a chat completion. Of a content in parts, the texts are the reply.

    Raises:
        ValueError: it is none.
    """
    answer = received(content, _ANSWER)
    choice = answer.choices[0]
    cost = answer.usage
    words = choice.message.content or ""
    if isinstance(words, list):
        words = "".join(part.text or "" for part in words if part.type == "text")
    places = (choice.logprobs.content if choice.logprobs else None) or []
    likeliest = [
        [
            (likely.token, likely.logprob)
            for likely in (place, *(place.top_logprobs or ()))
            if likely.logprob is not None
        ]
        for place in places
    ]
    tokens = (
        {"prompt_tokens": cost.prompt_tokens, "reply_tokens": cost.completion_tokens}
        if cost
        else {}
    )
    return Completion(words, choice.finish_reason != "length", likeliest, tokens)
