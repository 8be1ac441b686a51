"""The end of a recipe: its policies and the model that they start from answer held-out prompts, and
a judge compares them.

Both sides answer with the same randomness, at the temperature of training and at others. No
decoding parameter gives a policy's gain over the best decoding of its start (evaluation.decoding).
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tether.core.budget import time_limit
from tether.core.digest import digest
from tether.core.errors import ConfigError
from tether.core.protocols import Engine
from tether.core.rundir import (
    EVALUATIONS,
    RunDirectory,
    read_if_there,
    read_json,
    write_json,
    write_jsonl,
)
from tether.core.types import Facts, Json, Metrics, Prompt, Rollout, Sampling, Score
from tether.data.seen import digest_of, shared_prompts
from tether.evaluation.decoding import control, other_temperatures
from tether.evaluation.held_out import answers_at, as_block, column_figures, scores_by_part
from tether.evaluation.length_controlled import answers_at_equal_length
from tether.evaluation.likelihood import kl_to_reference
from tether.evaluation.suite import MeasuredPolicy, Moment, Record, Suite, as_record, note_changes
from tether.evaluation.winrate import mean_estimate
from tether.models.trunk import Role
from tether.runner.assembly.data.fitting import FITTING, Fitting
from tether.runner.assembly.data.prompts import usable_once
from tether.runner.assembly.evaluation.evaluators import Material
from tether.runner.assembly.evaluation.suites import recipe_evaluators, suite_of
from tether.runner.assembly.job import Job
from tether.runner.assembly.judges import TextJudge, judge_note, text_judge
from tether.runner.assembly.manifest import weights_of
from tether.runner.assembly.models import open_model
from tether.runner.assembly.online import episodes_of
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.runner.methods.overlaps import trained_prompts
from tether.settings.environment import EnvironmentConfig
from tether.settings.evaluation import UNTRAINED, EvaluationSection
from tether.settings.model import ModelConfig
from tether.settings.sampling import SamplingSection
from tether.stages.learner.ranks import Ranks

_LOG = logging.getLogger("tether.evaluate")
SEED = 104729
"""Added to the run's: held-out answers share no randomness with those of training."""


def train(
    job: Job[EvaluationSection],
    rows: Sequence[Prompt],
    run: RunDirectory,
    ranks: Ranks,
) -> Json:
    """Compare the job's policies with what they start from; every answer is in `answers.jsonl`.

    Raises:
        ConfigError: there is no policy.
    """
    if not job.policies:
        raise ConfigError(
            "[evaluate] compares policies, and the run has none: add a stage that trains one",
        )
    section = job.settings
    start = time.perf_counter()
    run.update_manifest(judge=judge_note(section.judge))
    sampling = sampling_of(section, job.sampling)
    if job.sampling is None and None in (section.max_new_tokens, section.temperature):
        _LOG.info(
            "%s: no stage of the recipe samples, so answers have up to %d tokens at temperature %g "
            "(evaluate.max_new_tokens, evaluate.temperature)",
            job.stage,
            sampling.max_new_tokens,
            sampling.temperature,
        )
    load = partial(open_model, job.model, seed=job.seed)
    common = job.root / job.stage  # of all rounds
    rows = usable_once(job, rows, sampling.max_new_tokens, common / "left_out.json", load)
    fitting = Fitting(time_limit(), common / FITTING, len(rows))
    rows = fitting.order(rows, job.seed)
    judge = None if section.judge == "environment" else text_judge(section.judge, job.root)
    with ExitStack() as closing:
        asked = _Sides(job, rows, judge, sampling, fitting, closing)
        before = asked.answers("before", common / "before", None)
        after = {
            name: asked.answers(name, run.path / name, folder)
            for name, folder in job.policies.items()
        }
    asked.judge_all([before, *after.values()])
    results = {name: _compared(asked, before, answers) for name, answers in after.items()}
    if job.earlier and job.policy is not None:  # what this round alone brought
        (name, answers) = next(iter(after.items()))
        previous = read_json(job.earlier[-1] / job.stage / name / "answers.json")
        if asked.alike(previous):
            asked.judge_all([previous])
            results[name]["gold_gain_of_round"] = asked.gained(previous, answers)["gold_gain"]
    write_jsonl(run.path / "answers.jsonl", asked.rows(before, after))
    write_jsonl(run.path / EVALUATIONS, asked.records(before, after))
    task = section.judge == "environment"
    shared = shared_prompts(asked.distinct, trained_prompts(job.others, task=task), task=task)
    return {
        "policies": results,
        "num_prompts": len(asked.distinct),
        **({"trained_on": shared} if shared else {}),
        "seconds": time.perf_counter() - start,
    }


def check_evaluation(job: Job[EvaluationSection], _: ModelConfig) -> None:
    """Check that settings of sampling are possible before the first stage begins, and that there is
    an environment if it shall judge.
    """
    played = _environment(job)
    if job.settings.judge == "environment" and not (played and played.call):
        raise ConfigError(
            "evaluate.judge = 'environment' needs a stage with environment.call, whose rewards it "
            "takes: name a function or a model",
        )
    if played and (job.settings.thought_tokens or job.settings.length_controlled):
        raise ConfigError(
            "evaluate.thought_tokens and length_controlled are of single answers, and the policy "
            "was trained on episodes: leave them out",
        )
    sampling = sampling_of(job.settings, job.sampling)
    if sampling.thought_tokens >= sampling.max_new_tokens:
        raise ConfigError(
            f"evaluate.max_new_tokens = {sampling.max_new_tokens} leaves no answer behind "
            f"thought_tokens = {sampling.thought_tokens}: raise it",
        )


def _environment(job: Job[EvaluationSection]) -> EnvironmentConfig | None:
    """The environment in which both sides answer: that of the first policy trained in one."""
    trained = map(job.others.get, job.policies)
    played = (one.environment for one in trained if isinstance(one, SamplingSection))
    return next(filter(None, played), None)


def sampling_of(section: EvaluationSection, trained: Sampling | None) -> Sampling:
    """The way in which both sides answer; `trained` is how a stage of the recipe samples, None
    where no stage samples.
    """
    sampling = trained or UNTRAINED
    temperature = section.temperature
    budget = section.thought_tokens
    return replace(
        sampling,
        max_new_tokens=section.max_new_tokens or sampling.max_new_tokens,
        temperature=sampling.temperature if temperature is None else temperature,
        thought_tokens=sampling.thought_tokens if budget is None else budget,
    )


_Block = tuple[dict[float, list[Rollout]], list[float | None]]
"""Answers by temperature, and the KL of those at the temperature of training."""


class _Sides:
    """Held-out prompts, the models that answer them, and the judge's scores. Equal answers are
    judged once.
    """

    def __init__(
        self,
        job: Job[EvaluationSection],
        prompts: Sequence[Prompt],
        judge: TextJudge | None,
        sampling: Sampling,
        fitting: Fitting,
        closing: ExitStack,
    ) -> None:
        self.section = job.settings
        self.closing = closing
        self.job = job
        self.judge = judge
        self.sampling = sampling
        self.fitting = fitting
        self.distinct = prompts
        self.environment = _environment(job)
        self.asked = digest([digest_of(one, task=bool(self.environment)) for one in prompts])
        played = self.environment and digest(self.environment.model_dump(mode="json"))
        self.played = {"played": played} if played else {}
        self._scores: dict[tuple[str, ...], list[Score]] = {}
        self.suite: Suite | None = None
        self.steps = 0

    @property
    def prompts(self) -> list[Prompt]:
        """Those that all sides answer, each as often as it is answered."""
        return [prompt for prompt in self.distinct for _ in range(self.section.samples)]

    @property
    def groups(self) -> list[str]:
        return [prompt.id for prompt in self.prompts]

    @property
    def temperatures(self) -> list[float]:
        """All temperatures at which both sides answer, that of training first."""
        own = self.sampling.temperature
        return [own, *other_temperatures(self.sampling, self.section.temperatures)]

    def answers(self, name: str, folder: Path, policy: Path | None) -> Json:
        """A policy's answers, kept in `folder`: texts, KL from the start, lengths, and `decoded` at
        other temperatures.
        """
        job = self.job
        start_model = job.model
        source = policy or start_model.source
        weights = weights_of(source)
        path = folder / "answers.json"
        earlier = read_if_there(path)
        if earlier.get("weights") != weights or not self.alike(earlier):
            if earlier:
                _LOG.warning("%s: of other weights, prompts or tools: all is drawn again", name)
            begun = self.fitting.clock()
            role, loaded = load_policy(str(source), start_model, job.seed)
            plain = local_engine(role, loaded, max_rows=self.section.engine_rows)
            engine = episodes_of(self.environment, plain, loaded)
            own = self.sampling.temperature
            # the trunk without its adapter is the start
            shared = role.adapter is not None or policy is None
            start = cache(lambda: open_model(start_model, seed=job.seed).model)
            opening = self.fitting.clock() - begun

            def answered(prompts: Sequence[Prompt], first: int) -> _Block:
                sampled = {t: self._sampled(t, engine, prompts, first) for t in self.temperatures}
                reference = Role(role.model if shared else start())
                moved = kl_to_reference(role, reference, sampled[own], encoder_of(loaded), own)
                return sampled, list(moved)

            sampled, moved = self._fitted(answered, opening)
            rollouts = sampled.pop(own)
            kl = {"kl": mean_estimate(moved, self.groups).as_dict()}
            whole = self.judge is None
            texts = {f"{t:g}": as_block(rows, whole) for t, rows in sampled.items()}
            measured = self._measured(MeasuredPolicy(role, encoder_of(loaded), plain))
            write_json(
                path,
                {
                    "weights": weights,
                    "prompts": self.asked,
                    **self.played,
                    **as_block(rollouts, whole),
                    **kl,
                    "decoded": texts,
                    **measured,
                },
            )
        return read_json(path)

    def alike(self, answers: Facts) -> bool:
        """True of answers to the same prompts, in the same environment."""
        same = answers.get("prompts", self.asked) == self.asked
        return same and answers.get("played") == self.played.get("played")

    def _sampled(
        self,
        temperature: float,
        engine: Engine,
        prompts: Sequence[Prompt],
        first: int,
    ) -> list[Rollout]:
        # episodes of a part are open at once
        rows = self.section.engine_rows // self.section.samples
        size = max(1, rows if self.environment else len(prompts))
        rollouts = [
            rollout
            for place in range(0, len(prompts), size)
            for rollout in answers_at(
                temperature,
                engine,
                prompts[place : place + size],
                self.sampling,
                num_samples=self.section.samples,
                seed=self.job.seed + SEED,
                first=first + place,
            )
        ]
        if self.fitting.count is not None:
            self._step()
        return rollouts

    def _fitted(
        self,
        answered: Callable[[Sequence[Prompt], int], _Block],
        opening: float,
    ) -> _Block:
        """The answers to all prompts. Of the first side, with a budget, to as many as fit, those of
        the other sides and the judge's time included.

        Args:
            opening: seconds in which a side was loaded.
        """
        temperatures = self.temperatures
        samples = self.section.samples
        if self.fitting.count is not None:
            return answered(self.distinct, 0)
        sampled: dict[float, list[Rollout]] = {t: [] for t in temperatures}
        moved: list[float | None] = []

        def answer(items: Sequence[tuple[int, Prompt]]) -> list[Json]:
            part, further = answered([prompt for _, prompt in items], items[0][0])
            for temperature, rollouts in part.items():
                sampled[temperature] += rollouts
            moved.extend(further)
            rows = iter(part[self.sampling.temperature])
            return [{"responses": [next(rows).text for _ in range(samples)]} for _ in items]

        self.fitting.answer(
            list(enumerate(self.distinct)),
            max(1, self.section.engine_rows // samples),
            answer,
            self.judge,
            sides=1 + len(self.job.policies),
            opening=opening,
            times=len(temperatures),
        )
        done = len(moved) // samples
        self.fitting.close(done)
        self.distinct = self.distinct[:done]
        for _ in temperatures:
            self._step()
        return sampled, moved

    def _step(self) -> None:
        """One more temperature of one more model is sampled."""
        self.steps += 1
        if self.job.progress is not None:
            sides = 1 + len(self.job.policies)
            self.job.progress(self.steps, len(self.temperatures) * sides, {})

    def _measured(self, policy: MeasuredPolicy) -> Json:
        """Measures of the evaluators that the section names."""
        if self.suite is None:
            material = Material(policy, self.job.quarantine, self.closing, exactly=True)
            self.suite = suite_of(recipe_evaluators(self.job.stage, self.section), material)
        records = [
            as_record(name, "after", 0, evaluator(policy, 0))
            for name, evaluator in self.suite.evaluators.items()
        ]
        return {"evaluations": records} if records else {}

    def records(self, before: Json, after: Mapping[str, Json]) -> list[Record]:
        """Measures of all evaluators on all sides, compared with the start."""
        records = self._records_of(before, "before", "before")
        for name, side in after.items():
            for record in self._records_of(side, "after", name):
                note_changes(records, record)
                records.append(record)
        return records

    def _records_of(self, side: Json, moment: Moment, policy: str) -> list[Record]:
        groups = [str(place // self.section.samples) for place in range(len(self.prompts))]
        decoded = {
            f"{temperature}/{key}": column
            for temperature, answers in side["decoded"].items()
            for key, column in scores_by_part(self.judged(answers)).items()
        }
        scores = column_figures(scores_by_part(self.judged(side)), groups)
        records = [
            as_record("held_out", moment, 0, scores),
            Record(evaluator="kl", moment=moment, step=0, figures={"kl": side["kl"]}, rows={}),
        ]
        if decoded:
            records.append(as_record("decoding", moment, 0, column_figures(decoded, groups)))
        records += side.get("evaluations", [])
        for record in records:
            record.update(moment=moment, policy=policy)
        return records

    def judge_all(self, sides: Sequence[Json]) -> None:
        """Score the answers of all sides at all temperatures, those to a prompt one after another:
        a judge that reads prompts reads each once.
        """
        blocks = [block for side in sides for block in self._blocks(side).values()]
        columns = {tuple(one["texts"]): None for one in blocks if not all(_outcomes(one))}
        prompts = [prompt for prompt in self.prompts for _ in columns]
        texts = [text for row in zip(*columns, strict=True) for text in row]
        scores = self.judge(prompts, texts) if self.judge else []
        for place, column in enumerate(columns):
            self._scores[column] = scores[place :: len(columns)]

    def judged(self, block: Facts) -> list[Score]:
        """Scores of answers to the held-out prompts: the judge's, or what the environment gave."""
        given = _outcomes(block)
        scores = self._scores.get(tuple(block["texts"]), given)
        return [Score(*own) if own else score for own, score in zip(given, scores, strict=True)]

    def gained(self, before: Facts, after: Facts) -> Json:
        """Gold before and after, gain and win rate with their intervals, parts, and what decoding
        alone gives.
        """
        own = self.sampling.temperature
        controls = control(
            self._scores_by_temperature(before),
            self._scores_by_temperature(after),
            self.groups,
            own,
        )
        if (measured := controls["by_temperature"].get(f"{own:g}")) is None:
            reasons = filter(None, (score.reason for score in self.judged(after)))
            reason = next(reasons, "")
            raise ConfigError(
                f"the judge scored no answer of both sides{f': {reason}' if reason else ''}. Look "
                "at evaluate.judge",
            )
        gold: Json = {f"gold_{name}": measured[name]["value"] for name in ("before", "after")}
        gold |= {f"gold_{name}": measured[name] for name in ("gain", "win_rate")}
        parts = [_mean_parts(self.judged(side)) for side in (before, after)]
        gold["gold_parts"] = {k: {"before": parts[0][k], "after": parts[1][k]} for k in parts[0]}
        return {**gold, "gold_by_temperature": controls.pop("by_temperature"), **controls}

    def at_equal_length(self, before: Facts, after: Facts) -> Json:
        """The win rate at the temperature of training, if answers were as long as the start's."""
        if not self.section.length_controlled:
            return {}
        rate = answers_at_equal_length(self._scored(after), self._scored(before), self.groups)
        if math.isnan(rate.value):
            _LOG.warning("%s: no win rate at equal length: %s", self.job.stage, rate.reason)
        return {"gold_win_rate_at_equal_length": rate.as_dict()}

    def _scores_by_temperature(self, answers: Facts) -> dict[float, list[float | None]]:
        blocks = self._blocks(answers)
        return {t: [score.value for score in self.judged(block)] for t, block in blocks.items()}

    def _blocks(self, side: Facts) -> dict[float, Facts]:
        """A side's answers by temperature, that of training first."""
        others = {float(t): block for t, block in side["decoded"].items()}
        return {self.sampling.temperature: side, **others}

    def rows(self, before: Facts, after: Facts) -> Iterator[Json]:
        """A line an answer: the start's, the first policy's, and those of the others."""
        first, *others = after
        sides = {"before": self._scored(before), "after": self._scored(after[first])}
        arms = {name.removeprefix(f"{first}-"): self._scored(after[name]) for name in others}
        for i, prompt in enumerate(self.prompts):
            kind = prompt.metadata.get("kind", "")
            row: Json = {"id": prompt.id, "kind": kind, "prompt": prompt.text}
            for name, answers in sides.items():
                text, score = answers[i]
                row |= {name: text, f"gold_{name}": score.value, f"parts_{name}": score.parts}
            row["arms"] = {}
            for name, answers in arms.items():
                text, score = answers[i]
                row["arms"][name] = {"response": text, "gold": score.value}
            yield row

    def _scored(self, answers: Facts) -> list[tuple[str, Score]]:
        return list(zip(answers["texts"], self.judged(answers), strict=True))


def _compared(asked: _Sides, before: Facts, after: Facts) -> Json:
    """Results of a policy against the model before it: the judge's scores, the distance in KL, and
    the form of the answers.
    """
    looks = {"kl": after["kl"]}
    premises = {}
    for name, end, side in (("after", "", after), ("before", "_before", before)):
        # a transcript begins with the name of a role
        texts = [text.removeprefix("assistant: ") for text in side["texts"]]
        commonest = Counter(map(opening, texts)).most_common(1)[0][1]
        looks |= {f"length{end}": side["length"], f"same_opening{end}": commonest / len(texts)}
        for record in side.get("evaluations", ()):
            if record["evaluator"] == "sycophancy":
                premises[name] = record["figures"]
    return {
        **asked.gained(before, after),
        **asked.at_equal_length(before, after),
        "answers": looks,
        "finished": after["finished"],
        **({"sycophancy": premises} if premises else {}),
    }


def _outcomes(block: Facts) -> list[Any]:
    return block.get("outcomes") or [None] * len(block["texts"])


def _mean_parts(scores: Sequence[Score]) -> Metrics:
    rows = [score.parts for score in scores if score.parts]
    return {key: sum(row[key] for row in rows) / len(rows) for key in (rows or [{}])[0]}


def opening(response: str) -> str:
    """Its first word, in small letters."""
    return next(iter(re.findall(r"(?:[^\W\d_]|')+", response.lower())), "")
