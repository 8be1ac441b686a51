"""An engine that samples for the next steps while a step learns: overlap with a bound on the age of
the weights.

The samples of step `t` are drawn with the weights that were new at the beginning of step `t -
max_staleness`, for every timing. So a run depends on its settings alone, and short answers get no
preference. A checkpoint waits for the samples in progress and stores them. So each sample is drawn
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol, Unpack, runtime_checkable

from pydantic import TypeAdapter

from tether.core.protocols import DrawArguments, Engine
from tether.core.types import Facts, Json, Prompt, Rollout, RolloutGroup, Sampling

ROLLOUTS = TypeAdapter(tuple[Rollout, ...])
"""From these to JSON and back."""


@runtime_checkable
class BeginningEngine(Engine, Protocol):
    """An engine that goes on sampling while its caller does something else."""

    def begin(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> Callable[[], list[RolloutGroup]]:
        """Ask for samples with the weights of now; what comes back waits for them."""
        ...


class AheadEngine:
    """Has the interface of core.protocols.OrderingEngine. Servers sample while the learner learns;
    an engine in this process samples at once.

    Args:
        max_staleness: largest number of updates between the weights that sample and those that
            learn from the samples; 1 or more.
    """

    def __init__(self, engine: Engine, max_staleness: int) -> None:
        self.engine = engine
        self.max_staleness = max_staleness
        self.policy_version = engine.policy_version
        self.orders: dict[int, tuple[object, Callable[[], list[RolloutGroup]]]] = {}
        """By the number of a step: what was asked for, and the function that waits for the samples
        once.
        """
        self.saved: dict[int, list[list[Json]]] = {}

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)
        self.policy_version = version

    def order(
        self,
        number: int,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> None:
        """Ask for the samples of step `number` with the weights of now, unless that was done."""
        if number in self.orders:
            return
        if number in self.saved:
            collect = partial(_groups, self.saved.pop(number), prompts)
        elif isinstance(self.engine, BeginningEngine):
            collect = self.engine.begin(prompts, sampling, **how)
        else:
            collect = partial(list, self.engine.generate(prompts, sampling, **how))
        self.orders[number] = _asked(prompts, sampling, how), cache(collect)

    def forget(self, number: int) -> None:
        """Let go of the samples of the steps before `number`."""
        self.orders = {n: order for n, order in self.orders.items() if n >= number}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        """The groups of an order for the same samples. Everything else is sampled now."""
        request = _asked(prompts, sampling, how)
        for ordered, collect in self.orders.values():
            if ordered == request:
                return collect()
        return self.engine.generate(prompts, sampling, **how)

    def state(self) -> Json:
        """All that is ordered, once it is there: tokens, their log-probabilities and the version of
        the weights.
        """
        rows = {
            number: [_rows(group) for group in collect()]
            for number, (_, collect) in self.orders.items()
        }
        return {
            "orders": {str(number): groups for number, groups in {**self.saved, **rows}.items()},
        }

    def load_state(self, values: Facts) -> None:
        self.orders = {}
        self.saved = {int(number): rows for number, rows in values["orders"].items()}


def _asked(prompts: Sequence[Prompt], sampling: Sampling, how: DrawArguments) -> object:
    """Everything that samples depend on beside the weights."""
    places = how.get("ordinals")
    return (
        [*prompts],
        sampling,
        None if places is None else [*places],
        how.get("num_samples"),
        how.get("seed"),
    )


def _rows(group: RolloutGroup) -> list[Json]:
    """A group's rollouts without their prompt, which the recipe knows."""
    return ROLLOUTS.dump_python(group.rollouts, mode="json", exclude={"__all__": {"prompt"}})


def _groups(groups: Sequence[Sequence[Json]], prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """The inverse of `_rows`, of each group."""
    return [
        RolloutGroup(prompt, ROLLOUTS.validate_python([{**row, "prompt": prompt} for row in rows]))
        for rows, prompt in zip(groups, prompts, strict=True)
    ]
