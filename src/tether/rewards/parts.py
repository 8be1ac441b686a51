"""Everything that a reward can be made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tether.core.protocols import RewardSource
    from tether.data.chat import ChatEncoder
    from tether.models.trunk import Role
    from tether.settings.sampling import RewardedSection


@dataclass(frozen=True, kw_only=True)
class RewardParts:
    """Everything that a reward can be made of: the section, and the trained model that it names.

    Args:
        device: of the models.
        roles: of the trained model, one or those that score together.
        folder: of the trained model.
        encoder: with which the trained model reads.
        teacher: the teachers of the section, as a reward.
        reads_text: the trained model has another tokenizer or template than the policy.
    """

    section: RewardedSection
    device: torch.device
    seed: int
    roles: tuple[Role, ...] = ()
    folder: Path | None = None
    encoder: ChatEncoder | None = None
    reads_text: bool = False
    teacher: RewardSource | None = None

    @property
    def settings(self) -> Any:
        """The table of the section that has the reward's name."""
        return vars(self.section)[self.section.reward_source]
