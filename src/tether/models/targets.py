"""Layers that an adapter is put on: those that a recipe names, checked against the model before
anything is trained.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from tether.core.errors import ModelError
from tether.core.once import once
from tether.models.trunk import Role, has_adapters, setting
from tether.settings.model import LoraConfig

if TYPE_CHECKING:
    from tether.models.trunk import Trunk

logger = logging.getLogger(__name__)
READ_BESIDE = ("dt_proj", "classifier")
"""Layers whose weights are read without a pass through the layer: an adapter would learn
nothing.
"""
STATE_SPACES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types of which peft adapts neither `out_proj` nor `conv1d`."""
ATTENTION_INPUTS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "Wqkv"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # by way of latents (DeepSeek)
)


def target_names(model: Trunk, lora: LoraConfig, *, scores: bool = False) -> list[str]:
    """Ends of the names of the layers that get an adapter, in peft's terms. The output layer is
    never among them.

    Args:
        scores: of a model whose output layer is not used, so that an embedding that is tied to it
            may have an adapter.

    Raises:
        ModelError: a name fits no layer, a layer that cannot have an adapter, or one whose adapter
            would not be what is saved.
    """
    if not isinstance(lora.targets, str):
        _check(model, lora.targets, lora.last_layers, scores)
        return list(lora.targets)
    decoder = Role(model).decoder
    products = {name: layer for name, layer in _layers(decoder).items() if _is_linear(layer)}
    linear = {_end(name) for name in products}
    linear -= {
        _end(name) for name, layer in products.items() if not takes_adapter(model, name, layer)
    }
    wanted = (
        sorted(linear)
        if lora.targets == "all-linear"
        else [name for name in ATTENTION_INPUTS if name in linear]
    )
    if not wanted:
        raise ModelError(
            f"cannot tell which layers lora.targets = {lora.targets!r} means here; "
            f"name some of {sorted(linear)}",
        )
    stacked = {
        _leaf(name.rpartition(".")[0])
        for name, p in decoder.named_parameters()
        if p.dim() == 3 and "lora_" not in name
    }
    stacked -= {
        _leaf(name) for name, layer in _layers(decoder).items() if isinstance(layer, nn.Conv1d)
    }
    if stacked and lora.targets == "all-linear":
        left_out = ", ".join(sorted(stacked))
        once(
            logger.warning,
            "lora.targets = 'all-linear': the weights of %s are no linear layers "
            "and get no adapter",
            left_out,
        )
    return wanted


def kept_layers(config: object, lora: LoraConfig) -> list[int] | None:
    """The numbers of the layers that `lora.last_layers` keeps; None: all."""
    depth = setting(config, "num_hidden_layers")
    return (
        list(range(max(0, depth - lora.last_layers), depth)) if lora.last_layers and depth else None
    )


def _check(model: Trunk, targets: Sequence[str], last_layers: int | None, scores: bool) -> None:
    role = Role(model)
    causal = role.causal_model
    layers, kind = _layers(causal), type(causal).__name__
    output, embedding = map(bare_layer, (role.output_layer, causal.get_input_embeddings()))
    for target in targets:
        matches = {
            name: layer
            for name, layer in layers.items()
            if name == target or name.endswith(f".{target}")
        }
        if not matches:
            fit = (
                name
                for name, layer in layers.items()
                if takes_adapter(causal, name, layer) and layer is not output
            )
            able = sorted({_leaf(name) for name in fit})
            near = difflib.get_close_matches(target, able, cutoff=0.5)
            advice = (
                f"Nearest is {' or '.join(map(repr, near))}"
                if near
                else f"There are {', '.join(able)}"
            )
            raise ModelError(f"lora.targets: no layer of {kind} is called {target!r}. {advice}.")
        for name, layer in matches.items():
            if not takes_adapter(causal, name, layer):
                raise ModelError(
                    f"lora.targets: {name!r} is a {type(layer).__name__}, which takes no adapter. "
                    "Name linear layers or embeddings.",
                )
        if any(layer is output for layer in matches.values()):
            raise ModelError(
                f"lora.targets: {target!r} is the output layer, whose weight the losses read "
                "without an adapter. Leave it out, or train the whole model (lora = false).",
            )
        tied = embedding.weight is output.weight
        if tied and not scores and any(layer is embedding for layer in matches.values()):
            raise ModelError(
                f"lora.targets: {target!r} is also the output layer of this model (tied weights). "
                "A merged adapter would change both, and training changes one. Leave it out, or "
                "train the whole model (lora = false).",
            )
        if last_layers and not any(re.search(r"\.\d+\.", name) for name in matches):
            raise ModelError(
                f"lora.targets: {target!r} stands in no numbered layer, so lora.last_layers = "
                f"{last_layers} leaves it out. Drop one of the two.",
            )


def _is_linear(layer: nn.Module) -> bool:
    """True if a layer is a matrix product, stored either way (GPT-2 has the transpose)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, nn.Linear | Conv1D)


def takes_adapter(model: Trunk, name: str, layer: nn.Module) -> bool:
    """True if peft can put an adapter on a layer, and the model passes its states through the
    layer.

    A router that is a linear layer by its class gives more than a product. Kernels of state spaces
    read `out_proj` themselves.
    """
    routes = isinstance(layer, nn.Linear) and "Router" in type(layer).__name__
    fused = (
        _leaf(name) in ("out_proj", "conv1d")
        and Role(model).causal_model.config.model_type in STATE_SPACES
    )
    fused |= _leaf(name) in READ_BESIDE
    # peft merges no such adapter, so no export could hold it
    fused |= isinstance(layer, nn.Conv1d) and layer.groups > 1
    return (
        (_is_linear(layer) or isinstance(layer, nn.Embedding | nn.Conv1d))
        and not routes
        and not fused
    )


def _layers(root: nn.Module) -> Mapping[str, nn.Module]:
    """The modules as they were before any adapter, by name."""
    parts = {
        name: module
        for name, module in root.named_modules()
        if ".lora_" not in name and ".base_layer" not in name
    }
    return {name: bare_layer(module) for name, module in parts.items()}


def bare_layer(module: nn.Module) -> nn.Module:
    """A layer without peft's adapters around it."""
    return module.get_base_layer() if has_adapters(module) else module


def _end(name: str) -> str:
    """The last part of a name, with the one before where it is a number, which layers have too."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
