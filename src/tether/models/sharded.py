"""Weights cut over processes: each holds a part of every decoder layer, which is whole only while
the layer runs.

torch's FSDP2 (`fully_shard`) does it, layer by layer. Embeddings, last norm, output layer, adapters
and heads stay whole. Layers are cut before any adapter is put on, so no tensor of FSDP meets peft.
A pass needs all processes at once: they must run the same number of forward and backward passes in
the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tether.core.errors import ModelError
from tether.models.trunk import Role, is_cut

if TYPE_CHECKING:
    pass


def shard_layers(model: Any, mesh: DeviceMesh) -> nn.Module:
    """The same model with its decoder layers cut over the processes of `mesh`; gradients of their
    weights are summed over these.

    Raises:
        ModelError: the model keeps its layers where they are not found.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    layers = Role(model).decoder_layers
    if not layers:
        raise ModelError(
            f"learner.shard cuts a decoder's `layers`, and {type(model).__name__} "
            "has none: leave learner.shard out",
        )
    for layer in layers:
        part = fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
        )
        part.set_gradient_divide_factor(1.0)  # denominators are those of the whole step
        part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.sharded = True
    return model


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, sharing its memory; the tensor itself where it
    is whole.
    """
    return tensor.to_local() if is_cut(tensor) else tensor


def distributed(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which every process holds such a `part`, cut as `like` is; the part itself
    where that is whole.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        shape=like.shape,
        stride=like.stride(),
    )


def gathered(tensor: Tensor) -> Tensor:
    """A tensor whole on every process; all of them must ask."""
    return tensor.full_tensor() if is_cut(tensor) else tensor


def cut(tensor: Tensor, like: Tensor) -> Tensor:
    """The inverse of `distributed`: this process's part, also of a tensor that every process has
    whole.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or is_cut(tensor):
        return local(tensor)
    return distribute_tensor(
        tensor.to(like.device),
        like.device_mesh,
        like.placements,
        src_data_rank=None,
    ).to_local()
