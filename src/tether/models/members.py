"""Several trained roles on one trunk, and what their passes have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tether.algorithms.token_batch import TokenBatch
from tether.models.trunk import Role, forwards, has_adapters, setting

GATED = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
"""Modules of a layer that treats every token by itself, in Llama and its kin. Experts are left out.
"""


@dataclass
class Member(Role):
    """A role whose lowest `depth` layers give the same results as those of the other members:
    `common` of one is valid for all of them.

    Other adapters, such as the policy's, may be in those layers. They are off while a member runs.
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
    """Roles on one model; each gets the place of the lowest of their adapters.

    Raises:
        ValueError: there are none, or they are on several models.
    """
    if not roles or any(role.model is not roles[0].model for role in roles):
        raise ValueError("members stand on one trunk, each under an adapter of its own")
    depth = _depth_below(roles[0], {role.adapter for role in roles})
    return [Member(role.model, role.adapter, role.head, depth=depth) for role in roles]


def _depth_below(role: Role, adapters: set[str | None]) -> int:
    """Number of the lowest layers that carry none of these adapters."""
    if setting(role.config, "num_kv_shared_layers"):
        return 0
    place = {
        id(module): number
        for number, layer in enumerate(role.decoder_layers)
        for module in layer.modules()
    }
    carriers = (m for m in role.model.modules() if has_adapters(m))
    return min(
        (
            place.get(id(m), 0)
            for m in carriers
            if any(adapters & set(getattr(m, kind)) for kind in m.adapter_layer_names)
        ),
        default=0,
    )


@contextmanager
def _only_at(layers: Sequence[nn.Module], positions: Tensor) -> Iterator[None]:
    """Run with the gated feed-forward part of these layers, the larger one, at flat `positions`
    alone: nothing else is read.
    """
    parts = [
        layer.get_submodule("mlp")
        for layer in layers
        if dict(layer.named_modules()).keys() >= GATED
    ]

    def narrowed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(states: Tensor) -> Tensor:
            flat = states.flatten(0, 1)
            return (
                torch.zeros_like(flat)
                .index_copy(0, positions, forward(flat[positions][None])[0])
                .view_as(states)
            )

        return run

    with forwards(parts, narrowed):
        yield
