"""Frozen weights in four bits under an adapter that is trained in sixteen (QLoRA), and the library
that holds them so.

The linear layers of the decoder are held as NF4, whose constants are quantised once more: 4.13 bits
a weight. Embeddings, norms and the output layer stay as they are. A pass dequantises one layer at a
time. So the gradient of an adapter is exact for the weights in use (Dettmers et al. 2023,
https://arxiv.org/abs/2305.14314).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from tether.core.errors import ModelError, require
from tether.models.carried import hand_over
from tether.models.pretrained import quiet
from tether.models.trunk import Role, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LayerT = TypeVar("LayerT", bound=nn.Module)
LIBRARY = "bitsandbytes"


def bitsandbytes(option: str) -> ModuleType:
    """bitsandbytes, which `option` needs.

    Raises:
        ConfigError: it is not installed.
    """
    require(LIBRARY, option, "quantize")
    return importlib.import_module(LIBRARY)


def quantize(model: Any, device: torch.device) -> PreTrainedModel:
    """Hold the decoder's linear layers in NF4, and move the model to `device`, layer by layer.
    Returns the model.

    Raises:
        ModelError: it has no linear layers of torch's own kind.
    """
    modules = bitsandbytes("model.quantize").nn
    decoder = Role(model).decoder
    if not any(type(layer) is nn.Linear for layer in decoder.modules()):
        raise ModelError(
            f"model.quantize has no effect: {type(decoder).__name__} has no "
            "torch.nn.Linear layers. Leave it out.",
        )
    for parent, name, layer in _linears(decoder, nn.Linear):
        shape = (layer.in_features, layer.out_features, layer.bias is not None)
        packed = modules.Linear4bit(
            *shape,
            compute_dtype=model.dtype,
            quant_type="nf4",
            device="meta",
        )
        packed.weight = modules.Params4bit(
            layer.weight.data,
            requires_grad=False,
            quant_type="nf4",
            compress_statistics=True,
        )
        packed.bias = layer.bias
        # Or its first pass without gradients rearranges the weights for a CPU, and every later pass
        # is without gradients.
        packed.support_avx512bf16_for_cpu = False
        hand_over(layer, packed)
        setattr(parent, name, packed.to(device).train(layer.training))
    model.is_loaded_in_4bit = True  # by this peft knows which layers of its own to take
    return model.to(device)


def is_quantized(model: nn.Module) -> bool:
    """True if `quantize` has changed this model."""
    return bool(setting(model, "is_loaded_in_4bit"))


@torch.no_grad()
def dequantized(role: Role) -> Role:
    """The role with its base's layers as plain ones again, in host memory, with the dequantised
    values.

    So a merged adapter is combined with the weights of its training. A role that is not quantised
    is returned as it is; otherwise the old role becomes unusable.
    """
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    causal = role.causal_model
    adapter = role.adapter
    if not is_quantized(causal):
        return role
    config = role.model.peft_config[adapter] if adapter is not None else None
    trained = (
        get_peft_model_state_dict(role.model, adapter_name=adapter) if adapter is not None else {}
    )
    functional = bitsandbytes("model.quantize").functional
    with quiet():
        causal = role.model.unload() if adapter is not None else causal
        for parent, name, layer in _linears(
            Role(causal).decoder,
            bitsandbytes("model.quantize").nn.Linear4bit,
        ):
            plain = nn.Linear(
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                device="meta",
            )
            weight = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(
                "cpu",
                causal.dtype,
            )
            plain.weight = nn.Parameter(weight, requires_grad=False)
            plain.bias = layer.bias
            hand_over(layer, plain)
            setattr(parent, name, plain.train(layer.training))
        causal.is_loaded_in_4bit = False
        model = causal.to("cpu")
        if config is not None:
            assert adapter is not None
            model = get_peft_model(
                causal,
                config,
                adapter_name=adapter,
                autocast_adapter_dtype=False,
            )
            set_peft_model_state_dict(model, trained, adapter_name=adapter)
            model.to(causal.dtype)
    model.eval().requires_grad_(False)
    return Role(model, adapter, role.head.cpu() if role.head is not None else None)


def _linears(
    decoder: nn.Module,
    kind: type[LayerT],
) -> Iterator[tuple[nn.Module, str, LayerT]]:
    """(parent, name, layer) of every layer that is of this very class."""
    for parent in list(decoder.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is kind:
                yield parent, name, layer
