"""One process's learner: gradients accumulate in float32, AdamW works on float32 masters, weights
keep their own dtype.

A bfloat16 weight near 1 cannot take a step below 0.004, and eight micro-batch gradients summed in
bfloat16 lose what the small ones say. So every trainable tensor of another dtype has a float32
master. Its gradient is added to the master's as soon as it is complete. The rounded master is
copied back after each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from tether.algorithms.transfer import to_device
from tether.core.errors import TrainingError
from tether.core.types import Facts, Readings
from tether.models.quantized import bitsandbytes
from tether.models.sharded import cut, distributed, local
from tether.models.trunk import is_cut
from tether.settings.learner import OptimizerConfig
from tether.stages.learner.determinism import ordered_sums
from tether.stages.learner.ranks import ALONE, Ranks

_CLAIMS: MutableMapping[Tensor, RemovableHandle] = WeakTensorKeyDictionary()
"""The hook of each weight's newest learner."""


MOMENTS = ("state1", "state2", "absmax1", "absmax2")
"""Of AdamW in 8 bits: the codes of both moments, and the largest number of every 256 of them."""
CONSTANT = ("qmap1", "qmap2")
"""Meanings of the codes, the same for all tensors, so they are left out of checkpoints."""


def schedule_factor(config: OptimizerConfig, update: int, total: int) -> float:
    """Share of the learning rate that update number `update` (from 0) of `total` uses."""
    warmup = max(1, round(config.warmup_fraction * total)) if config.warmup_fraction > 0 else 0
    if update < warmup:
        return (update + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (update - warmup) / max(1, total - warmup))
    shape = (
        0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    )
    return config.final_fraction + (1 - config.final_fraction) * shape


class LocalLearner:
    """Turns losses into steps of a list of parameters: float32 masters, accumulation, clipping,
    schedule, averaging.

    Args:
        parameters: the trainable tensors; groups are formed by dimension (vectors get no weight
            decay).
        total_updates: length of the schedule.
        ema_decay: of an exponential moving average of the masters, to end with instead of the last
            weights (cf. Polyak and Juditsky 1992, https://doi.org/10.1137/0330046). Trap: both
            factors of an adapter are averaged. Their product is near the average of the products
            only if the factors change little within the average's span.
        ranks: those that add up their gradients in each step.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        config: OptimizerConfig,
        total_updates: int,
        ema_decay: float | None = None,
        *,
        ranks: Ranks = ALONE,
    ) -> None:
        if not parameters:
            raise ValueError("nothing to train")
        if config.learning_rate is None:
            raise ValueError(
                "the optimizer needs a learning rate: set one, or take a stage's "
                "(config.optimizer_for)",
            )
        self.config = config
        self.rate = config.learning_rate
        self.planned = self.total_updates = total_updates
        self.ema_decay = ema_decay
        self.ranks = ranks
        self.averages: list[Tensor] = []
        """The averaged weights, one for each master; none before the first update, or without a
        decay.
        """
        self.updates = self.skipped = 0
        self.fault = ""
        """The reason for which the last update was left out."""
        self._losses: list[Tensor] = []
        """Of the update in hand: those of this rank's micro-batches."""
        self.parameters = list(parameters)
        self.masters = [_master(p) for p in self.parameters]
        self._rounded = [
            (p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p
        ]
        self._cut = [m for p, m in self._rounded if is_cut(p)]
        self._whole = [
            m for p, m in zip(self.parameters, self.masters, strict=True) if not is_cut(p)
        ]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        for parameter, master in self._rounded:
            _collect_into(master, parameter)
        matrices, vectors = (
            [m for m in self.masters if (m.dim() > 1) == matrix] for matrix in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        # In 8 bits: https://arxiv.org/abs/2110.02861.
        eight = (
            bitsandbytes("optimizer.kind = 'adamw8bit'").optim.AdamW8bit
            if config.kind == "adamw8bit"
            else None
        )
        self.optimizer: torch.optim.Optimizer = (eight or torch.optim.AdamW)(
            groups,
            self.rate,
            config.betas,
            config.epsilon,
        )

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient to the step's; with a loss that is not finite the update
        will be left out.
        """
        if self.ranks.idle:
            loss = 0 * loss
        else:
            self._losses.append(loss.detach())
        with ordered_sums(self.masters[0].device):
            loss.backward()

    def step(self) -> Readings:
        """Clip by global norm, update the masters, copy them to the weights, advance the schedule.

        An update whose loss or gradient is not finite changes no weight and is counted. One whose
        gradient is 0 has nothing to learn, and changes neither weights nor moments.

        Raises:
            TrainingError: more than `max_skipped` of them.
        """
        broken = self._sum_over_ranks()
        # Beyond a shortened schedule, which often ends at 0, updates have its last rate.
        update = (
            self.updates
            if self.total_updates == self.planned
            else min(self.updates, self.total_updates - 1)
        )
        rate = self.rate * schedule_factor(self.config, update, self.total_updates)
        numbers = [self._clip(), *self._losses]
        self._losses = []
        # the one place of a step where the host waits for the device
        norm, *losses = torch.stack([one.detach().double() for one in numbers]).tolist()
        if fault := _fault(norm, losses, broken):
            self.fault = f"the {fault[0]} of update {self.updates} is {fault[1]}"
            metrics = self._skip(rate)
        else:
            if norm:  # momentum alone would move the weights
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
                self._round()
            metrics = {"grad_norm": norm, "learning_rate": rate}
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self.follow()
        return metrics

    def draw_over(self, steps: int, total: int) -> None:
        """From now on the schedule ends after `steps` of the `total` steps that were planned."""
        self.total_updates = max(1, self.planned * steps // total)

    @torch.no_grad()
    def follow(self) -> None:
        """Move the averages towards the masters, as every step does."""
        if self.ema_decay is not None:
            self.averages = self.averages or [master.clone() for master in self.masters]
            torch._foreach_lerp_(self.averages, list(self.masters), 1 - self.ema_decay)

    def _clip(self) -> Tensor:
        """Shorten the gradient of all weights together, those too of which other ranks hold parts;
        its norm before.
        """
        if not self._cut:
            return torch.nn.utils.clip_grad_norm_(self.masters, self.config.max_grad_norm)
        none = torch.zeros((), device=self.masters[0].device)
        whole, parts = (
            sum((one.grad.square().sum() for one in masters if one.grad is not None), none.clone())
            for masters in (self._whole, self._cut)
        )
        self.ranks.sum_([parts])
        norm = (whole + parts).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
        return norm

    def _sum_over_ranks(self) -> bool:
        """The gradients of all ranks together; those of weights that are cut were summed where they
        arose.

        Returns whether the loss of any rank was not finite: then all leave the update out.
        """
        if self.ranks.size == 1:
            return False
        gradients = [torch.zeros_like(m) if m.grad is None else m.grad for m in self._whole]
        present = [float(m.grad is not None) for m in self._whole]
        marks = to_device(torch.tensor([0.0, *present]), self.masters[0].device)
        if self._losses:  # without a wait for the device
            marks[0] = ~torch.stack(self._losses).isfinite().all()
        self.ranks.sum_([*gradients, marks])
        somewhere_broken, *present = marks.tolist()
        for master, gradient, somewhere in zip(self._whole, gradients, present, strict=True):
            master.grad = gradient if somewhere else None
        return somewhere_broken > 0

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounded:
            torch._foreach_copy_(
                [local(parameter) for parameter, _ in self._rounded],
                [master for _, master in self._rounded],
            )

    def _skip(self, rate: float) -> Readings:
        self.skipped += 1
        if self.skipped > self.config.max_skipped:
            before = (
                f"; {self.skipped - 1} before it had to be left out too" if self.skipped > 1 else ""
            )
            raise TrainingError(
                f"{self.fault}{before}. Lower optimizer.learning_rate, or look for broken rows.",
            )
        return {
            "grad_norm": math.nan,
            "learning_rate": rate,
            "skipped_updates": float(self.skipped),
        }

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Everything that the next step depends on: tensors, some of them cut over the ranks, and
        plain values.
        """
        tensors = {
            f"master.{i}": self.distributed(i, m.detach()) for i, m in enumerate(self.masters)
        }
        tensors |= {
            f"ema.{i}": self.distributed(i, average) for i, average in enumerate(self.averages)
        }
        for index, master in enumerate(self.masters):
            for key, value in self.optimizer.state.get(master, {}).items():
                if key not in CONSTANT:
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    tensors[f"{key}.{index}"] = (
                        tensor if tensor.shape != master.shape else self.distributed(index, tensor)
                    )
        return tensors, {"updates": self.updates, "skipped": self.skipped}

    @torch.no_grad()
    def put(self, weights: Iterable[Tensor]) -> None:
        """Replace the parameters, as far as there are any, by these; masters and moments stay."""
        for parameter, values in zip(self.parameters, weights, strict=False):
            local(parameter).copy_(values)

    def distributed(self, place: int, part: Tensor) -> Tensor:
        """A tensor that is cut as the parameter at `place` is, from this rank's part of it."""
        return distributed(part, self.parameters[place])

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], values: Facts) -> None:
        """Continue exactly where `state` was taken."""
        self.updates = values["updates"]
        self.skipped = values["skipped"]
        self.averages = []
        for index, master in enumerate(self.masters):
            master.copy_(cut(tensors[f"master.{index}"], self.parameters[index]))
            self.optimizer.state.pop(master, None)
            if f"ema.{index}" in tensors:
                average = tensors[f"ema.{index}"].to(master.device, copy=True)
                self.averages.append(cut(average, self.parameters[index]))
            if f"step.{index}" in tensors:
                self.optimizer.state[master] = self._moments(tensors, index)
        self._round()

    def _moments(self, tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor | int]:
        """State of the optimizer for one master, from the tensors that `state` gave."""
        device = self.masters[index].device
        keys = ("exp_avg", "exp_avg_sq", *MOMENTS)
        held = {
            key: tensors[f"{key}.{index}"].to(device, copy=True)
            for key in keys
            if f"{key}.{index}" in tensors
        }
        held = {key: cut(value, self.parameters[index]) for key, value in held.items()}
        if self.config.kind == "adamw":  # which counts its steps on the CPU
            return {"step": tensors[f"step.{index}"].clone(), **held}
        if "absmax1" in held:  # a small tensor's moments are in float32
            maps: Any = self.optimizer
            held |= {
                "qmap1": maps.name2qmap["dynamic"].to(device),
                "qmap2": maps.name2qmap["udynamic"].to(device),
            }
        return {"step": int(tensors[f"step.{index}"]), **held}


def _fault(norm: float, losses: Sequence[float], broken: bool) -> tuple[str, str] | None:
    """The number that forbids an update, and its value; `broken`: the loss of some rank is not
    finite.
    """
    for loss in losses:
        if not math.isfinite(loss):
            return "loss", str(loss)
    if broken:
        return "loss", "not finite"
    return None if math.isfinite(norm) else ("gradient", "not finite")


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself if it is whole and in float32; else a copy in float32, or what is here
    of it (sharing its memory).
    """
    if parameter.dtype == torch.float32 and not is_cut(parameter):
        return parameter
    return nn.Parameter(local(parameter.detach()).float())


def _collect_into(master: nn.Parameter, parameter: nn.Parameter) -> None:
    """Gradients of `parameter` are added to its master's; an earlier learner's claim on it ends."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    if parameter in _CLAIMS:
        _CLAIMS[parameter].remove()
    _CLAIMS[parameter] = parameter.register_post_accumulate_grad_hook(collect)
