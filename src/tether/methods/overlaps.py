"""Prompts of [evaluate] that are also training rows of the recipe: answers to them are not held
out.
"""

from __future__ import annotations

import contextlib
import logging

from tether.build.data.rows import load_rows
from tether.core.errors import TetherError
from tether.core.types import Json, Prompt
from tether.data.seen import digest_of, shared_prompts
from tether.data.sources import Quarantine
from tether.methods.sampling import prompts_of
from tether.settings.recipe import BaseRecipe
from tether.settings.sampling import OnlineSection
from tether.stages.heldout import held_out_split

_LOG = logging.getLogger("tether.data")
SENTENCE = (
    "[evaluate]: {count} of {total} prompts are among the rows of {stages}. Answers to them show "
    "what was learned by heart, too: they are not held out. Give evaluate.data other prompts."
)


def trained_prompts(recipe: BaseRecipe) -> dict[str, frozenset[str]]:
    """The prompts of every stage that trains, as far as its files can be read; equal prompts have
    equal digests, whatever the file.
    """
    trained = {}
    for name in recipe.stages:
        section = recipe.section(name)
        if name == "evaluate" or section.data is None or section.kind is None:
            continue
        with contextlib.suppress(TetherError):  # the stage itself reports it
            rows = load_rows(section.data, section.kind, Quarantine(keep=0))
            heldout = section.evaluate if isinstance(section, OnlineSection) else None
            if heldout is not None and heldout.data is None:  # some of the rows are set aside
                rows, _ = held_out_split(prompts_of(section, rows), heldout.prompts)
            trained[name] = frozenset(map(digest_of, rows))
    return trained


def overlap_of(recipe: BaseRecipe) -> str:
    """A sentence on the prompts of [evaluate] that the recipe trains on; empty without any."""
    section = recipe.section("evaluate")
    if section is None or section.data is None:
        return ""
    with contextlib.suppress(TetherError):
        rows = load_rows(section.data, Prompt, Quarantine(keep=0))
        if shared := shared_prompts(rows, trained_prompts(recipe)):
            return in_words(shared)
    return ""


def in_words(shared: Json) -> str:
    """The sentence of such a count."""
    stages = " and ".join(f"[{name}]" for name in shared["stages"])
    return SENTENCE.format(count=shared["count"], total=shared["total"], stages=stages)


def warn_of_overlap(recipe: BaseRecipe) -> None:
    """Write that sentence into the log."""
    if sentence := overlap_of(recipe):
        _LOG.warning("%s", sentence)
