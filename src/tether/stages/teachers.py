"""The teachers of a policy: how likely they find what it wrote, and how far it is from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tether.algorithms.distillation import TeacherView, TokenGaps, TopView, divergence, token_gaps
from tether.algorithms.transfer import to_device
from tether.core.types import Metrics, Prompt, Rollout, Score
from tether.data.batches import TokenBatch, batches_for, make_batch
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.settings.teacher import TaughtConfig

Reads = Callable[[Prompt], tuple[int, ...]]
"""The ids of a prompt as a teacher reads it."""


class Read(NamedTuple):
    """A micro-batch of the policy's answers, as its teachers get it.

    - batch, rollouts: the same sequences.
    - common: what the layers below all adapters gave for the batch, if that is known.
    """

    batch: TokenBatch
    rollouts: Sequence[Rollout]
    common: Tensor | None = None


@dataclass(eq=False, kw_only=True)
class ModelTeacher:
    """A teacher in this process.

    Args:
        encoder: of the policy, whose ids the answers are.
        reads: the ids of a prompt as this teacher reads it; None: those of the policy.
        micro_batch_tokens: see `Role.document_tokens`.
    """

    role: Role
    encoder: ChatEncoder
    weight: float = 1.0
    reads: Reads | None = None
    micro_batch_tokens: int = 2048
    shares: bool = False
    """True if it is on the policy's trunk, so that the lowest layers give it the same."""

    @torch.no_grad()
    def view(self, read: Read, temperature: float) -> TeacherView:
        """Its states at the counted tokens, in the order of the batch."""
        role = self.role
        head = role.unembedding(temperature)
        batch = read.batch
        if self.reads is None:
            states = role.hidden(batch, read.common if self.shares else None)
            return TeacherView(states[batch.predict], head, self.weight)
        own = make_batch(
            [
                self.encoder.sampled(
                    replace(rollout, prompt_ids=self.reads(rollout.opened or rollout.prompt)),
                )
                for rollout in read.rollouts
            ],
            self.encoder.pad_id,
            document_tokens=role.document_tokens(self.micro_batch_tokens),
        ).to(batch.ids.device)
        states = role.hidden(own)[own.predict]
        return TeacherView(states[_places(own, batch)], head, self.weight)

    @torch.no_grad()
    def logprobs(self, read: Read, temperature: float) -> Tensor:
        """(N,) log-probabilities of the counted tokens, in nats."""
        states, head, _ = self.view(read, temperature)
        return head.chosen(states, read.batch.targets)[0]


@dataclass(eq=False, kw_only=True)
class AskingTeacher:
    """A teacher elsewhere: `ask` gives the log-probabilities of the tokens of answers.

    Args:
        likeliest: gives the likeliest tokens in their places, and these tokens' log-probabilities;
            None: it gives no distribution.
        least_mass: probability that these must have together for a place to count.
    """

    ask: Callable[[Sequence[Rollout]], list[list[float]]]
    weight: float = 1.0
    likeliest: Callable[[Sequence[Rollout]], list[list[tuple[list[int], list[float]]]]] | None = (
        None
    )
    least_mass: float = 0.0
    masses: list[Tensor] = field(default_factory=list)
    """The probability at each place of a step that the likeliest tokens have."""

    def view(self, read: Read, temperature: float) -> TopView:
        """Its likeliest tokens at the counted tokens, in the order of the batch; the temperature is
        1.
        """
        assert self.likeliest is not None
        answers = self.likeliest(read.rollouts)
        ids, logprobs = (
            self._placed([torch.tensor([row[part] for row in rows]) for rows in answers], read)
            for part in (0, 1)
        )
        mass = logprobs.exp().sum(-1)
        if torch.is_grad_enabled():  # a step, and no measurement
            self.masses.append(mass.detach().clamp(max=1.0))
        return TopView(ids, logprobs, mass >= self.least_mass, self.weight)

    def logprobs(self, read: Read, temperature: float) -> Tensor:
        """See ModelTeacher; the temperature is 1."""
        return self._placed([torch.tensor(row) for row in self.ask(read.rollouts)], read)

    def _placed(self, rows: list[Tensor], read: Read) -> Tensor:
        """Values of the tokens of each answer, in the order of the batch."""
        table = to_device(pad_sequence(rows, batch_first=True), read.batch.ids.device)
        return table[read.batch.sequence, read.batch.step]

    def coverage(self) -> Metrics:
        """The mean probability, and the share of places, left out since the last call."""
        mass = torch.cat(self.masses)
        self.masses.clear()
        return {
            "teacher/mass_left_out": 1 - float(mass.mean()),
            "teacher/places_left_out": float((mass < self.least_mass).double().mean()),
        }


def _places(own: TokenBatch, other: TokenBatch) -> Tensor:
    """The place in `own` of each counted token of `other`, which has the same ones."""
    keys = own.sequence * own.num_steps + own.step
    order = keys.argsort()
    wanted = other.sequence * own.num_steps + other.step
    return order[torch.searchsorted(keys[order], wanted)]


@dataclass(eq=False, kw_only=True)
class Teachers:
    """All teachers of a policy.

    Args:
        members: their weights are shares of one.
        following: the role that is a moving average of the policy, with its decay.
    """

    config: TaughtConfig
    policy: Role
    encoder: ChatEncoder
    members: Sequence[ModelTeacher | AskingTeacher]
    temperature: float
    micro_batch_tokens: int
    following: Role | None = None

    @property
    def shown(self) -> list[ModelTeacher | AskingTeacher]:
        """Those that give a distribution."""
        return [one for one in self.members if isinstance(one, ModelTeacher) or one.likeliest]

    def check(self, prompt: Prompt) -> None:
        """Raises a DataError where a teacher cannot read a prompt."""
        for one in self.members:
            if isinstance(one, ModelTeacher) and one.reads:
                one.reads(prompt)

    def coverage(self) -> Metrics:
        """The same of all servers with likeliest tokens, by their weights; empty without one."""
        served = [one for one in self.members if isinstance(one, AskingTeacher) and one.masses]
        total = sum(one.weight for one in served)
        metrics: Metrics = {}
        for one in served:
            for name, value in one.coverage().items():
                metrics[name] = metrics.get(name, 0.0) + one.weight / total * value
        return metrics

    def logprobs(self, read: Read) -> Tensor:
        """(N,) the weighted sum of the teachers' log-probabilities of the counted tokens."""
        return torch.stack(
            [one.weight * one.logprobs(read, self.temperature) for one in self.members],
        ).sum(0)

    def divergence(self, hidden: Tensor, read: Read) -> Tensor:
        """(N,) the divergence at each counted token, with gradient to the policy's states."""
        return divergence(
            hidden[read.batch.predict],
            self.policy.unembedding(self.temperature),
            [one.view(read, self.temperature) for one in self.shown],
            self.config.divergence,
            self.config.jsd_beta,
        )

    @torch.no_grad()
    def measure(self, rollouts: Sequence[Rollout]) -> list[Metrics]:
        """Of each answer the means over its tokens, those that count, of what separates the policy from
        its teachers; of servers that give no others only the log-ratio is known.
        """
        sequences = [self.encoder.sampled(rollout) for rollout in rollouts]
        rows: list[Metrics] = [{} for _ in rollouts]
        for cut, batch in batches_for(
            self.policy,
            sequences,
            self.encoder.pad_id,
            self.micro_batch_tokens,
        ):
            read = Read(batch, [rollouts[i] for i in cut])
            gaps = self._measured(read)
            for name, values in gaps._asdict().items():
                over = batch.mask if name == "entropy" else batch.scatter(gaps.counted)
                sums = batch.scatter(values).sum(-1) / over.sum(-1)
                for place, mean in zip(cut, sums.tolist(), strict=True):
                    rows[place][name] = mean
        return rows

    def _measured(self, read: Read) -> TokenGaps:
        batch = read.batch
        hidden = self.policy.hidden(batch)
        if len(self.shown) == len(self.members):
            return token_gaps(
                hidden[batch.predict],
                self.policy.unembedding(self.temperature),
                [one.view(read, self.temperature) for one in self.shown],
                batch.targets,
            )
        own, entropy = self.policy.logprobs_of(hidden, batch, self.temperature)
        unknown = torch.full_like(own, torch.nan)
        return TokenGaps(own - self.logprobs(read), unknown, unknown, torch.ones_like(own), entropy)

    @torch.no_grad()
    def follow(self, averages: Sequence[Tensor]) -> None:
        """Put the policy's moving average into the teacher that follows it; none yet: the policy."""
        if self.following is None:
            return
        given = averages or self.policy.parameters()
        for own, average in zip(self.following.parameters(), given, strict=False):
            own.copy_(average)


ALONE = "teacher"
"""The name of the reward that the teachers are by themselves."""
NO_PLACE = "at none of its tokens have the likeliest ones least_mass"
PARTS = {"forward": "forward_kl", "other": "other_tokens", "entropy": "entropy"}


@dataclass(eq=False)
class TeacherReward:
    """Implements core.protocols.JudgingReward: the teachers as the only reward.

    A step learns from single tokens, and scores its answers itself, by what its teachers have read
    there already. For measurements the score is minus KL(policy || teacher) in nats a token, over
    the whole vocabulary. Its parts are the other direction, the share of tokens of which a teacher
    has another likeliest one, and the policy's entropy.
    """

    teachers: Teachers
    name = ALONE

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return [Score(0.0)] * len(rollouts)

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores that mean the same at every step."""
        return [
            Score(
                -row["reverse"] if row["counted"] == 1 else None,
                {name: row[key] for key, name in PARTS.items() if math.isfinite(row[key])},
                NO_PLACE * math.isnan(row["counted"]),
            )
            for row in self.teachers.measure(rollouts)
        ]
