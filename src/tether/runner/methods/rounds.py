"""Direct methods in rounds: the policy answers, its answers become pairs, it learns from them, and
answers again.

Iterative DPO (Xu et al. 2023, https://arxiv.org/abs/2312.16682; Dong et al. 2024,
https://arxiv.org/abs/2405.07863): a reward orders several answers. Self-play, SPIN (Chen et al.
2024, https://arxiv.org/abs/2401.01335): a demonstration is preferred to the policy's own answer.

A policy with an adapter keeps this adapter through all rounds. The round's reference is a frozen
copy of the adapter at the round's start. Nothing is merged, so nothing is rounded away, and a round
leaves only an adapter. Pairs hold the token ids that were sampled, so that these are trained, not
what their text would become.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tether.core.budget import TimeLimit, limited_by, time_limit
from tether.core.errors import DataError
from tether.core.protocols import Engine, count_of, doing, now_doing
from tether.core.rundir import RunDirectory, read_json, read_jsonl, write_jsonl
from tether.core.types import (
    Demonstration,
    Json,
    Problem,
    Prompt,
    Rollout,
    RolloutGroup,
    Score,
    assistant,
)
from tether.data.chat import ChatEncoder
from tether.data.prepare import Limit, Ranking, Split, encode_rows, limit_of, within
from tether.data.rows import turn_rows
from tether.data.sources import group_of, split_by_group
from tether.models.loading import LoadedModel
from tether.models.trunk import Role
from tether.rewards.limit import FailureLimit
from tether.rewards.verifiable import problem_prompt
from tether.rollout.conversations import as_rollout
from tether.rollout.drawn import prompt_ids
from tether.rollout.local import LocalEngine
from tether.runner.assembly.data.prompts import usable_once
from tether.runner.assembly.job import Job
from tether.runner.assembly.manifest import note_machine
from tether.runner.assembly.models import open_model
from tether.runner.assembly.rewards import reward_apart
from tether.runner.assembly.roles import attach, encoder_of, local_engine, new_role, save_trained
from tether.runner.methods.stage import drop_checkpoint, open_part
from tether.settings.rounds import RoundsSection
from tether.stages.direct import Direct
from tether.stages.learner.loop import endless
from tether.stages.learner.ranks import Ranks
from tether.stages.online_direct import best_and_worst

SAMPLED = "sampling"
"""The entry of a round's manifest with the counts of its sampling, written before the pairs."""
Made = tuple[list[Json], Json]
"""Lines of pairs.jsonl, and what the summary says of the sampling."""


def train(
    job: Job[RoundsSection],
    rows: Sequence[Any],
    run: RunDirectory,
    ranks: Ranks,
) -> Json:
    """Run what is left of the rounds; each leaves its pairs and its policy in `round-NN`.

    Raises:
        DataError: a round's samples give no pair.
    """
    section = job.settings
    rows = [problem_prompt(row) if isinstance(row, Problem) else row for row in rows]
    if section.method == "iterative":
        load = partial(open_model, job.model, seed=job.seed)
        note = run.path / "left_out.json"
        rows = usable_once(job, rows, section.max_new_tokens, note, load)
    manifest = read_json(run.path / "manifest.json")
    noted = {key: manifest[key] for key in ("data", "rows") if key in manifest}
    summaries = []
    limit = time_limit()
    parts = job.parts
    for number, part in enumerate(parts):
        if number and not part.finished and limit.over():
            break
        one = open_part(part, **noted)
        if one.complete:
            drop_checkpoint(one)
            limit.before += one.summary()["seconds"]
        else:
            start = parts[number - 1].folder / "policy" if number else None
            with limited_by(TimeLimit()):  # a round is whole
                once = _Round(job=job, ranks=ranks, run=one, number=number, previous=start)
                once.play(rows)
        summaries.append(one.summary())
        limit.pace.add(summaries[-1]["seconds"])
        limit.begin(number + 1, len(parts))
    return {
        "rounds": summaries,
        "policy": f"{parts[len(summaries) - 1].folder.name}/policy",
        **_totals(summaries),
    }


def _totals(rounds: Sequence[Json]) -> Json:
    """Numbers of all rounds together, and those of the last one's training."""
    last = rounds[-1]
    sums = {key: sum(one[key] for one in rounds) for key in ("num_pairs", "updates", "seconds")}
    return {
        key: last[key]
        for key in ("train_loss", "heldout_loss", "heldout_accuracy", "heldout_margin_mean")
        if key in last
    } | sums


@dataclass(kw_only=True)
class _Round:
    """From the policy in the folder `previous` (None: from the model itself) to that in the round's
    own folder.
    """

    job: Job[RoundsSection]
    ranks: Ranks
    run: RunDirectory
    number: int
    previous: Path | None

    @property
    def section(self) -> RoundsSection:
        return self.job.settings

    def play(self, rows: Sequence[Any]) -> None:
        """Sample unless that is done, train, and leave policy and summary."""
        run = self.run
        folder = run.path
        section = self.section
        config = section.direct
        path = folder / "pairs.jsonl"
        start = time.perf_counter()
        loaded, policy = self._policy()
        note_machine(run, loaded)
        encoder = encoder_of(loaded)
        if not (path.is_file() and SAMPLED in read_json(folder / "manifest.json")):
            doing(self.job.progress, f"sampling for round {self.number + 1}")
            engine = local_engine(policy, loaded, max_rows=section.engine_rows)
            if section.method == "spin":
                made, counts = self._against_samples(rows, engine)
            else:
                made, counts = self._ordered(rows, engine)
            counts["seconds"] = time.perf_counter() - start
            run.update_manifest(**{SAMPLED: counts})
            write_jsonl(path, made)
            del engine  # with its copies of weights
        limit = limit_of(encoder, config, "rounds.direct")
        pairs, long = encode_rows(read_jsonl(path), lambda row: _ranking(row, encoder, limit))
        split = Split(*split_by_group(pairs, config.heldout_fraction, config.seed), long)
        sampled = read_json(folder / "manifest.json")[SAMPLED]
        sampled["too_long"] = sum(long.values())
        if limit.cut:
            sampled["cut"] = limit.cut.total()
        if not split.train:
            raise DataError(
                f"{folder} has no pair to train on: {sampled}. Look at the reward's "
                "scores, or sample more.",
            )
        reference = self._reference(loaded, policy)
        stage = Direct(config, policy, reference, encoder, ranks=self.ranks)
        summary = stage.fit(split, run, self.job.progress)
        save_trained(policy, loaded, folder / "policy", kind="policy")
        seconds = summary["seconds"] + sampled.get("seconds", 0)
        run.finish(loaded.noted({**summary, "sampling": sampled, "seconds": seconds}))
        drop_checkpoint(run)

    def _opened(self, policy: Path | None) -> LoadedModel:
        """The model under a policy's adapter, or a policy without one."""
        model = self.job.model
        if policy is not None and self.section.lora is False:
            model = model.on_folder(policy / "model")
        return open_model(model, seed=self.job.seed)

    def _policy(self) -> tuple[LoadedModel, Role]:
        """The policy as the round before left it."""
        loaded = self._opened(self.previous)
        lora = self.section.lora
        if self.previous is None or lora is False:
            return loaded, new_role(loaded, "policy", lora, seed=self.job.seed)
        attach(loaded, self.previous, "policy")
        return loaded, Role(loaded.model, "policy")

    def _reference(self, loaded: LoadedModel, policy: Role) -> Role | None:
        """The policy at this round's start, or before the first: the bare trunk, another adapter on
        it, or another model.
        """
        config = self.section.direct
        start = self.previous if self.section.reference == "round" else None
        if not config.needs_reference:
            return None
        if self.section.lora is False:
            asked_before_it_changes = config.precomputed and start == self.previous
            return policy if asked_before_it_changes else Role(self._opened(start).model)
        if start is not None:
            attach(loaded, start, "reference")
        return Role(loaded.model, None if start is None else "reference")

    def _places(self, count: int) -> dict[int, int]:
        """This round's part of endless epochs over `count` rows: place -> row. A sample's
        randomness depends on its place.
        """
        size = self.section.prompts_per_round or count
        places = range(self.number * size, (self.number + 1) * size)
        return dict(zip(places, endless(count, places, self.job.seed), strict=True))

    def _groups(
        self,
        prompts: Mapping[int, Prompt],
        engine: Engine,
        num_samples: int,
    ) -> list[RolloutGroup]:
        """Answers to prompts, by their places."""
        return engine.generate(
            [*prompts.values()],
            self.section.sampling,
            num_samples=num_samples,
            seed=self.job.seed,
            ordinals=list(prompts),
            progress=count_of(f"sampling for round {self.number + 1}", len(prompts) * num_samples),
        )

    def _ordered(self, rows: Sequence[Prompt], engine: Engine) -> Made:
        """The best and the worst of several samples a prompt; counts, and the mean score of all
        samples.
        """
        samples = self.section.samples_per_prompt
        penalty = self.section.missing_stop_penalty
        prompts = {place: rows[row] for place, row in self._places(len(rows)).items()}
        groups = self._groups(prompts, engine, samples)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        scores, reasons = self._scored(rollouts)
        pairs, skipped = best_and_worst(rollouts, scores, samples, missing_stop_penalty=penalty)
        made = []
        for pair in pairs:
            row = _row(pair.best, pair.worst)
            made.append(row | {"chosen_score": pair.best_score, "rejected_score": pair.worst_score})
        counts: Json = {"pairs": len(made), **skipped, "proxy": None}
        if values := [score.value for score in scores if score.value is not None]:
            counts["proxy"] = statistics.fmean(values)
            counts["proxy_std"] = statistics.pstdev(values)
        counts |= _looks(rollouts)
        if reasons:
            counts["failed_rewards_by_reason"] = reasons
        return made, counts

    def _scored(self, rollouts: Sequence[Rollout]) -> tuple[list[Score], dict[str, int]]:
        """Scores of all samples, the samples of a prompt together, and the reasons of failures; the
        reward is let go after.

        Raises:
            RewardError: too many scores failed.
        """
        job = self.job
        section = job.settings
        reward = reward_apart(section, job.scorer, job.model, job.seed)
        limit = FailureLimit(reward, section.max_failed)
        samples = section.samples_per_prompt
        size = samples * max(1, section.engine_rows // samples)
        with contextlib.closing(limit):
            limit.keep_stacks(self.run.path / "stacks.txt")
            now_doing(f"scoring {len(rollouts)} answers")
            scores = [
                score
                for start in range(0, len(rollouts), size)
                for score in limit.score(rollouts[start : start + size])
            ]
        return scores, dict(limit.reasons.most_common(10))

    def _against_samples(
        self,
        rows: Sequence[Demonstration],
        engine: LocalEngine,
    ) -> Made:
        """Each demonstration over one sample; those that cannot be encoded, or were sampled to the
        letter, are counted.
        """
        encoder = engine.encoder
        most = self.section.max_new_tokens
        shown = {}
        unusable = 0
        for place, number in self._places(len(rows)).items():
            row = rows[number]
            try:
                prompt = Prompt(row.messages[:-1], row.id, row.metadata)
                prompt_ids(encoder, prompt, most, engine.context_length)
                shown[place] = replace(as_rollout(row.messages, encoder), prompt=prompt)
            except DataError:
                unusable += 1
        prompts = {place: rollout.prompt for place, rollout in shown.items()}
        samples = [group.rollouts[0] for group in self._groups(prompts, engine, 1)]
        made = [
            _row(rollout, sample)
            for rollout, sample in zip(shown.values(), samples, strict=True)
            if rollout.response_ids != sample.response_ids
        ]
        counts = {"pairs": len(made), "unusable": unusable, "tied": len(samples) - len(made)}
        return made, counts | _looks(samples)


def _looks(rollouts: Sequence[Rollout]) -> Json:
    """The mean length of samples in tokens, and the share that ended in time."""
    if not rollouts:
        return {}
    return {
        "length": statistics.fmean(r.num_written for r in rollouts),
        "finished": statistics.fmean(r.finished for r in rollouts),
    }


def _row(chosen: Rollout, rejected: Rollout) -> Json:
    """A line of pairs.jsonl: a published layout of comparisons, with the token ids beside the
    texts.
    """
    prompt = chosen.prompt
    row: Json = {
        "id": prompt.id,
        "group": group_of(prompt),
        "prompt": turn_rows(prompt.messages),
        "prompt_ids": chosen.prompt_ids,
    }
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        row[name] = turn_rows((assistant(side.text),))
        row[f"{name}_ids"] = side.response_ids
        if len(side.spans) > 1:
            row[f"{name}_spans"] = side.spans
        if side.forks:
            row[f"{name}_forks"] = side.forks
    return row


def _ranking(row: Json, encoder: ChatEncoder, limit: Limit) -> Ranking:
    sides = [
        encoder.rollout(
            tuple(row["prompt_ids"]),
            tuple(row[f"{name}_ids"]),
            row.get(f"{name}_spans", ()),
            row.get(f"{name}_forks", ()),
        )
        for name in ("chosen", "rejected")
    ]
    sides = tuple(within(sides, limit))
    return Ranking(row["group"], sides, (0,), (1,), (1.0,), (0.0,))
