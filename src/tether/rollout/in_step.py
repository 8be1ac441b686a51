"""Sampling from models that cannot use slots of keys and values: rows of one length, in step.

Recurrent states, convolutions and ALiBi derive a row's length from their cache alone. So prompts of
one length are drawn together, with the cache that transformers makes for the model and without any
padding. A model without such a cache reads its whole rows again for every token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tether.core.types import StopReason
from tether.models.trunk import Role
from tether.rollout.drawn import Drawn, Draws, PromptReader, drawn_of, has_stop_string
from tether.rollout.sampling import check_distributions, counter_uniform, sample_tokens

CACHES = ("past_key_values", "cache_params")
"""Names under which transformers' models take their cache."""


class StepDecoder:
    """Last states of a role, token by token, for rows of one length.

    Args:
        cached: with the model's own cache; otherwise whole rows are read again.
    """

    def __init__(self, role: Role, *, cached: bool) -> None:
        self.role = role
        self.ids = torch.zeros(0, 0, dtype=torch.long)
        self.cache = None
        names = inspect.signature(type(role.decoder).forward).parameters
        self.name = next((name for name in CACHES if name in names), None) if cached else None

    def begin(self, ids: Tensor) -> Tensor:
        """The states after rows of prompts, (rows, dim)."""
        self.ids = ids
        self.cache: Any = (
            None if self.name is None else DynamicCache(config=self.role.causal_model.config)
        )
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
        start = self.ids.shape[1] - ids.shape[1]
        width = self.ids.shape[1]
        places = (
            {"position_ids": torch.arange(start, width, device=ids.device).expand_as(ids)}
            if role.takes_positions
            else {}
        )
        return role.decoder(
            input_ids=ids,
            use_cache=True,
            **{self.name: self.cache},
            **places,
        ).last_hidden_state[:, -1]


class StepEngine(PromptReader, Protocol):
    """An engine that can draw in step (rollout.local.LocalEngine)."""

    max_rows: int
    cpu_kernels: bool


def draw_in_step(engine: StepEngine, decoder: StepDecoder, draws: Draws) -> list[list[Drawn]]:
    """The responses to each row, prompts of one length together."""
    drawn: list[list[Drawn]] = [[] for _ in draws.rows]
    finished = 0
    for prompts in _of_one_length(
        [len(row) for row in draws.rows],
        max(1, engine.max_rows // draws.num_samples),
    ):
        for place, responses in zip(prompts, _draw(engine, decoder, draws, prompts), strict=True):
            drawn[place] = responses
        finished += len(prompts) * draws.num_samples
        if draws.progress:
            draws.progress(finished)
    return drawn


def _of_one_length(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of rows, at most so many together, all of one length; the longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for _, group in groupby(order, key=lambda i: lengths[i]):
        while places := list(islice(group, most)):
            yield places


def _draw(
    engine: StepEngine,
    decoder: StepDecoder,
    draws: Draws,
    prompts: list[int],
) -> list[list[Drawn]]:
    """All responses to prompts of one length; rows leave when they end."""
    encoder = engine.encoder
    role = decoder.role
    sampling = draws.sampling
    count = draws.num_samples
    device = role.device
    ids = torch.tensor([draws.rows[i] for i in prompts], device=device)
    hidden = decoder.begin(ids).repeat_interleave(count, 0)
    decoder.keep(torch.arange(len(prompts), device=device).repeat_interleave(count))
    rows = torch.arange(len(hidden), device=device)
    ordinals = torch.tensor(
        [draws.ordinals[i] for i in prompts],
        device=device,
    ).repeat_interleave(count)
    stops = torch.tensor(encoder.stop_ids, device=device)
    # and what each has drawn so far
    going = [(number, list[tuple[int, float]]()) for number in range(len(hidden))]
    responses: dict[int, Drawn] = {}
    for step in range(sampling.max_new_tokens):
        uniforms = counter_uniform(
            draws.seed,
            ordinals[rows],
            rows % count,
            torch.full_like(rows, step),
        )
        new, chances = sample_tokens(
            role.logits(hidden),
            uniforms,
            sampling,
            cpu_kernels=engine.cpu_kernels,
        )
        tokens, logprobs, stopped = torch.stack(
            [new.double(), chances.double(), (new[:, None] == stops).any(-1).double()],
        ).tolist()
        check_distributions(logprobs)
        staying = []
        for place, (number, response) in enumerate(going):
            response.append((int(tokens[place]), logprobs[place]))
            reason = StopReason.STOP_TOKEN if stopped[place] else StopReason.LENGTH
            if not stopped[place] and has_stop_string(
                encoder,
                sampling,
                [token for token, _ in response],
            ):
                reason = StopReason.STOP_STRING
            if reason is not StopReason.LENGTH or step + 1 == sampling.max_new_tokens:
                responses[number] = drawn_of(response, reason)
            else:
                staying.append(place)
        if not staying:
            break
        going = [going[place] for place in staying]
        places = torch.tensor(staying, device=device)
        rows = rows[places]
        decoder.keep(places)
        hidden = decoder.advance(new[places])
    return [
        [responses[number * count + sample] for sample in range(count)]
        for number in range(len(prompts))
    ]
