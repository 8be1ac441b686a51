"""Memory of the local engine on a GPU, measured on shapes: one prefill pass, and one draw of
tokens.
"""

from __future__ import annotations

import torch

from tether.core.types import Sampling
from tether.models.trunk import Role
from tether.rollout.decoding import TreeDecoder
from tether.rollout.local import ACCELERATOR_PREFILL_TOKENS
from tether.rollout.sampling import sample_tokens
from tether.stages.learner import planner


@torch.no_grad()
def prefill_bytes(role: Role, prompts: int, length: int) -> int:
    """The most bytes alive in a prefill pass of the role, which is on shapes, over prompts of
    `length` tokens.
    """
    decoder = TreeDecoder(role, packed=False)
    rows = max(1, min(prompts, ACCELERATOR_PREFILL_TOKENS // length))
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return planner.measure_pass(role.model, lambda: decoder.prefill(ids, []))


@torch.no_grad()
def sampler_bytes(rows: int, vocabulary: int, dtype: torch.dtype, sampling: Sampling) -> int:
    """The most bytes alive while a token of every row is drawn, logits included."""
    uniforms = torch.zeros(rows, dtype=torch.float64, device="meta")

    def draw() -> object:
        return sample_tokens(
            torch.zeros(rows, vocabulary, dtype=dtype, device="meta"),
            uniforms,
            sampling,
        )

    with planner.LiveBytes() as live:
        draw()
    return live.peak
