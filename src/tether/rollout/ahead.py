"""An engine that is asked for the next steps' samples while a step learns: overlap with a bound on how old weights may be.

The samples of step `t` are drawn with the weights that were new at the beginning of step `t - max_staleness`, whatever takes how
long. So a run depends on its settings alone, no answer is preferred for being short, and what is under way when a checkpoint is
written is waited for and saved with it: nothing is lost and nothing drawn twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

from tether.core.protocols import Engine
from tether.core.types import Json, Prompt, Rollout, RolloutGroup, Sampling, StopReason


@runtime_checkable
class BeginningEngine(Engine, Protocol):
    """An engine that goes on sampling while its caller does something else."""

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int, ordinals: Sequence[int]
    ) -> Callable[[], list[RolloutGroup]]:
        """Ask for samples with the weights of now; what comes back waits for them."""
        ...


@dataclass
class Order:
    """The samples of a step, asked for or there. `ordinals` are the places of their prompts in the run."""

    ordinals: Sequence[int]
    collect: Callable[[], list[RolloutGroup]]

    @cached_property
    def groups(self) -> list[RolloutGroup]:
        return self.collect()


class AheadEngine:
    """Speaks core.protocols.OrderingEngine: servers sample while the learner learns; an engine in this process samples at once.

    Args:
        max_staleness: updates that may lie between the weights that sample and those that learn from the samples; 1 or more.
    """

    def __init__(self, engine: Engine, max_staleness: int) -> None:
        self.engine, self.max_staleness, self.policy_version = engine, max_staleness, engine.policy_version
        self.orders: dict[int, Order] = {}
        self.saved: dict[int, list[Json]] = {}

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)
        self.policy_version = version

    def order(
        self, number: int, prompts: Sequence[Prompt], sampling: Sampling, *, num_samples: int, seed: int, ordinals: Sequence[int]
    ) -> None:
        """Ask for the samples of step `number` with the weights of now, unless that was done."""
        how: Any = {"num_samples": num_samples, "seed": seed, "ordinals": ordinals}
        if number in self.orders:
            return
        if number in self.saved:
            rows = self.saved.pop(number)
            collect = partial(_groups, rows, prompts, sampling)
        elif isinstance(self.engine, BeginningEngine):
            collect = self.engine.begin(prompts, sampling, **how)
        else:
            collect = partial(list, self.engine.generate(prompts, sampling, **how))
        self.orders[number] = Order(ordinals, collect)

    def forget(self, number: int) -> None:
        """Let go of the samples of the steps before `number`."""
        self.orders = {n: order for n, order in self.orders.items() if n >= number}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        seed: int = 0,
        ordinals: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[RolloutGroup]:
        """What was ordered for these places; anything else is drawn now."""
        for order in self.orders.values():
            if ordinals is not None and list(order.ordinals) == list(ordinals):
                return order.groups
        how: Any = {"num_samples": num_samples, "seed": seed, "ordinals": ordinals, "progress": progress}
        return self.engine.generate(prompts, sampling, **how)

    def state(self) -> Json:
        """All that is ordered, once it is there: tokens, their log-probabilities and the version of the weights."""
        rows = {str(number): [_row(group) for group in order.groups] for number, order in self.orders.items()}
        return {"orders": {**{str(number): saved for number, saved in self.saved.items()}, **rows}}

    def load_state(self, values: Mapping[str, Any]) -> None:
        self.orders, self.saved = {}, {int(number): rows for number, rows in values["orders"].items()}


def _row(group: RolloutGroup) -> Json:
    """A group without its prompt, which the recipe knows."""
    drawn = [[r.response_ids, r.logprobs, r.stop_reason.value, r.text, r.policy_version] for r in group.rollouts]
    return {"prompt_ids": group.rollouts[0].prompt_ids, "drawn": drawn}


def _groups(rows: Sequence[Json], prompts: Sequence[Prompt], sampling: Sampling) -> list[RolloutGroup]:
    """The inverse of `_row`."""
    groups = []
    for row, prompt in zip(rows, prompts, strict=True):
        ids, rollouts = tuple(row["prompt_ids"]), []
        for index, (response, logprobs, stop, text, version) in enumerate(row["drawn"]):
            numbers = tuple(response), tuple(logprobs)
            rollouts.append(Rollout(ids, *numbers, StopReason(stop), text, index, version, sampling, prompt))
        groups.append(RolloutGroup(prompt, tuple(rollouts)))
    return groups
