"""The learner: a second one on the same weights takes over from the first."""

import torch
from torch import nn

from tether.learner.config import OptimizerConfig
from tether.learner.local import LocalLearner


def test_a_second_learner_takes_the_weights_over():
    """SFT and then PPO on one bfloat16 model in memory: each gradient reaches the newer learner's masters, and those alone."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    config = OptimizerConfig(learning_rate=0.1, schedule="constant", warmup_fraction=0.0, max_grad_norm=100.0)
    first = LocalLearner([weight], config, 2)
    first.backward((weight.float() * torch.tensor([1.0, 2.0, 3.0])).sum())
    first.step()
    second = LocalLearner([weight], config, 2)
    for scale in (1.0, 10.0):
        second.backward((weight.float() * scale * torch.tensor([1.0, 2.0, 3.0])).sum())
    assert first.masters[0].grad is None and weight.grad is None
    assert second.masters[0].grad.tolist() == [11.0, 22.0, 33.0]
