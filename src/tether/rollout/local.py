"""The in-process engine: samples from a policy role with the very weights that are being trained.

The prompt of a group is prefilled once and its cache repeated; finished rows leave the batch. Prompts are padded on the
left and positions count real tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.core.errors import DataError
from tether.core.types import Prompt, Rollout, RolloutGroup, Sampling, StopReason
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.rollout.cache import make_cache, repeat_rows, select_rows
from tether.rollout.sampling import counter_uniform, sample_tokens

ROWS = 16


@dataclass
class _Wave:
    """The rows that are being decoded together; row k of every tensor belongs to `owner[k]`."""

    owner: Tensor
    ordinals: Tensor
    samples: Tensor
    attention: Tensor
    positions: Tensor
    responses: list[list[int]]
    logprobs: list[list[float]]
    reasons: list[StopReason] = field(default_factory=list)


class LocalEngine:
    """Speaks core.protocols.Engine.

    Args:
        max_rows: how many responses are decoded at once; results do not depend on it beyond rounding.
        context_length: the model's limit; a prompt that leaves no room for its response is refused.
    """

    def __init__(self, role: Role, encoder: ChatEncoder, *, max_rows: int = 64, context_length: int = 2**31) -> None:
        self.role = role
        self.encoder = encoder
        self.max_rows = max_rows
        self.context_length = context_length
        self.policy_version = 0

    def update_weights(self, version: int) -> None:
        """The learner's tensors are the engine's own, so only the stamp changes."""
        self.policy_version = version

    @torch.no_grad()
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
        """See core.protocols.Engine.generate.

        Raises:
            DataError: a prompt and its response do not fit the model's context.
        """
        encoded = [self.encoder.prompt(prompt.messages) for prompt in prompts]
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) + sampling.max_new_tokens > self.context_length:
                raise DataError(
                    f"prompt {prompt.id or prompt.text[:40]!r} has {len(ids)} tokens; with {sampling.max_new_tokens} new ones it "
                    f"does not fit the model's context of {self.context_length}. Shorten it or lower max_new_tokens."
                )
        ordinals = range(len(prompts)) if ordinals is None else ordinals
        self.role.activate()
        groups: list[RolloutGroup | None] = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: (len(encoded[i]), i))
        per_wave = max(1, self.max_rows // num_samples)
        done = 0
        for start in range(0, len(order), per_wave):
            chosen = order[start : start + per_wave]
            wave = self._decode([encoded[i] for i in chosen], [ordinals[i] for i in chosen], sampling, num_samples, seed)
            for place, index in enumerate(chosen):
                rows = range(place * num_samples, (place + 1) * num_samples)
                rollouts = [self._rollout(wave, row, encoded[index], prompts[index], sampling, row % num_samples) for row in rows]
                groups[index] = RolloutGroup(prompts[index], tuple(rollouts))
            done += len(chosen) * num_samples
            if progress:
                progress(done)
        return [group for group in groups if group is not None]

    def _decode(
        self, prompts: list[tuple[int, ...]], ordinals: list[int], sampling: Sampling, num_samples: int, seed: int
    ) -> _Wave:
        device, width = self.role.device, max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.encoder.pad_id)
        attention = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            attention[row, width - len(prompt) :] = 1
        ids, attention = ids.to(device), attention.to(device)
        cache = make_cache(self.role.causal_model.config, width + sampling.max_new_tokens)
        positions = (attention.cumsum(-1) - 1).clamp_(min=0)
        hidden = self._forward(ids, attention, positions, cache)
        repeat_rows(cache, num_samples)
        count = len(prompts) * num_samples
        wave = _Wave(
            owner=torch.arange(count, device=device),
            ordinals=torch.tensor(ordinals, device=device).repeat_interleave(num_samples),
            samples=torch.arange(num_samples, device=device).repeat(len(prompts)),
            attention=attention.repeat_interleave(num_samples, 0),
            positions=attention.sum(-1).repeat_interleave(num_samples),
            responses=[[] for _ in range(count)],
            logprobs=[[] for _ in range(count)],
            reasons=[StopReason.LENGTH] * count,
        )
        hidden = hidden.repeat_interleave(num_samples, 0)
        for step in range(sampling.max_new_tokens):
            uniforms = counter_uniform(seed, wave.ordinals, wave.samples, torch.full_like(wave.samples, step))
            tokens, logprobs = sample_tokens(self._logits(hidden), uniforms, sampling)
            going = self._record(wave, tokens, logprobs, sampling)
            if step + 1 == sampling.max_new_tokens or not going.any():
                break
            tokens = self._drop_finished(wave, tokens, going, cache)
            wave.attention = torch.cat([wave.attention, torch.ones_like(wave.attention[:, :1])], 1)
            hidden = self._forward(tokens[:, None], wave.attention, wave.positions[:, None], cache)
            wave.positions = wave.positions + 1
        return wave

    def _record(self, wave: _Wave, tokens: Tensor, logprobs: Tensor, sampling: Sampling) -> Tensor:
        """Append the new tokens; True for the rows that go on."""
        going = torch.ones_like(tokens, dtype=torch.bool)
        for row, (owner, token, logprob) in enumerate(zip(wave.owner.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)):
            if wave.reasons[owner] is not StopReason.LENGTH:
                going[row] = False
                continue
            wave.responses[owner].append(token)
            wave.logprobs[owner].append(logprob)
            if token in self.encoder.stop_ids:
                wave.reasons[owner] = StopReason.STOP_TOKEN
            elif sampling.stop_strings and self._has_stop_string(wave.responses[owner], sampling.stop_strings):
                wave.reasons[owner] = StopReason.STOP_STRING
            else:
                continue
            going[row] = False
        return going

    def _has_stop_string(self, response: list[int], stop_strings: tuple[str, ...]) -> bool:
        tail = self.encoder.tokenizer.decode(response[-max(map(len, stop_strings)) - 8 :])
        return any(stop in tail for stop in stop_strings)

    @staticmethod
    def _drop_finished(wave: _Wave, tokens: Tensor, going: Tensor, cache: object) -> Tensor:
        """Rows that ended leave, with their cache. The owner column keeps track of who is who.

        Row counts stay multiples of ROWS: every new shape costs a CPU's matrix kernels a set-up of their own. So a few
        finished rows may be decoded along for a while; what they draw is thrown away.
        """
        keep = min(len(tokens), -(-int(going.sum()) // ROWS) * ROWS)
        if keep == len(tokens):
            return tokens
        rows = going.int().argsort(descending=True, stable=True)[:keep].sort().values
        select_rows(cache, rows)  # type: ignore[arg-type]
        for name in ("owner", "ordinals", "samples", "attention", "positions"):
            setattr(wave, name, getattr(wave, name)[rows])
        return tokens[rows]

    def _forward(self, ids: Tensor, attention: Tensor, positions: Tensor, cache: object) -> Tensor:
        """Hidden state of each row's last position, (rows, dim)."""
        output = self.role.decoder(
            input_ids=ids, attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.last_hidden_state[:, -1]

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.role.causal_model.get_output_embeddings()(hidden)
        cap = getattr(self.role.causal_model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits.float() / cap)

    def _rollout(
        self, wave: _Wave, row: int, prompt_ids: tuple[int, ...], prompt: Prompt, sampling: Sampling, sample: int
    ) -> Rollout:
        text = self.encoder.decode(wave.responses[row])
        for stop in sampling.stop_strings:
            text = text.split(stop)[0]
        return Rollout(
            prompt_ids,
            tuple(wave.responses[row]),
            tuple(wave.logprobs[row]),
            wave.reasons[row],
            text,
            sample,
            self.policy_version,
            sampling,
            prompt,
        )
