"""A saved model as transformers 4 reads it, too: vLLM releases and converters that depend on it
know no newer names.

transformers 5 writes the settings of rotary embeddings, and tokenizers, under names that version 4
does not have. Version 4 takes its defaults then, and says nothing: another rotary base computes
other log-probabilities. Both names are written here. Version 5 reads either.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tether.core.rundir import read_json, write_json
from tether.core.types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTENCEPIECE = "tokenizer.model"
"""A tokenizer's model that converters to other formats look for; transformers 5 saves
tokenizer.json alone.
"""
OLDER_CLASSES = {
    "TokenizersBackend": "PreTrainedTokenizerFast",
    "PythonBackend": "PreTrainedTokenizer",
}
OLDER_ROTARIES = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""Kinds of scaling that version 4 has; of others version 5 refuses the older form."""
OWN_NAMES = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""Names of a family's settings in transformers 4, besides the common names."""


def write_for_older_readers(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add to a saved model what transformers 4 and converters read in place of newer names and
    files.
    """
    _write_older_names(folder)
    if (model := _sentencepiece_of(str(tokenizer.name_or_path))) is not None:
        shutil.copyfile(model, folder / SENTENCEPIECE)


def _sentencepiece_of(source: str) -> Path | None:
    """The SentencePiece model that a tokenizer was loaded beside, in a folder or in the hub's
    cache.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source)
    if folder.is_dir():
        return folder / SENTENCEPIECE if (folder / SENTENCEPIECE).is_file() else None
    path = try_to_load_from_cache(source, SENTENCEPIECE) if source.count("/") == 1 else None
    return Path(path) if isinstance(path, str) else None


def _write_older_names(folder: Path) -> None:
    """In config.json and tokenizer_config.json."""
    config = folder / "config.json"
    if config.is_file():
        write_json(config, with_older_names(read_json(config)))
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file():
        values = read_json(tokenizer)
        if values.get("tokenizer_class") in OLDER_CLASSES:
            values["tokenizer_class"] = OLDER_CLASSES[values["tokenizer_class"]]
        if isinstance(values.get("extra_special_tokens"), list):  # version 4 wants a table there
            values["additional_special_tokens"] = values.pop("extra_special_tokens")
        write_json(tokenizer, values)


def with_older_names(config: Json) -> Json:
    """The settings of a model, or of a part of one, with those of its rotary embedding under their
    older names.
    """
    config = {
        key: with_older_names(value) if key.endswith("_config") and value else value
        for key, value in config.items()
    }
    if "dtype" in config:
        config["torch_dtype"] = config["dtype"]
    rotary = config.get("rope_parameters")
    if not isinstance(rotary, dict):
        return config
    if "full_attention" in rotary:  # a base for each kind of layer
        if "rope_theta" in rotary.get("sliding_attention", ()):
            config["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
        rotary = rotary["full_attention"]
    if "rope_type" in rotary:
        config |= _rotary(rotary)
    own = OWN_NAMES.get(str(config.get("model_type")), {})
    return config | {name: config[common] for common, name in own.items() if common in config}


def _rotary(parameters: Json) -> Json:
    bases = ("rope_theta", "partial_rotary_factor")
    older: Json = {name: parameters[name] for name in bases if name in parameters}
    if parameters["rope_type"] in OLDER_ROTARIES:
        older["rope_scaling"] = {
            key: value for key, value in parameters.items() if key not in bases
        }
    return older
