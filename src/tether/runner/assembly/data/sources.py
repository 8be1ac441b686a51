"""Files and folders that a recipe names, looked up before a run starts; this module loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tether.core.errors import MissingFileError
from tether.core.rundir import check_folder
from tether.models.sources import check_model_source
from tether.settings.config import Config
from tether.settings.model import ModelConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.section import DataConfig


def check_sources(recipe: BaseRecipe) -> None:
    """Look for the data and the models that a recipe names, those of its arms included, and for a
    place for its run.

    Raises:
        MissingFileError: one of them is not there.
        RunError: the run's folder can neither be found nor made.
        ConfigError: a source of a model is neither a folder nor a name.
    """
    check_folder(Path(recipe.run))
    for part in (recipe, *map(recipe.section, recipe.stages)):
        for settings in _sources(part):
            if isinstance(settings, ModelConfig):
                check_model_source(settings)
            else:
                check_data_paths(settings)


def check_data_paths(data: DataConfig) -> None:
    """Look for the files and folders of a data section; a hub's are left for when they are needed.

    Raises:
        MissingFileError: one of them is not there.
    """
    for path in data.paths:
        if not path.startswith("hub:") and not Path(path).exists():
            raise MissingFileError(
                f"data not found: {path}. Give a file, a folder, or hub:owner/name:split.",
            )


def _sources(value: object) -> Iterator[DataConfig | ModelConfig]:
    if isinstance(value, DataConfig | ModelConfig):
        yield value
    elif isinstance(value, Config):
        for _, part in value:
            yield from _sources(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _sources(part)
