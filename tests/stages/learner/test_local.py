"""The learner: a second one on the same weights takes over from the first."""

import pytest
import torch
from torch import nn

from tether.core.errors import TrainingError
from tether.settings.learner import OptimizerConfig
from tether.stages.learner.determinism import deterministic
from tether.stages.learner.local import LocalLearner


def test_a_second_learner_takes_the_weights_over():
    """SFT and then PPO on one bfloat16 model in memory: each gradient reaches the newer learner's
    masters, and those alone.
    """
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    config = OptimizerConfig(
        learning_rate=0.1,
        schedule="constant",
        warmup_fraction=0.0,
        max_grad_norm=100.0,
    )
    first = LocalLearner([weight], config, 2)
    first.backward((weight.float() * torch.tensor([1.0, 2.0, 3.0])).sum())
    first.step()
    second = LocalLearner([weight], config, 2)
    for scale in (1.0, 10.0):
        second.backward((weight.float() * scale * torch.tensor([1.0, 2.0, 3.0])).sum())
    assert first.masters[0].grad is None and weight.grad is None
    assert second.masters[0].grad.tolist() == [11.0, 22.0, 33.0]


def test_gradients_of_rows_picked_several_times_are_added_up_in_their_order():
    """On two threads, fifty times over: the sum that is written down here term by term, and nothing
    else.
    """
    torch.set_num_threads(2)
    weight, places = nn.Parameter(torch.zeros(3, 512)), torch.tensor([1, 0, 1, 1, 2, 1, 0, 1] * 40)
    slopes = torch.randn(len(places), 512, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(3, 512)
    for place, slope in zip(places.tolist(), slopes, strict=True):
        expected[place] += slope
    learner = LocalLearner([weight], OptimizerConfig(learning_rate=0.1), 1)
    for _ in range(50):
        weight.grad = None
        learner.backward((weight[places] * slopes).sum())
        assert torch.equal(weight.grad, expected)
    assert (
        not torch.are_deterministic_algorithms_enabled()
        and torch.utils.deterministic.fill_uninitialized_memory
    )
    with deterministic():
        learner.backward((weight[places] * slopes).sum())
        assert torch.are_deterministic_algorithms_enabled()


def learner(**settings):
    weight = nn.Parameter(torch.ones(2))
    config = OptimizerConfig(
        learning_rate=0.1,
        schedule="constant",
        warmup_fraction=0.0,
        **settings,
    )
    return LocalLearner([weight], config, 10), weight


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(where, bad):
    """The same weights as if the others had been made alone; beside a good micro-batch, nothing of
    that is kept either.
    """
    found, weight = learner(max_skipped=1)
    expected, other = learner()
    for scale in (1.0, 2.0):
        for one, parameter in ((found, weight), (expected, other)):
            one.backward((scale * parameter**2).sum())
            one.step()
    found.backward((weight**2).sum())
    found.backward(weight.sum() * bad if where == "loss" else _explode(weight, bad))
    metrics = found.step()
    assert weight.tolist() == other.tolist() and weight.grad is None
    assert (
        metrics["skipped_updates"] == found.skipped == 1
        and f"the {where} of update 2 is" in found.fault
    )
    for one, parameter in ((found, weight), (expected, other)):
        one.backward((parameter**2).sum())
        one.step()
    assert weight.tolist() == other.tolist() and (found.updates, expected.updates) == (4, 3)
    assert found.state()[1]["skipped"] == 1
    found.backward(weight.sum() * bad)
    with pytest.raises(
        TrainingError,
        match=(
            r"the loss of update 4 is (nan|inf); 1 before it had "
            r"to be left out too\. Lower"
        ),
    ):
        found.step()


def _explode(weight, bad):
    """A finite loss whose gradient is not."""
    copy = weight.clone()
    copy.register_hook(lambda gradient: gradient * bad)
    return copy.sum()


def test_none_may_be_left_out_where_none_is_allowed():
    found, weight = learner(max_skipped=0)
    found.backward(weight.sum() * float("nan"))
    with pytest.raises(TrainingError, match="update 0 is nan"):
        found.step()
    assert weight.tolist() == [1.0, 1.0]
