"""Operations that torch does slowly on a CPU: kernels.c, built once for the processor at hand and
kept in the cache.

In a decoding step with grouped heads, torch first copies the keys for every query head. These
copies take a quarter of the decoding time of a small model. In training, a short tile is too small
a product for the kernels of torch. Such tiny products take a fifth of an update. Without a C
compiler, and on accelerators, torch's own operations are used. They are slower and give the same
results to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tether.models.cpu.native import compiled

SOURCE = Path(__file__).with_name("kernels.c")
TYPES = {torch.float32: "float", torch.bfloat16: "bfloat"}
_SIZE = ctypes.c_int64
_POINTER = ctypes.c_void_p
_FLOAT = ctypes.c_float
SIGNATURES = {
    "panel_width": [],
    "product": [*[_SIZE] * 3, *[_POINTER] * 4],
    "decode": [
        *[_SIZE] * 5,
        _POINTER,
        *[_POINTER, _SIZE, _SIZE] * 3,
        *[_POINTER] * 3,
        _FLOAT,
        _SIZE,
        _FLOAT,
    ],
    "sample": [*[_SIZE] * 3, _POINTER, _FLOAT, *[_POINTER] * 3],
    "add_norm": [_SIZE, _SIZE, *[_POINTER] * 3, _FLOAT, _POINTER],
    "rotate": [*[_SIZE] * 6, *[_POINTER] * 5, _FLOAT],
    "gate": [_SIZE, _SIZE, _POINTER, _POINTER],
    "attend": [*[_SIZE] * 5, *[_POINTER] * 7, _FLOAT],
    "attend_back": [*[_SIZE] * 5, *[_POINTER] * 11, _FLOAT],
}
"""Parameters of the functions in kernels.c, each of which exists for every type in `TYPES`."""
ALLOCATING = ("decode", "attend", "attend_back")
"""Functions that say by their result whether their memory sufficed."""


@cache
def library() -> ctypes.CDLL | None:
    """The shared library; None where it cannot be had."""
    # torch's own threads, not a second set of them
    openmp = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]
    if not openmp and torch.get_num_threads() > 1:
        return None  # on one thread they would be slower than torch on all
    flags = ["-O3", "-march=native", "-ffast-math", *(["-fopenmp"] if openmp else [])]
    loaded = compiled(SOURCE, ("gcc", "cc", "clang"), flags, [*map(str, openmp), "-lm"])
    for name, parameters in SIGNATURES.items() if loaded is not None else ():
        for kind in TYPES.values():
            function = getattr(loaded, f"{name}_{kind}")
            function.argtypes = parameters
            function.restype = _SIZE if name in (*ALLOCATING, "panel_width") else None
            if name in ALLOCATING:
                function.errcheck = _memory_sufficed
    return loaded


def _memory_sufficed(failed: int, function: Callable[..., object], arguments: object) -> None:
    if failed:
        name = function.__name__.rpartition("_")[0]
        raise MemoryError(
            f"attention ({name}) found no memory to work in: sample fewer rows at once, or cut "
            "smaller micro-batches",
        )


def library_for(tensor: Tensor) -> ctypes.CDLL | None:
    """The library, if it has kernels for such a tensor."""
    return library() if tensor.device.type == "cpu" and tensor.dtype in TYPES else None


def _call(name: str, dtype: torch.dtype, *arguments: object) -> int | None:
    """The function for this type; tensors are passed by their addresses, and live until it
    returns.
    """
    function = getattr(library(), f"{name}_{TYPES[dtype]}")
    return function(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))


def panel_width(weight: Tensor) -> int:
    """Outputs in a panel of `product`; 0 where there is no such kernel, or torch has a better
    one.
    """
    return 0 if library_for(weight) is None else _call("panel_width", weight.dtype) or 0


def product(states: Tensor, panels: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """(..., inputs) times a matrix laid out in panels (products.Panels) -> (..., columns); all
    contiguous.
    """
    out = states.new_empty(*states.shape[:-1], columns)
    inputs = states.shape[-1]
    steps = inputs * states.element_size() // 4
    _call(
        "product",
        states.dtype,
        states.numel() // inputs,
        steps,
        columns,
        states,
        panels,
        bias,
        out,
    )
    return out


def draw_tokens(
    logits: Tensor,
    uniforms: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor] | None:
    """One token a row, (rows,), and its log-probability, from the whole tempered distribution: see
    sampling.sample_tokens.

    Returns None where there is no kernel for these logits (rows, vocab). A row that is no
    distribution has token -1 and a log-probability of NaN.
    """
    if library_for(logits) is None or logits.stride(-1) != 1:
        return None
    (rows, vocab), uniforms = logits.shape, uniforms.double().contiguous()
    tokens = logits.new_empty(rows, dtype=torch.long)
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    _call(
        "sample",
        logits.dtype,
        rows,
        vocab,
        logits.stride(0),
        logits,
        1 / temperature,
        uniforms,
        tokens,
        logprobs,
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
    """Write one key and value a row to its slot and attend to the slot, without copies.

    Args:
        query: (rows, heads, 1, dim); new_keys, new_values: (rows, kv heads, 1, dim).
        store: keys and values, (slots, kv heads, capacity, dim) contiguous, changed in place; row k
            is slot k.
        lengths: (rows,) int64, how many places of its slot a row has filled before.

    Returns:
        (rows, 1, heads, dim), or None where there is no kernel for these tensors (nothing has been written then).
    """
    tensors = (query, new_keys, new_values, *store)
    if any(
        t.stride(-1) != 1 or t.dtype != query.dtype or t.shape[-1] != query.shape[-1]
        for t in tensors
    ):
        return None
    if library_for(query) is None:
        return None
    (rows, heads, _, dim), (_, kv_heads, capacity, _) = query.shape, store[0].shape
    out = query.new_empty(rows, 1, heads, dim)
    strided = [argument for t in tensors[:3] for argument in (t, t.stride(0), t.stride(1))]
    sizes = (rows, kv_heads, heads // kv_heads, dim, capacity)
    _call(
        "decode",
        query.dtype,
        *sizes,
        lengths,
        *strided,
        *store,
        out,
        scale,
        window or 0,
        softcap or 0.0,
    )
    return out


class Ragged(NamedTuple):
    """The keys that each of M tiles of queries sees, tile after tile.

    - starts: (M + 1,) int64, where each tile's keys begin
    - keys: (starts[-1],) int64, flat index into batch × keys
    - mask: (side · starts[-1],) float32, additive, every tile's (side, its keys)
    """

    starts: Tensor
    keys: Tensor
    mask: Tensor


SHARES = 2**24
"""Floats that may wait to be added up in the backward pass: 64 MB."""


def attend(query: Tensor, key: Tensor, value: Tensor, tiles: Ragged, scale: float) -> Tensor:
    """Attention of tiles, query (M, K, G, side, D), key and value (keys, K, D), all contiguous ->
    like query.

    The caller has asked `library_for`, and seen to it that they have one type and that the tiles
    are theirs.
    """
    out = torch.empty_like(query)
    _call("attend", query.dtype, *query.shape, *tiles, query, key, value, out, scale)
    return out


def attend_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Ragged,
    scale: float,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attend` in query, key and value, the latter two in float32. The same bits
    at every call.
    """
    grads = (
        torch.empty_like(query),
        torch.zeros_like(key, dtype=torch.float32),
        torch.zeros_like(value, dtype=torch.float32),
    )
    starts = tiles.starts.tolist()
    count, kv_heads, _, _, dim = query.shape
    first = 0
    while first < count:
        end = first + 1
        while end < count and 2 * kv_heads * dim * (starts[end + 1] - starts[first]) <= SHARES:
            end += 1
        shares = query.new_empty(
            2 * kv_heads * dim * (starts[end] - starts[first]),
            dtype=torch.float32,
        )
        some = (
            tiles.starts[first:],
            tiles.keys,
            tiles.mask,
            query[first:],
            key,
            value,
            grad[first:],
            grads[0][first:],
        )
        _call(
            "attend_back",
            query.dtype,
            end - first,
            *query.shape[1:],
            *some,
            *grads[1:],
            shares,
            scale,
        )
        first = end
    return grads


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add `delta` to `residual` in place, both (rows, dim) contiguous, and return its RMS norm
    times `weight`.
    """
    out = torch.empty_like(residual)
    _call("add_norm", residual.dtype, *residual.shape, residual, delta, weight, epsilon, out)
    return out


def rotate(
    heads: Tensor,
    queries: int,
    keys: int,
    cosines: Tensor,
    sines: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
) -> None:
    """Turn the query and key heads of a fused projection, (rows, heads, dim), by their positions,
    in place.

    cosines, sines: (rows, turned) float32 contiguous. norms: weights of the heads' own RMS norms,
    if any, and their epsilon.
    """
    sizes = (heads.shape[0], queries, keys, heads.shape[2], cosines.shape[1], heads.stride(0))
    _call("rotate", heads.dtype, *sizes, heads, cosines, sines, *norms)


def gate(both: Tensor) -> Tensor:
    """silu(a) * b, (rows, dim), of `both`, whose rows are a and then b, (rows, 2 dim)
    contiguous.
    """
    rows = len(both)
    dim = both.shape[1] // 2
    out = both.new_empty(rows, dim)
    _call("gate", both.dtype, rows, dim, both, out)
    return out
