"""The parts of a training loop of one's own: a model, its roles, an engine and a learner
(docs/guides/python.md, "Below the door").
"""

from __future__ import annotations

from collections.abc import Sequence

from tether.core.types import Prompt, Rollout
from tether.data.batches import TokenBatch, make_batch
from tether.data.formats.fields import turns
from tether.models.loading import LoadedModel
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine, new_head, new_role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.stages.learner.local import LocalLearner


class Workbench:
    """One opened model, of which roles, engines and learners are made."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.encoder = loaded, encoder_of(loaded)

    def role(self, name: str | None = None, *, seed: int = 0, **lora: object) -> Role:
        """A role: with a name an adapter of its own (keys of `[lora]`: rank, alpha, ...), without
        one the bare frozen model.
        """
        return (
            Role(self.loaded.model)
            if name is None
            else new_role(self.loaded, name, LoraConfig.model_validate(lora), seed=seed)
        )

    def value(self, role: Role) -> Role:
        """A value on the same pass as `role`: a head that starts at zero."""
        return Role(role.model, role.adapter, new_head(self.loaded))

    def engine(self, role: Role, *, max_rows: int = 64) -> LocalEngine:
        """An engine that samples from a role, with the weights that are being trained."""
        return local_engine(role, self.loaded, max_rows=max_rows)

    def learner(
        self,
        *roles: Role,
        learning_rate: float,
        updates: int,
        **optimizer: object,
    ) -> LocalLearner:
        """AdamW on float32 masters of what the roles train; other keys are those of `optimizer` in
        a recipe.
        """
        parameters = list(
            dict.fromkeys(parameter for role in roles for parameter in role.parameters()),
        )
        return LocalLearner(
            parameters,
            OptimizerConfig.model_validate({"learning_rate": learning_rate, **optimizer}),
            updates,
        )

    def prompts(self, rows: Sequence[object]) -> list[Prompt]:
        """Texts, or conversations (lists of messages), as prompts."""
        return [
            Prompt(turns(row, "user", "prompts"), str(number)) for number, row in enumerate(rows)
        ]

    def batch(self, rollouts: Sequence[Rollout]) -> TokenBatch:
        """Responses with their prompts as tensors; the tokens that the policy wrote count, the stop
        token among them.
        """
        encoded = [self.encoder.sampled(r) for r in rollouts]
        return make_batch(encoded, self.encoder.pad_id).to(self.loaded.model.device)


def load_model(source: str, *, seed: int = 0, **settings: object) -> Workbench:
    """Open a model for a loop of one's own.

    Args:
        source: a folder, a hub id, `package:NAME==VERSION` or `tiny`.
        seed: of what is random in the loading (the weights of `tiny`).
        settings: other keys of `[model]`: dtype, device, system_prompt, ...

    Raises:
        ModelError: it cannot be found or loaded.
    """
    return Workbench(
        open_model(ModelConfig.model_validate({"source": source, **settings}), seed=seed),
    )
