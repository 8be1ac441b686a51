"""An engine behind HTTP, on the standard library: the endpoints of vLLM's that a served engine
asks.

`GET /health`, `GET /v1/models`, `POST /v1/load_lora_adapter`, `POST /v1/unload_lora_adapter`, `POST
/inference/v1/generate`. Requests that wait together and ask alike are decoded together by the local
engine, in one thread. Other rows in a batch round otherwise, so bits depend on which requests meet,
unless each is decoded alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from tether.core.errors import TetherError
from tether.core.types import Json, Sampling, StopReason
from tether.rollout.drawn import Drawn, Draws, Ids, score_ids, top_ids
from tether.rollout.local import LocalEngine
from tether.rollout.wire import GENERATE, AdapterRequest, GenerateRequest
from tether.scale.servers.http import Answer, JsonServer, Route

T = TypeVar("T")
TOGETHER = 0.01
"""Seconds after a request in which another may come that is decoded with it; a run sends all those
of a step at once.
"""
Loader = Callable[[str, Path], LocalEngine]
"""From a name and a folder, of an adapter or a whole model, to an engine that samples with it."""


Result = list[Drawn] | Json | tuple[int, str]
"""The responses to a prompt, its log-probabilities, or the status and the reason of a failure."""


class Asked(NamedTuple):
    """A request, and the queue on which its responses go back, or the error."""

    kind: tuple[str, int, int, Ids, Sampling]
    """Adapter, samples, seed, stop ids and sampling: what requests must share to be decoded
    together.
    """
    ids: Ids
    ordinal: int
    back: queue.Queue[Result]


class EngineServer(JsonServer):
    """Serves the adapters that are loaded into it, by name.

    Args:
        address: host and port; port 0 takes a free one (`server_address`).
        base: the name of the model under the adapters in /v1/models.
        load: opens an adapter.
        plain: the engine of the model under the adapters, for requests that name it.
        unload: takes back the engine of an adapter that is no longer used.
        context: the longest sequence, in tokens.
        vocabulary: the number of token ids.
        alone: each request is decoded by itself, so that other requests change no bit of an answer.
        token: see JsonServer.
    """

    def __init__(
        self,
        address: tuple[str, int],
        base: str,
        load: Loader,
        unload: Callable[[LocalEngine], None],
        plain: Callable[[], LocalEngine],
        *,
        context: int,
        vocabulary: int,
        alone: bool = False,
        token: str | None = None,
    ) -> None:
        post: dict[str, Route] = {
            GENERATE: lambda body: self._if_open(self.generate, body),
            "/v1/load_lora_adapter": lambda body: self._if_open(partial(self.adapt, "load"), body),
            "/v1/unload_lora_adapter": lambda body: self._if_open(
                partial(self.adapt, "unload"),
                body,
            ),
        }
        self.base = base
        self.load = load
        self.unload = unload
        self.plain = plain
        self.context = context
        self.vocabulary = vocabulary
        self.alone = alone
        self.begun: float | None = None
        self.engines: dict[str, LocalEngine] = {}
        self.asked: queue.Queue[Asked | Callable[[], None] | None] = queue.Queue()
        self.worker = threading.Thread(target=self._work, daemon=True)
        self.worker.start()
        # at the end, because an address that cannot be had closes all of it
        super().__init__(address, {"/v1/models": self.models}, post, token)

    def server_close(self) -> None:
        """Close the port, and end the thread that samples."""
        super().server_close()
        self.asked.put(None)
        self.worker.join()

    def _work(self) -> None:
        """The one thread that touches the model: loads, unloads, and batches of requests that ask
        alike.
        """
        while True:
            waiting = [self.asked.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting.append(
                        self.asked.get(timeout=TOGETHER if isinstance(waiting[-1], Asked) else 0),
                    )
            if None in waiting:
                return
            self.begun = time.monotonic()
            requests = [task for task in waiting if isinstance(task, Asked)]
            try:
                for task in waiting:
                    if task is not None and not isinstance(task, Asked):
                        task()
                for batch in self._batches(requests):
                    self._draw(batch)
            except Exception as error:  # noqa: BLE001  (of ours: the thread lives on, and nobody waits in vain)
                for one in requests:
                    one.back.put((500, f"{type(error).__name__}: {error}"))
            self.begun = None

    def _batches(self, requests: list[Asked]) -> list[list[Asked]]:
        """The requests that are decoded together."""
        if self.alone:
            return [[one] for one in requests]
        return [
            [one for one in requests if one.kind == kind]
            for kind in dict.fromkeys(one.kind for one in requests)
        ]

    def _draw(self, batch: list[Asked]) -> None:
        model, count, seed, stop_ids, sampling = batch[0].kind

        def draw(engine: LocalEngine) -> list[list[Drawn]]:
            engine.encoder.stop_ids = stop_ids
            rows = [one.ids for one in batch]
            ordinals = [one.ordinal for one in batch]
            return engine.draw(Draws(rows, ordinals, sampling, count, seed))

        results = self._with_engine(model, draw)
        for one, result in zip(
            batch,
            [results] * len(batch) if isinstance(results, tuple) else results,
            strict=True,
        ):
            one.back.put(result)

    def _with_engine(self, model: str, work: Callable[[LocalEngine], T]) -> T | tuple[int, str]:
        """Result of `work` with the engine of a name, or a status and a reason."""
        engine = self.plain() if model == self.base else self.engines.get(model)
        return (
            (404, f"no adapter is called {model!r}")
            if engine is None
            else _outcome(partial(work, engine))
        )

    def generate(self, body: Json) -> Answer:
        """Status and answer of a request for samples, or for the log-probabilities of a prompt
        (`prompt_logprobs`).
        """
        words = GenerateRequest.model_validate(body)
        back = queue.Queue[Result]()
        ids = words.token_ids
        given = words.sampling_params
        for token in (*ids, *given.stop_token_ids):
            if not 0 <= token < self.vocabulary:
                return 400, {"error": f"there is no token {token}: the model has {self.vocabulary}"}
        scores = given.prompt_logprobs is not None
        score = partial(_scored, ids, min(given.prompt_logprobs or 0, self.vocabulary))
        longest = len(ids) if scores else len(ids) + given.max_tokens
        if longest > self.context:
            return 400, {
                "error": f"{len(ids)} + {longest - len(ids)} tokens; the context holds {self.context}",
            }
        if scores:
            self.asked.put(lambda: back.put(self._with_engine(words.model, score)))
        else:
            how = given.temperature, max(0, given.top_k), given.top_p, given.min_p
            sampling = Sampling(given.max_tokens, *how, stop_strings=given.stop)
            seed = given.seed if given.extra_args.seed is None else given.extra_args.seed
            kind = words.model, given.n, seed, given.stop_token_ids, sampling
            self.asked.put(Asked(kind, ids, given.extra_args.ordinal, back))
        if isinstance(answer := self._wait(back), tuple):
            return answer[0], {"error": answer[1]}
        if isinstance(answer, dict):
            return 200, {"model": words.model, **answer}
        return 200, {
            "model": words.model,
            "choices": [choice(index, one) for index, one in enumerate(answer)],
        }

    def _wait(self, back: queue.Queue[T]) -> T | tuple[int, str]:
        """The result of the thread that samples, or that it has ended."""
        while True:
            try:
                return back.get(timeout=1.0)
            except queue.Empty:
                if not self.worker.is_alive():
                    return 503, "the server is closed"

    def health(self) -> Answer:
        """The state of the thread that samples, and for how many seconds it has been at its present
        work.
        """
        if not self.worker.is_alive():
            return 503, {"error": "the thread that samples has ended"}
        return 200, {"at_work": 0.0 if self.begun is None else time.monotonic() - self.begun}

    def _if_open(self, route: Route, body: Json) -> Answer:
        return route(body) if self.worker.is_alive() else (503, {"error": "the server is closed"})

    def models(self) -> Json:
        """The base with the longest sequence that it takes, and the adapters."""
        return {
            "data": [
                {"id": self.base, "max_model_len": self.context},
                *({"id": name} for name in self.engines),
            ],
        }

    def adapt(self, what: str, body: Json) -> Answer:
        """Load or unload an adapter; a name is never given to another one."""
        words = AdapterRequest.model_validate(body)
        back = queue.Queue[tuple[int, str]]()
        name = words.lora_name

        def task() -> tuple[int, str]:
            if (name in self.engines) == (what == "load"):
                raise ValueError(
                    f"an adapter is called {name!r} already"
                    if what == "load"
                    else f"no adapter is called {name!r}",
                )
            if what == "unload":
                self.unload(self.engines.pop(name))
            else:
                # of a whole model the same one, with other weights
                engine = self.load(name, Path(words.lora_path))
                self.engines = {
                    old: other for old, other in self.engines.items() if other is not engine
                }
                self.engines[name] = engine
            return 200, ""

        self.asked.put(lambda: back.put(_outcome(task)))
        status, error = self._wait(back)
        return status, {"error": error} if error else {}


def _outcome(work: Callable[[], T]) -> T | tuple[int, str]:
    """Result of `work`, or a status and a reason: 400 for errors that would occur on another
    server, too.

    The thread that works survives every error.
    """
    try:
        return work()
    except TetherError as error:
        return 400, str(error)
    except (OSError, RuntimeError, ValueError) as error:
        return 400, f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  (ours: the caller is told, and asks another server)
        return 500, f"{type(error).__name__}: {error}"


def _scored(ids: Ids, top: int, engine: LocalEngine) -> Json:
    """The log-probabilities of a prompt, and of the likeliest tokens in their places, in vLLM's
    words.
    """
    decode = engine.encoder.tokenizer.decode
    rows = [
        {str(i): {"logprob": x, "decoded_token": decode([i])}}
        for i, x in zip(ids[1:], score_ids(engine.role, ids), strict=True)
    ]
    for row, (best, logprobs) in zip(
        rows,
        top_ids(engine.role, ids, top) if top else (),
        strict=False,
    ):
        row |= {str(i): {"logprob": x} for i, x in zip(best, logprobs, strict=True)}
    return {"choices": [], "prompt_logprobs": [None, *rows]}


def choice(index: int, drawn: Drawn) -> Json:
    """A response on the wire."""
    stopped = drawn.reason is not StopReason.LENGTH
    words = {
        "finish_reason": "stop" if stopped else "length",
        "stop_reason": "" if drawn.reason is StopReason.STOP_STRING else None,
    }
    content = [
        {"token_id": i, "logprob": logprob}
        for i, logprob in zip(drawn.ids, drawn.logprobs, strict=True)
    ]
    return {"index": index, "token_ids": drawn.ids, "logprobs": {"content": content}, **words}
