"""Hidden states of training rows below the first adapter, computed once for all epochs and
members.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from tether.data.batches import TokenBatch, batches_for
from tether.data.chat import Encoded
from tether.models.trunk import Role

OPTION = "reward.keep_states_gb"


class FrozenStates:
    """Hidden states of sequences at the first layer that learns, (tokens, dim) in the model's
    dtype.

    Where they would take more than `gigabytes`, none is kept and a warning says so.

    They are computed in batches that depend on `sequences` alone, so that a training which was
    interrupted goes on with the same numbers. Dropout, where a model has any, acts above these
    layers only.

    Args:
        gigabytes: what they may take.
    """

    def __init__(
        self,
        role: Role,
        sequences: Sequence[Encoded],
        pad_id: int,
        micro_batch_tokens: int,
        gigabytes: float,
    ) -> None:
        distinct = list({s.ids: s for s in sequences}.values())
        dtype = next(role.model.parameters()).dtype
        assert role.common_depth, "build.checks has found layers below the first adapter"
        dim = role.causal_model.config.get_text_config().hidden_size
        total = sum(map(len, distinct))
        needed = total * dim * dtype.itemsize / 1e9
        self.states: dict[tuple[int, ...], Tensor] = {}
        self.gigabytes = 0.0
        """Those that the kept states take."""
        if needed > gigabytes:
            logging.getLogger(__name__).warning(
                f"{OPTION} = {gigabytes:g} is too little: the states of {len(distinct):,} "
                f"responses, {total:,} tokens, take {needed:.2f} GB. None is kept, and each epoch "
                "computes them anew",
            )
            return
        self.gigabytes = needed
        role.train_mode(False)
        for cut, batch in batches_for(role, distinct, pad_id, micro_batch_tokens):
            states = role.common(batch)
            sequences = [distinct[i] for i in cut]
            assert states is not None
            parts = states.flatten(0, 1)[batch.places].split([len(s) for s in sequences])
            self.states |= {s.ids: part for s, part in zip(sequences, parts, strict=True)}

    def of(self, sequences: Sequence[Encoded], batch: TokenBatch) -> Tensor | None:
        """(rows, time, dim) for the batch of these sequences, padding zero; None where one of them
        is missing.
        """
        states = [
            self.states[sequence.ids] for sequence in sequences if sequence.ids in self.states
        ]
        if len(states) < len(sequences):
            return None
        common = states[0].new_zeros(batch.ids.numel(), states[0].shape[1])
        common[batch.places] = torch.cat(states)
        return common.unflatten(0, batch.ids.shape)
