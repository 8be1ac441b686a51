"""Settings of the stage that trains a reward model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat

from tether.core.types import Comparison
from tether.settings.config import BelowOne, FromOne
from tether.settings.learner import PreferenceConfig, Rates
from tether.settings.model import LoraConfig
from tether.settings.needs import Needs
from tether.settings.rewards import Combine
from tether.settings.section import DataConfig, Name, OwnLora, RowsSection, StagePart


class RewardConfig(PreferenceConfig):
    """Settings of the stage; lengths are in tokens."""

    rates: ClassVar[Rates] = Rates(5e-4, 1e-5)

    epochs: FromOne = Field(
        default=1,
        description="more than one usually overfits the annotators",
    )
    prompts_per_update: FromOne = Field(
        default=4,
        description="all pairs of a prompt stand in one update",
    )
    use_margin: bool = Field(
        default=False,
        description="demand the label's margin between the scores",
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="share of labels that are taken to be wrong",
    )
    labels: Literal["given", "votes"] = Field(
        default="given",
        description="votes: the share of annotators, ties half",
    )
    disentangle_length: Annotated[
        NonNegativeFloat,
        Needs(
            "not head_dropout",
            "scores every response twice, and head_dropout makes them differ: leave one out",
        ),
    ] = Field(default=0.0, description="weight of a second head, for length (ODIN has 1.0)")
    centering: NonNegativeFloat = Field(
        default=0.0,
        description="weight of (r_chosen + r_rejected)^2, https://arxiv.org/abs/2312.09244",
    )
    head_dropout: BelowOne = Field(
        default=0.0,
        description="of the states that the score is read from",
    )
    keep_states_gb: NonNegativeFloat = Field(
        default=0.0,
        description="GB for the training rows' states below the first adapter; 0: computed in every epoch",
    )

    @property
    def outputs(self) -> int:
        """Of the head while it is trained: quality, and perhaps length."""
        return 2 if self.disentangle_length else 1


TAKEN = frozenset(
    {
        "model",
        "score",
        "length",
        "proxy",
        "kl",
        "checkpoints",
        "best",
        "skipped",
        "engine",
        "policy",
        "test",
    },
)
"""Names that folders and columns have already, so that no objective can have them."""


NOT_OF_OBJECTIVES = Needs(
    "not objectives",
    "has no effect with objectives: each has comparisons of its own",
)
MEMBERS = Needs("members > 1 or teacher", "has no effect on one model: set members to 2 or more")


class RewardSection(RowsSection, RewardConfig):
    record: ClassVar[type] = Comparison
    scores: ClassVar[bool] = True
    objectives: Annotated[
        dict[Name, DataConfig] | None,
        Needs("lora", "are adapters on one trunk, and lora is false. Leave lora out"),
        Needs(
            "heldout_fraction",
            "are brought to one scale on held-out responses: heldout_fraction must be above 0",
        ),
    ] = Field(
        default=None,
        min_length=2,
        description="instead of data: by name the comparisons of several reward models",
    )
    test: Annotated[dict[str, DataConfig], NOT_OF_OBJECTIVES] = Field(
        default_factory=dict,
        description="further held-out comparisons, evaluated by name",
    )
    test_share: Annotated[BelowOne, NOT_OF_OBJECTIVES] = Field(
        default=0.0,
        description="share of the prompts whose comparisons train a second model, which only judges",
    )
    lora: OwnLora = LoraConfig()
    members: FromOne = Field(
        default=1,
        description="more than one: an ensemble on one trunk, with seeds and orders of their own",
    )
    average: Annotated[
        bool,
        MEMBERS,
        Needs("not distill", "and distill both make one model of the members: choose one"),
    ] = Field(
        default=False,
        description="make one model of the members by averaging their weights, "
        "https://arxiv.org/abs/2401.12187",
    )
    distill: Annotated[Combine | None, MEMBERS] = Field(
        default=None,
        description="train one more model, on the same base, on what the members "
        "say together, and keep that one",
    )
    teacher: Annotated[
        str | None,
        Needs("members = 1", "is learned by one model: leave members and objectives out"),
        Needs("not objectives", "is learned by one model: leave members and objectives out"),
    ] = Field(
        default=None,
        description="a run or folder with a trained reward model, of any size and tokenizer, whose scores "
        "of the rows' responses are learned in place of the labels; `distill` combines those "
        "of an ensemble",
    )

    @property
    def kind(self) -> type | None:
        return self.record if self.objectives is None else None

    def others(self) -> Iterator[DataConfig]:
        yield from (*(self.objectives or {}).values(), *self.test.values())

    def parts(self) -> Iterator[StagePart]:
        for name, data in (self.objectives or {}).items():
            settings = self.model_copy(update={"data": data, "objectives": None})
            yield StagePart(name=name, kind="objective", settings=settings)
        if self.test_share:
            plain = {"members": 1, "average": False, "distill": None, "teacher": None}
            rows = {"data": None, "test": {}, "test_share": 0.0}
            settings = self.model_copy(update={**rows, **plain})
            yield StagePart(name="test", kind="test model", settings=settings)
        if self.members == 1:
            return
        names = tuple(f"member-{number}" for number in range(self.members))
        for number, name in enumerate(names):
            yield StagePart(name=name, kind="member", settings=self, number=number)
        if self.distill is not None:
            yield StagePart(name="student", kind="student", settings=self, needs=names)

    @property
    def is_ensemble(self) -> bool:
        """True if several models will score."""
        return self.members > 1 and not self.average and self.distill is None

    def _objective_faults(self) -> Iterator[str]:
        if self.objectives is None:
            return
        if self.data:
            yield f"data {NOT_OF_OBJECTIVES.because}"
        if self.members > 1:
            yield "members and objectives do not go together: each objective has one model"
        for name in sorted(self.objectives):
            if name in TAKEN or re.match("round-[0-9]", name):
                yield f"an objective cannot be called {name!r}: something else in the run is"

    def faults(self) -> Iterator[str]:
        lora = self.lora
        yield from self._objective_faults()
        if self.members > 1 and lora is False:
            yield (
                "the members of an ensemble are adapters on one trunk, and lora is false. Leave "
                "members or lora out"
            )
        if (self.distill or self.teacher) and self.disentangle_length:
            yield (
                "a student has its teachers' scores and no second head: disentangle_length does "
                f"not go with {'teacher' if self.teacher else 'distill'}"
            )
        if self.keep_states_gb and (lora is False or lora.last_layers is None):
            yield (
                "keep_states_gb keeps what the layers below the first adapter compute, and here "
                "every layer learns. Set lora.last_layers, or leave keep_states_gb out"
            )
        if self.disentangle_length and lora is not False and lora.dropout:
            yield (
                "disentangle_length scores every response twice, and with lora.dropout they "
                "would differ: leave one out"
            )
