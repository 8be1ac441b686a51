"""A reward that servers work out: responses go out in batches, scores come back, from whichever
server is able.

A server works on one batch at a time. A few more wait there, and the rest here, so that a slow
reward delays its step without filling a queue. A batch with which several servers in turn end, hang
or talk nonsense is given up: its scores have failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from tether.core.errors import ConfigError
from tether.core.protocols import RewardSource
from tether.core.received import received
from tether.core.types import Json, Rollout, Score
from tether.rewards.returned import as_score, placed, whole_groups
from tether.scale.servers.http import Answer, JsonServer
from tether.scale.servers.launch import Servers
from tether.scale.servers.pool import RefusedError, ServerPool
from tether.settings.rewards import RewardServersConfig

TRIES = 3
"""Servers that may fail with a batch before it is to blame itself."""
ROLLOUTS, SCORES = TypeAdapter(Sequence[Rollout]), TypeAdapter(list[Score])
"""From these to JSON and back."""


_DESCRIBED = TypeAdapter(dict[str, str])
_SCORED = TypeAdapter(dict[str, list[Score]])


class ServedReward:
    """Implements core.protocols.RewardSource.

    Args:
        servers: None on a rank that does not ask them.
        digest: of what scores; a server that scores by something else is refused.
        folder: for the log of the servers' states.

    Raises:
        ModelError: a server scores by something else.
        RunError: no server starts.
    """

    def __init__(
        self,
        name: str,
        servers: Servers | None,
        config: RewardServersConfig,
        folder: Path,
        digest: str,
    ) -> None:
        self.name = name
        self.batch = config.batch
        self.digest = digest
        self.pool: ServerPool | None = None
        if servers is None:
            return
        self.pool = ServerPool(servers, config, folder, self._prepare, config.waiting)
        self.pool.start(partial(self.pool.want, digest))

    def close(self) -> None:
        """End the servers that were started for it."""
        if self.pool is not None:
            self.pool.close()

    def _prepare(self, name: str, task: str) -> None:
        assert self.pool is not None
        held = received(self.pool.get(name, "/v1/reward"), _DESCRIBED).get("digest")
        if held != self.digest:
            raise RefusedError(
                f"it scores by other settings ({held}) than this run "
                f"({self.digest}): give it this run's recipe",
            )

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """See core.protocols.RewardSource.

        Raises:
            ConfigError: a prompt's metadata cannot be sent.
            RunError: no server is left.
        """
        assert self.pool is not None
        size = self.batch
        pool = self.pool
        single = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        parts = whole_groups(rollouts, size) if self.name == "function" else single
        try:
            bodies = [
                json.dumps({"rollouts": ROLLOUTS.dump_python(part, mode="json")}).encode()
                for part in parts
            ]
        except ValueError as error:
            raise ConfigError(
                f"reward_servers get prompts as JSON, and metadata of these is none: {error}",
            ) from None
        futures = [
            pool.senders.submit(self._ask, pool, body, part)
            for body, part in zip(bodies, parts, strict=True)
        ]
        return [score for future in futures for score in future.result()]

    def _ask(self, pool: ServerPool, body: bytes, rollouts: Sequence[Rollout]) -> list[Score]:
        def score(name: str) -> list[Score]:
            scores = received(pool.post(name, "/v1/score", body), _SCORED).get("scores", [])
            if len(scores) != len(rollouts):
                raise ValueError(f"{len(scores)} scores for {len(rollouts)} responses")
            return [
                placed(as_score(score, name), rollout, name)
                for score, rollout in zip(scores, rollouts, strict=True)
            ]

        try:
            return pool.give(score, tries=TRIES)
        except (RefusedError, OSError) as error:
            return [Score(None, reason=f"reward servers: {error}")] * len(rollouts)


def reward_server(
    source: RewardSource,
    digest: str,
    address: tuple[str, int],
    token: str | None = None,
) -> JsonServer:
    """A server that scores by this source, one request after the other; `serve_forever` makes it
    answer. See JsonServer.
    """
    turn = threading.Lock()

    def score(body: Json) -> Answer:
        rollouts = ROLLOUTS.validate_python(body["rollouts"])
        with turn:
            return 200, {"scores": SCORES.dump_python(source.score(rollouts), mode="json")}

    described: Callable[[], Json] = lambda: {"digest": digest, "name": source.name}  # noqa: E731
    return JsonServer(address, {"/v1/reward": described}, {"/v1/score": score}, token)
