"""Trained models as reward sources: a reward model, an ensemble, one for each objective, a process
reward model.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from tether.algorithms.objectives import dual_update, lagrangian, weighted
from tether.algorithms.process import aggregate_steps, right_probabilities, weakest_step
from tether.algorithms.reward_ensembles import combine_members, spread_of_members
from tether.core.errors import DataError
from tether.core.types import Facts, Json, Metrics, Rollout, Score, assistant
from tether.data.batches import TokenBatch, batches_for
from tether.data.chat import ChatEncoder, Encoded
from tether.data.steps import StepEncoder, step_states
from tether.models.members import as_members
from tether.models.trunk import Role
from tether.settings.rewards import Combine, ObjectiveConfig

MICRO_BATCH_TOKENS = 4096
"""Padded size of a pass; scores do not depend on it beyond rounding."""


def _sequences(encoder: ChatEncoder, rollouts: Sequence[Rollout]) -> list[Encoded]:
    return [encoder.rollout_for_scoring(*r.last_segment) for r in rollouts]


def _batches(
    role: Role,
    sequences: Sequence[Encoded],
    pad_id: int,
) -> Iterator[tuple[list[int], TokenBatch]]:
    """Micro-batches of the sequences that fit the model's context, each with their places."""
    fitting = [
        place for place, sequence in enumerate(sequences) if len(sequence) <= role.context_length
    ]
    for cut, batch in batches_for(
        role,
        [sequences[place] for place in fitting],
        pad_id,
        MICRO_BATCH_TOKENS,
    ):
        yield [fitting[i] for i in cut], batch


def _too_long(role: Role, sequence: Encoded) -> Score:
    """The score of a sequence that does not fit the model's context."""
    return Score(
        None,
        reason=f"{len(sequence)} tokens do not fit the reward model's context of {role.context_length}",
    )


class LearnedReward:
    """Scores the sampled token ids themselves, ended by a stop token as in training; no text in
    between.

    Args:
        encoder: the encoder the reward model was trained with.
        per_token: give as `Score.steps` what each token changed of the score, r_t = s_t − s_(t−1).
            They add up to the score, which leaves the best policy what it was (Ng et al. 1999).
    """

    name = "learned"

    def __init__(self, role: Role, encoder: ChatEncoder, *, per_token: bool = False) -> None:
        self.role = role
        self.encoder = encoder
        self.per_token = per_token
        role.train_mode(False)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; a number that is not finite becomes a failed score."""
        sequences = _sequences(self.encoder, rollouts)
        scores = [_too_long(self.role, sequence) for sequence in sequences]
        for cut, batch in _batches(self.role, sequences, self.encoder.pad_id):
            for index, course in zip(cut, self._courses(batch), strict=True):
                scores[index] = self._score(course, rollouts[index])
        return scores

    def _courses(self, batch: TokenBatch) -> list[list[float]]:
        """The score of each sequence; per token, what it is after each response token, the last of
        which is the score.
        """
        role = self.role
        if not self.per_token:
            return [[value] for value in role.scores(batch).tolist()]
        hidden = role.hidden(batch)
        before = batch.scatter(role.values_of(hidden, batch)).tolist()
        ends = role.values_at(hidden, batch.last).tolist()
        counts = batch.mask.sum(-1).tolist()
        return [[*row[1:count], end] for row, count, end in zip(before, counts, ends, strict=True)]

    def _score(self, course: list[float], rollout: Rollout) -> Score:
        """A score, and what each token changed of it (potential-based shaping: the steps of a
        response add up to its score).

        A stop token that scoring adds to an unfinished response belongs to the last token that was
        sampled.
        """
        value = course[-1]
        begin = rollout.begin
        last = len(rollout.response_ids) - 1
        tokens = pairwise([0.0, *course[: last - begin], value]) if self.per_token else ()
        steps = tuple((t, now - before) for t, (before, now) in enumerate(tokens, begin))
        return Score(value, steps=steps).finite("the reward model", course)


class TextReward:
    """A reward model that has another tokenizer or template than the policy: it reads the text of a
    conversation, not its ids.

    Args:
        source: scores by ids, those of `encoder`.
        encoder: the one that the reward model was trained with.
    """

    def __init__(self, source: LearnedReward | EnsembleReward, encoder: ChatEncoder) -> None:
        self.source = source
        self.encoder = encoder
        self.name = source.name

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; a conversation that the reward model's template refuses, or an empty
        answer, is a failed score.
        """
        texts = [self._read(rollout) for rollout in rollouts]
        given = iter(self.source.score([text for text in texts if text is not None]))
        unread = Score(None, reason="no text that the reward model could read")
        return [unread if text is None else next(given) for text in texts]

    def _read(self, rollout: Rollout) -> Rollout | None:
        try:
            encoded = self.encoder.conversation(
                (*rollout.prompt.messages, *(rollout.turns or (assistant(rollout.text),))),
                "last",
            )
        except DataError:
            return None
        length = encoded.prompt_length
        return replace(
            rollout,
            prompt_ids=encoded.ids[:length],
            response_ids=encoded.ids[length:],
            logprobs=(),
            spans=(),
            forks=(),
        )


class Scorers:
    """Reward models on one trunk, with the encoder that all of them were trained with; layers below
    their adapters run once.
    """

    def __init__(self, roles: Sequence[Role], encoder: ChatEncoder) -> None:
        self.members = as_members(roles)
        self.encoder = encoder
        for member in self.members:
            member.train_mode(False)

    @torch.no_grad()
    def table(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(members, responses) scores of sampled token ids, float64; NaN where one does not fit the
        context.
        """
        members = self.members
        sequences = _sequences(self.encoder, rollouts)
        table = torch.full((len(members), len(rollouts)), torch.nan, dtype=torch.float64)
        for cut, batch in _batches(members[0], sequences, self.encoder.pad_id):
            common = members[0].common(batch)
            for number, member in enumerate(members):
                table[number, cut] = member.scores(batch, common).double().cpu()
        return table


class EnsembleReward:
    """Scores the sampled token ids as `LearnedReward` does, by every member; the layers below their
    adapters run once.

    `Score.parts` holds each member's score, `member_0` and so on, and their standard deviation,
    `spread`.

    Args:
        members: reward models on one trunk, each with scores of deviation 1.
        encoder: the encoder that all of them were trained with.
        combine: what the members say on average, at worst, or on average less `uncertainty_weight`
            times their variance.
    """

    name = "ensemble"

    def __init__(
        self,
        members: Sequence[Role],
        encoder: ChatEncoder,
        combine: Combine = "mean",
        uncertainty_weight: float = 0.1,
    ) -> None:
        self.scorers = Scorers(members, encoder)
        self.combine = partial(combine_members, how=combine, uncertainty_weight=uncertainty_weight)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; where any member's number is not finite it is a failed score."""
        table = self.scorers.table(rollouts)
        values = self.combine(table)
        spreads = spread_of_members(table).tolist()
        return [
            self._score(*row)
            for row in zip(table.T.tolist(), values.tolist(), spreads, strict=True)
        ]

    def _score(self, opinions: list[float], value: float, spread: float) -> Score:
        parts = {**{f"member_{k}": opinion for k, opinion in enumerate(opinions)}, "spread": spread}
        return Score(value, parts=parts).finite("the reward ensemble", opinions)


class ObjectivesReward:
    """Scores the sampled token ids by every objective's model as an ensemble's members do; layers
    below their adapters run once.

    Each score is standardized; `Score.parts` holds them by name. The value is
    `algorithms.objectives.lagrangian` of them. Scoring moves nothing: a constraint's multiplier
    moves once a step of training, by `learn`. `judge` gives scores that are comparable over time,
    without the weights of constraints.

    Args:
        objectives: by the names of the settings a trained reward model, and the mean and deviation
            of its scores on held-out responses. The models share one trunk.
        encoder: the encoder that all of them were trained with.
    """

    name = "objectives"

    def __init__(
        self,
        settings: Mapping[str, ObjectiveConfig],
        objectives: Mapping[str, tuple[Role, float, float]],
        encoder: ChatEncoder,
    ) -> None:
        assert settings.keys() == objectives.keys()
        self.settings = settings
        roles, *scales = zip(*(objectives[name] for name in settings), strict=True)
        self.scorers = Scorers(roles, encoder)
        self.mean, self.deviation = torch.tensor(scales, dtype=torch.float64)[:, :, None]
        self.weights = torch.tensor(
            [objective.weight or 0.0 for objective in settings.values()],
            dtype=torch.float64,
        )
        self.multipliers = {
            name: 0.0 for name, objective in settings.items() if objective.at_least is not None
        }

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; where any objective's number is not finite it is a failed score."""
        table = self._table(rollouts)
        held = [number for number, name in enumerate(self.settings) if name in self.multipliers]
        multipliers = torch.tensor(list(self.multipliers.values()), dtype=table.dtype)
        return self._scores(
            table,
            lagrangian(weighted(table, self.weights), table[held], multipliers),
        )

    def judge(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """The weighted sum alone, the same at every step; whether the constraints hold is in the
        parts.
        """
        table = self._table(rollouts)
        return self._scores(table, weighted(table, self.weights))

    def _table(self, rollouts: Sequence[Rollout]) -> Tensor:
        """(objectives, responses) standardized scores, in the order of the settings."""
        return (self.scorers.table(rollouts) - self.mean) / self.deviation

    def _scores(self, table: Tensor, values: Tensor) -> list[Score]:
        scores = []
        for row, value in zip(table.T.tolist(), values.tolist(), strict=True):
            score = Score(value, parts=dict(zip(self.settings, row, strict=True)))
            scores.append(score.finite("the objectives' reward models", score.parts))
        return scores

    def learn(self, scores: Sequence[Score]) -> Metrics:
        """Move the multipliers by what a step of training scored; the objectives' means, and the
        multipliers that they met.
        """
        measured = [score.parts for score in scores if score.value is not None]
        if not measured:
            return {}
        means = {
            name: statistics.fmean(parts[name] for parts in measured) for name in self.settings
        }
        metrics = {f"objective/{name}": mean for name, mean in means.items()}
        metrics |= {
            f"objective/{name}_multiplier": value for name, value in self.multipliers.items()
        }
        for name, value in self.multipliers.items():
            objective = self.settings[name]
            assert objective.at_least is not None
            self.multipliers[name] = dual_update(
                value,
                objective.at_least - means[name],
                objective.rate,
            )
        return metrics

    def state(self) -> Json:
        return {"multipliers": dict(self.multipliers)}

    def load_state(self, values: Facts) -> None:
        self.multipliers = {name: float(values["multipliers"][name]) for name in self.multipliers}


class ProcessReward:
    """Scores the sampled token ids themselves, ended by a stop token as in training; steps are
    found in the ids.

    A step's reward is the probability that it is right. `Score.steps` names the token of the
    response that ends the step. The last step of a response that was cut off ends at its last
    token, though the model read the stop token after it.

    Args:
        encoder: the encoder the process model was trained with.
        delimiters: those it was trained with.
        aggregate: how the steps' probabilities become the score of the response.
    """

    name = "process"

    def __init__(
        self,
        role: Role,
        encoder: ChatEncoder,
        delimiters: tuple[str, ...] = ("\n\n",),
        aggregate: Literal["min", "product", "last"] = "min",
    ) -> None:
        self.role = role
        self.encoder = encoder
        self.steps = StepEncoder(encoder, delimiters)
        self.aggregate = partial(aggregate_steps, how=aggregate)
        role.train_mode(False)

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout; a response without a step, or a number that is not finite, is a
        failed score.
        """
        assert self.role.head is not None
        sequences = _sequences(self.encoder, rollouts)
        ends = [self.steps.step_ends(s.ids[s.prompt_length :]) for s in sequences]
        scores = [
            _too_long(self.role, s) if end else Score(None, reason="the response has no step")
            for s, end in zip(sequences, ends, strict=True)
        ]
        for cut, batch in _batches(self.role, sequences, self.encoder.pad_id):
            states = self.role.hidden(batch)[step_states(batch, [ends[i] for i in cut])]
            given = iter(right_probabilities(self.role.head(states)).tolist())
            for i in cut:
                if ends[i]:
                    scores[i] = self._score(rollouts[i], ends[i], [next(given) for _ in ends[i]])
        return scores

    def _score(self, rollout: Rollout, ends: Sequence[int], probabilities: list[float]) -> Score:
        matrix = torch.tensor([probabilities])
        judged = torch.ones_like(matrix, dtype=torch.bool)
        last = len(rollout.response_ids) - 1
        score = Score(
            float(self.aggregate(matrix, judged)),
            parts={
                "num_steps": float(len(ends)),
                "weakest_step": float(weakest_step(matrix, judged)),
            },
            steps=tuple(
                (min(rollout.begin + end, last), p)
                for end, p in zip(ends, probabilities, strict=True)
            ),
        )
        return score.finite("the process reward model", probabilities)
