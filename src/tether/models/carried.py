"""A trained change that layers carry beside their weights: y = W x + B A x.

A bfloat16 weight takes up no change below half a unit in its last place. Of an adapter of a
thousandth of the weights, a merge keeps half. So a model that is loaded in bfloat16, or in 4 bits,
computes with the adapter beside the weights. The adapter is part of the base: it is frozen, and
works under every role. Both products are added up in float32 and rounded once
(`product_with_change`). A CPU does this within `addmm`. On a GPU the larger product is written in
float32, because `addmm` may round there before it adds.

On disk, a folder holds the merged weights, which any program can load, and in `merged_adapter` the
adapter that was merged, in peft's format. Loading takes the adapter out of the weights again:
W is (W + B A) rounded, less B A, rounded. At most some of a hundred weights miss W, by one unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from tether.algorithms.autograd import AutogradContext
from tether.core.errors import ModelError, one_line
from tether.core.rundir import read_json, write_json
from tether.models.targets import bare_layer, takes_adapter
from tether.models.trunk import TrunkT, without_adapters
from tether.settings.model import ADAPTER_FILE

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

    from tether.models.trunk import Trunk

_SETS = ("target_modules", "exclude_modules", "modules_to_save")
MERGED_ADAPTER = "merged_adapter"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
DOWN, UP = "carried_down", "carried_up"
"""Buffers of a layer that carries a change."""
Factors = Mapping[str, tuple[Tensor, Tensor]]
"""By the name of a layer: A (rank, inputs) and B (outputs, rank) in float32, B with the scale."""


@dataclass(frozen=True)
class MergedChange:
    """The change that was merged into weights.

    `stored` is the type of the weights that it was merged into, as they lie on disk.
    """

    factors: Factors
    stored: torch.dtype


class Carrier(nn.Module):
    """A layer that carries a change."""

    weight: Tensor
    bias: Tensor | None
    carried_down: Tensor
    carried_up: Tensor


def _carries(layer: nn.Module) -> TypeGuard[Carrier]:
    return hasattr(layer, DOWN)


def carriers(model: Trunk) -> Iterator[tuple[str, Carrier]]:
    """The layers that carry a change, by the names that they have without adapters."""
    for name, module in without_adapters(model).named_modules():
        if _carries(module):
            yield name.replace(".base_layer", ""), module


def change_of(layer: nn.Module) -> Tensor | None:
    """The change that a layer carries, in the shape of its weight, float32; None without one."""
    return _carried(layer) if _carries(layer) else None


def _carried(layer: Carrier) -> Tensor:
    return _product(layer, layer.carried_down, layer.carried_up)


def factors_of(model: Trunk, adapter: str | None = None) -> Factors:
    """Factors of the changes that layers carry, stacked with those of an adapter of peft.

    The adapter's part covers only the layers that can carry it.
    """
    held = {name: (layer.carried_down, layer.carried_up) for name, layer in carriers(model)}
    own = {
        name: (
            layer.lora_A[adapter].weight,
            layer.lora_B[adapter].weight.float() * layer.scaling[adapter],
        )
        for name, layer in _adapted(model, adapter)
        if _can_carry(model, name, layer, adapter)
    }
    return stacked(held, own)


def stacked(first: Factors, second: Factors) -> Factors:
    """The factors of the sum of two changes, as copies in float32: their ranks add up."""
    both = {}
    for name in {**first, **second}:
        pairs = [factors[name] for factors in (first, second) if name in factors]
        downs, ups = zip(*pairs, strict=True)
        both[name] = (
            torch.cat([down.detach().float() for down in downs]),
            torch.cat([up.detach().float() for up in ups], 1),
        )
    return both


def _adapted(model: Trunk, adapter: str | None) -> list[tuple[str, Any]]:
    """The layers on which peft has put this adapter, by their names without it."""
    from peft.tuners.lora import LoraLayer

    return [
        (name, layer)
        for name, layer in without_adapters(model).named_modules()
        if isinstance(layer, LoraLayer) and adapter in layer.scaling
    ]


def carries_all(model: Trunk, adapter: str | None) -> bool:
    """True if layers carry a change, and every layer with an adapter can carry the adapter's."""
    able = all(_can_carry(model, *pair, adapter) for pair in _adapted(model, adapter))
    return able and any(carriers(model))


def _can_carry(model: Trunk, name: str, layer: nn.Module, adapter: str | None) -> bool:
    """True if a layer can carry an adapter: the whole change is a product of two matrices, added to
    the layer's output.

    That is not so of DoRA. The weight of an output layer, and of those that `takes_adapter`
    refuses, is read without a pass through the layer. Embeddings and convolutions are left out.
    """
    from peft.tuners.lora import Linear as LoraLinear

    return (
        isinstance(layer, LoraLinear)
        and adapter not in layer.lora_variant
        and not layer.lora_bias.get(str(adapter))
        and layer is not without_adapters(model).get_output_embeddings()
        and takes_adapter(without_adapters(model), name, layer.get_base_layer())
    )


@torch.no_grad()
def carry(model: Trunk, change: MergedChange) -> None:
    """Take a change out of the weights that it was merged into, and let the layers carry it."""
    for name, factors in change.factors.items():
        layer = without_adapters(model).get_submodule(name)
        weight = layer.get_parameter("weight")
        down, up = (factor.to(weight.device) for factor in factors)
        rest = weight.float() - _product(layer, down, up)
        weight.copy_(rest.to(change.stored))
        _hold(layer, down.to(model.dtype), up.to(model.dtype))


@torch.no_grad()
def fold_in(model: TrunkT) -> TrunkT:
    """Add to the weights what their layers carry, in the weights' own type. Returns the model."""
    for _, layer in list(carriers(model)):
        layer.weight.copy_(layer.weight.float() + _carried(layer))
    return drop(model)


def drop(model: TrunkT) -> TrunkT:
    """Let go of what layers carry. Returns the model."""
    for _, layer in list(carriers(model)):
        del layer.forward, layer.carried_down, layer.carried_up
    return model


@dataclass
class Rounding:
    """Changes of weights, and the share of them that rounding to `dtype` removes.

    The remaining share is <D, round(W + D) - W> / <D, D> over all weights: the projection of the
    remaining change on D.
    """

    dtype: torch.dtype
    lost: float = 0.0
    whole: float = 0.0
    layers: int = 0

    def add(self, change: Tensor, merged: Tensor) -> None:
        """Count one layer's change D and W + D, both in float32."""
        error = merged.double() - merged.to(self.dtype).double()
        exact = change.to(merged.device).double()
        self.lost += float((error * exact).sum())
        self.whole += float(exact.square().sum())
        self.layers += 1

    @property
    def share(self) -> float | None:
        """The share that is left; None: there is no change."""
        return 1.0 - self.lost / self.whole if self.whole else None


@torch.no_grad()
def settle(model: Any, adapter: str | None, rounding: Rounding | None = None) -> Any:
    """The model without peft, as it will be when it has been saved and loaded: its layers carry the
    adapter called `adapter`.

    A change that no layer can carry is added to the weights in float32, and rounded once. To
    float32 weights all of it is added, and the model's `change` says what. peft's wrapper is used
    up.

    Args:
        rounding: counts the changes that no layer can carry.
    """
    if adapter is None:
        return model
    dtype = model.dtype
    scale_carried(model, adapter)
    for name, layer in _adapted(model, adapter):
        able = _can_carry(model, name, layer, adapter)
        if able and dtype != torch.float32:
            continue
        layer.float()
        weight = layer.get_base_layer().weight
        before = None if able or rounding is None else weight.detach().clone()
        layer.merge(adapter_names=[adapter])
        if before is not None and rounding is not None:
            rounding.add(weight - before, weight)
        layer.to(dtype)
    change = MergedChange(factors_of(model, adapter), dtype)
    bare = model.unload()
    if dtype == torch.float32:
        bare.change = change
        return fold_in(bare)
    for name, (down, up) in change.factors.items():
        layer = bare.get_submodule(name)
        layer.weight.copy_(layer.weight.float() + _product(layer, down, up))
    carry(bare, change)
    return bare


@torch.no_grad()
def scale_carried(model: Trunk, adapter: str) -> None:
    """Prepare for the merge of a DoRA adapter: what a layer carries is scaled as its outputs are.

    DoRA multiplies each output by a learned length over the length that W + s B A has.
    """
    for _, layer in _adapted(model, adapter):
        base = layer.get_base_layer()
        if hasattr(base, DOWN) and layer.use_dora.get(adapter, False):
            learned = layer.lora_magnitude_vector[adapter].weight.flatten().float()
            factor = learned / lengths(layer, adapter)
            base.carried_up.copy_(base.carried_up.float() * factor[:, None])


def matrices(layer: LoraLayer) -> Mapping[str, tuple[Tensor, Tensor]]:
    """A and B of every adapter of a linear layer, a convolution or an embedding, by the adapters'
    names.
    """
    linear = {
        name: (part.get_parameter("weight"), layer.lora_B[name].get_parameter("weight"))
        for name, part in layer.lora_A.items()
    }
    return linear | {
        name: (layer.lora_embedding_A[name], layer.lora_embedding_B[name])
        for name in layer.lora_embedding_A
    }


def lengths(layer: LoraLayer, adapter: str) -> Tensor:
    """Each output's length in W + s B A, (outputs,) float32: the divisor of DoRA."""
    from peft.utils.integrations import dequantize_module_weight
    from transformers.pytorch_utils import Conv1D

    base = layer.get_base_layer()
    weight = dequantize_module_weight(base).float()
    # outputs come first
    weight = weight.T if isinstance(base, Conv1D | nn.Embedding) else weight.flatten(1)
    down, up = (factor.float().flatten(1) for factor in matrices(layer)[adapter])
    return (weight + layer.scaling[adapter] * up @ down).norm(dim=1)


def hand_over(layer: nn.Module, other: nn.Module) -> None:
    """Let `other`, which takes the place of a layer, carry what that carries."""
    if _carries(layer):
        _hold(other, layer.carried_down, layer.carried_up)


def base_weights(model: Trunk) -> dict[str, Tensor]:
    """A model's own weights by name, without what layers carry and without adapters."""
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in without_adapters(model).state_dict().items()
        if not name.endswith((DOWN, UP)) and ".lora_" not in name
    }


@torch.no_grad()
def merged_weights(model: Trunk) -> dict[str, Tensor]:
    """The weights by name with what layers carry, rounded to the weights' own type."""
    weights = base_weights(model)
    for name, layer in carriers(model):
        whole = layer.weight.float() + _carried(layer)
        weights[f"{name}.weight"] = whole.to(layer.weight.dtype)
    return weights


@torch.no_grad()
def rounding_of(
    model: Trunk,
    factors: Factors,
    dtype: torch.dtype,
    others: Rounding | None = None,
) -> Rounding:
    """Changes that were merged, or that layers carry, and how much of them weights in `dtype` hold.

    Args:
        model: in float32, merged, or with layers that carry the change.
        others: changes that no layer can carry; they are added.
    """
    rounding = Rounding(dtype) if others is None else others
    for name, (down, up) in factors.items():
        layer = bare_layer(without_adapters(model).get_submodule(name))
        weight = layer.get_parameter("weight")
        carried = change_of(layer)
        merged = weight if carried is None else weight + carried
        rounding.add(_product(layer, down, up), merged)
    return rounding


def order_settings(folder: Path) -> None:
    """Sort the names in an adapter's settings: peft holds them as sets, and a set's order differs
    from process to process.
    """
    settings = read_json(folder / ADAPTER_FILE)
    names = {
        key: sorted(value)
        for key, value in settings.items()
        if key in _SETS and isinstance(value, list)
    }
    write_json(folder / ADAPTER_FILE, {**settings, **names})


def write_change(folder: Path, change: MergedChange) -> None:
    """Write a change into `folder` in peft's format, as one adapter whose scale is 1."""
    from peft import LoraConfig

    rank = max(len(down) for down, _ in change.factors.values())
    targets = sorted(change.factors)
    LoraConfig(r=rank, lora_alpha=rank, target_modules=targets).save_pretrained(str(folder))
    order_settings(folder)
    tensors = {}
    for name, (down, up) in change.factors.items():
        less = rank - len(down)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = pad(down.cpu(), (0, 0, 0, less))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = pad(up.cpu(), (0, less))
    # one entry: safetensors writes several in any order, and bytes would differ
    metadata = {"stored": str(change.stored).removeprefix("torch.")}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata=metadata)


def read_change(folder: Path) -> MergedChange | None:
    """The change that was merged into the weights of a folder; None: the folder names none.

    Raises:
        ModelError: its file is damaged.
    """
    path = folder / MERGED_ADAPTER / ADAPTER_WEIGHTS
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            stored = getattr(torch, file.metadata()["stored"])
            tensors = list(map(file.get_tensor, names := sorted(file.keys())))
        # A of every layer, and its B
        layers = [name.removeprefix(PREFIX).rsplit(".", 2)[0] for name in names[::2]]
        factors = dict(zip(layers, zip(tensors[::2], tensors[1::2], strict=True), strict=True))
    except Exception as error:
        raise ModelError(
            f"{path} cannot be used: {one_line(error)}. Restore it, or delete {path.parent}: then "
            "the merged weights are taken as they are, rounded.",
        ) from error
    return MergedChange(factors, stored)


PREFIX = "base_model.model."
"""Of a layer's name in peft's files."""


def _product(layer: nn.Module, down: Tensor, up: Tensor) -> Tensor:
    """B A in the shape of a layer's weight, float32."""
    from transformers.pytorch_utils import Conv1D

    change = up.float() @ down.float()
    if isinstance(layer, Conv1D):
        return change.T
    return change


def _hold(layer: nn.Module, down: Tensor, up: Tensor) -> None:
    """Let a layer carry B A, in place of what it carries."""
    layer.forward = MethodType(_forward, layer)
    device = layer.get_parameter("weight").device
    layer.register_buffer(DOWN, down.to(device))
    layer.register_buffer(UP, up.to(device))


def _forward(layer: Carrier, states: Tensor) -> Tensor:
    """W x + B A x, rounded once, and so is its gradient (`product_with_change`). Layers in 4
    bits round W x before.
    """
    from transformers.pytorch_utils import Conv1D

    down = layer.carried_down
    up = layer.carried_up
    if states.dtype == torch.float32 or layer.weight.dtype != states.dtype:  # or held in 4 bits
        return type(layer).forward(layer, states) + linear(linear(states, down), up)
    weight = layer.weight if isinstance(layer, Conv1D) else layer.weight.T
    whole = product_with_change(states, weight, down.T, up.T)
    return whole if layer.bias is None else whole + layer.bias


def product_with_change(states: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """x W + (x A) B, rounded once: (..., inputs) -> (..., outputs).

    Args:
        weight: (inputs, outputs), in the type of the states.
        down: (inputs, rank), frozen.
        up: (rank, outputs), frozen.
    """
    return _ProductWithChange.apply(states, weight, down, up)


def rounded_once(rows: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """x W + (x A) B of rows (N, inputs), in their type.

    (x A) B is rounded before, which costs one part in 256 of the change.
    """
    change = rows @ down @ up
    if rows.device.type != "cuda":
        return torch.addmm(change, rows, weight)
    whole = torch.mm(rows, weight, out_dtype=torch.float32)
    # one kernel: read, add in float32, round, write
    return torch.add(whole, change, out=change)


class _ProductWithChange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        states: Tensor,
        weight: Tensor,
        down: Tensor,
        up: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(states if weight.requires_grad else None, weight, down, up)
        whole = rounded_once(states.flatten(0, -2), weight, down, up)
        return whole.view(*states.shape[:-1], -1)

    @staticmethod
    def backward(ctx: AutogradContext, slope: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, down, up = ctx.saved_tensors
        rows = slope.flatten(0, -2)
        before = own = None
        if ctx.needs_input_grad[0]:
            before = rounded_once(rows, weight.T, up.T, down.T).view(*slope.shape[:-1], -1)
        if states is not None:
            own = states.flatten(0, -2).T @ rows
        return before, own, None, None
