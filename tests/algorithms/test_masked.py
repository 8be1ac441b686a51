"""Masked sums, moments and whitening, against numpy on the values that count."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tether.algorithms.masked import masked_mean, masked_sum, masked_variance, whiten

GARBAGE = [math.inf, -math.inf, math.nan]


def spoil(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The same values, with infinities and NaN wherever the mask does not count."""
    garbage = (
        torch.tensor(GARBAGE, dtype=values.dtype)
        .repeat(values.numel())[: values.numel()]
        .view_as(values)
    )
    return torch.where(mask, values, garbage)


values_and_mask = st.integers(1, 5).flatmap(
    lambda rows: st.integers(1, 6).flatmap(
        lambda columns: st.tuples(
            arrays(np.float64, (rows, columns), elements=st.floats(-1e3, 1e3)),
            arrays(np.bool_, (rows, columns)),
        ),
    ),
)


@settings(max_examples=60, deadline=None)
@given(values_and_mask)
def test_moments_are_numpys_on_what_counts(example):
    values, mask = example
    kept = values[mask]
    tensor_mask = torch.tensor(mask)
    tensor = spoil(torch.tensor(values), tensor_mask)
    assert masked_sum(tensor, tensor_mask).item() == pytest.approx(kept.sum(), abs=1e-8)
    assert masked_mean(tensor, tensor_mask).item() == pytest.approx(
        kept.mean() if kept.size else 0.0,
        abs=1e-8,
    )
    assert masked_variance(tensor, tensor_mask).item() == pytest.approx(
        kept.var() if kept.size else 0.0,
        rel=1e-9,
        abs=1e-6,
    )
    by_row = [
        row[keep].mean() if keep.any() else 0.0 for row, keep in zip(values, mask, strict=True)
    ]
    np.testing.assert_allclose(masked_mean(tensor, tensor_mask, dim=1).numpy(), by_row, atol=1e-8)
    by_column = [column[keep].sum() for column, keep in zip(values.T, mask.T, strict=True)]
    np.testing.assert_allclose(masked_sum(tensor, tensor_mask, dim=0).numpy(), by_column, atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(values_and_mask, st.booleans())
def test_whiten_is_numpys_on_what_counts(example, shift_mean):
    values, mask = example
    tensor_mask = torch.tensor(mask)
    result = whiten(
        spoil(torch.tensor(values), tensor_mask),
        tensor_mask,
        shift_mean=shift_mean,
    ).numpy()
    assert (result[~mask] == 0).all()
    kept = values[mask]
    if kept.size and (kept.std() > 1e-2 or kept.std() == 0):
        expected = (kept - kept.mean()) / np.sqrt(kept.var() + 1e-8) + (
            0.0 if shift_mean else kept.mean()
        )
        np.testing.assert_allclose(result[mask], expected, rtol=1e-6, atol=1e-6)


def test_whiten_by_hand():
    # 1, 2, 3, 6: mean 3, population variance 14/4. Sample variance, 14/3, would give other numbers.
    values, mask = (
        torch.tensor([[1.0, 2.0, 99.0], [3.0, 6.0, -99.0]]),
        torch.tensor([[True, True, False]] * 2),
    )
    scale = math.sqrt(14 / 4)
    expected = torch.tensor([[-2 / scale, -1 / scale, 0.0], [0.0, 3 / scale, 0.0]])
    torch.testing.assert_close(whiten(values, mask), expected)
    torch.testing.assert_close(whiten(values, mask, shift_mean=False), (expected + 3.0) * mask)


def test_whiten_of_a_constant_is_zero_not_nan():
    constant, mask = torch.full((2, 3), 5.0), torch.ones(2, 3, dtype=torch.bool)
    assert torch.equal(whiten(constant, mask), torch.zeros(2, 3))
    assert torch.equal(whiten(constant, mask, shift_mean=False), constant)


def test_epsilon_is_inside_the_root():
    values, mask = torch.tensor([-1.0, 1.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    torch.testing.assert_close(whiten(values, mask, epsilon=3.0), values / 2)


@pytest.mark.parametrize(
    "function",
    [masked_sum, masked_mean, masked_variance, lambda v, m: whiten(v, m).square().mean()],
)
def test_no_nan_leaks_into_the_gradient(function):
    mask = torch.tensor([True, True, False, True, False, False])
    values = spoil(torch.tensor([1.0, 2.0, 0.0, 4.0, 0.0, 0.0]), mask).requires_grad_()
    function(values, mask).backward()
    assert torch.isfinite(values.grad).all()
    assert (values.grad[~mask] == 0).all()


def test_the_mean_of_nothing_is_zero():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(torch.full((2, 3), math.nan), nothing).item() == 0.0
    assert masked_mean(torch.full((2, 3), math.nan), nothing, dim=1).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_variance, whiten])
def test_shapes_do_not_broadcast(function, as_in_production):
    with pytest.raises(ValueError, match=r"values \(3, 1\), mask \(3, 4\)"):
        function(torch.ones(3, 1), torch.ones(3, 4, dtype=torch.bool))
