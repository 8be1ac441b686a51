"""Keys of every section of a recipe, and the sources of its rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from tether.core.errors import MissingFileError
from tether.core.types import Facts, Json, Prompt
from tether.settings.budget import Budget
from tether.settings.config import Config
from tether.settings.model import LoraConfig

PACKAGED = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
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


def _without_dropout(lora: Lora) -> Lora:
    if lora is not False and lora.dropout:
        raise ValueError(
            "lora.dropout has no effect here: what is sampled, compared and trained is one "
            "policy, without dropout. Leave it out",
        )
    return lora


SteadyLora = Annotated[Lora, AfterValidator(_without_dropout)]
"""Of the stages whose losses compare several passes over the same tokens: dropout would make those
differ by itself.
"""


OFFLOAD = (
    "keep the layers of frozen models of their own in host memory; one at a time visits the device"
)


class Section(Config):
    """The settings of a stage in a recipe: the stage's own, and where its rows come from."""

    record: ClassVar[type] = Prompt
    """The kind of row that the stage reads."""
    data: DataConfig | None = Field(default=None, description="where the rows come from")

    @property
    def scorer(self) -> str | None:
        """The stage whose trained model scores this one's answers."""
        return None

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

    def others(self) -> Iterator[DataConfig]:
        """Data that the stage will read beside its rows."""
        yield from ()


class TimedSection(Section):
    """The settings of a stage that trains, and so may end after any of its steps."""

    budget: Budget = Field(
        default=None,
        description="minutes after which the training ends, at a whole step; its learning rate is "
        "drawn over the steps that fit; "
        "may change from start to start",
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
    inner = (getattr(settings, name) for name in type(settings).model_fields)
    return "call" in type(settings).model_fields or any(
        isinstance(value, Config) and calls_functions(value) for value in inner
    )


def overlaid(one: Facts, other: Facts) -> Json:
    """Settings with others on top, tables within tables too."""
    both = {
        key: overlaid(one[key], value)
        for key, value in other.items()
        if isinstance(value, Mapping) and isinstance(one.get(key), Mapping)
    }
    return {**one, **other, **both}
