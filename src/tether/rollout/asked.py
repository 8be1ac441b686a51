"""Teachers that are servers: whole answers go out as token ids, the log-probability of each token
comes back.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from tether.core.errors import RunError
from tether.core.received import received
from tether.core.rundir import read_json, write_json
from tether.core.types import Rollout
from tether.data.chat import ChatEncoder
from tether.rollout.drawn import Ids, Top
from tether.rollout.served import TOLERANCE, probe_ids
from tether.rollout.wire import (
    GENERATE,
    MODELS,
    likeliest_of,
    likelihoods_of,
    scored_request,
    scored_tokens,
)
from tether.scale.servers.launch import Servers
from tether.scale.servers.pool import RefusedError, ServerPool
from tether.settings.teacher import OTHER_TOKENS
from tether.settings.workers import ServersConfig

T = TypeVar("T")
SPARE = 4
"""Likeliest tokens asked for beyond those that are used."""
WAITING = 8
"""Answers at a server at once, at most."""


class AskedTeacher:
    """A teacher at addresses that all serve the same model, the first one that each of them offers.

    Args:
        encoder: of the policy, whose ids the answers are.
        top: likeliest tokens that the servers shall give in the place of each.

    Raises:
        ModelError: a server decodes ids to other texts, or gives them other log-probabilities than
            the first one gave when the stage began.
        RunError: none answers.
    """

    def __init__(
        self,
        config: ServersConfig,
        encoder: ChatEncoder,
        folder: Path,
        top: int = 0,
    ) -> None:
        self.top = top
        self.probe = probe_ids(encoder)
        self.words = [encoder.tokenizer.decode([i]).strip() for i in self.probe[1:]]
        self.vocabulary = len(encoder.tokenizer)
        self.bases = dict[str, str]()
        self.pool = ServerPool(
            Servers(lambda host, port: (), (), folder, config.running),
            config,
            folder,
            self._prepare,
            WAITING,
        )
        self.pool.start(partial(self.pool.want, "teacher"))

    def close(self) -> None:
        """Give up the connections."""
        self.pool.close()

    def _prepare(self, name: str, task: str) -> None:
        """Compare a server's tokens with the policy's, and its numbers with those of the first server."""
        if task == "load":
            self.bases[name] = received(self.pool.get(name, "/v1/models"), MODELS).data[0].id
        tokens = scored_tokens(self._post(name, self.probe), self.probe)
        for own, token in zip(self.words, tokens, strict=True):
            if (token.decoded_token or own).strip() != own:
                raise RefusedError(OTHER_TOKENS.format(teacher=self.bases[name]))
        if self.top:
            self._likeliest(name, self.probe)
        mine = [token.logprob for token in tokens]
        here = self.pool.servers.addresses[name]
        note = self.pool.log.with_name("probe.json")
        with self.pool.changed:
            if not note.exists():
                write_json(note, {"address": here, "logprobs": mine})
            first = read_json(note)
        gap = statistics.fmean(abs(a - b) for a, b in zip(mine, first["logprobs"], strict=True))
        if not gap <= TOLERANCE["bfloat16"]:
            raise RefusedError(
                f"it gives the same {len(mine)} tokens {sum(mine):.4f} nats, and {first['address']} "
                f"gave them {sum(first['logprobs']):.4f} when the stage began: {here} holds another "
                "teacher, or other weights of it. Give the addresses of one model",
            )

    def _post(self, name: str, ids: Ids, top: int = 0) -> bytes:
        """Send the tokens to a server, and return its answer with their log-probabilities."""
        return self.pool.post(name, GENERATE, scored_request(self.bases[name], ids, top))

    def _read(self, name: str, ids: Ids) -> list[float]:
        """The log-probability of every token but the first."""
        return likelihoods_of(self._post(name, ids), ids)

    def _likeliest(self, name: str, ids: Ids) -> list[Top]:
        # more, since some may be rows without a token
        given = self._post(name, ids, self.top + SPARE)
        return likeliest_of(given, ids, self.top, self.vocabulary)

    def __call__(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """The log-probabilities of the tokens that the policy wrote, in nats.

        Raises:
            RunError: no server is left, or a server refuses an answer.
        """
        return self._all(rollouts, self._read)

    def likeliest(self, rollouts: Sequence[Rollout]) -> list[list[Top]]:
        """The likeliest tokens in the place of each that the policy wrote; errors as above."""
        return self._all(rollouts, self._likeliest)

    def _all(self, rollouts: Sequence[Rollout], read: Callable[..., list[T]]) -> list[list[T]]:
        futures = [
            self.pool.senders.submit(self._of, (*one.prompt_ids, *one.response_ids), one, read)
            for one in rollouts
        ]
        try:
            return [future.result() for future in futures]
        except RefusedError as error:
            raise RunError(f"a teacher's server refuses an answer: {error}") from None
        finally:
            for future in futures:
                future.cancel()

    def _of(self, ids: Ids, rollout: Rollout, read: Callable[..., list[T]]) -> list[T]:
        rows = self.pool.give(partial(read, ids=ids), ids)
        start = len(rollout.prompt_ids) - 1
        return [rows[start + i] for begin, end in rollout.spans for i in range(begin, end)]
