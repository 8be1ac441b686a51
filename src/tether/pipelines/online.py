"""Stages that sample: their prompts, their measurements on held-out ones, and the watch over them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tether.assemble import (
    DataConfig,
    OnlineSection,
    OnlineStage,
    WatchSection,
    encoder_of,
    learned_reward,
    online_stage,
    save_trained,
)
from tether.assemble.judge_config import JudgeConfig
from tether.assemble.judges import score_judge
from tether.core.errors import ConfigError, DataError, MissingFileError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory
from tether.core.types import Alarm, Problem, Prompt, Rollout, Score
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine
from tether.evaluation.distance import kl_to_reference
from tether.evaluation.sycophancy import Sycophancy, read_pairs
from tether.models.config import ModelConfig
from tether.models.trunk import Role
from tether.monitoring.watch import Watch
from tether.pipelines.measured import Progress, current_rss_bytes
from tether.pipelines.opening import finish_stage, open_stage, rows_of
from tether.rewards.function import FailureLimit
from tether.rewards.verifiable import problem_prompt, reasoning_gym_prompts
from tether.stages.heldout import HeldOut, set_aside
from tether.stages.policy_gradient import PolicyGradient

Gold = tuple[Sequence[Prompt], Callable[[Sequence[Rollout]], Sequence[Score]]]
"""Held-out prompts, and a judge of answers to them that nobody trains on."""


def run_online(
    section: OnlineSection,
    model: ModelConfig,
    folder: Path,
    seed: int,
    *,
    name: str,
    reward_folder: Path | None,
    prompts: Sequence[Prompt] | None = None,
    gold: Gold | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Optimise the policy on its own samples, by the method that the section is of; the result is the role in `folder/policy`.

    Args:
        name: of the section in a recipe.
        gold: held-out prompts, and a judge of their answers that nobody trains on, where `section.evaluate` asks for
            measurements; without it, prompts are set aside and the training's own reward judges.
    """
    section, run, done = open_stage(folder, name, section, model, seed)
    if done is not None:
        return done
    if gold is not None and section.evaluate and section.evaluate.judge != "reward":
        raise ConfigError(f"{name}.evaluate.judge has no effect: this pipeline has gold. Leave it out")
    rows, quarantine = _prompts(prompts, section, section.data, run, name)
    rows, test = _held_out(rows, section, run, name) if section.evaluate and gold is None else (rows, [])
    stage, loaded = online_stage(section, model, reward_folder, seed)
    assert isinstance(stage.reward, FailureLimit)
    with contextlib.closing(stage.reward):  # its workers, however this ends
        stage.reward.keep_stacks(run.path / "stacks.txt")
        run.update_manifest(model={"source": loaded.source, "digest": loaded.digest}, reward=str(reward_folder))
        judged = Judged(*gold, "gold") if gold is not None else _judge(section, test, stage, model, reward_folder, run, name)
        evaluation = _evaluation(section, stage, encoder_of(loaded), judged, run, seed) if section.evaluate else None

        def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
            measured = evaluation.at(step, stage.config.steps) if evaluation is not None else {}
            return {"memory/rss_bytes": float(current_rss_bytes()), **measured}

        if evaluation is not None and not run.held_out():
            doing(progress, "measuring held-out answers")
            evaluation.measure(0)
        if evaluation is not None and max(run.held_out()) == 0:
            evaluation.decode(0)
        guard = Guard(section.watch, stage, run)
        ended = lambda: guard.halted or (evaluation is not None and evaluation.fallen(stage.config.steps))  # noqa: E731
        summary = stage.train(rows, run, on_step=on_step, monitor=guard, ended=ended, progress=progress)
        if evaluation is not None:
            if summary["steps"] not in run.held_out() or stage.average.tensors:  # stopped early, or not those weights
                stage.engine.update_weights(summary["steps"] + 1)
                evaluation.measure(summary["steps"])
            if evaluation.learner is not None:
                evaluation.restore()
                stage.engine.update_weights(summary["steps"] + 2)
            evaluation.decode(evaluation.kept)
            summary[evaluation.name] = evaluation.summary()
    if stage.reward.reasons:
        summary["failed_rewards_by_reason"] = dict(stage.reward.reasons.most_common(10))
    save_trained(stage.policy, loaded, folder / "policy", kind="policy")
    return finish_stage(run, section, summary, quarantine)


class Judged(NamedTuple):
    """Held-out prompts, who judges answers to them, and what that is called."""

    prompts: Sequence[Prompt]
    judge: Callable[[Sequence[Rollout]], Sequence[Score]]
    name: Literal["gold", "test", "heldout"]


def _judge(
    section: OnlineSection,
    test: Sequence[Prompt],
    stage: OnlineStage,
    model: ModelConfig,
    reward_folder: Path | None,
    run: RunDirectory,
    name: str,
) -> Judged:
    """The training's own reward; where the section wants it the model of other labels, or a language model with a rubric."""
    if section.evaluate is None or section.evaluate.judge == "reward":
        return Judged(test, getattr(stage.reward, "judge", stage.reward.score), "heldout")
    if isinstance(section.evaluate.judge, JudgeConfig):
        return Judged(test, score_judge(section.evaluate.judge, run.path), "gold")
    folder = None if reward_folder is None else reward_folder.parent / "test" / "model"
    if folder is None or not folder.is_dir():
        raise MissingFileError(
            f"{name}.evaluate.judge = 'test' needs a test model: set reward.test_share and train the reward stage"
        )
    return Judged(test, learned_reward(folder, model).score, "test")


def _evaluation(
    section: OnlineSection, stage: OnlineStage, encoder: ChatEncoder, judged: Judged, run: RunDirectory, seed: int
) -> HeldOut:
    """The measurement that a section asks for.

    Beside the judge's scores stand the distance from the reference and, if the judge is another, the training's own reward of the
    same answers.
    """
    assert section.evaluate is not None
    temperature = section.evaluate.temperature
    how = stage.config.sampling if temperature is None else replace(stage.config.sampling, temperature=temperature)
    reference: Role | None = getattr(stage, "reference", None)

    def beside(rollouts: Sequence[Rollout]) -> dict[str, list[float | None]]:
        more: dict[str, list[float | None]] = {}
        if judged.name != "heldout":
            more["proxy"] = [score.value for score in stage.reward.score(rollouts)]
        if reference is not None and how.temperature:
            more["kl"] = list(kl_to_reference(stage.policy, reference, rollouts, encoder, how.temperature))
        return more

    asked = section.evaluate.sycophancy
    sycophancy = None if asked is None else Sycophancy(stage.policy, encoder, read_pairs(asked.files, asked.pairs))
    more: dict[str, Any] = {"learner": stage.learner, "name": judged.name, "sycophancy": sycophancy, "beside": beside}
    return HeldOut(section.evaluate, judged.prompts, judged.judge, stage.engine, how, run, seed=seed, **more)


class Guard(Watch):
    """The watch over a stage, which also does what its section says when a detector fires."""

    def __init__(self, section: WatchSection, stage: OnlineStage, run: RunDirectory) -> None:
        super().__init__(section)
        self.act, self.stage, self.run = section.act, stage, run

    @property
    def halted(self) -> bool:
        return any(self.act.get(alarm["detector"]) == "stop" for alarm in self.run.alarms())

    def observe(
        self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> list[Alarm]:
        alarms = super().observe(step, {**metrics, "run/share": step / self.stage.config.steps}, rollouts, scores)
        if any(self.act.get(alarm.detector) == "raise_kl" for alarm in alarms):
            assert isinstance(self.stage, PolicyGradient)
            self.stage.kl_coefficient *= 2
        return alarms


def _prompts(
    given: Sequence[Prompt] | None, section: OnlineSection, data: DataConfig | None, run: RunDirectory, name: str
) -> tuple[Sequence[Prompt], Quarantine | None]:
    """Prompts; of problems where their answers are to be checked, or of a reasoning-gym task."""
    if section.task is not None:
        task = section.task
        system = {} if task.system is None else {"system": task.system}
        return reasoning_gym_prompts(task.name, task.size, task.seed, task.config, **system), None
    if section.verifiable is None or given is not None:
        return rows_of(given, data, Prompt, run, name)
    problems, quarantine = rows_of(None, data, Problem, run, name)
    return [problem_prompt(problem) for problem in problems], quarantine


def _held_out(
    rows: Sequence[Prompt], section: OnlineSection, run: RunDirectory, name: str
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """(training, held-out) prompts: from data of their own, less what is trained on, or set aside from the training's."""
    assert section.evaluate is not None
    if section.evaluate.data is None:
        return set_aside(rows, section.evaluate.prompts)
    trained = {prompt.messages for prompt in rows}
    others, _ = _prompts(None, section, section.evaluate.data, run, f"{name}-evaluate")
    fresh = {prompt.messages: prompt for prompt in others if prompt.messages not in trained}
    if len(fresh) < 2:
        raise DataError(f"{name}.evaluate.data has {len(fresh)} prompts that are not trained on; at least two are needed")
    return rows, list(fresh.values())[: section.evaluate.prompts]
