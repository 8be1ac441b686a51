"""Proof, on the policy itself, that the engine draws from the very distribution that is trained: a
few tokens both ways.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tether.core.errors import ModelError
from tether.core.once import once
from tether.models.independence import agrees, windows
from tether.models.trunk import Role
from tether.rollout.cache import SlotCache
from tether.rollout.decoding import Decoder, TreeDecoder
from tether.rollout.in_step import StepDecoder

logger = logging.getLogger(__name__)
SLOTS = "slots"
IN_STEP = "in step"
WHOLE = "whole"
KNOWN_WINDOWS = {"sliding_window"}
"""Settings of the reach of attention that `rollout.cache` reads; others are by place, of which rows
in slots have others.
"""
SLOWER = {
    IN_STEP: "the engine draws from %s with the model's own cache: only prompts of one length "
    "together, which is slower",
    WHOLE: "%s has no cache that the engine can use: whole rows are read again for every token, "
    "which is slow",
}
_WAYS: dict[tuple[object, ...], str] = {}
"""The way that was proven for a configuration under an attention function, in a type, on a kind of
device.
"""


@torch.no_grad()
def step_decoder(role: Role, decoder: Decoder) -> StepDecoder | None:
    """The decoder that draws in the place of slots; None if `decoder` and its slots are right for
    this model.

    Raises:
        ModelError: no way gives the states that training computes.
    """
    if not isinstance(decoder, TreeDecoder):
        return None  # it has been compared with the model already
    model = role.causal_model
    training = role.model.training
    key = (
        role.attention,
        decoder.in_place,
        model.dtype,
        role.device.type,
        role.config.to_json_string(use_diff=False),
    )
    if key not in _WAYS:
        role.train_mode(False)
        _WAYS[key] = _way(role, decoder)
        role.train_mode(training)
    kind = type(model).__name__
    way = _WAYS[key]
    if way == SLOTS:
        return None
    once(logger.warning, SLOWER[way], kind)
    return StepDecoder(role, cached=way == IN_STEP)


def _way(role: Role, decoder: TreeDecoder) -> str:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(role.vocabulary, (2, 13), generator=draw).to(role.device)
    ids[1, :3] = ids[0, :3]  # what both prompts begin with
    reads_alone = role.independence  # proven before the adapter is switched on
    role.activate()
    expected = (
        role.states(ids)[:, 8:]
        if reads_alone.rows
        else torch.cat([role.states(row[None]) for row in ids])[:, 8:]
    )
    for way, states in ((SLOTS, _by_slots), (IN_STEP, _in_step), (WHOLE, _in_step)):
        try:
            given = states(role, decoder, ids, way)
        except Exception as error:  # noqa: BLE001  (a model of any author may keep anything in its cache)
            logger.debug("%s: %s", way, error)
            continue
        if agrees(given, expected):
            return way
    raise ModelError(
        f"the local engine cannot draw from {type(role.causal_model).__name__}: token by token it "
        "computes other states than at "
        "once. Choose another model, or an engine of servers (engine.kind).",
    )


def _by_slots(role: Role, decoder: TreeDecoder, ids: Tensor, way: str) -> Tensor:
    """The states after tokens 9 to 13 of each row: row 0 begins with 9 tokens in its slot, row 1
    with 6.
    """
    if (
        not role.takes_positions
        or {name for name, _ in windows(role.config.to_dict())} - KNOWN_WINDOWS
    ):
        raise ModelError(
            "positions cannot be given from outside, or attention has a reach that "
            "slots know nothing of",
        )
    for product in decoder.products:
        product.refresh()
    lengths = torch.tensor([9, 6], device=role.device)
    device = role.device
    cache = SlotCache(role.causal_model.config, 2, 13, in_place=decoder.in_place)
    _, prefix = decoder.prefill(ids[:1, :3], [])
    states, layers = decoder.prefill(ids[:, 3:9], prefix, lengths - 3)
    for slot, (keys, values) in zip(cache.slots, layers, strict=True):
        slot.fill(torch.arange(2, device=device), keys, values, 13)
    of_long = [states[0, 5]]
    of_short = [states[1, 2]]
    for _ in range(7):
        cache.lengths = lengths.clamp(max=12)
        cache.width = int(cache.lengths.max()) + 1
        tokens = ids[torch.arange(2, device=device), cache.lengths]
        hidden = decoder.decode(tokens, cache)
        of_long.append(hidden[0])
        of_short.append(hidden[1])
        lengths = lengths + 1
    return torch.stack([torch.stack(of_long[:5]), torch.stack(of_short[3:8])])


def _in_step(role: Role, decoder: TreeDecoder, ids: Tensor, way: str) -> Tensor:
    """The same with both rows at one length, which change places once."""
    steps = StepDecoder(role, cached=way == IN_STEP)
    if way == IN_STEP and steps.name is None:
        raise ModelError("the model takes no cache")
    states = [steps.begin(ids[:, :9])]
    steps.keep(torch.tensor([1, 0], device=role.device))
    states += [steps.advance(ids[:, place].flip(0)).flip(0) for place in range(9, 13)]
    return torch.stack(states, 1)
