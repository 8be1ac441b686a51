"""Checks of a loaded model's architecture, before anything is trained: what cannot be right is
refused, what differs is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tether.core.errors import ModelError, one_line
from tether.models.independence import agrees
from tether.models.trunk import Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tether.models.trunk import Trunk

OTHER = "Choose another model"


def check_architecture(source: str, model: PreTrainedModel) -> None:
    """Run a few tokens, and compare what a role reads with what the model itself returns.

    Raises:
        ModelError: the model sees later tokens, its log-probabilities cannot be read from its last
            states, or it does not run.
    """
    kind = type(model).__name__
    role = Role(model)
    head = model.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise ModelError(
            f"{source}: {kind} has no output layer of its own, from which "
            f"log-probabilities are read. {OTHER}.",
        )
    try:
        proven = role.independence
        expected, ours = _logits(role)
    except Exception as error:  # a model of any author is run here for the first time
        raise ModelError(
            f"{source}: {kind} cannot be run on token ids alone ({one_line(error)}). {OTHER}.",
        ) from error
    if not proven.causal:
        raise ModelError(
            f"{source} cannot be loaded as a causal language model: {kind} reads both ways and "
            "cannot continue a text. Give a causal language model.",
        )
    if not agrees(ours, expected):
        raise ModelError(
            f"{source}: {kind} computes other logits than its output layer and configuration "
            f"give, so its log-probabilities cannot be read. {OTHER}.",
        )


@torch.no_grad()
def _logits(role: Role) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a random text, centred: those that the model returns, and those of the role's
    states.

    Both are (time, vocab), in the model's type.
    """
    ids = role.few_ids(9)
    places = (
        {"position_ids": torch.arange(9, device=role.device)[None]} if role.takes_positions else {}
    )
    ours = role.logits(role.states(ids)[0])
    expected = role.causal_model(input_ids=ids, use_cache=False, **places).logits[
        0,
        :,
        : ours.shape[-1],
    ]
    centred = (
        logits.float() - logits.float().mean(-1, keepdim=True) for logits in (expected, ours)
    )
    first, second = (logits.to(role.causal_model.dtype) for logits in centred)
    return first, second


def differences(model: Trunk) -> Iterator[str]:
    """One sentence for each thing that is done otherwise with this architecture than with most."""
    proven = Role(model).independence
    kind = type(model).__name__
    if not proven.packing:
        yield (
            f"{kind} lets texts in one row see each other, so every text has a row of its own "
            "and packing is off"
        )
    if not proven.rows:
        yield (
            f"{kind} lets rows of one batch depend on each other, so texts pass through it one "
            "at a time"
        )
