"""What torch has no good operation for on a CPU: kernels.c, built once for the processor at hand and kept in the cache.

For one query a row over grouped heads torch first copies the keys for every query head, and in training a short tile is too small
a product for its kernels: copies and tiny products cost a small model a quarter of its decoding, a fifth of its update. Without a
C compiler and on accelerators torch's own operations are taken: the same results to rounding, more slowly.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.models.native import build

SOURCE = Path(__file__).with_name("kernels.c")
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat"}


@cache
def library() -> Any:
    """The shared library; None where it cannot be had."""
    openmp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]  # torch's own threads, not a second set of them
    if not openmp and torch.get_num_threads() > 1:
        return None  # on one thread they would be slower than torch on all
    flags = ["-O3", "-march=native", "-ffast-math", *(["-fopenmp"] if openmp else [])]
    loaded = build(SOURCE, ("gcc", "cc", "clang"), flags, [*openmp, "-lm"])
    if loaded is None:
        return None
    size, pointer, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
    signatures = {
        "product": [*[size] * 3, *[pointer] * 4],
        "decode": [*[size] * 5, pointer, *[pointer, size, size] * 3, *[pointer] * 3, number, size, number],
        "sample": [*[size] * 3, pointer, number, *[pointer] * 3],
        "add_norm": [size, size, *[pointer] * 3, number, pointer],
        "rotate": [*[size] * 6, *[pointer] * 5, number],
        "norm_back": [size, size, pointer, pointer, number, pointer, pointer],
        "gate": [*[size] * 3, *[pointer] * 3],
        "gate_back": [size, *[pointer] * 5],
        "attend": [*[size] * 5, *[pointer] * 7, number],
        "attend_back": [*[size] * 5, *[pointer] * 11, number],
    }
    for name, arguments in signatures.items():
        for kind in TYPES.values():
            function = getattr(loaded, f"{name}_{kind}")
            function.restype, function.argtypes = None, arguments
            if name in ("decode", "attend", "attend_back"):
                function.restype, function.errcheck = size, _memory_sufficed
    for kind in TYPES.values():
        getattr(loaded, f"panel_width_{kind}").restype = size
    return loaded


def _memory_sufficed(failed: int, function: Any, arguments: Any) -> None:
    if failed:
        name = function.__name__.rpartition("_")[0]
        raise MemoryError(
            f"attention ({name}) found no memory to work in: sample fewer rows at once, or cut smaller micro-batches"
        )


def library_for(tensor: Tensor) -> Any:
    """The library, if it has kernels for such a tensor."""
    return library() if tensor.device.type == "cpu" and tensor.dtype in TYPES else None


class Panels:
    """A matrix (outputs, inputs) laid out for products with few rows: states (..., inputs) -> (..., outputs).

    In bfloat16 oneDNN's kernel leaves a fifth of the processor idle at 32 rows and a seventh at 64, waiting for weights, and
    torch's product in float32 lays the matrix out anew each time; this one fetches the next panel while it works on one. From
    256 rows on they are alike.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.columns, self.inputs = weight.shape
        self.width, self.each = _panel_width(weight), 4 // weight.element_size()
        missing = -self.columns % self.width
        padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
        self.panels = padded.view(-1, self.width, self.inputs // self.each, self.each).transpose(1, 2).contiguous()
        self.bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, missing))

    @staticmethod
    def fit(weight: Tensor) -> bool:
        """Whether there is such a kernel here, for such a matrix, and nothing better."""
        return _panel_width(weight) > 0 and weight.shape[1] * weight.element_size() % 4 == 0

    def __call__(self, states: Tensor) -> Tensor:
        if states.dtype != self.panels.dtype or states.shape[-1] != self.inputs:
            given = f"{states.dtype} of width {states.shape[-1]}"
            raise RuntimeError(
                f"a matrix of {self.panels.dtype} with {self.inputs} inputs cannot be multiplied with states of {given}"
            )
        states = states.contiguous()
        out = states.new_empty(*states.shape[:-1], self.columns)
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (states.data_ptr(), self.panels.data_ptr(), bias, out.data_ptr())
        sizes = (states.numel() // self.inputs, self.inputs // self.each, self.columns)
        getattr(library(), f"product_{TYPES[states.dtype]}")(*sizes, *addresses)
        return out


def _panel_width(weight: Tensor) -> int:
    loaded = library_for(weight)
    return 0 if loaded is None else getattr(loaded, f"panel_width_{TYPES[weight.dtype]}")()


def sample(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor] | None:
    """One token a row, (rows,), and its log-probability, from the whole tempered distribution: see sampling.sample_tokens.

    Returns None where there is no kernel for these logits (rows, vocab). A log-probability of NaN: these were no distribution.
    """
    loaded = library_for(logits)
    if loaded is None or logits.stride(-1) != 1:
        return None
    rows, vocab = logits.shape
    tokens, logprobs = logits.new_empty(rows, dtype=torch.long), logits.new_empty(rows, dtype=torch.float32)
    uniforms = uniforms.double().contiguous()
    addresses = (uniforms.data_ptr(), tokens.data_ptr(), logprobs.data_ptr())
    getattr(loaded, f"sample_{TYPES[logits.dtype]}")(
        rows, vocab, logits.stride(0), logits.data_ptr(), 1 / temperature, *addresses
    )
    return tokens, logprobs


def decode(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    store: tuple[Tensor, Tensor],
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor | None:
    """Write one key and value a row to its slot and attend to the slot: what `torch_decode` computes, without copies.

    Args:
        query: (rows, heads, 1, dim); new_keys, new_values: (rows, kv heads, 1, dim).
        store: keys and values, (slots, kv heads, capacity, dim) contiguous, changed in place; row k is slot k.
        lengths: (rows,) int64, how many places of its slot a row has filled before.

    Returns:
        (rows, 1, heads, dim), or None where there is no kernel for these tensors (nothing has been written then).
    """
    loaded, given = library_for(query), (query, new_keys, new_values, *store)
    if loaded is None or any(t.stride(-1) != 1 or t.dtype != query.dtype or t.shape[-1] != query.shape[-1] for t in given):
        return None
    rows, heads, _, dim = query.shape
    _, kv_heads, capacity, _ = store[0].shape
    out = query.new_empty(rows, 1, heads, dim)
    strided = [n for t in (query, new_keys, new_values) for n in (t.data_ptr(), t.stride(0), t.stride(1))]
    addresses = (*strided, store[0].data_ptr(), store[1].data_ptr(), out.data_ptr())
    sizes = (rows, kv_heads, heads // kv_heads, dim, capacity)
    getattr(loaded, f"decode_{TYPES[query.dtype]}")(*sizes, lengths.data_ptr(), *addresses, scale, window or 0, softcap or 0.0)
    return out


def torch_decode(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    store: tuple[Tensor, Tensor],
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same with torch's operations, on any device; `sinks` (heads,) are logits that take probability and give nothing."""
    (rows, heads, _, dim), (keys, values) = query.shape, store
    places = torch.arange(rows, device=lengths.device)
    keys[places, :, lengths], values[places, :, lengths] = new_keys[:, :, 0], new_values[:, :, 0]
    width, kv_heads = int(lengths.max()) + 1, keys.shape[1]
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = (grouped * scale) @ keys[:rows, :, :width].transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    age = lengths[:, None] - torch.arange(width, device=lengths.device)  # 0: the token itself; below 0: what others left there
    hidden = (age < 0) if window is None else (age < 0) | (age >= window)
    scores = scores.float().masked_fill_(hidden[:, None, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)], -1)
    weights = scores.softmax(-1)[..., :width].to(values.dtype)
    return (weights @ values[:rows, :, :width]).reshape(rows, 1, heads, dim)


@dataclass(frozen=True)
class Ragged:
    """The keys that each of M tiles of queries sees, tile after tile.

    starts: (M + 1,) int64, where each tile's keys begin; keys: (starts[-1],) int64, flat index into batch × keys; mask:
    (side · starts[-1],) float32, additive, every tile's (side, its keys).
    """

    starts: Tensor
    keys: Tensor
    mask: Tensor


SHARES = 2**24
"""Floats that may wait to be added up in the backward pass: 64 MB."""


def attend(query: Tensor, key: Tensor, value: Tensor, tiles: Ragged, scale: float) -> Tensor:
    """Attention of tiles, query (M, K, G, side, D), key and value (keys, K, D), all contiguous -> like query.

    The caller has asked `library_for`, and seen to it that they have one type and that the tiles are theirs.
    """
    out = torch.empty_like(query)
    addresses = (*(t.data_ptr() for t in (tiles.starts, tiles.keys, tiles.mask, query, key, value, out)), scale)
    getattr(library(), f"attend_{TYPES[query.dtype]}")(*query.shape, *addresses)
    return out


def attend_back(
    query: Tensor, key: Tensor, value: Tensor, tiles: Ragged, scale: float, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attend` in query, key and value, the latter two in float32. The same bits at every call."""
    grads = torch.empty_like(query), torch.zeros_like(key, dtype=torch.float32), torch.zeros_like(value, dtype=torch.float32)
    starts, (count, kv_heads, _, _, dim), kind = tiles.starts.tolist(), query.shape, TYPES[query.dtype]
    first = 0
    while first < count:
        end = first + 1
        while end < count and 2 * kv_heads * dim * (starts[end + 1] - starts[first]) <= SHARES:
            end += 1
        size = 2 * kv_heads * dim * (starts[end] - starts[first])
        shares = torch.empty(size, dtype=torch.float32, device=query.device)
        some = [tiles.starts[first:], tiles.keys, tiles.mask, query[first:], key, value, grad[first:], grads[0][first:]]
        addresses = [t.data_ptr() for t in (*some, *grads[1:], shares)]
        getattr(library(), f"attend_back_{kind}")(end - first, *query.shape[1:], *addresses, scale)
        first = end
    return grads


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add `delta` to `residual` in place, both (rows, dim) contiguous, and return its RMS norm times `weight`."""
    out, kind = torch.empty_like(residual), TYPES[residual.dtype]
    addresses = (residual.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr())
    getattr(library(), f"add_norm_{kind}")(*residual.shape, *addresses, epsilon, out.data_ptr())
    return out


def rotate(
    heads: Tensor, queries: int, keys: int, cosines: Tensor, sines: Tensor, norms: tuple[Tensor | None, Tensor | None, float]
) -> None:
    """Turn the query and key heads of a fused projection, (rows, heads, dim), by their positions, in place.

    cosines, sines: (rows, turned) float32 contiguous. norms: weights of the heads' own RMS norms, if any, and their epsilon.
    """
    weights = [None if weight is None else weight.data_ptr() for weight in norms[:2]]
    sizes = (heads.shape[0], queries, keys, heads.shape[2], cosines.shape[1], heads.stride(0))
    addresses = (heads.data_ptr(), cosines.data_ptr(), sines.data_ptr(), *weights)
    getattr(library(), f"rotate_{TYPES[heads.dtype]}")(*sizes, *addresses, norms[2])


def norm_back(x: Tensor, weight: Tensor, epsilon: float, grad: Tensor) -> Tensor:
    """The gradient in x of x / rms(x) * weight, all contiguous and (..., dim)."""
    out, dim = torch.empty_like(x), x.shape[-1]
    addresses = (x.data_ptr(), weight.data_ptr(), epsilon, grad.data_ptr(), out.data_ptr())
    getattr(library(), f"norm_back_{TYPES[x.dtype]}")(x.numel() // dim, dim, *addresses)
    return out


def gate(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, (..., dim): contiguous, or two halves of one matrix (rows, 2 dim)."""
    out, dim = torch.empty(a.shape, dtype=a.dtype, device=a.device), a.shape[-1]
    stride = dim if a.is_contiguous() else a.stride(0)
    getattr(library(), f"gate_{TYPES[a.dtype]}")(a.numel() // dim, dim, stride, a.data_ptr(), b.data_ptr(), out.data_ptr())
    return out


def gate_back(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `gate` in a and b, all contiguous."""
    grads = torch.empty_like(a), torch.empty_like(b)
    addresses = [t.data_ptr() for t in (a, b, grad, *grads)]
    getattr(library(), f"gate_back_{TYPES[a.dtype]}")(a.numel(), *addresses)
    return grads
