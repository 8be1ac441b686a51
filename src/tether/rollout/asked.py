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
from tether.core.types import Rollout
from tether.data.chat import ChatEncoder
from tether.rollout.drawn import Ids, Top
from tether.rollout.served import TOLERANCE, probe_ids
from tether.rollout.wire import GENERATE, MODELS, likeliest_of, likelihoods_of, scored_request
from tether.scale.servers.launch import Servers
from tether.scale.servers.pool import RefusedError, ServerPool
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
        ModelError: two servers give different log-probabilities for the same ids.
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
        self.vocabulary = len(encoder.tokenizer)
        self.given = dict[str, list[float]]()
        self.bases = dict[str, str]()
        servers = Servers(lambda host, port: (), (), folder, config.running)
        self.pool = ServerPool(servers, config, folder, self._prepare, WAITING)
        self.pool.start(partial(self.pool.want, "teacher"))

    def close(self) -> None:
        """Give up the connections."""
        self.pool.close()

    def _prepare(self, name: str, task: str) -> None:
        """Compare a server with those that were compared before."""
        if task == "load":
            self.bases[name] = received(self.pool.get(name, "/v1/models"), MODELS).data[0].id
        mine = self._read(name, self.probe)
        if self.top:
            self._likeliest(name, self.probe)
        with self.pool.changed:
            first, theirs = next(iter(self.given.items()), (name, mine))
            self.given.setdefault(name, mine)
        gap = statistics.fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        if not gap <= TOLERANCE["bfloat16"]:
            here, there = (self.pool.servers.addresses[one] for one in (name, first))
            raise RefusedError(
                f"it gives the same {len(mine)} tokens {sum(mine):.4f} nats, and {there} gives them "
                f"{sum(theirs):.4f}: {here} holds another teacher, or other weights of it. Give "
                "the addresses of one model",
            )

    def _read(self, name: str, ids: Ids) -> list[float]:
        """The log-probability of every token but the first."""
        body = scored_request(self.bases[name], ids)
        return likelihoods_of(self.pool.post(name, GENERATE, body), ids)

    def _likeliest(self, name: str, ids: Ids) -> list[Top]:
        # more, since some may be rows without a token
        body = scored_request(self.bases[name], ids, self.top + SPARE)
        return likeliest_of(self.pool.post(name, GENERATE, body), ids, self.top, self.vocabulary)

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
