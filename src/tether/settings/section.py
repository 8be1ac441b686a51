"""Keys of every section of a recipe, and the sources of its rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from tether.core.amounts import plural
from tether.core.errors import MissingFileError
from tether.core.types import Facts, Json, Prompt, Sampling
from tether.settings.budget import Budget
from tether.settings.config import Config
from tether.settings.model import LoraConfig

PACKAGED = Path(__file__).resolve().parent / "recipes" / "quickstart"
"""Meaning of `tether:NAME`: demonstrations, prompts and held-out prompts that come with tether."""


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][\w-]*$", max_length=50)]
"""Of an objective or an arm: a folder's and a metric's too."""


def _folder(path: str) -> str:
    if not path.strip():
        raise ValueError("the path of a folder belongs here, such as runs/mine")
    return os.path.expanduser(path)


Folder = Annotated[str, AfterValidator(_folder)]
"""The path of a folder; `~` is the home folder."""


class DataConfig(Config):
    """Files, folders, `hub:owner/name:split` or `tether:prompts` and its like, and how to read
    them.
    """

    path: str | tuple[str, ...] = Field(
        description="a file, a folder, hub:owner/name:split, tether:prompts and its like, or a "
        "list of these",
    )
    format: str = Field(
        default="auto",
        description="a format of docs/reference/data.md; auto detects the format",
    )
    columns: dict[str, str] | None = Field(
        default=None,
        description="names of a format for your columns: {prompt = 'question', answer = "
        "'reward_model.ground_truth'}; dots lead "
        "into objects, numbers into lists",
    )
    limit: int | None = Field(default=None, ge=1, description="read only the first rows")
    strict: bool = Field(
        default=False,
        description="a row that cannot be used is an error, not set aside",
    )

    @property
    def paths(self) -> tuple[str, ...]:
        """The sources, with environment variables, the home folder (`~`) and the folder of
        `tether:` filled in.
        """
        given = (self.path,) if isinstance(self.path, str) else self.path
        return tuple(
            str(PACKAGED / f"{p.removeprefix('tether:')}.jsonl")
            if p.startswith("tether:")
            else os.path.expanduser(os.path.expandvars(p))
            for p in given
        )

    @property
    def on_hub(self) -> bool:
        """True if some of the rows have to be fetched."""
        return any(path.startswith("hub:") for path in self.paths)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for path in self.paths:
            if path.startswith("$"):
                raise MissingFileError(
                    f"data path {path}: that environment variable is not set. Set it to the "
                    "folder of your data.",
                )
        return self


Lora = LoraConfig | Literal[False]
OwnLora = Annotated[
    Lora,
    Field(description="the adapter that learns; false trains the whole model"),
]
EngineRows = Annotated[
    int,
    Field(ge=1, description="responses decoded at once; unset on a GPU: up to 256"),
]


def _without_dropout(lora: Lora) -> Lora:
    if lora is not False and lora.dropout:
        raise ValueError(
            "lora.dropout has no effect here: what is sampled, compared and trained is one "
            "policy, without dropout. Leave it out",
        )
    return lora


SteadyLora = Annotated[OwnLora, AfterValidator(_without_dropout)]
"""Of the stages whose losses compare several passes over the same tokens: dropout would make those
differ by itself.
"""


OFFLOAD = (
    "keep the layers of frozen models of their own in host memory; one at a time visits the device"
)


PartKind = Literal["objective", "test model", "member", "student", "round"]


@dataclass(frozen=True, kw_only=True)
class StagePart:
    """One training within a stage, in a folder of its own.

    Args:
        name: of its folder in the stage's own.
        settings: of the training; those of the stage where its number is the only difference.
        number: of a member, from 0; of a round, from 1.
        needs: names of the parts from whose results it starts.
    """

    name: str
    kind: PartKind
    settings: Section
    number: int | None = None
    needs: tuple[str, ...] = ()

    @property
    def noted(self) -> Json:
        """Entries of its config.json beside those of the stage."""
        return {} if self.number is None else {self.kind: self.number}


@dataclass(frozen=True)
class StageWork:
    """The work of a stage, in words and in steps; None where its rows are not counted.

    Args:
        times: how often a phase is in a step, by its name; once where it is not named.
    """

    words: str
    steps: int | None
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    """The counts by which a stage works out its work, beside its own settings.

    Args:
        rows, prompts: its rows, and the different prompts in them; None: not counted.
        policies: models that the recipe trains.
        sampling: how the first of them answers; None: none samples.
    """

    rows: int | None = None
    prompts: int | None = None
    policies: int = 0
    sampling: Sampling | None = None


class Section(Config):
    """The settings of a stage in a recipe: the stage's own, and where its rows come from."""

    record: ClassVar[type] = Prompt
    """The kind of row that the stage reads."""
    online: ClassVar[bool] = False
    """The stage samples at every step."""
    scores: ClassVar[bool] = False
    """The model that is trained has a head that scores."""
    compares: ClassVar[bool] = False
    """The judge compares answers in place of scoring them."""
    data: DataConfig | None = Field(default=None, description="where the rows come from")

    @property
    def scorer(self) -> str | None:
        """The stage whose trained model scores this one's answers."""
        return None

    def scorer_in(self, place: Path) -> Path | None:
        """The path that names the trained model by which a stage whose folder is in `place` scores;
        None: by none.
        """
        if named := dict(self).get("reward_model"):
            return Path(named)
        return place / self.scorer / "model" if self.scorer else None

    @property
    def kind(self) -> type | None:
        """The kind of row that these settings read from `data`; None where they need none."""
        return self.record

    @property
    def learning(self) -> Config:
        """The settings of the training itself."""
        return self

    @property
    def further_columns(self) -> tuple[str, ...]:
        """Columns that the settings name: they are used beside those of the format."""
        return ()

    @property
    def measurement(self) -> Any:
        """The settings by which held-out answers are measured; None where they are not."""
        return None

    @property
    def set_aside(self) -> int:
        """Prompts of the rows that are held out to measure on."""
        along = self.measurement
        return 0 if along is None or along is self or along.data is not None else along.prompts

    @property
    def ahead(self) -> int:
        """Steps that may be sampled before the weights are those of the step."""
        return 0

    @property
    def own_models(self) -> bool:
        """True if frozen roles have models of their own."""
        return False

    def judges(self) -> Iterator[tuple[object, DataConfig | None]]:
        """Judges of answers, each with the source of the prompts."""
        yield from ()

    def others(self) -> Iterator[DataConfig]:
        """Data that the stage will read beside its rows."""
        yield from ()

    def parts(self) -> Iterator[StagePart]:
        """Trainings within the stage, in the order in which they run; none where it is one. The
        list is made from the settings alone.
        """
        yield from ()

    def work(self, counts: Counts) -> StageWork:
        """The words and steps of this stage's work."""
        return StageWork("", None)


class TimedSection(Section):
    """The settings of a stage that trains, and so may end after any of its steps."""

    budget: Budget = Field(
        default=None,
        description="minutes after which the training ends, at a whole step; its learning rate is "
        "drawn over the steps that fit; "
        "may change from start to start",
    )


READING = 0.4
"""Of the time of learning from rows, what it takes to read them alone."""


class RowsSection(TimedSection):
    """The settings of a stage that does not sample as it learns."""

    batch_key: ClassVar[str] = "prompts_per_update"
    """The key of the number of rows, or of prompts, that an update learns from."""
    if TYPE_CHECKING:
        epochs: int
        heldout_fraction: float
        evaluate_every: int

    def work(self, counts: Counts) -> StageWork:
        passes = f"{self.epochs} passes" if self.epochs > 1 else "1 pass"
        if counts.rows is None:
            return StageWork(f"{passes} over rows that are not counted", None)
        models = sum(part.kind in ("objective", "member", "student") for part in self.parts()) or 1
        learned = (counts.prompts or counts.rows) * (1 - self.heldout_fraction)
        once = max(1, ceil(learned / dict(self)[self.batch_key]))
        updates = models * self.epochs * once
        of = f" × {models} models" if models > 1 else ""
        # held-out rows are read at least once in each pass over the others
        reads = max(1.0, once / self.evaluate_every) if self.evaluate_every else 1.0
        held = reads * self.heldout_fraction / (1 - self.heldout_fraction)
        return StageWork(
            f"{counts.rows:,} rows × {passes}{of} in {plural(updates, 'update')}",
            updates,
            {"update": 1 + READING * held},
        )


class PromptedSection(TimedSection):
    """The settings of a stage that answers prompts and trains nothing: with less time it answers
    fewer of them.
    """

    budget: Budget = Field(
        default=None,
        description="minutes of this stage, in which it answers as many of its prompts as fit, at "
        "least 32; may change from start to start",
    )


def calls_functions(settings: Config) -> bool:
    """True if a function of the user's scores answers here, as a reward or as a judge."""
    for name, value in settings:
        tables = value if isinstance(value, tuple) else (value,)
        inner = (calls_functions(table) for table in tables if isinstance(table, Config))
        if name == "call" or any(inner):
            return True
    return False


def overlaid(one: Facts, other: Facts) -> Json:
    """Settings with others on top, tables within tables too."""
    both = {
        key: overlaid(one[key], value)
        for key, value in other.items()
        if isinstance(value, Mapping) and isinstance(one.get(key), Mapping)
    }
    return {**one, **other, **both}
