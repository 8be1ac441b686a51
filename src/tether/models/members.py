"""Several trained roles on one trunk: what their passes have in common, and one role with the mean of their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.algorithms.token_batch import TokenBatch
from tether.models.config import LoraConfig
from tether.models.loading import add_adapter
from tether.models.trunk import Role, forwards, has_adapters, setting

GATED = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
"""What a layer that treats every token by itself is made of in Llama and its kin; experts are not."""


@dataclass
class Member(Role):
    """A role whose lowest `depth` layers compute what they compute for its fellows: `common` of one is good for all of them.

    Adapters of strangers, the policy's say, may stand in those layers: they are off while a member runs.
    """

    depth: int = 0

    @property
    def common_depth(self) -> int:
        return self.depth

    def scores(self, batch: TokenBatch, common: Tensor | None = None) -> Tensor:
        """The head's number at each sequence's last real token, (S,) float32."""
        with _only_at(self.decoder_layers[-1:], batch.last):
            return self.values_at(self.hidden(batch, common), batch.last)


def as_members(roles: Sequence[Role]) -> list[Member]:
    """Roles on one model, each told where the first of their adapters stands.

    Raises:
        ValueError: there are none, or they stand on several models.
    """
    if not roles or any(role.model is not roles[0].model for role in roles):
        raise ValueError("members stand on one trunk, each under an adapter of its own")
    depth = _depth_below(roles[0], {role.adapter for role in roles})
    return [Member(role.model, role.adapter, role.head, depth=depth) for role in roles]


def _depth_below(role: Role, adapters: set[str | None]) -> int:
    """How many of the lowest layers carry none of these adapters."""
    if setting(role.config, "num_kv_shared_layers"):
        return 0
    place = {id(module): number for number, layer in enumerate(role.decoder_layers) for module in layer.modules()}
    carriers = (m for m in role.model.modules() if has_adapters(m))
    return min((place.get(id(m), 0) for m in carriers if adapters & set(_adapters_of(m))), default=0)


@contextmanager
def _only_at(layers: Sequence[Any], positions: Tensor) -> Iterator[None]:
    """Run with the gated feed-forward part of these layers, the larger one, at flat `positions` alone: nothing else is read."""
    parts = [layer.mlp for layer in layers if dict(layer.named_modules()).keys() >= GATED]

    def narrowed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(states: Tensor) -> Tensor:
            flat = states.flatten(0, 1)
            return torch.zeros_like(flat).index_copy(0, positions, forward(flat[positions][None])[0]).view_as(states)

        return run

    with forwards(parts, narrowed):
        yield


def _adapters_of(layer: Any) -> list[str]:
    return [name for kind in layer.adapter_layer_names for name in getattr(layer, kind)]


@torch.no_grad()
def average_roles(roles: Sequence[Role], name: str, lora: LoraConfig) -> Role:
    """One role with the mean of the members' weights (WARM, https://arxiv.org/abs/2401.12187), under an adapter called `name`.

    mean_k (W + s B_k A_k) is not W + s mean(B) mean(A). It is W + (s/K) [B_1 … B_K] [A_1; …; A_K], exactly: an adapter of K times
    the rank, whose scaling alpha / (K rank) is s/K by itself. Heads are linear, so theirs is a plain mean.

    Args:
        lora: what the members' adapters were made with.
    """
    first = roles[0]
    model = add_adapter(first.model, name, lora.model_copy(update={"rank": lora.rank * len(roles)}), scores=True)
    for layer in model.modules():
        if has_adapters(layer) and name in _adapters_of(layer):
            for letter, dimension in (("A", 0), ("B", 1)):
                parts = [_matrix(layer, letter, role.adapter) for role in roles]
                _matrix(layer, letter, name).copy_(torch.cat(parts, dimension))
    head = copy.deepcopy(first.head)
    heads = [role.head for role in roles if role.head is not None]
    assert head is not None and len(heads) == len(roles)
    head.linear.weight.copy_(torch.stack([h.linear.weight * h.scale for h in heads]).mean(0))
    head.linear.bias.copy_(torch.stack([(h.linear.bias - h.offset) * h.scale for h in heads]).mean(0))
    head.offset.zero_()
    head.scale.fill_(1.0)
    return Role(model, name, head)


def _matrix(layer: Any, letter: str, adapter: str | None) -> Tensor:
    """An adapter's A or B at a linear layer or an embedding."""
    linear = getattr(layer, f"lora_{letter}")
    return linear[adapter].weight if adapter in linear else getattr(layer, f"lora_embedding_{letter}")[adapter]
