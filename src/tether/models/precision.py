"""A model in another type of numbers, as transformers itself would hold it in that type.

Some numbers stay in float32 whatever the type of the weights is. Rounded rotary frequencies would
move late tokens to other places. The rounded bias of a router of experts would send tokens to other
experts. A plain `model.to(dtype)` rounds them all, and the result is another model than its own
library computes.
"""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tether.models.trunk import TrunkT, without_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def cast(model: TrunkT, dtype: torch.dtype) -> TrunkT:
    """`model` as `from_pretrained(dtype=dtype)` holds it: the types of its tensors, and the numbers
    in buffers that are computed.

    Adapters take `dtype`. Tensors are replaced in place, and stay on their devices. Returns the
    model.
    """
    causal = without_adapters(model)
    made = _made(causal, dtype)
    always = _kept_in_float32(causal, dtype)
    own = {id(tensor): name.replace(".base_layer.", ".") for name, tensor in _tensors(causal)}
    for module in model.modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or not tensor.is_floating_point():
                continue
            name = own.get(id(tensor), "")
            if key in module._non_persistent_buffers_set and name in made:
                module._buffers[key] = made[name].to(tensor.device)
                continue
            wanted = (
                torch.float32
                if always and always.search(name)
                else made[name].dtype
                if name in made
                else dtype
            )
            if key in module._parameters:
                tensor.data = tensor.data.to(wanted)
            else:
                module._buffers[key] = tensor.to(wanted)
    return model


def _made(causal: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters (without memory) and buffers by name, as the library makes such a model in
    `dtype`.
    """
    from accelerate import init_empty_weights

    config = copy.deepcopy(causal.config)
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        return dict(_tensors(type(causal)._from_config(config, dtype=dtype)))


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _kept_in_float32(causal: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """The names of weights that the library's class keeps in float32; some of them it keeps beside
    float16 alone.
    """
    names = set(causal._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names |= set(causal._keep_in_fp32_modules or ())
    if dtype not in (torch.float16, torch.bfloat16) or not names:
        return None
    return re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in sorted(names)))
