"""What the experiments share: tiny models, the stages run on them in a folder that is thrown away,
numbers of several seeds.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tether.core.protocols import RewardSource
from tether.core.rundir import RunDirectory
from tether.core.types import Demonstration, Prompt, Rollout, Sampling, Score
from tether.data.batches import cut_batches, make_batch
from tether.data.chat import ChatEncoder
from tether.models.heads import ScalarHead
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.settings.learner import OptimizerConfig
from tether.settings.policy import PolicyConfig
from tether.settings.supervised import SFTConfig
from tether.stages.online_loop import train
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.sft import SFT

DIM = 64
TOKENS = 256
"""Of a micro-batch: replies are so short that larger ones spend their time on attention across what
they share a prompt with.
"""
NEVER = 10**9
Curve = list[dict[str, float]]


@cache
def encoder() -> ChatEncoder:
    return ChatEncoder(tiny_tokenizer(), (1,))


@contextmanager
def scratch() -> Iterator[RunDirectory]:
    with tempfile.TemporaryDirectory() as folder:
        yield RunDirectory.open(Path(folder) / "run", {})


def optimizer(learning_rate: float, schedule: Any = "constant") -> OptimizerConfig:
    return OptimizerConfig(learning_rate=learning_rate, schedule=schedule)


def imitate(
    demonstrations: Sequence[Demonstration],
    seed: int,
    *,
    learning_rate: float = 3e-3,
    batch_size: int = 32,
) -> Any:
    """A tiny model after one epoch of supervised fine-tuning from random weights."""
    model, settings = (
        tiny_model(seed, dim=DIM).eval(),
        {"batch_size": batch_size, "row_tokens": 512, "rows_per_micro_batch": 1},
    )
    config = SFTConfig.model_validate(
        {**settings, "epochs": 1, "heldout_fraction": 0.0, "checkpoint_every": NEVER, "seed": seed}
        | {"optimizer": optimizer(learning_rate, "cosine")},
    )
    with scratch() as run:
        SFT(config, Role(model), encoder()).train(demonstrations, run)
    return model


def sample(
    model: Any,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    *,
    num_samples: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
) -> list[Rollout]:
    """Replies, prompt by prompt."""
    engine = LocalEngine(Role(model), encoder(), max_rows=512)
    how = Sampling(max_new_tokens=max_new_tokens, temperature=temperature)
    groups = engine.generate(prompts, how, num_samples=num_samples, seed=seed)
    return [rollout for group in groups for rollout in group.rollouts]


class Watched:
    """A reward source that also measures what the training must not see."""

    def __init__(
        self,
        source: RewardSource,
        measure: Callable[[Sequence[Rollout]], dict[str, float]],
    ) -> None:
        self.source, self.measure, self.name = source, measure, source.name
        self.seen: Curve = []

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        self.seen.append(self.measure(rollouts))
        return self.source.score(rollouts)


def stage(model: Any, reward: RewardSource, settings: dict[str, Any]) -> PolicyGradient:
    """A policy-gradient stage on a copy of `model`, all of whose weights are trained; `model`
    itself is the reference.
    """
    config = PolicyConfig.model_validate(
        {"micro_batch_tokens": TOKENS, "checkpoint_every": NEVER, "sample_rows": 0, **settings},
    )
    policy = Role(copy.deepcopy(model))
    value = Role(policy.model, None, ScalarHead(DIM)) if config.critic else None
    engine = LocalEngine(policy, encoder(), max_rows=512)
    return PolicyGradient(
        config=config,
        policy=policy,
        reference=Role(model),
        value=value,
        reward=reward,
        engine=engine,
        encoder=encoder(),
    )


def optimise(
    model: Any,
    reward: RewardSource,
    prompts: Sequence[Prompt],
    measure: Callable[[Sequence[Rollout]], dict[str, float]],
    settings: dict[str, Any],
    probe: Callable[[Any], dict[str, float]] | None = None,
    every: int = 1,
) -> tuple[Any, Curve]:
    """The trained policy's model, and what was measured at every step: on the training's own
    samples, before its update.

    After every so many steps `probe` may measure the policy as it then is.
    """
    watched = Watched(reward, measure)
    training = stage(model, watched, settings)

    def probed(step: int, metrics: dict[str, float]) -> dict[str, float]:
        if probe is not None and step % every == 0:
            watched.seen[-1] |= probe(training.policy.model)
        return {}

    with scratch() as run:
        train(training, prompts, run, on_step=probed)
        metrics = run.metrics()
    curve = [
        {"proxy": row["reward/proxy"], "kl": row.get("kl/policy_reference_k1", 0.0), **seen}
        for row, seen in zip(metrics, watched.seen, strict=True)
    ]
    return training.policy.model, curve


@torch.no_grad()
def kl(replies: Sequence[Rollout], reference: Any) -> float:
    """KL(policy || reference) in nats a reply, by k1 on the policy's own replies."""
    role, total = Role(reference), 0.0
    sequences = [encoder().rollout(reply.prompt_ids, reply.response_ids) for reply in replies]
    for cut in cut_batches(sequences, TOKENS):
        batch = make_batch([sequences[i] for i in cut], encoder().pad_id)
        total += sum(sum(replies[i].logprobs) for i in cut) - float(role.logprobs(batch)[0].sum())
    return total / len(replies)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    """The deviation among seeds; of values that are not all finite there is none."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) if len(values) > 1 else 0.0


def told(values: Sequence[float], digits: int = 2) -> str:
    """Mean ± deviation over seeds."""
    return f"{mean(values):.{digits}f} ± {spread(values):.{digits}f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
