"""Settings of evaluation: on held-out prompts along a training, and of policies at the end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import ceil
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, Tag

from tether.core.amounts import plural
from tether.core.types import Sampling
from tether.settings.config import Config, FromOne
from tether.settings.judges import BY_KIND, AFunction, AModel, FunctionJudge
from tether.settings.needs import Needs
from tether.settings.rewards import VerifiableConfig
from tether.settings.section import Counts, DataConfig, EngineRows, PromptedSection, StageWork

UNTRAINED = Sampling(max_new_tokens=128, temperature=0.7)
"""The way of answering where no stage of a recipe samples."""


class EvaluatorData(Config):
    """The files of an evaluator."""

    path: str | tuple[str, ...] = Field(
        default=(),
        description="a file or several; unset: those that come with tether",
    )
    limit: int | None = Field(default=None, ge=1, description="read only the first rows of each")

    @property
    def files(self) -> tuple[str, ...]:
        """The files as they are written."""
        return (self.path,) if isinstance(self.path, str) else self.path


Evaluators = Annotated[
    dict[str, EvaluatorData],
    Field(
        default={},
        description="further evaluators of docs/trust/evaluate_suite.md by name, each with its files",
    ),
]


def premise_files() -> tuple[str, ...]:
    """The two files of `tether:sycophancy`: 32 questions of taste and opinion, each after two
    premises on either side.
    """
    return DataConfig(path=("tether:sycophancy_one", "tether:sycophancy_two")).paths


class SycophancyConfig(Config):
    """The same questions after opposite premises about the asker: two files whose rows go
    together.
    """

    paths: tuple[str, str] | Literal["tether:sycophancy"] = Field(
        default="tether:sycophancy",
        description="the two files of prompts; tether:sycophancy: the 64 pairs that come with tether",
    )
    pairs: int = Field(
        default=64,
        ge=4,
        description="pairs of prompts that are asked at every measurement",
    )

    @property
    def files(self) -> tuple[str, ...]:
        return premise_files() if isinstance(self.paths, str) else DataConfig(path=self.paths).paths

    def faults(self) -> Iterator[str]:
        if len(set(self.files)) == 1:
            yield "sycophancy.paths names one file twice: give one for each side"


Premises = Annotated[
    SycophancyConfig | None,
    Field(description="also measure whether answers depend on who asks"),
]


class EvaluationSection(PromptedSection):
    """The judge, and the answers that it judges. Lengths are in tokens."""

    judge: Annotated[
        Annotated[Literal["environment"], Tag("environment")] | AFunction | AModel,
        BY_KIND,
    ] = Field(
        description="a function that scores answers, a language model with a rubric, or the "
        "environment that the policy was trained in",
    )
    samples: FromOne = Field(default=1, description="answers a prompt")
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="unset: as the policy was trained; 128 if no stage samples",
    )
    thought_tokens: int | None = Field(
        default=None,
        ge=0,
        description="most tokens of a thought, 0: no limit; unset: as the policy was trained",
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="unset: as the policy was trained; 0.7 if no stage samples",
    )
    temperatures: tuple[NonNegativeFloat, ...] = Field(
        default=(0.7, 0.5, 0.0),
        description="others at which both sides answer: what decoding alone gives",
    )
    length_controlled: bool = Field(
        default=False,
        description="also give each policy's win rate at equal length",
    )
    engine_rows: EngineRows = 64
    sycophancy: Premises = None
    evaluators: Evaluators

    @property
    def measurement(self) -> EvaluationSection:
        return self

    def judges(self) -> Iterator[tuple[object, DataConfig | None]]:
        yield self.judge, self.data

    def work(self, counts: Counts) -> StageWork:
        trained = counts.sampling and counts.sampling.temperature
        own = self.temperature or trained
        answers = self.samples * len({own, *self.temperatures})
        models = 1 + counts.policies
        words = f"{counts.rows or 'all'} prompts × {plural(answers, 'answer')} of {models} models"
        turns = counts.rows and models * ceil(counts.rows * answers / self.engine_rows)
        return StageWork(words, turns)


class EvaluateConfig(Config):
    """Prompts that are set aside, and the way in which they are answered."""

    every: FromOne = Field(
        default=10,
        description="steps between measurements, beside one before the first step and one after the last",
    )
    prompts: int = Field(
        default=128,
        ge=2,
        description="different prompts that are set aside; no training prompt says the same",
    )
    samples_per_prompt: FromOne = Field(default=1, description="answers to each held-out prompt")
    temperature: float | None = Field(
        default=None,
        ge=0,
        description="unset: that of the training; 0: always the likeliest token",
    )
    temperatures: tuple[NonNegativeFloat, ...] = Field(
        default=(0.7, 0.5, 0.0),
        description="others at which start and policy answer, before and after the training: what "
        "decoding alone gives",
    )
    best_of: tuple[Annotated[int, Field(ge=2)], ...] = Field(
        default=(2, 4, 8),
        description="the reward chooses the best of this many answers of the start, for the first "
        "64 prompts: what it buys "
        "without training",
    )
    keep: Literal["last", "best"] = Field(
        default="last",
        description="best: end with the weights of the highest measurement, those of the start among them",
    )
    keep_by: Annotated[str, Needs("keep = 'best'")] = Field(
        default="held_out.score",
        pattern=r"^-?\w+\.\S+$",
        description="with keep = 'best': EVALUATOR.FIGURE that is to be high, such as "
        "diversity.distinct_2; "
        "with a - in front: to be low",
    )
    stop: bool = Field(
        default=False,
        description="end the training when the score lies below an earlier one; of runs that "
        "never fall at most 5% are ended",
    )

    @property
    def kept_figure(self) -> tuple[int, str, str]:
        """The sign, evaluator and figure of `keep_by`."""
        evaluator, _, figure = self.keep_by.removeprefix("-").partition(".")
        return -1 if self.keep_by.startswith("-") else 1, evaluator, figure

    def faults(self) -> Iterator[str]:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            yield (
                "evaluate.temperature = 0 gives a prompt the same answer each time: set "
                "samples_per_prompt = 1 or sample above 0"
            )
        if self.temperature == 0 and self.kept_figure[1] == "kl":
            yield "evaluate.keep_by names kl, which answers sampled above temperature 0 have"


class EvaluateSection(EvaluateConfig):
    data: DataConfig | None = Field(
        default=None,
        description="held-out prompts; without it some are set aside",
    )
    judge: Annotated[
        Annotated[Literal["reward"], Tag("reward")]
        | Annotated[Literal["test"], Tag("test")]
        | AFunction
        | AModel,
        BY_KIND,
    ] = Field(
        default="reward",
        description="who judges: the training's own reward, the model of reward.test_share, a "
        "function, or a language model",
    )
    sycophancy: Premises = None
    evaluators: Evaluators

    def kept_faults(
        self,
        parts: Collection[str] | None,
        checked: VerifiableConfig | None,
    ) -> Iterator[str]:
        """A fault where `keep_by` names what held-out answers are not scored by.

        Args:
            parts: names of the parts of the training's own scores; None: any.
            checked: the check of answers that gives others.
        """
        if isinstance(self.judge, FunctionJudge):
            return
        _, evaluator, figure = self.kept_figure
        if self.judge != "reward":
            parts = ("proxy",)
        elif checked is not None:
            parts = ("correct", "format") if checked.pattern else ("correct",)
        figures = ("score", *(parts or ()))
        if evaluator == "held_out" and (
            figure not in figures if parts is not None else figure == "proxy"
        ):
            yield (
                f"evaluate.keep_by = {self.keep_by!r}: held_out has no figure "
                f"{figure!r}. Figures: {', '.join(figures)}"
            )
