"""Roles: policy, reference, value and reward, as views of one trunk or of several models.

A role is a decoder, perhaps a scalar head, and the adapter that is switched on while the role runs
(None: the bare base weights). On one shared trunk the reference is the policy's base with every
adapter off, so it cannot drift. With separate models each role holds another module. The stages
work in the same way with both.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from tether.algorithms.distillation import Unembedding
from tether.algorithms.token_batch import TokenBatch
from tether.models.heads import ScalarHead
from tether.models.independence import Independence, prove_independence, windows

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch.distributed.tensor import DTensor
    from transformers import PretrainedConfig, PreTrainedModel

    Trunk = PreTrainedModel | PeftModel

DOCUMENT_TOKENS = 1024
TrunkT = TypeVar("TrunkT", bound="Trunk")
GROUPED = "tether_grouped"
"""The name under which transformers' models find cpu.attention, which is not loaded here."""
SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that families give to the soft cap of their logits."""
_PROVEN: dict[tuple[object, ...], Independence] = {}
"""Results proven of a configuration under an attention function, in a type, on a kind of device."""


def is_cut(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if other processes hold parts of a tensor."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """True where a query may see a key -> 0 there and the lowest number elsewhere: the form that
    attention kernels take.
    """
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def setting(config: object, name: str) -> Any:
    """A value of a model's config, of unlike layers the largest; None where its family has no such
    setting.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:  # by which transformers says that layers differ
        return max(
            filter(None, (setting(layer, name) for layer in setting(config, "per_layer_config"))),
            default=None,
        )


def context_length(config: object) -> int:
    """Number of tokens that a decoder has positions for; 2**31 if its configuration names no
    number.

    Stretched rotary positions reach further than those that the model was first trained on.
    Longrope and Llama 3 name the stretched number already.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "context_length")
    length = next(filter(None, (setting(config, name) for name in names)), 2**31)
    rope = setting(config, "rope_parameters") or {}
    kind = rope.get("rope_type")
    factor = rope.get("factor") or 1.0
    if kind == "yarn" and (first := rope.get("original_max_position_embeddings")):
        return max(length, int(first * factor))
    return int(length * factor) if kind in ("linear", "dynamic", "yarn") else int(length)


def has_adapters(layer: nn.Module) -> TypeGuard[BaseTunerLayer]:
    """True if peft has put adapters on this layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(layer, BaseTunerLayer)


def without_adapters(model: Trunk) -> PreTrainedModel:
    """The transformers model, without peft's wrapper."""
    from peft import PeftModel

    if isinstance(model, PeftModel):
        return cast("PreTrainedModel", model.get_base_model())
    return model


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Number of the last places that each layer of a decoder attends to; None means all of them."""
    window = setting(config, "sliding_window")
    kinds = setting(config, "layer_types") or ["full_attention"] * config.num_hidden_layers
    everywhere = None if hasattr(config, "layer_types") else window
    return [window if kind == "sliding_attention" else everywhere for kind in kinds]


class _Pass(threading.local):
    unpacked = False


_PASS = _Pass()


@contextmanager
def unpacked(rows: bool) -> Iterator[None]:
    """Within this block of this thread transformers looks for no packed rows, where all `rows` are
    single sequences.
    """
    _put_in_place()
    before = _PASS.unpacked
    _PASS.unpacked = rows
    try:
        yield
    finally:
        _PASS.unpacked = before


@cache
def _put_in_place() -> None:
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: (
        None if _PASS.unpacked else search(position_ids)
    )


@dataclass
class Role:
    """One of the parts that a model plays."""

    model: Any
    adapter: str | None = None
    head: ScalarHead | None = None
    _layers: list[BaseTunerLayer] = field(default_factory=list, repr=False)
    _kept_apart: tuple[str, Independence] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._find_adapters()
        if self.adapter is not None and not self._layers:
            raise ValueError(
                f"the model has no adapters, so {self.adapter!r} cannot be switched on",
            )

    def _find_adapters(self) -> None:
        self._layers = [m for m in self.model.modules() if has_adapters(m)]

    @cached_property
    def causal_model(self) -> Any:
        """The transformers model, without peft's wrapper."""
        return without_adapters(self.model)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The settings of the language model, as transformers has them."""
        return self.causal_model.config.get_text_config()

    @property
    def decoder(self) -> nn.Module:
        """The module that turns token ids into states."""
        decoder = self.causal_model.get_decoder()
        # beside towers, it may be a whole language model
        if setting(decoder, "lm_head") is not None and decoder is not self.causal_model:
            decoder = decoder.get_decoder()
        # or it is a layer that is called so
        own = decoder is not self.causal_model and hasattr(decoder, "config")
        return decoder if own else self.causal_model.model

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def takes_positions(self) -> bool:
        """True if the caller can pass positions. Models with ALiBi count them themselves."""
        return "position_ids" in inspect.signature(type(self.decoder).forward).parameters

    @cached_property
    def context_length(self) -> int:
        """Number of tokens that the model has positions for."""
        return context_length(self.config)

    @property
    def vocabulary(self) -> int:
        """Token ids that have an embedding."""
        return self.causal_model.get_input_embeddings().weight.shape[0]

    @property
    def width(self) -> int:
        """Numbers of a last hidden state, which the output layer reads."""
        return self.output_layer.weight.shape[1]

    @property
    def output_layer(self) -> nn.Linear:
        """The layer that turns states into logits."""
        return self.causal_model.get_output_embeddings()

    @property
    def attention(self) -> str:
        """The name of its attention function."""
        return str(self.config._attn_implementation)

    @property
    def independence(self) -> Independence:
        """The parts of a batch that this model computes independently in one pass.

        Measured on the bare model itself, once a configuration.
        """
        parameter = next(self.model.parameters())
        key = (
            self.attention,
            parameter.dtype,
            parameter.device.type,
            self.config.to_json_string(use_diff=False),
        )
        if self._kept_apart is None or self._kept_apart[0] != self.attention:
            proven = _PROVEN
            if any(map(is_cut, self.model.parameters())):
                # all ranks prove a cut model together, whatever one of them has proven before
                proven = vars(self.causal_model).setdefault("tether_proven", {})
            if key not in proven:
                proven[key] = self._prove(parameter)
            self._kept_apart = self.attention, proven[key]
        return self._kept_apart[1]

    def _prove(self, parameter: Tensor) -> Independence:
        reach = dict(windows(self.config.to_dict()))
        masks = self.attention in ("eager", "sdpa") or self.attention.startswith("tether")
        masks = masks and self.takes_positions and not reach
        if parameter.is_meta:  # shapes alone show nothing
            return Independence(packing=self.takes_positions, masks=masks)
        bare = Role(self.causal_model)
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                bare.activate()
                packing = self.takes_positions and "attention_chunk_size" not in reach
                how = {"masks": masks, "packing": packing}
                return prove_independence(
                    bare._pass,
                    self.vocabulary,
                    parameter.dtype,
                    parameter.device,
                    **how,
                )
        finally:
            self.model.train(training)

    @property
    def reads_masks(self) -> bool:
        """True if a batch's mask may decide which token attends to which."""
        return self.independence.masks

    def document_tokens(self, budget: int) -> int:
        """Largest length in tokens of a document of several answers to one prompt. Masks and eager
        scores grow with its square."""
        return min(budget, DOCUMENT_TOKENS) if self.reads_masks else 0

    def activate(self) -> None:
        """Route the forward pass through this role's adapter alone.

        peft's own `set_adapter` also changes requires_grad. This would cut gradients of a role
        whose graph still waits for its backward pass. The learner sets trainable weights once.
        """
        if not self._layers:
            self._find_adapters()  # those of other roles, which came after this one
        names = [] if self.adapter is None else [self.adapter]
        for layer in self._layers:
            layer._active_adapter = names

    def parameters(self) -> list[nn.Parameter]:
        """Parameters that training this role would change: its adapter, or the whole model if it
        has none, and its head."""
        marked = [
            p
            for name, p in self.model.named_parameters()
            if self.adapter is None or self.adapter in name.split(".")
        ]
        return marked + (list(self.head.parameters()) if self.head is not None else [])

    def train_mode(self, on: bool) -> None:
        """Dropout on or off, in adapters and head."""
        self.model.train(on)
        if self.head is not None:
            self.head.train(on)

    @property
    def decoder_layers(self) -> list[nn.Module]:
        """In order. Empty if a model keeps its layers elsewhere (GPT-2); such a model has no shared
        lower pass.
        """
        return list(setting(self.decoder, "layers") or ())

    @property
    def common_depth(self) -> int:
        """Number of the lowest layers that carry no adapter. They compute the same for every role
        on this model."""
        # a layer that is left half-way would leave the others waiting
        cut = setting(self.causal_model, "sharded")
        if (
            cut
            or _touched(self.causal_model.get_input_embeddings())
            or setting(self.config, "num_kv_shared_layers")
        ):
            return 0
        return next(
            (depth for depth, layer in enumerate(self.decoder_layers) if _touched(layer)),
            0,
        )

    @torch.no_grad()
    def common(self, batch: TokenBatch) -> Tensor | None:
        """States of a batch after the common layers, (rows, time, dim): computed once, valid for
        every role until these layers change.

        None where there are none, or where dropout makes them differ from pass to pass.
        """
        depth = self.common_depth
        if not depth or self.model.training:
            return None
        try:
            with forwards([self.decoder_layers[depth]], lambda _: _interrupt):
                self._decode(batch)
        except _Reached as reached:
            return reached.args[0]
        return None

    def hidden(self, batch: TokenBatch, common: Tensor | None = None) -> Tensor:
        """Last hidden states, (rows × time, dim); `common` replaces the layers that it covers."""
        spared = [] if common is None else self.decoder_layers[: self.common_depth]
        # they hand on what they have given before
        with forwards(spared, lambda _: lambda *_, **__: common):
            return self._decode(batch).flatten(0, 1)

    def _decode(self, batch: TokenBatch) -> Tensor:
        masks = self.reads_masks
        self.activate()
        again = torch.is_grad_enabled() and setting(self.causal_model, "recompute")
        with forwards(self.decoder_layers if again else [], self._recomputed):
            # a model that reads no masks makes its own, from positions that restart
            if batch.visible is not None:
                return self._pass(
                    batch.ids,
                    batch.positions,
                    batch.visible if masks else None,
                    masks,
                )
            # padding may go beyond the last position that there is
            fits = slice(min(batch.ids.shape[1], self.context_length))
            states = self._pass(batch.ids[:, fits], batch.positions[:, fits], None, masks)
        return (
            pad(states, (0, 0, 0, batch.ids.shape[1] - states.shape[1]))
            if states.shape[1] < batch.ids.shape[1]
            else states
        )

    def few_ids(self, count: int) -> Tensor:
        """(1, count) ids of tokens, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.vocabulary, (1, count), generator=generator, device="cpu")
        return ids.to(self.device)

    def states(self, ids: Tensor) -> Tensor:
        """Last hidden states (rows, time, dim) of rows without padding, under the adapter that is
        switched on.
        """
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return self._pass(ids, positions, None, self.reads_masks)

    def _pass(self, ids: Tensor, positions: Tensor, visible: Tensor | None, masks: bool) -> Tensor:
        """Last hidden states (rows, time, dim) under the adapter that is switched on."""
        if self.attention == GROUPED and masks and visible is None:
            rows, time = ids.shape
            visible = (
                torch.ones(time, time, dtype=torch.bool, device=ids.device)
                .tril()
                .expand(rows, 1, time, time)
            )
        mask = (
            None if visible is None else additive_mask(visible, next(self.model.parameters()).dtype)
        )
        places = {"position_ids": positions} if self.takes_positions else {}
        with unpacked(mask is None and masks):
            return self.decoder(
                input_ids=ids,
                attention_mask=mask,
                use_cache=False,
                **places,
            ).last_hidden_state

    def _recomputed(self, forward: Callable[..., object]) -> Callable[..., object]:
        """A layer that keeps its input alone for the backward pass (activation checkpointing,
        https://arxiv.org/abs/1604.06174).

        By the time of the backward pass another role may have been routed through the adapters, so
        recomputing routes again.
        """

        def again(*args: object, **kwargs: object) -> object:
            self.activate()
            return forward(*args, **kwargs)

        return lambda *args, **kwargs: checkpoint(again, *args, use_reentrant=False, **kwargs)

    def logprobs(
        self,
        batch: TokenBatch,
        temperature: float = 1.0,
        common: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the counted tokens, each (N,) float32, at the sampling
        temperature.
        """
        return self.logprobs_of(self.hidden(batch, common), batch, temperature)

    def logprobs_of(
        self,
        hidden: Tensor,
        batch: TokenBatch,
        temperature: float = 1.0,
        *,
        padded: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The same from hidden states already computed, for roles that also need them for a value.

        Args:
            padded: of all the output layer's rows, including rows without a token.
        """
        head = self.unembedding(temperature, padded=padded)
        return head.chosen(hidden[batch.predict], batch.targets)

    def unembedding(self, temperature: float = 1.0, *, padded: bool = False) -> Unembedding:
        """The output layer as it makes a distribution over the tokenizer's tokens; `padded`: over
        all of its rows.
        """
        head = self.output_layer
        weight, bias, softcap = head.weight, head.bias, self._softcap
        if not padded and self.num_tokens < len(weight):
            weight = weight[: self.num_tokens]
            bias = None if bias is None else bias[: self.num_tokens]
        return Unembedding(
            weight,
            bias,
            temperature / self._logit_scale,
            None if softcap is None else softcap / self._logit_scale,
        )

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits that the model would return for these hidden states: (..., dim) -> (..., tokens).

        `head` is a copy of the model's output layer to use in its place.
        """
        logits = (head or self.output_layer)(hidden)
        logits = logits[..., : self.num_tokens]
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return (
            logits
            if self._softcap is None
            else self._softcap * torch.tanh(logits.float() / self._softcap)
        )

    @cached_property
    def num_tokens(self) -> int:
        """Number of the output layer's first rows that are tokens of the tokenizer. The other rows
        are padding.

        Padding rows are never sampled, and get no probability when a text is scored.
        """
        return setting(self.causal_model, "num_tokens") or len(self.output_layer.weight)

    @property
    def _softcap(self) -> float | None:
        return next(filter(None, (setting(self.config, name) for name in SOFT_CAPS)), None)

    @property
    def _logit_scale(self) -> float:
        """Cohere and Falcon-H1 multiply their logits by a number, Granite divides them by one."""
        times = (setting(self.config, "logit_scale") or 1.0) * (
            setting(self.config, "lm_head_multiplier") or 1.0
        )
        return times / (setting(self.config, "logits_scaling") or 1.0)

    def scores(self, batch: TokenBatch, common: Tensor | None = None) -> Tensor:
        """The head's number at each sequence's last real token, (B,) float32."""
        return self.values_at(self.hidden(batch, common), batch.last)

    def values_of(self, hidden: Tensor, batch: TokenBatch) -> Tensor:
        """The head's number at the state before each counted token, (N,) float32."""
        return self.values_at(hidden, batch.predict)

    def values_at(self, hidden: Tensor, places: Tensor) -> Tensor:
        """The head's number at flat `places`, float32."""
        if self.head is None:
            raise ValueError("this role has no scalar head")
        return self.head(hidden[places])


def _touched(module: nn.Module) -> bool:
    return any(map(has_adapters, module.modules())) or any(
        p.requires_grad for p in module.parameters()
    )


class _Reached(Exception):  # noqa: N818  (a way out, not an error)
    """Carries a layer's input, its one argument, out of a forward pass that need not go on."""


def _interrupt(*args: object, **kwargs: object) -> NoReturn:
    raise _Reached(args[0] if args else kwargs["hidden_states"])


@contextmanager
def forwards(
    modules: Sequence[nn.Module],
    wrap: Callable[[Callable[..., Tensor]], Callable[..., object]],
) -> Iterator[None]:
    """Run with every module's forward wrapped; afterwards all of them are as they were."""
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = wrap(module.forward)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward
