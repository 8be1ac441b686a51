"""Layers that an adapter is put on: those that a recipe names, checked against the model before
anything is trained.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping, Set
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tether.core.errors import ModelError
from tether.core.once import once
from tether.models.independence import agrees
from tether.models.trunk import Role, has_adapters, setting
from tether.settings.model import LoraConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from tether.models.trunk import Trunk

logger = logging.getLogger(__name__)
READ_BESIDE = "dt_proj"
"""A layer whose weight some kernels read without a pass through the layer: an adapter would learn
nothing.
"""
STATE_SPACES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Model types of which peft adapts neither `out_proj` nor `conv1d`."""
ATTENTION_INPUTS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "Wqkv"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # by way of latents (DeepSeek)
)


def target_names(
    model: Trunk,
    lora: LoraConfig,
    *,
    scores: bool = False,
) -> tuple[list[str], list[str]]:
    """Ends of the names of the layers that get an adapter, in peft's terms, and the names of layers
    that end so and get none. The output layer is never among the first.

    Args:
        scores: of a model whose output layer is not used, so that an embedding that is tied to it
            may have an adapter.

    Raises:
        ModelError: a name fits no layer, a layer that cannot have an adapter, or one whose adapter
            would not be what is saved.
    """
    causal = Role(model).causal_model
    layers = _layers(causal)
    learning = learning_layers(model)
    able = {
        name
        for name, layer in layers.items()
        if name in learning and takes_adapter(causal, name, layer)
    }
    if isinstance(lora.targets, str):
        wanted = _by_kind(model, layers, able, lora.targets)
    else:
        _check(model, able, lora, scores)
        wanted = [*lora.targets]
    return wanted, [
        name for name in layers if name not in able and any(_ends(name, end) for end in wanted)
    ]


def _by_kind(
    model: Trunk,
    layers: Mapping[str, nn.Module],
    able: Set[str],
    kind: str,
) -> list[str]:
    """The ends of names that `kind` means here."""
    linear = {_end(name) for name in able if _is_linear(layers[name])}
    wanted = (
        sorted(linear)
        if kind == "all-linear"
        else [name for name in ATTENTION_INPUTS if name in linear]
    )
    if not wanted:
        raise ModelError(
            f"cannot tell which layers lora.targets = {kind!r} means here; "
            f"name some of {sorted(linear)}",
        )
    stacked = {
        _leaf(name)
        for name, layer in _layers(Role(model).decoder).items()
        if not isinstance(layer, nn.Conv1d)
        and any(weight.dim() == 3 for weight in layer.parameters(recurse=False))
    }
    if stacked and kind == "all-linear":
        once(
            logger.warning,
            "lora.targets = 'all-linear': the weights of %s are no linear layers "
            "and get no adapter",
            ", ".join(sorted(stacked)),
        )
    return wanted


def learning_layers(model: Trunk) -> set[str]:
    """Names of the decoder's layers in which an adapter learns from text: a pass on text calls
    them, and its gradient reaches them.

    The towers of images and sounds are not called. Choices, such as an indexer's, have no gradient.
    An expert that no token chose is like those beside it. Shapes alone count as called, since some
    cannot be run.
    """
    role = Role(Role(model).causal_model)
    role.activate()
    inner = {*role.decoder.modules()}
    inside = {name: layer for name, layer in _layers(role.causal_model).items() if layer in inner}
    reached = set[str]()
    starts = list[Tensor]()

    def followed(name: str, layer: nn.Module, _: object, output: object) -> object:
        if not isinstance(output, Tensor):
            return output
        if isinstance(layer, nn.Embedding):
            starts.append(output.requires_grad_())
        seen = output.clone() if output.is_leaf else output  # which the model may change in place
        if seen.requires_grad:
            seen.register_hook(lambda _: reached.add(name))
        return seen

    hooks = [
        layer.register_forward_hook(partial(followed, name))
        for name, layer in inside.items()
        if _is_linear(layer) or isinstance(layer, nn.Embedding | nn.Conv1d)
    ]
    try:
        with torch.enable_grad():
            total = role.states(role.few_ids(9)).float().sum()
            torch.autograd.grad(total, starts, allow_unused=True)
    except Exception:  # noqa: BLE001  (shapes have no values to choose experts by; others have run before)
        return {*inside}
    finally:
        for hook in hooks:
            hook.remove()
    kinds = {*map(_beside, reached)}
    return {name for name in inside if _beside(name) in kinds}


def kept_layers(config: PretrainedConfig, lora: LoraConfig) -> list[int] | None:
    """The numbers of the layers that `lora.last_layers` keeps; None: all."""
    depth = setting(config.get_text_config(), "num_hidden_layers")
    return (
        list(range(max(0, depth - lora.last_layers), depth)) if lora.last_layers and depth else None
    )


def _check(model: Trunk, able: Set[str], lora: LoraConfig, scores: bool) -> None:
    role = Role(model)
    causal = role.causal_model
    layers = _layers(causal)
    kind = type(causal).__name__
    output, embedding = map(bare_layer, (role.output_layer, causal.get_input_embeddings()))
    for target in lora.targets:
        matches = {name: layer for name, layer in layers.items() if _ends(name, target)}
        if not matches:
            names = sorted({_leaf(name) for name in able})
            near = difflib.get_close_matches(target, names, cutoff=0.5)
            advice = (
                f"Nearest is {' or '.join(map(repr, near))}"
                if near
                else f"There are {', '.join(names)}"
            )
            raise ModelError(f"lora.targets: no layer of {kind} is called {target!r}. {advice}.")
        if any(layer is output for layer in matches.values()):
            raise ModelError(
                f"lora.targets: {target!r} is the output layer, whose weight the losses read "
                "without an adapter. Leave it out, or train the whole model (lora = false).",
            )
        if not able & matches.keys():
            name, layer = next(iter(matches.items()))
            raise ModelError(
                f"lora.targets: {name!r} is a {type(layer).__name__}, which takes no adapter here. "
                "Name linear layers or embeddings of the language model.",
            )
        tied = embedding.weight is output.weight
        if tied and not scores and any(layer is embedding for layer in matches.values()):
            raise ModelError(
                f"lora.targets: {target!r} is also the output layer of this model (tied weights). "
                "A merged adapter would change both, and training changes one. Leave it out, or "
                "train the whole model (lora = false).",
            )
        if lora.last_layers and not any(re.search(r"\.\d+\.", name) for name in matches):
            raise ModelError(
                f"lora.targets: {target!r} stands in no numbered layer, so lora.last_layers = "
                f"{lora.last_layers} leaves it out. Drop one of the two.",
            )


def _is_linear(layer: nn.Module) -> bool:
    """True if a layer is a matrix product, stored either way (GPT-2 has the transpose)."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, nn.Linear | Conv1D)


def takes_adapter(model: Trunk, name: str, layer: nn.Module) -> bool:
    """True if peft can put an adapter on a layer, and the model passes its states through the layer
    wherever it runs. Kernels of state spaces read `out_proj` themselves.
    """
    fused = (
        _leaf(name) in ("out_proj", "conv1d")
        and Role(model).causal_model.config.model_type in STATE_SPACES
    )
    if fused or _leaf(name) == READ_BESIDE:
        return False
    if isinstance(layer, nn.Conv1d):
        return layer.groups == 1  # peft merges no other adapter, so no export could hold it
    return isinstance(layer, nn.Embedding) or (_is_linear(layer) and _is_product(layer))


@torch.no_grad()
def _is_product(layer: nn.Module) -> bool:
    """True if a layer gives the product with its weight: subclasses may split their input into
    groups, or return more.
    """
    if type(layer).forward is nn.Linear.forward or not isinstance(layer, nn.Linear):
        return True
    weight = layer.weight
    if not weight.is_floating_point():  # in 4 bits: the library's own layer
        return True
    given = torch.linspace(0, 1, layer.in_features)[None].to(weight)
    try:
        result = type(layer).forward(layer, given)
        expected = nn.functional.linear(given, weight, layer.bias)
        return result.shape == expected.shape and (weight.is_meta or agrees(result, expected))
    except Exception:  # noqa: BLE001  (a layer of any author)
        return False


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


def _ends(name: str, end: str) -> bool:
    """True if a name ends so, as peft reads it."""
    return f".{name}".endswith(f".{end}")


def _beside(name: str) -> str:
    """A name that an expert's layer shares with those of the experts beside it."""
    return re.sub(r"(?<=experts\.)\d+", "*", name)


def _end(name: str) -> str:
    """The last part of a name, with the one before where it is a number, which layers have too."""
    parts = name.split(".")
    return ".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
