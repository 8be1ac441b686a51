"""A folder with an adapter of peft: loaded as its base with the adapter merged, whichever program
has written it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from tether.core.errors import ModelError, TetherError, one_line
from tether.core.keeping import temporary_folder
from tether.core.once import once
from tether.core.rundir import read_json
from tether.models.carried import MergedChange, carry, factors_of, fold_in, scale_carried
from tether.models.precision import cast
from tether.models.sources import check_model_source
from tether.models.trunk import Role, without_adapters
from tether.settings.model import ADAPTER_FILE, TINY, ModelConfig
from tether.settings.reading import build

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    Loaded = tuple[Any, PreTrainedTokenizerBase, str]
    """Model, tokenizer and the name of the source."""

logger = logging.getLogger(__name__)
WEIGHTS = "adapter_model.safetensors"
APART = 1e-3
"""Share of the largest logit that no rounding in float32 explains."""


def holds_adapter(folder: Path) -> bool:
    """True if a folder holds an adapter of peft, alone or beside the weights of its base."""
    return (folder / ADAPTER_FILE).is_file()


@torch.no_grad()
def load_merged(
    load: Callable[[ModelConfig, torch.dtype], Loaded],
    config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
) -> Loaded:
    """The base of an adapter's folder, with the adapter merged in float32: (model, tokenizer,
    name). Its `change` is what was merged, as far as layers can carry that.

    The base is the folder's own whole weights, as transformers has it, or the model that the
    adapter's settings name.

    Raises:
        ModelError: there is no base, or the adapter does not fit it or cannot be merged.
    """
    from transformers import AutoTokenizer

    with base_of(config, folder) as bare:
        model, tokenizer, base = load(bare, torch.float32)
    if (before := vars(model).pop("change", None)) is not None:
        carry(model, before)
    if any(folder.glob("*token*.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
    name = base if bare.source == base else "its own weights"
    once(logger.info, "%s holds an adapter, which is merged into %s", config.source, name)
    return cast(_merged(model, folder), dtype), tokenizer, config.source


def _is_alone(folder: Path) -> bool:
    return all(path.name == WEIGHTS for path in folder.glob("*.safetensors"))


def _check_bases(folder: Path) -> None:
    """Refuse an adapter whose base is itself, or an adapter that leads back to it."""
    base = folder
    seen = set[Path]()
    while holds_adapter(base) and _is_alone(base):
        if base.resolve() in seen:
            raise ModelError(
                f"{folder} holds an adapter alone, whose base leads back to {base}. Write the "
                f"folder or hub id of the base into {ADAPTER_FILE} (base_model_name_or_path).",
            )
        seen.add(base.resolve())
        base = Path(str(read_json(base / ADAPTER_FILE).get("base_model_name_or_path")))


@contextmanager
def base_of(config: ModelConfig, folder: Path) -> Iterator[ModelConfig]:
    """The settings that load the base alone: transformers would put the adapter on it, where no
    later adapter finds it.
    """
    alone = _is_alone(folder)
    if alone:
        _check_bases(folder)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(
            f"{folder} holds the settings of an adapter, and no weights: {WEIGHTS} is missing. "
            "Give the whole folder of the adapter.",
        )
    if alone:
        settings = read_json(folder / ADAPTER_FILE)
        base = settings.get("base_model_name_or_path")
        if not base:
            raise ModelError(
                f"{folder} holds an adapter alone, and its {ADAPTER_FILE} names no base "
                "(base_model_name_or_path). Write the folder or hub id of the base there.",
            )
        if base == TINY:
            raise ModelError(
                f"{folder} holds an adapter alone, for the random model {TINY!r}, which no folder "
                "holds. Export the run without --adapter.",
            )
        try:
            named = {**config.model_dump(), "source": str(base), "fallback": None}
            named["revision"] = settings.get("revision")
            bare = build(ModelConfig, named, where=ADAPTER_FILE)
            check_model_source(bare)
            yield bare
        except TetherError as error:
            raise ModelError(
                f"{folder} holds an adapter alone, whose base cannot be loaded: {error} "
                f"The name of the base stands in {ADAPTER_FILE} (base_model_name_or_path).",
            ) from error
        return
    with temporary_folder("tether-adapter") as place:
        for path in folder.iterdir():
            if path.is_file() and path.name not in (ADAPTER_FILE, WEIGHTS):
                (place / path.name).symlink_to(path.resolve())
        try:
            yield config.model_copy(
                update={"source": str(place), "revision": None, "fallback": None},
            )
        except ModelError as error:
            raise ModelError(str(error).replace(str(place), config.source)) from error


def _merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    try:
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{WEIGHTS} is missing")
        start = str(read_json(folder / ADAPTER_FILE).get("init_lora_weights"))
        if start.startswith("pissa_niter"):
            raise ValueError(
                f"init_lora_weights = {start!r} took a random part out of the base, which no file "
                "holds; peft's path_initial_model_for_weight_conversion saves such an adapter for "
                "the base as it is",
            )
        kind = PeftConfig.from_pretrained(str(folder))
        adapted = PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False)
        if not hasattr(adapted.base_model, "merge_and_unload"):
            raise ValueError(
                f"an adapter of the kind {kind.peft_type} cannot be merged into weights",
            )
        lacking = (
            get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
            - load_file(folder / WEIGHTS).keys()
        )
        if lacking:
            raise ValueError(
                f"{len(lacking)} tensors are missing in {WEIGHTS}, such as {min(lacking)}",
            )
        expected = _probe(adapted)
        change = MergedChange(factors_of(adapted, "default"), torch.float32)
        tied = _untie(without_adapters(adapted))
        scale_carried(adapted, "default")
        merged = fold_in(adapted.merge_and_unload(safe_merge=True))
        if tied:
            _tie(merged)
        difference = float((_probe(merged) - expected).abs().max() / expected.abs().max())
        if not difference < APART:
            raise ValueError(
                "merged weights compute other logits than base and adapter "
                f"(relative difference {difference:.2g})",
            )
    except Exception as error:  # peft, safetensors and torch have errors of their own each
        raise ModelError(
            f"the adapter in {folder} cannot be merged into its base: {one_line(error)}. "
            "Give an adapter that can be merged, or a whole model.",
        ) from error
    vars(merged).pop("peft_config", None)
    vars(merged)["change"] = change
    return merged


def _probe(model: nn.Module) -> torch.Tensor:
    """Logits of a few tokens."""
    ids = torch.arange(8, device=next(model.parameters()).device)[None]
    return model.eval()(input_ids=ids).logits


def _untie(model: PreTrainedModel) -> bool:
    """Give the output layer a weight of its own where it shares the embedding's: an adapter may
    change one of the two alone.
    """
    shared = {id(weight) for weight in model.get_input_embeddings().parameters()}
    layers = [
        layer
        for layer in Role(model).output_layer.modules()
        if id(vars(layer)["_parameters"].get("weight")) in shared
    ]
    for layer in layers:
        layer.weight = nn.Parameter(layer.get_parameter("weight").clone(), requires_grad=False)
    return bool(layers)


def _tie(model: PreTrainedModel) -> None:
    """Let the output layer share the embedding's weight again, or say in the configuration that
    they differ now.
    """
    shared = model.get_input_embeddings().get_parameter("weight")
    output = Role(model).output_layer
    same = torch.equal(shared, output.weight)
    if same:
        output.weight = shared
    else:
        model.all_tied_weights_keys = {}
    # peft writes it, too
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = same
