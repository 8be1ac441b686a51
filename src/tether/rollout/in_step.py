"""Sampling from models whose rows cannot stand in slots of keys and values: rows of one length, in step.

Recurrent states, convolutions and ALiBi know a row's length by their cache alone. So prompts of one length are drawn together,
with the cache that transformers makes for the model and without any padding. A model without such a cache reads its whole rows
again for every token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tether.core.types import StopReason
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.rollout.drawn import Drawn, Draws, has_stop_string
from tether.rollout.sampling import counter_uniform, sample_tokens

CACHES = ("past_key_values", "cache_params")
"""Names under which transformers' models take their cache."""


class StepDecoder:
    """Last states of a role, token by token, for rows of one length.

    Args:
        cached: with the model's own cache; otherwise whole rows are read again.
    """

    def __init__(self, role: Role, *, cached: bool) -> None:
        self.role, self.ids, self.cache = role, torch.zeros(0, 0, dtype=torch.long), None
        names = inspect.signature(type(role.decoder).forward).parameters
        self.name = next((name for name in CACHES if name in names), None) if cached else None

    def begin(self, ids: Tensor) -> Tensor:
        """The states after rows of prompts, (rows, dim)."""
        self.ids = ids
        self.cache: Any = None if self.name is None else DynamicCache(config=self.role.causal_model.config)
        return self._states(ids)

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows, in this order; one may be named several times."""
        self.ids = self.ids[rows]
        if self.cache is not None:
            self.cache.reorder_cache(rows)

    def advance(self, tokens: Tensor) -> Tensor:
        """The states after one more token a row, (rows, dim)."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        return self._states(self.ids if self.name is None else tokens[:, None])

    def _states(self, ids: Tensor) -> Tensor:
        role = self.role
        role.activate()
        if self.name is None:
            return role.states(ids)[:, -1]
        start, width = self.ids.shape[1] - ids.shape[1], self.ids.shape[1]
        places = {"position_ids": torch.arange(start, width, device=ids.device).expand_as(ids)} if role.takes_positions else {}
        return role.decoder(input_ids=ids, use_cache=True, **{self.name: self.cache}, **places).last_hidden_state[:, -1]


def draw_in_step(
    decoder: StepDecoder, encoder: ChatEncoder, draws: Draws, max_rows: int, progress: Callable[[int], None] | None
) -> list[list[Drawn]]:
    """`draws.num_samples` responses to each row, prompts of one length together."""
    drawn: list[list[Drawn]] = [[] for _ in draws.rows]
    finished = 0
    for prompts in _of_one_length([len(row) for row in draws.rows], max(1, max_rows // draws.num_samples)):
        for place, responses in zip(prompts, _draw(decoder, encoder, draws, prompts), strict=True):
            drawn[place] = responses
        finished += len(prompts) * draws.num_samples
        if progress:
            progress(finished)
    return drawn


def _of_one_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of rows, at most so many together, all of one length; the longest first."""
    for _, group in groupby(sorted(range(len(lengths)), key=lambda i: -lengths[i]), key=lambda i: lengths[i]):
        places = list(group)
        yield from (places[start : start + most] for start in range(0, len(places), most))


def _draw(decoder: StepDecoder, encoder: ChatEncoder, draws: Draws, prompts: list[int]) -> list[list[Drawn]]:
    """All responses to prompts of one length; rows leave when they end."""
    role, sampling, count = decoder.role, draws.sampling, draws.num_samples
    ids = torch.tensor([draws.rows[i] for i in prompts], device=role.device)
    hidden = decoder.begin(ids).repeat_interleave(count, 0)
    decoder.keep(torch.arange(len(prompts), device=role.device).repeat_interleave(count))
    rows = torch.arange(len(hidden), device=role.device)
    ordinals = torch.tensor([draws.ordinals[i] for i in prompts], device=role.device).repeat_interleave(count)
    stops = torch.tensor(encoder.stop_ids, device=role.device)
    responses: dict[int, Drawn] = {}
    tokens, logprobs = rows.new_zeros(len(rows), 0), hidden.new_zeros(len(rows), 0, dtype=torch.float32)
    for step in range(sampling.max_new_tokens):
        uniforms = counter_uniform(draws.seed, ordinals[rows], rows % count, torch.full_like(rows, step))
        new, chances = sample_tokens(role.logits(hidden), uniforms, sampling)
        tokens, logprobs = torch.cat([tokens, new[:, None]], 1), torch.cat([logprobs, chances[:, None]], 1)
        going = []
        for place, (number, stopped) in enumerate(zip(rows.tolist(), torch.isin(new, stops).tolist(), strict=True)):
            reason = StopReason.STOP_TOKEN if stopped else StopReason.LENGTH
            if not stopped and has_stop_string(encoder, sampling, tokens[place]):
                reason = StopReason.STOP_STRING
            if reason is not StopReason.LENGTH or step + 1 == sampling.max_new_tokens:
                responses[number] = Drawn(tuple(tokens[place].tolist()), tuple(logprobs[place].tolist()), reason)
            else:
                going.append(place)
        if not going:
            break
        staying = torch.tensor(going, device=role.device)
        rows, tokens, logprobs = rows[staying], tokens[staying], logprobs[staying]
        decoder.keep(staying)
        hidden = decoder.advance(tokens[:, -1])
    return [[responses[number * count + sample] for sample in range(count)] for number in range(len(prompts))]
