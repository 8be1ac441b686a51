"""Settings of the stage that has pairs of answers judged."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, Tag

from tether.core.amounts import plural
from tether.core.types import Sampling
from tether.settings.config import FromOne
from tether.settings.judges import BY_KIND, AFunction, AModel, FunctionJudge, JudgeConfig
from tether.settings.needs import Needs
from tether.settings.section import Counts, DataConfig, EngineRows, PromptedSection, StageWork

Strategy = Literal[
    "random",
    "uncertain",
    "information",
    "disagreement",
    "length_matched",
    "ranking",
]
"""Ways to choose the pairs that are judged."""
SCORED = ("uncertain", "information", "disagreement")
"""Choices of pairs that ask a reward model."""
OF_PEOPLE = Needs("judge = 'people'", "has no effect with this judge: it is of people")


class PairsSection(PromptedSection):
    """Prompts to answer, number of answers, and judge of the pairs. Lengths are in tokens."""

    compares: ClassVar[bool] = True
    prompts: int | None = Field(
        default=None,
        ge=2,
        description="how many are answered; unset: all. With repeat, others in each round",
    )
    samples_per_prompt: int = Field(
        default=4,
        ge=2,
        description="answers to each prompt, of which pairs are made",
    )
    max_new_tokens: FromOne = Field(default=128, description="longest answer")
    temperature: PositiveFloat = Field(default=0.7, description="of sampling")
    engine_rows: EngineRows = 64
    labels: int | None = Field(
        default=None,
        ge=4,
        description="comparisons that are judged; unset: all pairs of all answers",
    )
    choose: Strategy = Field(
        default="random",
        description="which of them; before any reward model, at random",
    )
    judge: Annotated[Annotated[Literal["people"], Tag("people")] | AFunction | AModel, BY_KIND] = (
        Field(
            description="a language model; a function, on whose scores simulated annotators vote; or "
            "people, in a store",
        )
    )
    annotator_agreement: float = Field(
        default=0.70,
        gt=0.5,
        lt=1,
        description="of simulated ones: how often two of them agree",
    )
    num_annotators: FromOne = Field(
        default=3,
        description="simulated annotators who vote on every pair",
    )
    agreement: str | None = Field(
        default=None,
        description="of a language model: comparisons that people judged, with which its "
        "agreement is measured first",
    )
    store: str | None = Field(
        default=None,
        description="of people: the preference store, a path or a URL",
    )
    ask: Annotated[FromOne, OF_PEOPLE] = Field(
        default=1,
        description="of people: how many judge each comparison",
    )
    how: Annotated[Literal["majority", "soft", "dawid-skene"], OF_PEOPLE] = Field(
        default="majority",
        description="of people: labels by majority, by the share of votes, by "
        "how reliable each annotator is",
    )

    @property
    def sampling(self) -> Sampling:
        """Settings by which answers are drawn."""
        return Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)

    def judges(self) -> Iterator[tuple[object, DataConfig | None]]:
        yield self.judge, self.data

    def work(self, counts: Counts) -> StageWork:
        prompts = self.prompts or counts.rows
        words = f"{prompts or 'all'} prompts × {plural(self.samples_per_prompt, 'answer')}"
        turns = prompts and ceil(prompts * self.samples_per_prompt / self.engine_rows)
        return StageWork(words, turns)

    def faults(self) -> Iterator[str]:
        labels = self.labels
        people = self.judge == "people"
        simulated = isinstance(self.judge, FunctionJudge)
        if (self.store is not None) != people:
            yield "judge = 'people' and store belong together: people judge what lies in a store"
        if self.agreement is not None and not isinstance(self.judge, JudgeConfig):
            yield "agreement has no effect without a language model that judges"
        if not simulated:
            yield from self.idle(
                "annotator_agreement",
                "num_annotators",
                because="with this judge: it is of a function",
            )
        if labels is None:
            if self.choose != "random":
                yield "choose has no effect where all pairs are judged: set labels"
            return
        of_each = self.samples_per_prompt * (self.samples_per_prompt - 1) // 2
        most = (self.prompts or labels) * (of_each if self.choose == "ranking" else min(3, of_each))
        if labels > most:
            yield (
                f"labels = {labels}, and {self.prompts} prompts give {most} pairs at most: "
                "sample more"
            )
