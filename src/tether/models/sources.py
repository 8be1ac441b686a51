"""Sources of models, looked up before any is loaded; this module loads no torch."""

from __future__ import annotations

import difflib
from os.path import exists
from pathlib import Path

from tether.core.errors import ConfigError, MissingFileError
from tether.core.rundir import nearby
from tether.models.packaged import PACKAGES
from tether.settings.model import ADAPTER_FILE, PACKAGE_PREFIX, TINY, ModelConfig
from tether.settings.synonyms import did_you_mean

TEMPLATES = ("chatml-tools",)
"""Chat templates of tether, by the names that `model.chat_template` takes."""


def check_model_source(config: ModelConfig) -> None:
    """Look for the folder and the template that the settings of a model name.

    Raises:
        MissingFileError: one of them is not there.
        ConfigError: the source is neither a folder nor the name of a model.
    """
    source = config.source
    folder = Path(config.source).expanduser()
    is_gguf = folder.suffix == ".gguf"
    looks_local = is_gguf or source.startswith((".", "/", "~")) or exists(source)
    files = [folder] if is_gguf else [folder / "config.json", folder / ADAPTER_FILE]
    if looks_local and not any(file.is_file() for file in files):
        raise MissingFileError(
            f"model folder {source!r} has no config.json. Give a transformers folder, a "
            ".gguf file, a hub id or `tiny`.",
        )
    template_of(config)
    packages = [f"{PACKAGE_PREFIX}{name}" for name in PACKAGES]
    named = source in (TINY, *packages) or (source.count("/") == 1 and ":" not in source)
    if not looks_local and not named:
        raise ConfigError(
            f"model source {source!r} is neither an existing folder, nor a hub id like "
            f"owner/name, nor one of the packages {', '.join(packages)}, nor `tiny`."
            f"{near_model(source)}",
        )


def near_model(source: str) -> str:
    """Suggestion for a missing source: a model with a similar name, or a run nearby."""
    models = {TINY: TINY, "gpt2": "openai-community/gpt2"}
    near = difflib.get_close_matches(source, models, n=1, cutoff=0.5)
    meant = did_you_mean([models[name] for name in near])
    return f" D{meant[1:]}" if meant else f" {nearby(Path(source))}".rstrip()


def template_of(config: ModelConfig) -> str | None:
    """The text of the chat template that replaces the tokenizer's own; None: none does.

    Raises:
        MissingFileError: its file is not there.
    """
    given = config.chat_template
    if given is None:
        return None
    path = Path(__file__).with_name(f"{given}.jinja") if given in TEMPLATES else Path(given)
    if not path.is_file():
        raise MissingFileError(
            f"chat template not found: {given}. Give the path of a Jinja file, or "
            f"{', '.join(TEMPLATES)}.",
        )
    return path.read_text(encoding="utf-8")
