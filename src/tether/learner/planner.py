"""How much memory a pass will need, found out without weights: it is run on shapes alone, and what would be alive is added up.

On torch's meta device a tensor has a shape and no memory. The very code that will train runs there, forwards and backwards,
while every storage that comes to life is counted until it dies: exact for any architecture, adapters, loss and chunking, with no
formula to keep true. What lies outside torch (the allocator's slack, kernels' scratch space, the process itself) is added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.data.batches import COMMON, TokenBatch, make_batch, padded_tokens
from tether.data.chat import Encoded
from tether.models.attention import KERNEL_TILE
from tether.models.config import LoraConfig
from tether.models.kernels import SHARES
from tether.models.loading import add_adapter

FUSED, TILED = "tether_shapes_fused", "tether_shapes_tiled"
"""Attention functions of shapes alone, with the memory of a GPU's fused kernel and with that of our grouped attention."""
TRAINING_BYTES = 16
"""Of a trainable weight beside itself: float32 master, its gradient, and Adam's two moments."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages while they live; `peak` is the most there were at once since the last `reset`."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()
        self.current = self.peak = 0
        for tensor in known:
            self.known[tensor.untyped_storage()] = 0

    def reset(self) -> None:
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: Any) -> None:
        if storage in self.known:
            return
        size = storage.nbytes()
        self.known[storage] = size
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.current -= size


class _ShapeAttention(torch.autograd.Function):
    """Keeps copies of queries, keys and values; fused: also the result and one number a query, and has no scores at all."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, fused: bool) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        kept = [query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)]
        ctx.save_for_backward(*(kept if fused else [torch.empty_like(t) for t in kept[:3]]))
        ctx.fused = fused
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        if not ctx.fused:  # in float32: the gradients of keys and values, and every tile's share of them, if causal
            wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in (key, value)]
            query.new_empty(min(key.numel() * query.shape[2] // KERNEL_TILE, SHARES), dtype=torch.float32)
            return torch.empty_like(query), *(w.to(key.dtype) for w in wide), None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _ShapeAttention.apply(query, key, value, True).transpose(1, 2), None


def _tiled(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _ShapeAttention.apply(query, key, value, False).transpose(1, 2), None


for _name, _function in ((FUSED, _fused), (TILED, _tiled)):
    ALL_ATTENTION_FUNCTIONS.register(_name, _function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, eager_mask)


def shape_model(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """A causal model of shapes, frozen, for any transformers configuration; attention: `FUSED`, `TILED` or "eager"."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.set_attn_implementation(attention)
    return model.eval().requires_grad_(False)


def with_adapter(model: Any, name: str, lora: LoraConfig) -> Any:
    """The same with an adapter."""
    with torch.device("meta"):
        return add_adapter(model, name, lora)


@dataclass(frozen=True)
class Answers:
    """One prompt's answers, which cut_rankings does not separate."""

    sequences: tuple[Encoded, ...]


def shape_answers(prompts: int, prompt: int, answers: int, length: int) -> list[Answers]:
    """Prompts that begin alike, as a template makes them, and several answers to each."""
    found, counted = [], (False,) * prompt + (True,) * length
    for number in range(1, prompts + 1):
        first = (0,) * min(COMMON, prompt - 1) + (number,) * max(1, prompt - COMMON)
        found.append(Answers(tuple(Encoded((*first, *((answer,) * length)), counted) for answer in range(answers))))
    return found


def largest_batch(cuts: Iterable[Sequence[Encoded]], document_tokens: int) -> TokenBatch:
    """The one of these micro-batches that takes the most padded tokens, without contents."""
    return shape_batch(max(cuts, key=lambda cut: padded_tokens(cut, document_tokens)), document_tokens)


def shape_batch(sequences: Sequence[Encoded], document_tokens: int = 0) -> TokenBatch:
    """A micro-batch without contents."""
    batch = make_batch(sequences, 0, document_tokens=document_tokens)
    if batch.visible is None:  # transformers would look at the values of positions to find packed documents
        time = batch.ids.shape[1]
        causal = torch.ones(time, time, dtype=torch.bool).tril().expand(len(batch.ids), 1, time, time)
        batch = TokenBatch(**{**batch.__dict__, "visible": causal})
    return batch.to("meta")


@dataclass(frozen=True)
class PassBytes:
    """peak: the most alive at once, beside weights; kept: what is still alive when the pass has returned."""

    peak: int
    kept: int


def measure(model: Any, passed: Callable[[], Any], *, extra: Iterable[Tensor] = ()) -> PassBytes:
    """Run a function over shapes and count. Gradients that it leaves on parameters are taken away and not counted as kept."""
    parameters = list(model.parameters())
    with LiveBytes([*parameters, *model.buffers(), *extra]) as live:
        result = passed()
        for parameter in parameters:
            parameter.grad = None
        kept = live.current
        del result
    return PassBytes(live.peak, kept)


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those that share a storage counted once."""
    storages = {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def training_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """What LocalLearner holds for these beside the weights themselves; a float32 weight is its own master."""
    return sum(p.numel() * (TRAINING_BYTES - (4 if p.dtype == torch.float32 else 0)) for p in parameters)


def cache_bytes(config: Any, rows: int, places: int, element_size: int) -> int:
    """Keys and values of `rows` sequences."""
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * dim * rows * places * element_size
