"""Roles: policy, reference, value and reward, as views of one trunk or of several models.

A role is a decoder, the adapter that is switched on while the role runs (None: the bare base weights) and perhaps a
scalar head. On one shared trunk the reference is the policy's base with every adapter off, so it cannot drift; with
separate models each role simply holds another module. The stages do not know the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from tether.algorithms.logprobs import token_logprobs
from tether.models.heads import ScalarHead


class Tokens(Protocol):
    """What a role reads of a batch (data.batches.TokenBatch): rows of ids, and flat indices into rows × time.

    visible: (rows, 1, time, time) which key a query may see, or None for causal attention within documents. predict: (N,)
    the positions whose hidden states predict the counted tokens; targets: (N,) those tokens; last: (S,) the last real
    token of each sequence.
    """

    @property
    def ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def visible(self) -> Tensor | None: ...
    @property
    def predict(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def last(self) -> Tensor: ...


@dataclass
class Role:
    """One of the parts that a model plays."""

    model: Any
    adapter: str | None = None
    head: ScalarHead | None = None
    _layers: list[BaseTunerLayer] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        self._layers = [m for m in self.model.modules() if isinstance(m, BaseTunerLayer)]
        if self.adapter is not None and not self._layers:
            raise ValueError(f"the model has no adapters, so {self.adapter!r} cannot be switched on")

    @property
    def causal_model(self) -> Any:
        """The transformers model, without peft's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def decoder(self) -> nn.Module:
        return self.causal_model.get_decoder()

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def reads_masks(self) -> bool:
        """Whether a batch may say what attends to what: kernels that take a mask, and no sliding windows."""
        config = self.causal_model.config.get_text_config()
        windows = getattr(config, "sliding_window", None) or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        return config._attn_implementation in ("eager", "sdpa") and not windows

    def activate(self) -> None:
        """Route the forward pass through this role's adapter alone.

        peft's own `set_adapter` also flips requires_grad, which would cut gradients of a role whose graph is still
        waiting for its backward pass; who is trainable is settled once, by the learner.
        """
        names = [] if self.adapter is None else [self.adapter]
        for layer in self._layers:
            layer._active_adapter = names

    def parameters(self) -> list[nn.Parameter]:
        """What training this role would change: its adapter, or the whole model if it has none, and its head."""
        marked = [p for name, p in self.model.named_parameters() if self.adapter is None or f".{self.adapter}." in name]
        return marked + (list(self.head.parameters()) if self.head is not None else [])

    def train_mode(self, on: bool) -> None:
        """Dropout on or off, in adapters and head."""
        self.model.train(on)
        if self.head is not None:
            self.head.train(on)

    def hidden(self, batch: Tokens) -> Tensor:
        """Last hidden states, (rows × time, dim)."""
        self.activate()
        mask = None if batch.visible is None else _additive(batch.visible, next(self.model.parameters()).dtype)
        output = self.decoder(input_ids=batch.ids, attention_mask=mask, position_ids=batch.positions, use_cache=False)
        return output.last_hidden_state.flatten(0, 1)

    def logprobs(self, batch: Tokens, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the counted tokens, each (N,) float32, at the sampling temperature."""
        return self.logprobs_of(self.hidden(batch), batch, temperature)

    def logprobs_of(self, hidden: Tensor, batch: Tokens, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The same from hidden states already computed, for roles that also need them for a value."""
        lm_head = self.causal_model.get_output_embeddings()
        softcap = getattr(self.causal_model.config, "final_logit_softcapping", None)
        return token_logprobs(
            hidden[batch.predict], lm_head.weight, batch.targets, temperature=temperature, bias=lm_head.bias, softcap=softcap
        )

    def scores(self, batch: Tokens) -> Tensor:
        """The head's number at each sequence's last real token, (S,) float32."""
        return self._head()(self.hidden(batch)[batch.last])

    def values_of(self, hidden: Tensor, batch: Tokens) -> Tensor:
        """The head's number at the state before each counted token, (N,) float32."""
        return self._head()(hidden[batch.predict])

    def _head(self) -> ScalarHead:
        if self.head is None:
            raise ValueError("this role has no scalar head")
        return self.head


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where True, the lowest number elsewhere: the form that every attention kernel with a mask takes."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
