"""The context of an operation with a gradient of its own."""

from typing import Protocol

from torch import Tensor


class AutogradContext(Protocol):
    """The `ctx` of a `torch.autograd.Function`: torch's own type has room for one saved tensor."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
