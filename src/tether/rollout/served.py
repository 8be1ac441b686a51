"""The engine of servers: prompts go out as token ids over HTTP, tokens and their log-probabilities
come back.

Weights are never stale. Every version is a folder of a new name, published by renaming: an adapter,
or a whole model for a policy without one. Every server loads it, and each answer names its version.
Before a server samples, a probe compares its log-probabilities with the learner's. If a request
fails because of the machine, another server gets it with the same seed and ordinal, so the sample
is the same. A refused request is an error.

Adapters are loaded beside each other and sampled by name. Of whole models a server holds one, the
newest.
"""

from __future__ import annotations

import shutil
import statistics
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Unpack

from tether.core.errors import DataError
from tether.core.protocols import DrawArguments
from tether.core.received import received
from tether.core.rundir import append_jsonl, file_digest
from tether.core.types import Json, Metrics, Prompt, RolloutGroup, Sampling, user
from tether.data.chat import ChatEncoder
from tether.models.saving import save_weights
from tether.models.trunk import Role
from tether.rollout.drawn import Drawn, Draws, as_groups, draws_of, score_ids
from tether.rollout.thinking import generate_within
from tether.rollout.wire import (
    DRAWN,
    GENERATE,
    MODELS,
    NEEDED,
    REPLACE,
    WEIGHTS,
    Model,
    as_request,
    likelihoods_of,
    read_drawn,
    scored_request,
)
from tether.scale.servers.launch import Servers
from tether.scale.servers.pool import MissingError, RefusedError, ServerPool
from tether.settings.engine import EngineConfig

PROBE = (
    "Name three things that one can find in a kitchen, and say in a sentence what each of "
    "them is good for."
)
PROBED = 24
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.12}
"""Nats by which log-probabilities of the probe's tokens may differ on average between two programs
that compute the same.

In bfloat16 the order of operations decides what is rounded. Each correct program is 0.03 to 0.07
from float32 on a model of 135M parameters, and two of them are as far from each other. Twice that
is allowed. Visible faults begin near 0.16: weights that are off by 3%, or a rotary base of 1e4 in
place of 1e5. The name identifies the version that answers.
"""
REQUESTS = 64
"""Prompts at a server at once, at most; a server decodes them together."""


def probe_ids(encoder: ChatEncoder) -> tuple[int, ...]:
    """The text by which weights are compared: the end of a prompt, for every version costs two
    passes over it.
    """
    return encoder.prompt((user(PROBE),))[-PROBED:]


class ServedEngine:
    """Has the interface of core.protocols.Engine.

    Args:
        role: the policy that is trained.
        folder: for weights, the servers' logs and the fleet's (`fleet.jsonl`); every server must
            see it.
        ours: the servers are tether's own, which take seed and ordinal directly. vLLM gets a seed
            made of both.
        combined: the servers' model lacks what the role's layers carry; each adapter brings it.

    Raises:
        ModelError: a server serves something else.
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
        combined: bool = False,
    ) -> None:
        self.role = role
        self.encoder = encoder
        self.servers = servers
        self.folder = folder
        self.config = config
        self.context_length = context_length
        self.policy_version = 0
        self.replaces = role.adapter is None and not ours
        """True if servers call all versions by one name, that of their base (in `bases`), and hold
        one of them.
        """
        self.merged = combined or self.replaces
        self.bases = dict[str, str]()
        unused = (
            ()
            if ours
            else range(role.num_tokens, len(role.causal_model.get_output_embeddings().weight))
        )
        self._request = partial(as_request, stop_ids=encoder.stop_ids, ours=ours, unused=unused)
        self._score = partial(score_ids, role, padded=not ours)
        dtype = str(role.model.dtype).removeprefix("torch.")
        self.tolerance = config.tolerance or TOLERANCE.get(dtype, TOLERANCE["bfloat16"])
        self.users = Counter[str]()
        self.probe_ids = probe_ids(encoder)
        self.expected = dict[str, list[float]]()
        self.probe_gap = 0.0
        """The largest of the last probes, in nats a token."""
        self.tokens = 0
        """Sampled since `measured` was asked."""
        self.run = uuid.uuid4().hex[:8]
        self.count = 0
        self.pool = ServerPool(servers, config, folder, self._prepare, REQUESTS)
        self.fleet = self.pool.fleet
        self.pool.start(partial(self.update_weights, 0, expected))

    def close(self) -> None:
        """End the servers that were started for it."""
        self.pool.close()

    # Weights.

    def update_weights(self, version: int, expected: list[float] | None = None) -> None:
        """Publish the weights under a new name; returns when every server that lives samples with
        it.

        Args:
            expected: the learner's log-probabilities of the probe; unset: they are measured here.

        Raises:
            ModelError: a server refuses it, or computes something else than the learner.
            RunError: no server is left.
        """
        self.count += 1
        name = f"policy-{self.run}-{self.count}-v{version}"
        # no server reads there before it is asked to
        save_weights(self.role, self.folder / "weights" / name, merged=self.merged)
        expected = expected or self._score(self.probe_ids)
        with self.pool.changed:
            self.policy_version = version
            self.probe_gap = 0.0
            self.expected = {
                name: expected,
                **{old: numbers for old, numbers in self.expected.items() if self.users[old]},
            }
            self.pool.want(name)
        for old in (self.folder / "weights").iterdir():
            if old.name != name and not self.users[old.name]:
                shutil.rmtree(old)

    def measured(self, step: int) -> Metrics:
        """Metrics of the fleet since the last call; when each server worked is a line of
        `work.jsonl`.

        `engine/tokens_per_second` is what a server samples while it works; `engine/probe_gap` the
        distance of log-probabilities from the learner's, in nats a token.
        """
        with self.pool.changed:
            metrics, work = self.fleet.usage()
            tokens = self.tokens
            self.tokens = 0
        append_jsonl(self.folder / "work.jsonl", [{"step": step, "servers": work}])
        seconds = sum(end - start for spans in work.values() for start, end in spans)
        speed = {"engine/tokens_per_second": tokens / seconds} if seconds else {}
        return {**metrics, **speed, "engine/probe_gap": self.probe_gap}

    def _prepare(self, name: str, task: str) -> None:
        """Load what is wanted, and older versions that requests still name; compare each by the
        probe; unload the rest.
        """
        wanted = self.fleet.wanted
        # who holds one model may have been given another one meanwhile
        if task == "probe" and not self.replaces:
            self._compare(name, wanted)
            return
        base, *adapters = self._models(name)
        longest = base.max_model_len or self.context_length
        # a server may take shorter prompts than the model does
        self.context_length = min(self.context_length, longest)
        self.bases[name] = base.id
        names = [one.id for one in adapters]
        if self.replaces:
            info = self._of_able("/weight_info", partial(self.pool.get, name, "/weight_info"))
            names = [str(received(info, WEIGHTS).get("weight_version"))]
        held = [one for one in names if one.startswith(f"policy-{self.run}-")]
        sampling = [one for one in [*self.expected] if one != wanted and self.users[one]]
        for version in (*sampling, wanted):
            if version not in held:
                self._load(name, version)
            if version not in held or version == wanted:
                self._compare(name, version)
        for old in held:
            if old != wanted and not self.users[old] and self.role.adapter is not None:
                self._post(name, "/v1/unload_lora_adapter", {"lora_name": old})

    def _models(self, name: str) -> list[Model]:
        """The base of a server, and its adapters."""
        return received(self.pool.get(name, "/v1/models"), MODELS).data

    def _load(self, name: str, version: str) -> None:
        (path,) = (self.folder / "weights" / version).resolve().iterdir()
        if not self.replaces:
            try:
                self._post(
                    name,
                    "/v1/load_lora_adapter",
                    {"lora_name": version, "lora_path": str(path)},
                )
            except RefusedError:  # or an earlier request, whose answer came too late, has loaded it
                if version not in {one.id for one in self._models(name)}:
                    raise
            return
        digests = {
            Path(file).name: digest
            for file, digest in file_digest([*path.glob("*.safetensors")]).items()
        }
        bodies = [
            {},
            {},
            {"update_info": {"folder": str(path), "digests": digests}},
            {"weight_version": version},
            {},
        ]
        for step, body in zip(REPLACE, bodies, strict=True):
            self._post(name, step, body)

    def _called(self, name: str, version: str) -> str:
        """Name of these weights at a server."""
        return self.bases[name] if self.replaces else version

    def _compare(self, name: str, version: str) -> None:
        """Raises: RefusedError: the server's log-probabilities of the probe are not the
        learner's.
        """
        with self.pool.changed:
            expected = self.expected.get(version)
        if expected is None:
            raise RefusedError(f"{version} has been replaced meanwhile")
        body = scored_request(self._called(name, version), self.probe_ids)
        theirs = likelihoods_of(self._post(name, GENERATE, body), self.probe_ids)
        distance = statistics.fmean(abs(a - b) for a, b in zip(theirs, expected, strict=True))
        self.probe_gap = max(self.probe_gap, distance)
        if not distance <= self.tolerance:
            raise RefusedError(
                f"its log-probabilities of {version} differ from the learner's by {distance:.3g} "
                f"nats a token, and {self.tolerance:g} is allowed: it holds other weights, "
                "another model, or computes in another dtype",
            )

    def _post(self, name: str, path: str, body: Json) -> bytes:
        """Raises: RefusedError: the server understands, and does not do it, or is one that
        cannot.
        """
        if "n" in body.get("sampling_params", {}):
            return self.pool.post(name, path, body)
        quick = path not in REPLACE
        return self._of_able(path, partial(self.pool.post, name, path, body, quick=quick))

    def _of_able(self, path: str, exchange: Callable[[], bytes]) -> bytes:
        """A server's answer; RefusedError if it has nothing at this path."""
        try:
            return exchange()
        except MissingError as error:
            raise RefusedError(f"{error}. {NEEDED[path]}") from None

    # Samples.

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        """See core.protocols.Engine.generate.

        Raises:
            DataError: a prompt and its response do not fit the model's context, or a server refuses
                it.
            RunError: no server is left.
        """
        if sampling.thought_tokens:
            return generate_within(self, prompts, sampling, **how)
        return self.begin(prompts, sampling, **how)()

    def begin(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> Callable[[], list[RolloutGroup]]:
        """Ask for samples with the weights of now; what comes back waits for them."""
        draws = draws_of(self, prompts, sampling, **how)
        number, answers = self._send(draws)
        return lambda: as_groups(self.encoder, prompts, draws, answers, number)

    def draw(self, draws: Draws) -> list[list[Drawn]]:
        """See rollout.drawn.TokenEngine.draw. A conversation goes to the server that has read its
        beginning.
        """
        return [*self._send(draws)[1]]

    def _send(self, draws: Draws) -> tuple[int, Iterator[list[Drawn]]]:
        """Ask for samples; the version of the weights, and the answers, which are waited for."""
        count = draws.num_samples
        bodies = [
            self._request(ids, draws.sampling, count, draws.seed, ordinal)
            for ids, ordinal in zip(draws.rows, draws.ordinals, strict=True)
        ]
        with self.pool.changed:
            version = self.fleet.wanted
            number = self.policy_version
            self.users[version] += len(bodies)
        futures = [self.pool.senders.submit(self._ask, version, body) for body in bodies]
        for future in futures:
            future.add_done_callback(partial(self._ended, version))

        def answers() -> Iterator[list[Drawn]]:
            try:
                for done, future in enumerate(futures, 1):
                    yield future.result()
                    if draws.progress:
                        draws.progress(done * count)
            finally:
                for future in futures:
                    future.cancel()

        return number, answers()

    def _ended(self, version: str, _: Future[list[Drawn]]) -> None:
        """A request that names this version is answered, or given up."""
        with self.pool.changed:
            self.users[version] -= 1

    def _ask(self, version: str, body: Json) -> list[Drawn]:
        """The samples of one prompt, from whichever server gives them."""

        def sample(name: str) -> list[Drawn]:
            try:
                answer = self._post(name, GENERATE, {**body, "model": self._called(name, version)})
                drawn = read_drawn(
                    received(answer, DRAWN),
                    version,
                    body["sampling_params"],
                    spans=self.replaces,
                    tokens=self.role.num_tokens,
                )
            except RefusedError as error:
                raise RefusedError(
                    f"{name} refuses a prompt of {len(body['token_ids'])} tokens: {error}",
                ) from None
            with self.pool.changed:
                self.tokens += sum(len(one.ids) for one in drawn)
            return drawn

        try:
            return self.pool.give(sample, body["token_ids"])
        except RefusedError as error:
            raise DataError(str(error)) from None
