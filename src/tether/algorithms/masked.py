"""Sums, means and whitening over the positions that count.

A mask is boolean and True means *counts*. Masked-out positions may hold anything, including
infinities and NaN. They are replaced before any arithmetic, because ``0 * inf`` is NaN.
"""

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor

Values = Float[Tensor, "*shape"]
Mask = Bool[Tensor, "*shape"]
"""Numbers, and which of them count; a function's arguments have one shape, (batch, time), packed or
any other.
"""
Scalar = Float[Tensor, ""]
Denominator = int | float | Num[Tensor, ""]
"""Divisor of a summed loss: a count over the whole optimizer step, chosen by the caller."""


def check_same_shape(**tensors: Tensor | float | None) -> None:
    """Raise ``ValueError`` naming the shapes unless all tensors have one shape; what is no tensor
    has none to compare.

    No broadcasting is allowed: a (batch, 1) tensor against a (batch, time) mask is a bug that still
    yields a number.
    """
    shapes = {
        name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, Tensor)
    }
    if len(set(shapes.values())) > 1:
        raise ValueError(
            "expected equal shapes, got "
            f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())}",
        )


def masked_sum(values: Values, mask: Mask, dim: int | None = None) -> Float[Tensor, "..."]:
    """Sum the values that count.

    Equation: ``Σ_i m_i x_i``, over everything or along ``dim``.
    Shapes: any; the result is a scalar or lacks ``dim``; the unit is that of the values.
    Raises: ``ValueError`` when the shapes differ.
    Trap: the sum of nothing is 0, not NaN.
    """
    check_same_shape(values=values, mask=mask)
    kept = torch.where(mask, values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Values, mask: Mask, dim: int | None = None) -> Float[Tensor, "..."]:
    """Average the values that count.

    Equation: ``Σ_i m_i x_i / max(1, Σ_i m_i)``, over everything or along ``dim``.
    Shapes: any; the result is a scalar or lacks ``dim``; the unit is that of the values.
    Raises: ``ValueError`` when the shapes differ.
    Trap: for reporting, not for losses. The mean of micro-batch means weighs tokens unequally; a
    loss takes a sum and a denominator counted over the whole step.
    """
    total = masked_sum(values, mask, dim)
    count = mask.sum() if dim is None else mask.sum(dim)
    return total / count.clamp(min=1)


def masked_variance(values: Values, mask: Mask) -> Scalar:
    """Compute the population variance of the values that count.

    Equation: ``Σ_i m_i (x_i − x̄)² / max(1, Σ_i m_i)``, two passes, for the numerics.
    Shapes: any; the result is a scalar in squared units of the values.
    Raises: ``ValueError`` when the shapes differ.
    Trap: population, not sample. ``torch.var`` divides by one less by default.
    """
    centred = torch.where(mask, values - masked_mean(values, mask), 0)
    return masked_mean(centred.square(), mask)


def whiten(values: Values, mask: Mask, shift_mean: bool = True, epsilon: float = 1e-8) -> Values:
    """Scale the values that count to unit variance, and by default to zero mean.

    Equation: ``(x − x̄) · rsqrt(var(x) + ε)``, plus ``x̄`` when ``shift_mean`` is False; population
        variance.
    Paper: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, as in openai/lm-human-preferences,
    where advantages are whitened with ``shift_mean=True`` and rewards with ``shift_mean=False``.
    Shapes: any, kept; the result has no unit; masked-out positions come back 0.
    Raises: ``ValueError`` when the shapes differ.
    Trap: ``shift_mean=False`` on advantages leaves their mean in, which pushes every sampled token
        up or down together.
    """
    mean = masked_mean(values, mask)
    values = torch.where(mask, values, 0)
    whitened = (values - mean) * torch.rsqrt(masked_variance(values, mask) + epsilon)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask, whitened, 0)
