"""A pretend accelerator: what a GPU would refuse is refused here, on a machine that has none.

Way: torch's spare backend PrivateUse1 gives the device its type (`tensor.device.type`, `torch.device(NAME)` and factories with
`device=` are torch's own), and a wrapper subclass gives its tensors: each holds the CPU tensor that stands for its memory, with
the same strides, and sees every operation below autograd. A backend alone, without the subclass, has to tell torch the strides
of every result itself, and loses them in a Llama layer; a mode that only tags CPU tensors would leave `tensor.device` as it is,
and the code under test branches on that. The backend has to be given a name, or no backward pass reaches it, and torch cannot
take the name back: it would then be `torch.accelerator` for every later test. So it is imported in a process of its own alone.

Refused, as CUDA refuses it: a CPU tensor among the device's (one without dimensions may take part in pointwise operations),
`numpy()` and `data_ptr()`, a generator of the CPU for a draw on the device. Refused beyond that: an index on the CPU into a
tensor of the device, which CUDA copies over without a word, and waits for.

What it cannot tell: what only `device.type == "cuda"` reaches, weights in 4 bits, memory, streams, speed, other kernels' digits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch import Tensor

NAME = "pretend"
BETWEEN = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
"""What may read one side and write the other."""
SCALARS = {"aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::masked_fill", "aten::masked_fill_"}
"""Not pointwise, and yet a number on the CPU is good enough as their value."""
FACTORIES = (
    "empty.memory_format empty_strided arange arange.start arange.start_step eye eye.m full linspace logspace "
    "rand rand.generator randn randn.generator randint randint.low randint.generator randint.low_generator "
    "randperm randperm.generator ones zeros scalar_tensor tril_indices triu_indices"
)


class _Module(ModuleType):
    """What torch looks up as `torch.<NAME>`."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None: ...

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


registration._setup_privateuseone_for_python_backend(NAME, _Module(f"torch.{NAME}"))
DEVICE = torch.device(NAME, 0)


class Pretended(Tensor):
    """A tensor on the pretend device; `raw` is its memory."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> Tensor:
        if raw.device.type != "cpu":  # a library that makes a parameter anew calls the class of the one it has
            return torch.nn.Parameter(raw, requires_grad)
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, raw.shape, device=DEVICE, **layout)  # pyright: ignore[reportAttributeAccessIssue]
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"a tensor on {self.device} cannot become an array: it has to go to the CPU first")

    def data_ptr(self) -> int:
        """An address that tells memory from other memory; our kernels would read what is there."""
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("tether.cpu"):
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
    call = _Call(operation, kwargs.get("device"))
    inner = [call.inside(value) for value in args]
    result = operation(*inner, **{key: call.inside(value) for key, value in kwargs.items()})
    for tensor, layout in call.written:
        if _layout(tensor) != layout:
            raise NotImplementedError(f"{call.name} changes the shape of a tensor in place, which the pretend device does not")
    return call.outside(result) if call.asked is None or call.asked.type == NAME else result


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
                raise RuntimeError(f"{self.name}: a tensor of shape {shape} on {value.device} among those of {DEVICE}")
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
    """Its name, whether it writes to an argument, may join both sides, and takes numbers on the CPU."""
    name = operation._schema.name
    return name, operation._schema.is_mutable, name in BETWEEN, name in SCALARS or torch.Tag.pointwise in operation.tags


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _made(operation: Any) -> Callable[..., Any]:
    """A factory's kernel: what it would make on the CPU."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return run(operation, *args, **{**kwargs, "device": DEVICE})

    return kernel


library = torch.library.Library("aten", "IMPL")
for full_name in FACTORIES.split():
    packet, _, overload = full_name.partition(".")
    library.impl(full_name, _made(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")


@torch.library.impl("aten::_copy_from", "PrivateUse1")
def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy that torch makes below the dispatch, where a list becomes a tensor of the device."""
    inner = [tensor.raw if isinstance(tensor, Pretended) else tensor for tensor in (source, target)]
    inner[1].copy_(inner[0])
    return target


torch.autograd.set_multithreading_enabled(False)  # or passes backward run in a thread of the device's own
torch.__future__.set_swap_module_params_on_conversion(True)  # or `to` makes two weights of one that is tied
