"""A pretended `cuda:0`: it refuses what a GPU would refuse, and counts what the host would wait
for.

Way: a wrapper subclass gives the device its tensors. Each holds the CPU tensor that stands for its
memory, with the same strides, and sees every operation below autograd. `guard.cpp`, preloaded by
`test_pretend.py`, lets them lie on a device of type cuda in a CPU build of torch, so that every
branch on `device.type == "cuda"` is taken. Torch cannot take that back, so this module is imported
in a process of its own alone.

Refused, as CUDA refuses it: a CPU tensor among the device's (one without dimensions may take part
in pointwise operations), `numpy()` and `data_ptr()`, a generator of the CPU for a draw on the
device. Refused beyond that: an index on the CPU into a tensor of the device, which CUDA copies over
without a word, and waits for.

Counted by `counting`: each wait of the host for the device and each copy between the two, with the
line of tether that causes it, and each operation that a GPU would launch. An operation that is
computed by others is counted as these.

It cannot show: weights in 4 bits, memory, streams, speed, other kernels' digits.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: (
    None if name.split(".")[0] == "bitsandbytes" else _find_spec(name, *rest)
)

import peft  # noqa: E402, F401  (before CUDA is there: bitsandbytes would look for symbols of a CUDA build)
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

NAME, KEY = "cuda", "CUDA"
DEVICE = torch.device(NAME, 0)
SOURCES = Path(__file__).parents[2] / "src"
BETWEEN = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
"""What may read one side and write the other."""
SCALARS = {
    "aten::fill_",
    "aten::index_put_",
    "aten::index_put",
    "aten::_index_put_impl_",
    "aten::masked_fill",
    "aten::masked_fill_",
}
"""Not pointwise, and yet a number on the CPU is good enough as their value."""
FACTORIES = (
    "empty.memory_format empty_strided arange arange.start arange.start_step eye eye.m full "
    "linspace logspace "
    "rand rand.generator randn randn.generator randint randint.low randint.generator "
    "randint.low_generator "
    "randperm randperm.generator ones zeros scalar_tensor tril_indices triu_indices"
)


WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::bincount",
}
WAITS |= {
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
}
"""Operations whose result the host has to see: it waits until the device has come that far."""
NO_ORDER = {
    "aten::cumsum",
    "aten::cumsum_",
    "aten::histc",
    "aten::kthvalue",
    "aten::median.dim",
    "aten::nanmedian.dim",
}
NO_ORDER |= {"aten::put_"}
NO_ORDER |= {
    "aten::ctc_loss_backward",
    "aten::_embedding_bag_backward",
    "aten::max_unpool2d",
    "aten::grid_sampler_2d_backward",
}
NO_ORDER |= {
    "aten::nll_loss2d_forward",
    "aten::reflection_pad1d_backward",
    "aten::replication_pad1d_backward",
}
"""Operations that CUDA refuses under torch.use_deterministic_algorithms, by PyTorch's documentation
of that function; `cumsum` of whole numbers is allowed, and so is `bincount` without weights.
"""
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
NO_KERNEL = {
    "aten::_unsafe_view",
    "aten::alias",
    "aten::detach",
    "aten::_reshape_alias",
    "aten::set_",
    "aten::resize_",
}
NO_KERNEL |= {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}


@dataclass
class Card:
    """Properties of the pretended card, in bytes; tests change them."""

    total: int = 24 * 2**30
    free: int = 20 * 2**30
    capability: tuple[int, int] = (9, 0)
    name: str = "pretend H100"
    """With a data sheet: a processor would measure its products for minutes."""
    emptied: int = 0

    @property
    def total_memory(self) -> int:
        return self.total

    def empty_cache(self) -> None:
        self.emptied += 1

    def multiplies_bfloat16(self, including_emulation: bool = True) -> bool:
        return including_emulation or self.capability >= (8, 0)


CARD = Card()


def _pretend() -> None:
    """Put answers of the pretended card in place of those of `torch.cuda`."""
    cuda = torch.cuda
    cuda._lazy_init = cuda.synchronize = torch.accelerator.synchronize = lambda *_: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.device_count, cuda.current_device = lambda: 1, lambda: 0
    cuda.is_bf16_supported = CARD.multiplies_bfloat16
    cuda.get_device_name = lambda *_: CARD.name
    cuda.get_device_properties = lambda *_: CARD
    cuda.get_device_capability = lambda *_: CARD.capability
    cuda.mem_get_info = lambda *_: (CARD.free, CARD.total)
    cuda.memory_reserved = cuda.memory_allocated = cuda.max_memory_allocated = (
        cuda.max_memory_reserved
    ) = lambda *_: 0
    cuda.reset_peak_memory_stats = lambda *_: None
    cuda.empty_cache = CARD.empty_cache
    cuda.manual_seed_all = cuda.manual_seed = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.zeros(
        16,
        dtype=torch.uint8,
    )
    cuda.set_rng_state = cuda.random.set_rng_state = lambda *_, **__: None


_pretend()
Tensor.pin_memory = lambda self, *_: self  # pyright: ignore[reportAttributeAccessIssue]


@dataclass
class Counted:
    """Waits and copies by kind and the line of tether that caused them, and the number of launched
    operations.
    """

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: int = 0

    def note(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one operation of the device."""
        name, overload = operation._schema.name, operation._schema.overload_name
        if name in WAITS or f"{name}.{overload}" in WAITS:
            self.waits[name.removeprefix("aten::"), _line()] += 1
        if name in INDEXED and any(
            part.dtype in (torch.bool, torch.uint8) and part.dim() for part in _tensors(args[1:2])
        ):
            self.waits["index by a mask", _line()] += 1
        if name == "aten::copy_":
            self._copy(
                isinstance(args[1], Pretended),
                isinstance(args[0], Pretended),
                bool(args[2:] and args[2]),
            )
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            self._copy(
                isinstance(args[0], Pretended),
                kwargs["device"].type == NAME,
                bool(kwargs.get("non_blocking")),
            )
        self.launches += not _is_view(operation) and name not in NO_KERNEL

    def _copy(self, source: bool, target: bool, asynchronous: bool) -> None:
        if source and not target:
            self.waits["copy to the host", _line()] += 1
        elif target and not source:
            self.copies["asynchronous" if asynchronous else "blocking", _line()] += 1


_counters: list[Counted] = []


@contextmanager
def ordered() -> Iterator[None]:
    """Within this block torch allows operations that have an order alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _refuse_disorder(operation: Any, args: tuple[Any, ...]) -> None:
    """Raise as CUDA does for what it computes in any order, where that is not allowed.

    Raises:
        RuntimeError: the operation is one of these.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return
    name, overload = operation._schema.name, operation._schema.overload_name
    whole = name.startswith("aten::cumsum") and not any(
        tensor.is_floating_point() for tensor in _tensors(args[:1])
    )
    counted_weights = name == "aten::bincount" and len(args) > 1 and args[1] is not None
    if counted_weights or (not whole and (name in NO_ORDER or f"{name}.{overload}" in NO_ORDER)):
        raise RuntimeError(f"{name} has no ordered kernel on {DEVICE}")


@contextmanager
def counting() -> Iterator[Counted]:
    """Count what happens on the device within this block."""
    _counters.append(Counted())
    try:
        yield _counters[-1]
    finally:
        _counters.pop()


def _note(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for counted in _counters:
        counted.note(operation, args, kwargs)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _line() -> str:
    """The innermost line of tether's that is being executed."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCES):
            return f"{path.relative_to(SOURCES / 'tether')}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@cache
def _is_view(operation: Any) -> bool:
    schema = operation._schema
    aliases = [
        argument.alias_info for argument in schema.arguments if argument.alias_info is not None
    ]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


class Pretended(Tensor):
    """A tensor on the pretend device; `raw` is its memory."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> Tensor:
        # a library that makes a parameter anew calls the class of the one it has
        if raw.device.type != "cpu":
            return torch.nn.Parameter(raw, requires_grad)
        layout = {
            "strides": raw.stride(),
            "storage_offset": raw.storage_offset(),
            "dtype": raw.dtype,
        }
        tensor = Tensor._make_wrapper_subclass(cls, raw.shape, device=DEVICE, **layout)  # pyright: ignore[reportAttributeAccessIssue]
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls,
        operation: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return run(operation, *args, **(kwargs or {}))

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Pretended):
            raise RuntimeError(f"a tensor of the device is given the data of one on {value.device}")
        Tensor.data.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        self.raw = value.raw

    def tolist(self) -> Any:
        for counted in _counters:
            counted.waits["tolist", _line()] += 1
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            f"a tensor on {self.device} cannot become an array: it has to go to the CPU first",
        )

    def data_ptr(self) -> int:
        """An address that tells memory from other memory; our kernels would read what is there."""
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("tether.models.cpu"):
            raise RuntimeError(f"{caller} would read the memory of a tensor on {self.device}")
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    def storage(self) -> Any:
        return self.raw.storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copy = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy.detach(), self.requires_grad)
            memo[id(self)] = copy
        return memo[id(self)]

    def __format__(self, form: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), form)

    def __repr__(self, **options: Any) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Pretended({self.raw!r})"


def run(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of which an argument, or the device asked for, is the pretend one.

    Raises:
        RuntimeError: the arguments are not all on that device.
    """
    _note(operation, args, kwargs)
    _refuse_disorder(operation, args)
    call = _Call(operation, kwargs.get("device"))
    inner = [call.inside(value) for value in args]
    # which a CPU counts in fractions alone
    if call.name == "aten::histc" and not inner[0].is_floating_point():
        inner[0] = inner[0].float()
    compute = _wide_product if operation is torch.ops.aten.mm.dtype else operation
    result = compute(*inner, **{key: call.inside(value) for key, value in kwargs.items()})
    for tensor, layout in call.written:
        if _layout(tensor) != layout:
            raise NotImplementedError(
                f"{call.name} changes the shape of a tensor in place, which "
                "the pretend device does not",
            )
    return call.outside(result) if call.asked is None or call.asked.type == NAME else result


def _wide_product(first: Tensor, second: Tensor, dtype: torch.dtype) -> Tensor:
    """A product whose result is wider than its factors, which CUDA alone computes."""
    return first.to(dtype) @ second.to(dtype)


class _Call:
    """One operation: what stands for its arguments inside, and what its results are outside."""

    def __init__(self, operation: Any, asked: torch.device | None) -> None:
        self.name, self.mutable, self.between, self.numbers = _traits(operation)
        self.asked = asked
        self.known: dict[int, Tensor] = {}
        self.written: list[tuple[Tensor, Any]] = []

    def inside(self, value: Any) -> Any:
        if isinstance(value, Pretended):
            self.known[id(value.raw)] = value
            if self.mutable:
                self.written.append((value.raw, _layout(value.raw)))
            return value.raw
        if isinstance(value, Tensor):
            if not (self.between or (self.numbers and value.dim() == 0)):
                shape = tuple(value.shape)
                raise RuntimeError(
                    f"{self.name}: a tensor of shape {shape} on {value.device} "
                    f"among those of {DEVICE}",
                )
            self.known[id(value)] = value
        elif isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        elif isinstance(value, torch.Generator):
            raise RuntimeError(f"{self.name}: a generator on {value.device} for a draw on {DEVICE}")
        elif isinstance(value, list | tuple):
            return [self.inside(item) for item in value]
        return value

    def outside(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.known[id(value)] if id(value) in self.known else Pretended(value)
        return type(value)(map(self.outside, value)) if isinstance(value, list | tuple) else value


@cache
def _traits(operation: Any) -> tuple[str, bool, bool, bool]:
    """Its name, whether it writes to an argument, may join both sides, and takes numbers on the
    CPU.
    """
    name = operation._schema.name
    return (
        name,
        operation._schema.is_mutable,
        name in BETWEEN,
        name in SCALARS or torch.Tag.pointwise in operation.tags,
    )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _made(operation: Any) -> Callable[..., Any]:
    """A factory's kernel: what it would make on the CPU."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(operation, *args, **{**kwargs, "device": DEVICE})

    return kernel


warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
library = torch.library.Library("aten", "IMPL")
for full_name in FACTORIES.split():
    packet, _, overload = full_name.partition(".")
    library.impl(
        full_name,
        _made(getattr(getattr(torch.ops.aten, packet), overload or "default")),
        KEY,
    )


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy that torch makes below the dispatch, where a list becomes a tensor of the device."""
    _note(torch.ops.aten.copy_.default, (target, source, non_blocking), {})
    inner = [tensor.raw if isinstance(tensor, Pretended) else tensor for tensor in (target, source)]
    inner[0].copy_(inner[1])
    return target


library.impl("copy_", _copy, KEY)
# or passes backward run in a thread of the device's own
torch.autograd.set_multithreading_enabled(False)
# or `to` makes two weights of one that is tied
torch.__future__.set_swap_module_params_on_conversion(True)
