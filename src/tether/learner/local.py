"""One process's learner: gradients accumulate in float32, AdamW works on float32 masters, weights keep their own dtype.

A bfloat16 weight near 1 cannot take a step below 0.004, and eight micro-batch gradients summed in bfloat16 lose what the
small ones say. So every trainable tensor that is not float32 has a float32 master; its gradient is added to the master's
as soon as it is complete, and the rounded master is copied back after each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tether.core.errors import TrainingError
from tether.learner.config import OptimizerConfig


def schedule_factor(config: OptimizerConfig, update: int, total: int) -> float:
    """Share of the learning rate that update number `update` (from 0) of `total` uses."""
    warmup = max(1, round(config.warmup_fraction * total)) if config.warmup_fraction > 0 else 0
    if update < warmup:
        return (update + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.final_fraction + (1 - config.final_fraction) * shape


class LocalLearner:
    """Speaks core.protocols.Learner for a list of parameters.

    Args:
        parameters: the trainable tensors; groups are formed by dimension (vectors get no weight decay).
        total_updates: length of the schedule.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], config: OptimizerConfig, total_updates: int) -> None:
        if not parameters:
            raise ValueError("nothing to train")
        if config.learning_rate is None:
            raise ValueError("the optimizer needs a learning rate: set one, or take a stage's (config.optimizer_for)")
        self.config, self.rate = config, config.learning_rate
        self.total_updates = total_updates
        self.updates = self.skipped = 0
        self.fault = ""
        """Why the last update that was left out was; `_poisoned` while the one in hand will be."""
        self._poisoned = False
        self.parameters = list(parameters)
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.requires_grad_(True)
            if master is not parameter:
                _collect_into(master, parameter)
        decayed = [m for m in self.masters if m.dim() > 1]
        plain = [m for m in self.masters if m.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=self.rate, betas=config.betas, eps=config.epsilon
        )

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient to the step's; with a loss that is not finite the update will be left out."""
        if not torch.isfinite(loss.detach()):
            self.fault, self._poisoned = f"the loss of update {self.updates} is {loss.item()}", True
        elif not self._poisoned:
            loss.backward()

    def step(self) -> Mapping[str, float]:
        """Clip by global norm, update the masters, copy them to the weights, advance the schedule.

        An update whose loss or gradient is not finite changes no weight and is counted.

        Raises:
            TrainingError: more than `max_skipped` of them.
        """
        rate = self.rate * schedule_factor(self.config, self.updates, self.total_updates)
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.config.max_grad_norm)
        if not self._poisoned and not torch.isfinite(norm):
            self.fault, self._poisoned = f"the gradient of update {self.updates} is not finite", True
        if self._poisoned:
            return self._skip(rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        self.updates += 1
        return {"grad_norm": float(norm), "learning_rate": rate}

    def _skip(self, rate: float) -> Mapping[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        self.updates, self.skipped, self._poisoned = self.updates + 1, self.skipped + 1, False
        if self.skipped > self.config.max_skipped:
            before = f"; {self.skipped - 1} before it had to be left out too" if self.skipped > 1 else ""
            raise TrainingError(f"{self.fault}{before}. Lower optimizer.learning_rate, or look for broken rows.")
        return {"grad_norm": math.nan, "learning_rate": rate, "skipped_updates": float(self.skipped)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that the next step depends on: tensors and plain values."""
        tensors = {f"master.{i}": m.detach() for i, m in enumerate(self.masters)}
        for index, master in enumerate(self.masters):
            for key, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{key}.{index}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return tensors, {"updates": self.updates, "total_updates": self.total_updates, "skipped": self.skipped}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue exactly where `state` was taken."""
        self.updates, self.skipped = values["updates"], values["skipped"]
        with torch.no_grad():
            for index, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
                master.copy_(tensors[f"master.{index}"])
                if master is not parameter:
                    parameter.copy_(master)
                self.optimizer.state.pop(master, None)
                if f"exp_avg.{index}" in tensors:
                    self.optimizer.state[master] = {
                        key: tensors[f"{key}.{index}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
                    }


def _collect_into(master: nn.Parameter, parameter: nn.Parameter) -> None:
    """Gradients of `parameter` are added to its master's; an earlier learner's claim on it ends."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    claimed = getattr(parameter, "collecting", None)
    if claimed is not None:
        claimed.remove()
    parameter.collecting = parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[attr-defined]
