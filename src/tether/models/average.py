"""One role with the mean of several roles' weights (WARM, https://arxiv.org/abs/2401.12187)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tether.core.errors import ModelError
from tether.models.carried import lengths, matrices
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.settings.model import LoraConfig

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


@torch.no_grad()
def average_roles(roles: Sequence[Role], name: str, lora: LoraConfig) -> Role:
    """One role with the mean of the members' weights, under an adapter called `name`.

    mean_k (W + s B_k A_k) is not W + s mean(B) mean(A). It is exactly an adapter of K times the
    rank: W + (s/K) [B_1 … B_K] [A_1; …; A_K]. LoRA's scale alpha / (K rank) is s/K without a change
    of alpha. For rsLoRA's scale alpha / sqrt(K rank), alpha is divided by sqrt(K).

    DoRA computes D_k (W + s B_k A_k). The diagonal D_k holds a learned length over the present one
    for each output. With D = mean_k D_k, the mean is exactly D (W + (s/K) [D⁻¹D_1 B_1 …] [A_1; …]):
    an adapter of the same kind. Heads are linear, so theirs is a plain mean.

    Args:
        lora: settings of the members' adapters.

    Raises:
        ModelError: the mean of DoRA's factors is 0 for an output, which leaves no adapter of this
            kind.
    """
    from peft.tuners.lora import LoraLayer

    first = roles[0]
    count = len(roles)
    wide = {
        "rank": lora.rank * count,
        "alpha": lora.alpha / math.sqrt(count) if lora.rslora else lora.alpha,
    }
    model = add_adapter(first.model, name, lora.model_copy(update=wide), scores=True)
    members = [str(role.adapter) for role in roles]
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and name in matrices(layer):
            _average_layer(layer, members, name)
    return Role(model, name, _average_heads(roles))


def _average_layer(layer: LoraLayer, members: Sequence[str], name: str) -> None:
    """Fill in the adapter `name` of a layer: A has the members' rows, B their columns."""
    factors = matrices(layer)
    downs, ups = ([factors[member][place] for member in members] for place in (0, 1))
    scales = mean = None
    if layer.use_dora[name]:
        scales = torch.stack(
            [
                layer.lora_magnitude_vector[one].get_parameter("weight").float().flatten()
                / lengths(layer, one)
                for one in members
            ],
        )
        mean = scales.mean(0)
        ups = [
            up.float() * (scale / mean).view(-1, *[1] * (up.dim() - 1))
            for up, scale in zip(ups, scales, strict=True)
        ]
    down, up = factors[name]
    down.copy_(torch.cat(downs, 0))
    up.copy_(torch.cat(ups, 1))
    if mean is not None:
        magnitude = layer.lora_magnitude_vector[name].get_parameter("weight")
        magnitude.copy_((mean * lengths(layer, name)).view_as(magnitude))
        if not all(tensor.isfinite().all() for tensor in (up, magnitude)):
            raise ModelError(
                "average = true: the members' DoRA factors cancel out, or are not finite, so "
                "their mean is no adapter. Train the members with lora.dora = false, or keep them "
                "as an ensemble (average = false).",
            )


def _average_heads(roles: Sequence[Role]) -> ScalarHead:
    """A head whose number is the mean of the members' heads on the same state."""
    heads = [role.head for role in roles if role.head is not None]
    assert len(heads) == len(roles)
    head = copy.deepcopy(heads[0])
    head.linear.weight.copy_(torch.stack([h.linear.weight * h.scale for h in heads]).mean(0))
    head.linear.bias.copy_(
        torch.stack([(h.linear.bias - h.offset) * h.scale for h in heads]).mean(0),
    )
    head.offset.zero_()
    head.scale.fill_(1.0)
    return head
