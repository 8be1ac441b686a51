"""The engine of servers: prompts go out as token ids over HTTP, tokens and their log-probabilities come back.

Weights cannot be stale. Every version is an adapter of a new name, published by renaming its folder, loaded on every server and
sampled by that name; before a server samples, a probe compares its log-probabilities with the learner's. What fails for reasons
of the machine is tried elsewhere with the same seed and ordinal, so it is the same sample; what the server refuses is an error.
"""

from __future__ import annotations

import shutil
import statistics
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from tether.core.errors import DataError, ModelError
from tether.core.types import Json, Prompt, RolloutGroup, Sampling, user
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.rollout.config import EngineConfig
from tether.rollout.drawn import Drawn, as_group, encode_prompts, score_ids
from tether.rollout.wire import GENERATE, NEEDED, as_request, read_drawn
from tether.servers.launch import Servers
from tether.servers.pool import RefusedError, ServerPool, reason

PROBE = "Name three things that one can find in a kitchen, and say in a sentence what each of them is good for."
PROBED = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
"""Nats by which log-probabilities of the probe's tokens may differ on average between two programs that compute the same."""
REQUESTS = 64
"""Prompts at a server at once, at most; a server decodes them together."""


def probe_ids(encoder: ChatEncoder) -> tuple[int, ...]:
    """The text by which weights are compared: the end of a prompt, for every version costs two passes over it."""
    return encoder.prompt((user(PROBE),))[-PROBED:]


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
        self.users, self.probe_ids, self.expected = Counter[str](), probe_ids(encoder), dict[str, list[float]]()
        self.probe_gap = 0.0
        """The largest of the last probes, in nats a token."""
        self.run, self.count = uuid.uuid4().hex[:8], 0
        self.pool = ServerPool(servers, config, folder, self._prepare, REQUESTS)
        self.fleet = self.pool.fleet
        self.pool.start()
        try:
            self.update_weights(0, expected)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the servers that were started for it."""
        self.pool.close()

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
        with self.pool.changed:
            self.policy_version, self.probe_gap = version, 0.0
            self.expected = {name: expected, **{old: numbers for old, numbers in self.expected.items() if self.users[old]}}
            self.pool.want(name)
        for old in (self.folder / "adapters").iterdir():
            if old.name != name and not self.users[old.name]:
                shutil.rmtree(old)

    def measured(self) -> dict[str, float]:
        """Of the fleet since the last call, and the distance of its log-probabilities from the learner's, in nats a token."""
        with self.pool.changed:
            return {**self.fleet.usage(), "engine/probe_gap": self.probe_gap}

    def _prepare(self, name: str, task: str) -> None:
        """Have a server hold what is wanted, and show it; what nobody samples with any more, it lets go of."""
        wanted = self.fleet.wanted
        if task == "probe":
            self._compare(name, wanted)
            return
        base, *adapters = self.pool.get(name, "/v1/models")["data"]
        longest = base.get("max_model_len") or self.context_length
        self.context_length = min(self.context_length, longest)  # a server may take shorter prompts than the model does
        held = [one["id"] for one in adapters if one["id"].startswith(f"policy-{self.run}-")]
        sampling = [one for one in [*self.expected] if one != wanted and self.users[one]]
        for version in (*sampling, wanted):
            if version not in held:
                self._load(name, version)
            if version not in held or version == wanted:
                self._compare(name, version)
        for old in held:
            if old != wanted and not self.users[old]:
                self._post(name, "/v1/unload_lora_adapter", {"lora_name": old})

    def _load(self, name: str, version: str) -> None:
        path = self.folder / "adapters" / version / "adapter"
        self._post(name, "/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(path.resolve())})

    def _compare(self, name: str, version: str) -> None:
        """Raises: RefusedError: the server's log-probabilities of the probe are not the learner's."""
        with self.pool.changed:
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

    def _post(self, name: str, path: str, body: Json) -> Json:
        """Raises: RefusedError: the server understands, and does not do it, or is one that cannot."""
        quick = "n" not in body.get("sampling_params", {})
        try:
            answer = self.pool.post(name, path, body, quick=quick)
        except httpx2.HTTPStatusError as error:
            if quick and error.response.status_code == 404:
                raise RefusedError(f"{reason(error.response)}. {NEEDED[path]}") from None
            raise
        return answer.json() if path == GENERATE else {}

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
        with self.pool.changed:
            version, number = self.fleet.wanted, self.policy_version
            self.users[version] += len(bodies)
        futures = [self.pool.senders.submit(self._ask, version, body) for body in bodies]
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
        with self.pool.changed:
            self.users[version] -= 1

    def _ask(self, version: str, body: Json) -> list[Drawn]:
        """The samples of one prompt, from whichever server gives them."""

        def sample(name: str) -> list[Drawn]:
            try:
                return read_drawn(self._post(name, GENERATE, {**body, "model": version}), version, body["sampling_params"])
            except RefusedError as error:
                raise RefusedError(f"{name} refuses a prompt of {len(body['token_ids'])} tokens: {error}") from None

        try:
            return self.pool.give(sample, body["token_ids"])
        except RefusedError as error:
            raise DataError(str(error)) from None
