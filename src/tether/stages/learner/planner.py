"""Memory that a pass will need, measured without weights: a run on shapes alone adds up the storage
that would be alive.

On torch's meta device a tensor has a shape without memory. The code of the training runs there,
forwards and backwards, and every storage is counted while it exists. The count is exact for any
architecture, adapters, loss and chunking, without a formula. Memory outside torch (the allocator's
slack, kernels' scratch space, the process itself) is added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.algorithms.autograd import AutogradContext
from tether.data.batches import COMMON, TokenBatch, make_batch, padded_tokens
from tether.data.chat import Encoded
from tether.models.cpu.attention import KERNEL_TILE
from tether.models.cpu.kernels import SHARES
from tether.models.loading import add_adapter
from tether.models.pretrained import loader_of
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.stages.learner.local import LocalLearner

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from tether.models.trunk import Trunk

FUSED, TILED = "tether_shapes_fused", "tether_shapes_tiled"
"""Attention functions of shapes alone, with the memory of a GPU's fused kernel and with that of our
grouped attention.
"""
TRAINING_BYTES = 12
"""Of a trainable weight beside itself, between updates: float32 master and Adam's two moments."""
EIGHT_BIT_SAVES = 8 - (2 + 2 * 4 / 256)
"""Of the moments' 8 bytes, where they are held in 8 bits with a scale for every 256."""
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Of a weight in NF4: its code, its share of a block's 8-bit constant, and that one's share of a
float32 constant.
"""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages while they live; `peak` is the most there were at once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.known = WeakIdKeyDictionary()
        self.current = self.peak = 0
        for tensor in known:
            self.known[tensor.untyped_storage()] = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Iterable[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.known:
            return
        size = storage.nbytes()
        self.known[storage] = size
        self.current += size
        self.peak = max(self.peak, self.current)

        def forget() -> None:
            self.current -= size

        weakref.finalize(storage, forget)


class _Context(AutogradContext, Protocol):
    fused: bool


class _ShapeAttention(torch.autograd.Function):
    """Keeps copies of queries, keys and values; fused: also the result and one number a query, and
    has no scores at all.
    """

    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor, fused: bool) -> Tensor:
        rows, heads, time, _ = query.shape
        # a fused kernel writes the heads of a token side by side, as the next product reads them
        out = (
            query.new_empty(rows, time, heads, value.shape[-1]).transpose(1, 2)
            if fused
            else query.new_empty(rows, heads, time, value.shape[-1])
        )
        inputs = [query, key, value]
        per_query = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(
            *([*inputs, out, per_query] if fused else map(torch.empty_like, inputs)),
        )
        ctx.fused = fused
        return out

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        # in float32: the gradients of keys and values, and every tile's share of them, if causal
        if not ctx.fused:
            wide = [torch.empty_like(tensor, dtype=torch.float32) for tensor in (key, value)]
            query.new_empty(
                min(key.numel() * query.shape[2] // KERNEL_TILE, SHARES),
                dtype=torch.float32,
            )
            return torch.empty_like(query), *(w.to(key.dtype) for w in wide), None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attend(
    fused: bool,
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object = None,
    *_: object,
    **__: object,
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    # a fused kernel with a mask takes keys and values of every query's head
    if fused and mask is not None and groups > 1:
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    return _ShapeAttention.apply(query, key, value, fused).transpose(1, 2), None


for _name, _mask in ((FUSED, sdpa_mask), (TILED, eager_mask)):
    ALL_ATTENTION_FUNCTIONS.register(_name, partial(_attend, _name == FUSED))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_name, _mask)


def shape_model(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> Any:
    """A causal model of shapes, frozen, for any transformers configuration; attention: `FUSED`,
    `TILED` or "eager".
    """
    with torch.device("meta"):
        loader = loader_of("CausalLM", config)
        model = loader.from_config(config, dtype=dtype, attn_implementation="eager")
    model.set_attn_implementation(attention)
    return model.eval().requires_grad_(False)


def shape_adapter(model: Trunk, name: str, lora: LoraConfig) -> Any:
    """The same with an adapter."""
    with torch.device("meta"):
        return add_adapter(model, name, lora)


def shape_answers(prompts: int, prompt: int, answers: int, length: int) -> list[list[Encoded]]:
    """Prompts that begin alike, as a template makes them, and several answers to each, which belong
    together.
    """
    trained = (False,) * prompt + (True,) * length
    common = (0,) * min(COMMON, prompt - 1)
    groups = []
    for number in range(1, prompts + 1):
        ids = common + (number,) * max(1, prompt - COMMON)
        groups.append([Encoded(ids + (n,) * length, trained) for n in range(answers)])
    return groups


def largest_batch(cuts: Iterable[Sequence[Encoded]], document_tokens: int) -> TokenBatch:
    """The one of these micro-batches that takes the most padded tokens, without contents."""
    return shape_batch(
        max(cuts, key=lambda cut: padded_tokens(cut, document_tokens)),
        document_tokens,
    )


def shape_batch(
    sequences: Sequence[Encoded],
    document_tokens: int = 0,
    capacity: int | None = None,
) -> TokenBatch:
    """A micro-batch without contents; see `make_batch`."""
    return make_batch(sequences, 0, capacity=capacity, document_tokens=document_tokens).to("meta")


def measure_pass(
    model: nn.Module,
    passed: Callable[[], object],
    *,
    extra: Iterable[Tensor] = (),
) -> int:
    """The most bytes alive at once, beside weights and `extra`, while a function runs over shapes."""
    with LiveBytes([*model.parameters(), *model.buffers(), *extra]) as live:
        passed()
    return live.peak


def measure_learning(
    model: nn.Module,
    learned: Sequence[nn.Parameter],
    passed: Callable[[], object],
    cuts: int,
    at_once: bool,
) -> int:
    """`measure_pass` of the last of so many micro-batches of an update, or of its end.

    At the end, AdamW works on one weight after another or on all of them `at_once`.
    """
    learner = LocalLearner(learned, OptimizerConfig(learning_rate=1.0), 1)
    sums = [torch.zeros_like(master) for master in learner.masters] if cuts > 1 else []
    for master, gradient in zip(learner.masters, sums, strict=False):
        master.grad = gradient
    peak = measure_pass(model, passed, extra=[*learned, *learner.masters, *sums])
    sizes = [4 * master.numel() for master in learner.masters]
    for parameter in learned:
        parameter.grad = None
    return max(weight_bytes(sums) + peak, sum(sizes) + (sum if at_once else max)(sizes))


def weight_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, those that share a storage counted once."""
    return sum({id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}.values())


def held_bytes(model: PreTrainedModel, quantize: str | None) -> int:
    """Bytes of a model's weights as they are held; in 4 bits with room for one layer as it is used,
    in 16.
    """
    whole = weight_bytes(model.parameters())
    if quantize is None:
        return whole
    layers = [
        module.weight for module in model.get_decoder().modules() if type(module) is nn.Linear
    ]
    sixteen = [weight_bytes([weight]) for weight in layers]
    return (
        whole
        - sum(sixteen)
        + int(sum(w.numel() for w in layers) * NF4_BYTES)
        + max(sixteen, default=0)
    )


def training_bytes(parameters: Iterable[nn.Parameter], kind: str = "adamw") -> int:
    """Bytes that LocalLearner holds for these between updates, beside the weights themselves. A
    float32 weight is its own master.
    """
    each = TRAINING_BYTES - (EIGHT_BIT_SAVES if kind == "adamw8bit" else 0)
    return int(sum(p.numel() * (each - (4 if p.dtype == torch.float32 else 0)) for p in parameters))
