"""The engine of servers: prompts go out as token ids over HTTP, tokens and their log-probabilities come back.

Weights cannot be stale. Every version is an adapter of a new name, published by renaming its folder, loaded on every server and
sampled by that name; before a server samples, a probe compares its log-probabilities with the learner's. What fails for reasons
of the machine is tried elsewhere with the same seed and ordinal, so it is the same sample; what the server refuses is an error.
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from tether.core.errors import DataError, ModelError, RunError
from tether.core.types import Json, Prompt, RolloutGroup, Sampling, user
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.rollout.config import EngineConfig
from tether.rollout.drawn import Drawn, as_group, encode_prompts, score_ids
from tether.rollout.fleet import Fleet, Limits, State
from tether.rollout.launch import Servers
from tether.rollout.wire import GENERATE, NEEDED, RefusedError, as_request, read_drawn, reason

PROBE = "Name three things that one can find in a kitchen, and say in a sentence what each of them is good for."
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which log-probabilities of the probe's tokens may differ on average between two programs that compute the same."""
KEEPING = {"IDLE": 5, "INTVL": 5, "CNT": 3}
SHORT = 60.0
"""Seconds that everything but sampling may take, on a server that does not sample."""
CONNECT = 10.0
"""Seconds until a connection must stand."""
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):  # a host that is cut off is noticed after 5 + 3 * 5 s, however long an answer may take
    KEEP_ALIVE += [(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{what}"), value) for what, value in KEEPING.items()]
PAUSE = 0.05
"""Seconds between two looks at a server that needs nothing."""


def probe_ids(encoder: ChatEncoder) -> tuple[int, ...]:
    """The text by which weights are compared."""
    return encoder.prompt((user(PROBE),))


class ServedEngine:
    """Speaks core.protocols.Engine.

    Args:
        role: the policy that is trained, with an adapter.
        folder: for adapters, the servers' logs and the fleet's (`fleet.jsonl`); every server must see it.
        ours: the servers are tether's own, which take seed and ordinal as they are; vLLM gets a seed made of both.

    Raises:
        ModelError: the policy has no adapter, or a server serves something else.
        RunError: no server starts.
    """

    def __init__(
        self,
        role: Role,
        encoder: ChatEncoder,
        servers: Servers,
        folder: Path,
        config: EngineConfig,
        *,
        context_length: int,
        ours: bool,
        expected: list[float] | None = None,
    ) -> None:
        if role.adapter is None:
            raise ModelError("engine servers get adapters, and this policy is trained whole. Set lora, or engine.kind = 'local'.")
        self.role, self.encoder, self.servers, self.folder, self.config = role, encoder, servers, folder, config
        self.context_length, self.policy_version = context_length, 0
        self._request = partial(as_request, stop_ids=encoder.stop_ids, ours=ours)
        dtype = str(role.model.dtype).removeprefix("torch.")
        self.tolerance = config.tolerance or TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
        limits = Limits(start_seconds=config.start_seconds, restarts=config.restarts)
        self.fleet, self.changed = Fleet(servers.names, time.monotonic, limits), threading.Condition()
        self.users, self.told, self.fault, self.closed = Counter[str](), 0, "", False
        self.probe_ids, self.expected = probe_ids(encoder), dict[str, list[float]]()
        self.probe_gap = 0.0
        """The largest of the last probes, in nats a token."""
        lines = httpx2.HTTPTransport(limits=httpx2.Limits(max_connections=None), socket_options=KEEP_ALIVE)
        self.client = httpx2.Client(transport=lines)
        self.pool = ThreadPoolExecutor(64 * len(servers.names))
        self.run, self.count = uuid.uuid4().hex[:8], 0
        self.keepers = [threading.Thread(target=self._tend, args=(name,), daemon=True) for name in servers.names]
        for keeper in self.keepers:
            keeper.start()
        try:
            self.update_weights(0, expected)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers that were started for it."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.servers.close()
        self.client.close()
        for keeper in self.keepers:
            keeper.join(1.0)

    # Weights.

    def update_weights(self, version: int, expected: list[float] | None = None) -> None:
        """Publish the adapter under a new name; returns when every server that lives samples with it.

        Args:
            expected: the learner's log-probabilities of the probe; unset: they are measured here.

        Raises:
            ModelError: a server refuses it, or computes something else than the learner.
            RunError: no server is left.
        """
        self.count += 1
        name = f"policy-{self.run}-{self.count}-v{version}"
        unfinished, adapter = self.folder / "adapters" / f".{name}", str(self.role.adapter)
        self.role.model.save_pretrained(unfinished, selected_adapters=[adapter])
        (unfinished / adapter).rename(unfinished / "adapter")
        unfinished.rename(self.folder / "adapters" / name)
        expected = expected or score_ids(self.role, self.probe_ids)
        with self.changed:
            self.policy_version, self.probe_gap = version, 0.0
            self.expected = {name: expected, **{old: numbers for old, numbers in self.expected.items() if self.users[old]}}
            self.fleet.want(name)
            self.changed.notify_all()
            self._wait("a server to take the new weights", lambda: not self._coming() and self._able())
        for old in (self.folder / "adapters").iterdir():
            if old.name != name and not self.users[old.name]:
                shutil.rmtree(old)

    def _coming(self) -> bool:
        """Whether a server that could sample soon does not yet; one that restarts is not waited for while another is able."""
        return bool(self.fleet.at(State.STALE) or (self.fleet.at(State.RESTARTING, State.SUSPECT) and not self._able()))

    def _able(self) -> bool:
        return bool(self.fleet.at(State.HEALTHY))

    def _wait(self, what: str, until: Callable[[], bool]) -> None:
        """Wait for a change of the fleet, which is locked; bounded by the servers' own limits, since each gives up some time.

        Raises:
            ModelError: a server refuses what others would refuse, too.
            RunError: no server is left, or nothing has happened for too long.
        """
        start, limit = time.monotonic(), 2 * (self.config.start_seconds + self.config.request_seconds)
        while not until():
            states = ", ".join(f"{name} {member.state.value}" for name, member in self.fleet.members.items())
            if self.fault:
                raise ModelError(self.fault)
            if self.closed or not self.fleet.at(*set(State) - {State.RETIRED}):
                last = "; ".join(f"{c.server}: {c.why}" for c in self.fleet.changes[-2:])
                raise RunError(f"no engine server is left ({last}). Their logs are in {self.folder}; the same command goes on.")
            if time.monotonic() - start > limit:
                raise RunError(f"waited {limit:.0f} s for {what} ({states}). The logs are in {self.folder}.")
            self.changed.wait(1.0)

    def measured(self) -> dict[str, float]:
        """Of the fleet since the last call, and the distance of its log-probabilities from the learner's, in nats a token."""
        with self.changed:
            return {**self.fleet.usage(), "engine/probe_gap": self.probe_gap}

    # Servers: one thread looks after each.

    def _tend(self, name: str) -> None:
        while not self.closed:
            with self.changed:
                member, wanted = self.fleet.members[name], self.fleet.wanted
                if (status := self.servers.ended(name)) is not None and member.state not in (State.DEAD, State.RETIRED):
                    why = f"its process ended with status {status}: {self.servers.last_words(name)}"
                    self.fault = self.fault if member.lived else f"{name} does not start, {why}. Its log is in {self.folder}"
                    self.fleet.exited(name, why)
                task = self.fleet.due(name)
                if not task and member.state is State.RESTARTING:
                    task = "ask" if name in self.servers.addresses else "restart"
                self._tell()
                if not task:
                    self.changed.wait(PAUSE)
                    continue
            try:
                self._do(name, task)
            except RefusedError as error:
                if wanted == self.fleet.wanted:  # or what it was about has been replaced meanwhile
                    self.fault = f"{name} ({self.servers.addresses[name]}): {error}"
            except (httpx2.HTTPError, OSError, ValueError, LookupError, TypeError) as error:
                if task != "ask":
                    with self.changed:
                        self.fleet.failed(name, f"{task}: {type(error).__name__}: {error}")
                time.sleep(PAUSE)
            except Exception as error:  # noqa: BLE001  (ours: the run ends with it, and does not wait for this thread)
                self.fault = f"{name}, {task}: {type(error).__name__}: {error}"
            with self.changed:
                self._tell()

    def _do(self, name: str, task: str) -> None:
        """One thing that a server needs; what it holds already is unloaded when nobody samples with it any more."""
        match task:
            case "restart":
                self.servers.start(name)
            case "ask":
                self._get(name, "/health")
                self._take_limit(name)
                with self.changed:
                    self.fleet.started(name)
            case "load":
                wanted, held = self.fleet.wanted, self._held(name)
                sampling = [one for one in [*self.expected] if one != wanted and self.users[one]]
                for version in (*sampling, wanted):
                    if version not in held:
                        self._load(name, version)
                    if version not in held or version == wanted:
                        self._compare(name, version)
                for old in held:
                    if old != wanted and not self.users[old]:
                        self._post(name, "/v1/unload_lora_adapter", {"lora_name": old})
                with self.changed:
                    self.fleet.loaded(name, wanted)
            case _:
                self._compare(name, self.fleet.wanted)
                with self.changed:
                    self.fleet.answered(name)

    def _take_limit(self, name: str) -> None:
        """Refuse longer prompts from now on, where a server takes shorter ones than the model does."""
        longest = self._get(name, "/v1/models")["data"][0].get("max_model_len")
        self.context_length = min(self.context_length, longest or self.context_length)

    def _held(self, name: str) -> list[str]:
        """This run's adapters on a server."""
        return [one["id"] for one in self._get(name, "/v1/models")["data"] if one["id"].startswith(f"policy-{self.run}-")]

    def _load(self, name: str, version: str) -> None:
        path = self.folder / "adapters" / version / "adapter"
        self._post(name, "/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(path.resolve())})

    def _compare(self, name: str, version: str) -> None:
        """Raises: RefusedError: the server's log-probabilities of the probe are not the learner's."""
        with self.changed:
            expected = self.expected.get(version)
        if expected is None:
            raise RefusedError(f"{version} has been replaced meanwhile")
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answer = self._post(name, GENERATE, {"model": version, "token_ids": self.probe_ids, "sampling_params": sampling})
        theirs = [float(row[str(i)]["logprob"]) for i, row in zip(self.probe_ids[1:], answer["prompt_logprobs"][1:], strict=True)]
        distance = statistics.fmean(abs(a - b) for a, b in zip(theirs, expected, strict=True))
        self.probe_gap = max(self.probe_gap, distance)
        if not distance <= self.tolerance:
            raise RefusedError(
                f"its log-probabilities of {version} differ from the learner's by {distance:.3g} nats a token, and "
                f"{self.tolerance:g} is allowed: it holds other weights, another model, or computes in another dtype"
            )

    def _get(self, name: str, path: str) -> Any:
        answer = self.client.get(self.servers.addresses[name] + path, timeout=10)
        answer.raise_for_status()
        return answer.json() if answer.content and path != "/health" else {}

    def _post(self, name: str, path: str, body: Json) -> Json:
        """Raises: RefusedError: the server understands, and does not do it."""
        limit = self.config.request_seconds
        busy = "n" in body.get("sampling_params", {}) or self.fleet.members[name].inflight
        limit = limit if busy else min(limit, SHORT)
        timeout = httpx2.Timeout(limit, connect=min(limit, CONNECT))
        answer = self.client.post(self.servers.addresses[name] + path, json=body, timeout=timeout)
        lacking = answer.status_code == 404 and "n" not in body.get("sampling_params", {})
        if lacking or answer.status_code in (400, 401, 403, 413, 422):
            raise RefusedError(reason(answer) + (f". {NEEDED[path]}" if lacking else ""))
        answer.raise_for_status()
        return answer.json() if path == GENERATE else {}

    def _tell(self) -> None:
        """Write new changes of state down, and wake who waits; the fleet is locked."""
        if new := self.fleet.changes[self.told :]:
            with (self.folder / "fleet.jsonl").open("a", encoding="utf-8") as log:
                log.writelines(json.dumps({"time": time.time(), **asdict(change)}) + "\n" for change in new)
            self.told += len(new)
            self.changed.notify_all()

    # Samples.

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        seed: int = 0,
        ordinals: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[RolloutGroup]:
        """See core.protocols.Engine.generate.

        Raises:
            DataError: a prompt and its response do not fit the model's context, or a server refuses it.
            RunError: no server is left.
        """
        how: Any = {"num_samples": num_samples, "seed": seed, "ordinals": ordinals}
        return self.begin(prompts, sampling, **how)(progress)

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int, ordinals: Sequence[int] | None
    ) -> Callable[..., list[RolloutGroup]]:
        """Ask for samples with the weights of now; what comes back waits for them."""
        rows = encode_prompts(self.encoder, prompts, sampling, self.context_length)
        ordinals = range(len(rows)) if ordinals is None else ordinals
        bodies = [self._request(ids, sampling, num_samples, seed, ordinal) for ids, ordinal in zip(rows, ordinals, strict=True)]
        with self.changed:
            version, number = self.fleet.wanted, self.policy_version
            self.users[version] += len(bodies)
        futures = [self.pool.submit(self._ask, version, body) for body in bodies]
        for future in futures:
            future.add_done_callback(partial(self._ended, version))

        def collect(progress: Callable[[int], None] | None = None) -> list[RolloutGroup]:
            groups = []
            try:
                for prompt, ids, future in zip(prompts, rows, futures, strict=True):
                    groups.append(as_group(self.encoder, prompt, ids, future.result(), sampling, number))
                    if progress:
                        progress(len(groups) * num_samples)
            finally:
                for future in futures:
                    future.cancel()
            return groups

        return collect

    def _ended(self, version: str, _: Future[Any]) -> None:
        """A request that names this version is answered, or given up."""
        with self.changed:
            self.users[version] -= 1

    def _ask(self, version: str, body: Json) -> list[Drawn]:
        """The samples of one prompt, from whichever server gives them."""
        avoid: set[str] = set()
        while True:
            with self.changed:
                self._wait("a server that samples", self._able)
                name = self.fleet.pick(body["token_ids"], avoid)
                assert name is not None
                self.fleet.use(name, 1)
            why = lacking = ""
            try:
                answer = self._post(name, GENERATE, {**body, "model": version})
                return read_drawn(answer, version, body["sampling_params"])
            except RefusedError as error:
                raise DataError(f"{name} refuses a prompt of {len(body['token_ids'])} tokens: {error}") from None
            except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
                why = f"{type(error).__name__}: {error}"
                lacking = version if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code == 404 else ""
                avoid.add(name)
            finally:
                with self.changed:
                    self.fleet.use(name, -1)
                    if lacking:
                        self.fleet.emptied(name, f"it has no {lacking}")
                    elif why:
                        self.fleet.failed(name, why)
                    else:
                        self.fleet.answered(name)
                    self._tell()
