"""Direct methods in a recipe: a policy that learns from comparisons or verdicts, without a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, Feedback
from tether.learner.config import ReferencedConfig
from tether.models.config import LoraConfig, ModelConfig
from tether.models.loading import LoadedModel, add_adapter
from tether.models.trunk import Role
from tether.run.roles import encoder_of, frozen_model, save_trained
from tether.run.rows import OFFLOAD, Section, SteadyLora
from tether.run.stage import Context, settled
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

    @model_validator(mode="after")
    def _check_offload(self) -> _OwnReference:
        if self.offload and (self.lora is not False or not self.needs_reference or self.precomputed):
            raise ValueError("offload moves a reference of its own; there is one with lora = false and a loss that asks it anew")
        return self


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
        stage: Any = KTO(settled(section, KTOConfig), policy, reference, encoder_of(loaded))
    else:
        stage = Direct(settled(section, DirectConfig), policy, reference, encoder_of(loaded))
    summary = stage.train(rows, run, context.progress)
    save_trained(policy, loaded, run.path / "policy", kind="policy")
    return summary


def direct_roles(
    loaded: LoadedModel, section: DirectSection | KTOSection, settings: ModelConfig, seed: int
) -> tuple[Role, Role | None]:
    """The policy under an adapter and the bare trunk as its reference; trained whole, the reference is a model of its own."""
    if section.lora is False:
        if not section.needs_reference:
            return Role(loaded.model), None
        if section.reference_logprobs == "precomputed":  # asked before it changes
            return Role(loaded.model), Role(loaded.model)
        return Role(loaded.model), Role(frozen_model(settings, seed, section.offload))
    model = add_adapter(loaded.model, "policy", section.lora, seed=seed)
    return Role(model, "policy"), Role(model) if section.needs_reference else None
