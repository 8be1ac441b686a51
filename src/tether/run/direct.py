"""Direct methods in a recipe: a policy that learns from comparisons or verdicts, without a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field

from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, Feedback
from tether.learner.config import ReferencedConfig
from tether.models.config import LoraConfig, ModelConfig
from tether.models.loading import LoadedModel
from tether.models.trunk import Role
from tether.run.roles import encoder_of, frozen_model, new_role, save_trained
from tether.run.rows import OFFLOAD, Section, SteadyLora
from tether.run.stage import Context
from tether.stages.direct import REFERENCE_FREE, Direct, DirectConfig
from tether.stages.kto import KTO, KTOConfig


class _OwnReference(Section, ReferencedConfig):
    """A stage that learns from rows against a reference, which is a model of its own where the policy is trained whole."""

    lora: SteadyLora = Field(
        default=LoraConfig(), description="the adapter that learns; false trains the whole model, beside a frozen copy"
    )
    offload: bool = Field(default=False, description=OFFLOAD)

    @property
    def needs_reference(self) -> bool:
        return True

    def faults(self) -> Iterator[str]:
        yield from super().faults()
        if self.offload and (self.lora is not False or not self.needs_reference or self.precomputed):
            yield "offload moves a reference of its own; there is one with lora = false and a loss that asks it anew"


class DirectSection(_OwnReference, DirectConfig):
    record: ClassVar[type] = Comparison

    @property
    def needs_reference(self) -> bool:
        return self.loss not in REFERENCE_FREE


class KTOSection(_OwnReference, KTOConfig):
    record: ClassVar[type] = Feedback


def train(
    section: DirectSection | KTOSection, context: Context, rows: Sequence[Comparison | Feedback], run: RunDirectory
) -> dict[str, Any]:
    """Train on top of the model; the result is the role in `policy`."""
    loaded = context.load(run)
    policy, reference = direct_roles(loaded, section, context.model, context.seed)
    if isinstance(section, KTOSection):
        assert reference is not None
        stage = KTO(section, policy, reference, encoder_of(loaded))
    else:
        stage = Direct(section, policy, reference, encoder_of(loaded))
    summary = stage.train(rows, run, context.progress)  # type: ignore[arg-type]  (of the kind that the section reads)
    save_trained(policy, loaded, run.path / "policy", kind="policy")
    return summary


def direct_roles(
    loaded: LoadedModel, section: DirectSection | KTOSection, settings: ModelConfig, seed: int
) -> tuple[Role, Role | None]:
    """The policy under an adapter and the bare trunk as its reference; trained whole, the reference is a model of its own."""
    policy = new_role(loaded, "policy", section.lora, seed=seed)
    if not section.needs_reference:
        return policy, None
    on_trunk = section.lora is not False or section.precomputed  # precomputed: asked before it changes
    return policy, Role(policy.model if on_trunk else frozen_model(settings, seed, section.offload))
