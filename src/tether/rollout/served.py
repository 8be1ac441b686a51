"""A model behind an OpenAI-compatible address that is asked: https://platform.openai.com/docs/api-reference/chat.

vLLM, SGLang, llama.cpp, Ollama and most paid services speak it. Log-probabilities are those of the first tokens of the reply;
where a server gives none, the reply itself is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from tether.core.config import Config
from tether.core.errors import ConfigError, ModelError
from tether.core.protocols import Reply, Verdict
from tether.core.types import Conversation, Sampling
from tether.rollout.verdicts import Likeliest, check_options, read_verdict

T = TypeVar("T")

LADDER = (20, 5, 0)
"""How many likeliest tokens are asked for; a server that refuses is asked for fewer, and in the end for none."""
MARGIN_TOKENS = 256
"""What a template may add to a conversation, where the most that a request can cost is set aside; answers teach more."""
LONGEST_WAIT = 60.0
SPENT, DOWN, QUOTA = "budget spent", "the server gave no answers", "the account has no quota left"
CONTROL = re.compile(r"<(?=[|｜][^\s<>]{1,40}[|｜]>|/?s>|/?think>|(?:start|end)_of_turn>|[be]os>)|\[(?=/?INST\])")
"""Where control tokens of the usual templates begin; which ones a server's tokenizer has is not known here."""


class ServerConfig(Config):
    """Where a server is, and what asking it may cost. The key is never here: it stands in an environment variable."""

    url: str = Field(description="base address, such as http://127.0.0.1:8000/v1")
    model: str = Field(description="the model's name at the server")
    key_variable: str | None = Field(
        default=None, description="environment variable that holds the key; unset: OPENAI_API_KEY for api.openai.com, else no key"
    )
    concurrency: int = Field(default=8, ge=1, description="requests at a time")
    time_limit: float = Field(default=120.0, gt=0, description="seconds a request")
    attempts: int = Field(default=5, ge=1, description="requests a question, where a server is busy, fails or is silent")
    max_requests: int | None = Field(default=None, ge=0, description="for all questions together, repeated ones counted")
    max_tokens: int | None = Field(default=None, ge=0, description="of prompts and replies, for all questions together")
    reply_tokens: int = Field(default=8, ge=1, description="longest reply where one of several options is asked for")

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ValueError("an address with a name, a password or a query would be written down. Use key_variable for the key")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: write http://host:port/v1")
        return url.rstrip("/")

    def key(self) -> str | None:
        """The key, from the environment.

        Raises:
            ConfigError: the variable that should hold it is not set.
        """
        name = self.key_variable or ("OPENAI_API_KEY" if urlsplit(self.url).hostname == "api.openai.com" else None)
        if name is None:
            return None  # a key that belongs elsewhere is not shown to this server
        if not os.environ.get(name):
            raise ConfigError(f"the key for {self.url} belongs into the environment variable {name}, which is not set")
        return os.environ[name]


class Budget:
    """Requests and tokens that may still be spent; never exceeded, whatever is under way at the same time."""

    def __init__(self, requests: int | None, tokens: int | None) -> None:
        self.max_requests, self.max_tokens = requests, tokens
        self.requests = self.tokens = self.reserved = 0
        self.settled = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def request(self, most: int) -> AsyncIterator[Callable[[int], None] | None]:
        """One request that costs at most so many tokens: what it cost is to be told; None when the budget does not cover it."""
        if not await self._covers(most):
            yield None
            return
        cost = [most]  # for all that is known, a request without an answer has cost that
        try:
            yield cost.append
        finally:
            async with self.settled:
                self.reserved, self.tokens = self.reserved - most, self.tokens + cost[-1]
                self.settled.notify_all()

    async def _covers(self, most: int) -> bool:
        async with self.settled:
            while True:
                if self.max_requests is not None and self.requests >= self.max_requests:
                    return False
                if self.max_tokens is None or self.tokens + self.reserved + most <= self.max_tokens:
                    self.requests, self.reserved = self.requests + 1, self.reserved + most
                    return True
                if not self.reserved:
                    return False
                await self.settled.wait()  # what is under way may cost less than was set aside for it


class _Failure(NamedTuple):
    """Why a request brought nothing, whether to ask again and after how many seconds; `free`: it cost no tokens.

    `reworded`: the next one says the same in other words, so this was no attempt.
    """

    reason: str
    again: bool
    wait: float = 0.0
    free: bool = False
    reworded: bool = False


class ServedChat:
    """Speaks core.protocols.ChatModel.

    Busy servers (429), failing ones (5xx) and silent ones are asked again, after twice as long each time or as long as they say.
    Where the budget does not cover a request, the account is empty (402), or many questions in a row have got no answer, nothing
    more is asked, and that is the reason of what is left. A server that has answered and then forbids (403) means that question.

    Raises:
        ConfigError: the package openai is not installed, or there is no key in the variable that should hold it.
    """

    def __init__(self, config: ServerConfig, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        try:
            import openai
        except ImportError:
            raise ConfigError("asking a server needs the package openai: pip install 'tether-rlhf[judge]'") from None
        self.config, self.sleep, self.openai, self._key = config, sleep, openai, config.key()
        self.name = f"{config.model} at {config.url}"
        self.spent: Counter[str] = Counter()
        self.budget = Budget(config.max_requests, config.max_tokens)
        self._level, self._length_name, self._fruitless, self._stopped = 0, "max_tokens", 0, ""
        self._answered = False
        self._margin = MARGIN_TOKENS

    def usage(self) -> Mapping[str, int]:
        return self.spent

    def verdicts(
        self,
        conversations: Sequence[Conversation],
        options: Sequence[str],
        *,
        told: Callable[[int, Verdict], None] | None = None,
    ) -> list[Verdict]:
        """See core.protocols.ChatModel.

        Raises:
            ModelError: the server refuses the key, or knows no such model.
            ValueError: the options cannot be told apart by what a reply begins with.
        """
        check_options(options)

        def how() -> dict[str, Any]:
            most = LADDER[self._level]
            return {"temperature": 0.0, **({"logprobs": True, "top_logprobs": most} if most else {})}

        async def ask(client: Any, place: int) -> Verdict:
            written, reason = await self._written(client, conversations[place], self.config.reply_tokens, how)
            if written is None:
                return Verdict(None, reason=reason)
            return read_verdict(written.text, written.likeliest, options)

        return self._all(len(conversations), ask, told)

    def replies(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        seed: int = 0,
        ordinals: Sequence[int] | None = None,
        told: Callable[[int, Reply], None] | None = None,
    ) -> list[Reply]:
        """See core.protocols.ChatModel; whether seed and ordinal decide the reply is up to the server."""
        places = range(len(conversations)) if ordinals is None else ordinals
        fixed: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        fixed |= {"stop": list(sampling.stop_strings)} if sampling.stop_strings else {}
        more = {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        fixed |= {"extra_body": more} if more else {}

        async def ask(client: Any, place: int) -> Reply:
            how = {**fixed, "seed": random.Random(f"{seed}/{places[place]}").getrandbits(31)}
            written, reason = await self._written(client, conversations[place], sampling.max_new_tokens, lambda: how)
            return Reply(None, False, reason) if written is None else Reply(written.text.strip(), written.finished)

        return self._all(len(conversations), ask, told)

    def _all(self, count: int, ask: Callable[[Any, int], Awaitable[T]], told: Callable[[int, T], None] | None) -> list[T]:
        """Every question once, `concurrency` of them under way at a time."""
        found: dict[int, T] = {}
        places = iter(range(count))

        async def work(client: Any) -> None:
            for place in places:
                found[place] = await ask(client, place)
                if told:
                    told(place, found[place])

        async def all_of_them() -> None:
            self.budget.settled = asyncio.Condition()  # one belongs to one event loop
            options = {"base_url": self.config.url, "timeout": self.config.time_limit, "max_retries": 0}
            async with self.openai.AsyncOpenAI(api_key=self._key or "none", **options) as client:
                workers = [asyncio.create_task(work(client)) for _ in range(min(count, self.config.concurrency))]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()

        _run(all_of_them())
        return [found[place] for place in range(count)]

    async def _written(
        self, client: Any, conversation: Conversation, length: int, how: Callable[[], dict[str, Any]]
    ) -> tuple[_Written | None, str]:
        """What came back, or None and why; `how` is asked before each attempt, for a refusal may have changed it."""
        messages = [{"role": turn.role, "content": CONTROL.sub(r"\g<0> ", turn.content)} for turn in conversation]
        size = len(json.dumps(messages, ensure_ascii=False).encode())  # no token is less than a byte
        attempt = 0
        while not self._stopped:
            most = size + self._margin + length
            async with self.budget.request(most) as cost:
                if cost is None:
                    return None, SPENT
                self.spent.update({"requests": 1, **({"retries": 1} if attempt else {})})
                level, name = self._level, self._length_name
                wanted = {"model": self.config.model, "messages": messages, name: length, **how()}
                try:
                    completion = await asyncio.wait_for(client.chat.completions.create(**wanted), self.config.time_limit)
                    written = _read(completion)
                    cost(sum(written.tokens.values()) or most)
                    self._margin += max(0, sum(written.tokens.values()) - size - self._margin - length)
                    self.spent.update(written.tokens)
                    self._fruitless, self._answered = 0, True
                    return written, ""
                except (self.openai.OpenAIError, TimeoutError, ValueError) as error:
                    failure = self._failure(error, attempt, level, name)
                    if failure.free:
                        cost(0)
            self.spent[f"failed: {failure.reason.partition(': ')[0]}"] += 1
            if not failure.again:
                return None, failure.reason
            attempt += not failure.reworded
            if attempt == self.config.attempts:
                self._fruitless += 1
                if self._fruitless > 2 * self.config.concurrency:
                    self._stopped = f"{DOWN}: {failure.reason}, {self._fruitless} times in a row"
                return None, failure.reason
            await self.sleep(failure.wait)
        return None, self._stopped

    def _failure(self, error: Any, attempt: int, level: int, name: str) -> _Failure:
        """What an error means; some refusals change how the next request is worded, or end the asking.

        Raises:
            ModelError: every other request would meet it too, and the user can mend it.
        """
        wait = min(LONGEST_WAIT, 0.5 * 2**attempt) * (0.75 + 0.5 * random.random())
        if isinstance(error, self.openai.APIStatusError):
            code, text = error.status_code, self._said(error)
            # Some services refuse a single prompt so, which their moderation has flagged: https://openrouter.ai/docs/errors.
            of_one = code == 403 and (self._answered or "flagged" in text)
            if code in (401, 403, 404) and not of_one:
                raise ModelError(
                    f"{self.name} refuses (HTTP {code}): {text}. Mend the address, the model's name or the key"
                ) from None
            if code in (400, 422) and self._reworded(text, level, name):
                return _Failure(f"HTTP {code}", True, free=True, reworded=True)
            if code == 402 or "insufficient_quota" in str(error.body):
                self._stopped = QUOTA
                return _Failure(QUOTA, False, free=True)
            again = code in (408, 409, 425, 429) or code >= 500
            return _Failure(f"HTTP {code}" if again else f"HTTP {code}: {text}", again, _told_to_wait(error) or wait, free=True)
        if isinstance(error, self.openai.APITimeoutError | TimeoutError):
            return _Failure("no answer in time", True, wait)
        if isinstance(error, self.openai.APIConnectionError):
            return _Failure("no connection", True, wait, free=type(error.__cause__).__name__.startswith("Connect"))
        return _Failure("unreadable answer", True, wait)

    def _said(self, error: Any) -> str:
        """The server's own words, shortened and without the key, which some repeat."""
        said = error.body.get("message") if isinstance(error.body, dict) else error.body
        text = " ".join((said if isinstance(said, str) and said else str(error.message)).split()).rstrip(".")
        return (text.replace(self._key, "(key)") if self._key else text)[:200]

    def _reworded(self, text: str, level: int, name: str) -> bool:
        """Whether the next request will say it differently: fewer likeliest tokens, or another name for the length."""
        if "max_completion_tokens" in text and name == "max_tokens":
            self._length_name = "max_completion_tokens"
        elif "logprobs" in text and level < len(LADDER) - 1:
            self._level = max(self._level, level + 1)
        else:
            return False
        return True


class _Written(NamedTuple):
    """A reply, whether it ended by itself, the likeliest tokens at each of its places, and what it cost."""

    text: str
    finished: bool
    likeliest: Likeliest
    tokens: dict[str, int]


def _read(completion: Any) -> _Written:
    """The parts of a chat completion.

    Raises:
        ValueError: it is none.
    """
    try:
        choice, cost = completion.choices[0], completion.usage
        places = (choice.logprobs.content if choice.logprobs else None) or ()
        likeliest = [[(t.token, float(t.logprob)) for t in (place, *(place.top_logprobs or ()))] for place in places]
        tokens = {"prompt_tokens": int(cost.prompt_tokens), "reply_tokens": int(cost.completion_tokens)} if cost else {}
        return _Written(str(choice.message.content or ""), choice.finish_reason != "length", likeliest, tokens)
    except (AttributeError, TypeError, LookupError) as error:
        raise ValueError(f"not a chat completion: {error}") from error


def _told_to_wait(error: Any) -> float:
    """Seconds that the server asks for, at most a minute; 0 where it does not say."""
    try:
        return max(0.0, min(LONGEST_WAIT, float(error.response.headers.get("retry-after", 0))))
    except ValueError:
        return 0.0


def _run(work: Coroutine[Any, Any, None]) -> None:
    """To its end, also from a notebook, where a loop is running already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, work).result()
