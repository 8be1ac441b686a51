"""The watch over a stage that samples, and what it does where a detector fires."""

from __future__ import annotations

from collections.abc import Sequence

from tether.core.budget import time_limit
from tether.core.rundir import RunDirectory
from tether.core.types import Alarm, Readings, Rollout, Score
from tether.runner.assembly.online import OnlineStage
from tether.settings.policy import PolicyConfig
from tether.settings.watch import WatchSection
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.teachers import ALONE as TEACHERS_ALONE
from tether.watch.monitoring.watch import Watch


class Guard(Watch):
    """The watch over a stage, which also does what its section says when a detector fires."""

    def __init__(self, section: WatchSection, stage: OnlineStage, run: RunDirectory) -> None:
        config = stage.config
        meant = {
            # a large part of whole sequences is meant to be clipped
            "long_updates": isinstance(config, PolicyConfig) and config.surrogate == "sequence",
            # nearness to a teacher is no reward that a policy could fool
            "score_jump": stage.reward.name == TEACHERS_ALONE,
        }
        silent = (*section.silent, *(name for name, holds in meant.items() if holds))
        super().__init__(section.model_copy(update={"silent": silent}))
        self.act = section.act
        self.stage = stage
        self.run = run

    @property
    def halted(self) -> bool:
        return any(self.act.get(alarm["detector"]) == "stop" for alarm in self.run.alarms())

    def observe(
        self,
        step: int,
        metrics: Readings,
        rollouts: Sequence[Rollout],
        scores: Sequence[Score],
    ) -> list[Alarm]:
        alarms = super().observe(
            step,
            {**metrics, "run/share": step / (time_limit().drawn or self.stage.config.steps)},
            rollouts,
            scores,
        )
        if any(self.act.get(alarm.detector) == "raise_kl" for alarm in alarms):
            assert isinstance(self.stage, PolicyGradient)
            self.stage.raise_kl()
        return alarms
