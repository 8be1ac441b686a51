"""Answers of the rows in the place of sampled ones: what supervised distillation learns from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Unpack

from tether.core.protocols import DrawArguments, Engine
from tether.core.types import Message, Prompt, Rollout, RolloutGroup, Sampling, StopReason
from tether.data.chat import ChatEncoder

REPLY = "reply of the row"
"""The entry of a prompt's metadata that holds it; no column of a teacher's system message is called so."""


@dataclass(eq=False)
class PartlyGiven:
    """Implements core.protocols.Engine: another engine answers a share of the prompts, and of the
    others the reply of the row is the answer.

    Which they are depends on the seed and on a prompt's place in the run alone.
    """

    engine: Engine
    encoder: ChatEncoder
    share: float

    def __post_init__(self) -> None:
        self.policy_version = self.engine.policy_version

    def update_weights(self, version: int) -> None:
        """See core.protocols.Engine."""
        self.engine.update_weights(version)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        """See core.protocols.Engine."""
        seed = how.get("seed", 0)
        count = how.get("num_samples", 1)
        places = how.get("ordinals") or range(len(prompts))
        own = [random.Random(f"{seed}/{place}/own").random() < self.share for place in places]
        how["ordinals"] = [*compress(places, own)]
        asked = [*compress(prompts, own)]
        sampled = iter(self.engine.generate(asked, sampling, **how) if asked else ())
        return [
            next(sampled) if mine else self._given(prompt, sampling, count)
            for prompt, mine in zip(prompts, own, strict=True)
        ]

    def _given(self, prompt: Prompt, sampling: Sampling, count: int) -> RolloutGroup:
        """The reply of the row, cut to the length of an answer."""
        reply = prompt.metadata[REPLY]
        assert isinstance(reply, Message)
        whole = self.encoder.conversation((*prompt.messages, reply), "last")
        last = max(place for place, counts in enumerate(whole.trained) if counts) + 1
        ids = whole.ids[whole.prompt_length : last]
        rollout = Rollout(
            whole.prompt,
            ids[: sampling.max_new_tokens],
            (),
            StopReason.STOP_TOKEN if len(ids) <= sampling.max_new_tokens else StopReason.LENGTH,
            reply.content,
            0,
            self.policy_version,
            sampling,
            prompt,
        )
        return RolloutGroup(prompt, (rollout,) * count)


def partly_given(engine: Engine, encoder: ChatEncoder, share: float) -> Engine:
    """An engine that answers this share of the prompts itself; 1: the engine as it is."""
    return engine if share == 1 else PartlyGiven(engine, encoder, share)
