"""A model behind an OpenAI-compatible address that is asked:
https://platform.openai.com/docs/api-reference/chat.

vLLM, SGLang, llama.cpp, Ollama and most paid services implement it. Log-probabilities are those of
the first tokens of the reply; where a server gives none, the reply itself is read. Retries and
waiting are the OpenAI client's own; every request of it, a repeated one too, passes a meter that
keeps the budget.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx2
import openai

from tether.core.errors import ModelError
from tether.core.protocols import AnswerT, PlacedAnswers, Reply, Told, Verdict
from tether.core.types import Conversation, Json, JsonValue, Sampling
from tether.judges.verdicts import DOWN, QUOTA, SPENT, Likeliest, read_verdict
from tether.settings.judges import JudgeServerConfig

Options = dict[str, object]
"""Settings of a request, as the OpenAI client takes them."""

LADDER = (20, 5, 0)
"""Numbers of likeliest tokens to ask for. If a server refuses one, the next smaller number is
tried, and at last none.
"""
MARGIN_TOKENS = 256
"""Tokens that a template may add to a conversation, for the upper bound of a request's cost.
Answers correct the number.
"""
NO_ANSWER, NO_CONNECTION, UNREADABLE = "no answer in time", "no connection", "unreadable answer"
CONTROL = re.compile(
    r"<(?=[|｜][^\s<>]{1,40}[|｜]>|/?s>|/?think>|(?:start|end)_of_turn>|[be]os>)|\[(?=/?INST\])",
)
"""Beginnings of control tokens in the usual templates. The tokens of the server's own tokenizer are
unknown here.
"""


class Stopped(openai.OpenAIError):
    """Nothing more is asked, and why; the client passes its own errors on without asking again."""


class Meter(openai.DefaultAsyncHttpxClient):
    """Sends the client's requests: within the budget, each with a limit of time, all counted.

    The limits of requests and tokens are never exceeded, even with many requests at once. The
    highest possible cost of a request is reserved before it is sent.
    """

    def __init__(self, chat: ServedChat) -> None:
        super().__init__(timeout=chat.config.time_limit)
        self.chat, self.reserved, self.settled = chat, 0, asyncio.Condition()

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """One request, a repeated one too.

        Raises:
            Stopped: the budget does not cover it, the account is empty, or the server has given no
                answers for long.
            RequestError: there was no answer, or no chat completion. The client asks again. The
                class is that of httpx2.
        """
        chat, body = self.chat, json.loads(request.content)
        # no token is less than a byte
        sent = body["messages"] + body.get("tools", [])
        size = len(json.dumps(sent, ensure_ascii=False).encode())
        size += body.get("max_tokens") or body["max_completion_tokens"]
        most = cost = size + chat.margin
        await self._reserve(most)
        chat.spent.update(
            ["requests", "retries"]
            if int(request.headers["x-stainless-retry-count"])
            else ["requests"],
        )
        failure = ""
        try:
            # the client's own limit begins again with every byte
            async with asyncio.timeout(chat.config.time_limit):
                response = await super().send(request, **options)
            if response.is_success:
                tokens = read_completion(response.json()).tokens
                # a server that does not say may have taken all that was set aside
                cost = sum(tokens.values()) or most
                chat.margin = max(chat.margin, cost - size)
                chat.spent.update(tokens)
                return response
            cost, failure = 0, f"HTTP {response.status_code}"
            if response.status_code == 402 or "insufficient_quota" in response.text:
                failure = chat.stopped = QUOTA
                raise Stopped(QUOTA)
            return response
        except (TimeoutError, httpx2.TimeoutException):
            failure = NO_ANSWER
            raise httpx2.ReadTimeout(failure, request=request) from None
        except httpx2.RequestError as error:
            cost, failure = 0 if isinstance(error, httpx2.ConnectError) else most, NO_CONNECTION
            raise
        except ValueError as error:
            failure = UNREADABLE
            raise httpx2.DecodingError(failure, request=request) from error
        finally:
            if failure:
                chat.spent[f"failed: {failure}"] += 1
            async with self.settled:
                self.reserved, chat.tokens = self.reserved - most, chat.tokens + cost
                self.settled.notify_all()

    async def _reserve(self, most: int) -> None:
        """Take one request, and the most tokens that it can cost, from the budget."""
        chat = self.chat
        requests = self.chat.config.max_requests
        tokens = self.chat.config.max_tokens
        async with self.settled:
            while (
                tokens is not None
                and chat.tokens + self.reserved + most > tokens
                and not chat.stopped
            ):
                if not self.reserved:
                    raise Stopped(SPENT)
                # a request under way may cost less than was set aside for it
                await self.settled.wait()
            if chat.stopped or (requests is not None and chat.requests >= requests):
                raise Stopped(chat.stopped or SPENT)
            chat.requests, self.reserved = chat.requests + 1, self.reserved + most


class ServedChat:
    """Implements core.protocols.ChatModel.

    The client repeats requests to busy servers (429), failing ones (5xx) and silent ones. It waits
    longer each time, or as long as the server's reply names. In three cases, the client sends no
    further requests. The budget does not cover a request, the account is empty (402), or many
    questions in a row got no answer. The case is then the reason of all remaining failures. If a
    server has answered before, a refusal (403) concerns that one question.

    Attributes:
        requests, tokens: what was spent of the budget, by all questions together.

    Raises:
        ConfigError: there is no key in the variable that should hold it.
    """

    def __init__(self, config: JudgeServerConfig) -> None:
        self.config, self._key = config, config.key()
        self.name = f"{config.model} at {config.url}"
        self.spent: Counter[str] = Counter()
        self.requests, self.tokens, self.margin, self.stopped = 0, 0, MARGIN_TOKENS, ""
        self._level, self._length_name = 0, "max_tokens"
        self._fruitless, self._answered = 0, False

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

        async def ask(client: openai.AsyncOpenAI, place: int) -> Verdict:
            length = self.config.reply_tokens
            completion, reason = await self._complete(
                client,
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
        fixed: Options = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        fixed |= {"stop": list(sampling.stop_strings)} if sampling.stop_strings else {}
        more = {"top_k": sampling.top_k, "min_p": sampling.min_p}
        fixed |= {"extra_body": {name: value for name, value in more.items() if value}}

        async def ask(client: openai.AsyncOpenAI, place: int) -> Reply:
            how = {**fixed, "seed": random.Random(f"{seed}/{ordinals[place]}").getrandbits(31)}
            completion, reason = await self._complete(
                client,
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
        ask: Callable[[openai.AsyncOpenAI, int], Awaitable[AnswerT]],
        told: Told[AnswerT],
    ) -> list[AnswerT]:
        """Every question once, `concurrency` of them under way at a time."""
        answers, places, config = PlacedAnswers(told), iter(range(count)), self.config

        async def work(client: openai.AsyncOpenAI) -> None:
            for place in places:
                answers[place] = await ask(client, place)

        async def all_of_them() -> None:
            how = {
                "timeout": config.time_limit,
                "max_retries": config.attempts - 1,
                "http_client": Meter(self),
            }
            async with openai.AsyncOpenAI(
                api_key=self._key or "none",
                base_url=config.url,
                **how,
            ) as client:
                workers = [
                    asyncio.create_task(work(client)) for _ in range(min(count, config.concurrency))
                ]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()

        _run(all_of_them())
        return answers.in_order()

    async def _complete(
        self,
        client: openai.AsyncOpenAI,
        conversation: Conversation,
        length: int,
        how: Options,
        *,
        likeliest: bool = False,
    ) -> tuple[Completion | None, str]:
        """A completion, or None and why; a refusal may change the wording, so that it is asked once
        more.

        Raises:
            ModelError: every other request would meet the same, and the user can mend it.
        """
        messages: Any = _wire_rows(conversation)
        tools = conversation[0].tools
        while True:
            level, name = self._level, self._length_name
            most = LADDER[level] if likeliest else 0
            wording: Json = {
                name: length,
                **how,
                # a reply is text: the model knows its tools and calls none
                **({"tools": json.loads(tools), "tool_choice": "none"} if tools else {}),
                **({"logprobs": True, "top_logprobs": most} if most else {}),
            }
            try:
                answer = await client.chat.completions.create(
                    model=self.config.model,
                    messages=messages,
                    **wording,
                )
                self._fruitless, self._answered = 0, True
                return read_completion(answer.model_dump()), ""
            except Stopped as stop:
                return None, str(stop)
            except openai.APIStatusError as error:
                code, text = error.status_code, self._words(error)
                # Some services refuse a single prompt so, which their moderation has flagged:
                # https://openrouter.ai/docs/errors.
                of_one = code == 403 and (self._answered or "flagged" in text)
                if code in (401, 403, 404) and not of_one:
                    raise ModelError(
                        f"{self.name} refuses (HTTP {code}): {text}. Mend the address, the "
                        "model's name or the key",
                    ) from None
                if code in (400, 422) and self._reworded(text, level, name):
                    continue
                if code < 500 and code not in (408, 409, 429):
                    return None, f"HTTP {code}: {text}"
                reason = f"HTTP {code}"
            except openai.APITimeoutError:
                reason = NO_ANSWER
            except openai.APIConnectionError as error:
                reason = (
                    UNREADABLE
                    if isinstance(error.__cause__, httpx2.DecodingError)
                    else NO_CONNECTION
                )
            self._fruitless += 1
            if self._fruitless > 2 * self.config.concurrency:
                self.stopped = f"{DOWN}: {reason}, {self._fruitless} times in a row"
            return None, reason

    def _words(self, error: openai.APIStatusError) -> str:
        """The server's own words, shortened and without the key, which some repeat."""
        words = error.body.get("message") if isinstance(error.body, dict) else error.body
        text = " ".join(
            (words if isinstance(words, str) and words else error.message).split(),
        ).rstrip(".")
        return (text.replace(self._key, "(key)") if self._key else text)[:200]

    def _reworded(self, text: str, level: int, name: str) -> bool:
        """Change the form of the next request: fewer likeliest tokens, or another name for the
        length. False if there is no other form.
        """
        if "max_completion_tokens" in text and name == "max_tokens":
            self._length_name = "max_completion_tokens"
        elif "logprobs" in text and level < len(LADDER) - 1:
            self._level = max(self._level, level + 1)
        else:
            return False
        return True


def _wire_rows(conversation: Conversation) -> list[Json]:
    """The turns as OpenAI's requests have them. The arguments of a call are text there, and control
    tokens are broken up.

    A tool's result names the call that it answers. Results without that name are taken in the order
    of the calls.
    """
    rows, unanswered, number = [], list[str](), itertools.count()
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


class Completion(NamedTuple):
    """A reply, whether it ended by itself, the likeliest tokens at each of its places, and what it
    cost.
    """

    text: str
    finished: bool
    likeliest: Likeliest
    tokens: dict[str, int]


def read_completion(answer: JsonValue) -> Completion:
    """The parts of a chat completion.

    Raises:
        ValueError: it is none.
    """
    try:
        choice, cost = answer["choices"][0], answer.get("usage")
        places = (choice.get("logprobs") or {}).get("content") or ()
        likeliest = [
            [(t["token"], float(t["logprob"])) for t in (place, *(place.get("top_logprobs") or ()))]
            for place in places
        ]
        tokens = (
            {
                "prompt_tokens": int(cost["prompt_tokens"]),
                "reply_tokens": int(cost["completion_tokens"]),
            }
            if cost
            else {}
        )
        return Completion(
            str(choice["message"]["content"] or ""),
            choice["finish_reason"] != "length",
            likeliest,
            tokens,
        )
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"not a chat completion: {error}") from error


def _run(work: Coroutine[object, object, None]) -> None:
    """To its end, also from a notebook, where a loop is running already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()
