"""Sources of models, looked up before any is loaded; this module loads no torch."""

from __future__ import annotations

from os.path import exists
from pathlib import Path

from tether.core.errors import ConfigError, MissingFileError
from tether.settings.model import ADAPTER_FILE, PACKAGE_PREFIX, TINY, ModelConfig


def check_model_source(config: ModelConfig) -> None:
    """Look for the folder and the template that the settings of a model name.

    Raises:
        MissingFileError: one of them is not there.
        ConfigError: the source is neither a folder nor the name of a model.
    """
    source, folder = config.source, Path(config.source).expanduser()
    looks_local = source.startswith((".", "/", "~")) or exists(source)
    is_gguf = folder.suffix == ".gguf" and folder.is_file()
    names = ("config.json", ADAPTER_FILE)
    if looks_local and not is_gguf and not any((folder / name).is_file() for name in names):
        raise MissingFileError(
            f"model folder {source!r} has no config.json. Give a transformers folder, a "
            ".gguf file, a hub id or `tiny`.",
        )
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise MissingFileError(
            f"chat template not found: {config.chat_template}. Give the path of a Jinja file.",
        )
    named = source.startswith(PACKAGE_PREFIX) or source == TINY or source.count("/") == 1
    if not looks_local and not named:
        raise ConfigError(
            f"model source {source!r} is neither an existing folder, nor a hub id like "
            "owner/name, nor package:NAME==VERSION, nor `tiny`",
        )
