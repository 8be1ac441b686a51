"""Lengths and counts of the rows of a recipe's stages, as far as their files are here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import comb
from statistics import fmean

from tether.core.errors import TetherError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Feedback,
    Message,
    Prompt,
    Record,
    StepLabels,
    assistant,
    user,
)
from tether.data.formats.conversions import prompt_of
from tether.data.prepare import encoded_split
from tether.data.sources import group_of
from tether.data.steps import StepEncoder, encode_solutions
from tether.runner.assembly.checks import file_rows
from tether.runner.assembly.roles import encoder_at_hand
from tether.runner.planning.speeds import RowSizes
from tether.settings.learner import SupervisedConfig
from tether.settings.model import ModelConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.section import DataConfig
from tether.settings.supervised import ProcessSection, SFTSection

SAMPLE = 64
"""Rows whose lengths are measured."""
MARKS = 8
"""Tokens that a template adds to a turn: a guess."""


def row_sizes(
    recipe: BaseRecipe,
    names: Sequence[str],
    prompt_tokens: int | None = None,
    *,
    encode: float = 0,
) -> dict[str, RowSizes]:
    """Lengths and counts of the rows of stages, as far as their files are here; `prompt_tokens`
    instead of measured prompts. Of a stage with at most `encode` rows, the counts are those of the
    rows that train.

    Raises:
        DataError: no row of a stage can train.
    """
    tokens = _counter(recipe.model)
    sizes = {}
    for name in names:
        with contextlib.suppress(TetherError):  # the stage itself reports it
            rows = _sized(recipe, name, tokens)
            if prompt_tokens is not None:
                longest = rows.longest and (prompt_tokens, rows.longest[1])
                rows = replace(rows, prompt=prompt_tokens, longest=longest)
            sizes[name] = rows
    return {name: _trained(recipe, name, sizes[name], encode) for name in sizes}


def _trained(recipe: BaseRecipe, name: str, sizes: RowSizes, most: float) -> RowSizes:
    """The counts of the rows that train: all are encoded as the stage does it."""
    section = recipe.section(name)
    data, kind = section.data, section.kind
    learns = isinstance(section, SupervisedConfig)
    if not (learns and data and sizes.count) or sizes.count > most or kind in (None, Prompt):
        return sizes
    rows = [*file_rows(data, kind)]
    encoder = encoder_at_hand(recipe.model)
    if isinstance(section, ProcessSection):
        solutions, _ = encode_solutions(rows, StepEncoder.of(section, encoder), section)
        groups = len({solution.group for solution in solutions})
        return replace(sizes, count=len(solutions), groups=groups)
    split = encoded_split(rows, section, encoder, recipe.kind(name).name)
    groups = len(split.train) + len(split.test)
    return replace(sizes, count=len(rows) - sum(split.counts["skipped"].values()), groups=groups)


def _counter(model: ModelConfig) -> Callable[[Conversation], int]:
    """Tokens of a conversation, its marks guessed."""
    tokenizer = encoder_at_hand(model).tokenizer
    return lambda turns: sum(
        len(tokenizer(_text(t), add_special_tokens=False, verbose=False)["input_ids"]) + MARKS
        for t in turns
    )


def _sized(recipe: BaseRecipe, name: str, tokens: Callable[[Conversation], int]) -> RowSizes:
    section = recipe.section(name)
    pairs = recipe.section("pairs")
    system = tokens((user(recipe.model.system_prompt),)) if recipe.model.system_prompt else 0
    if recipe.from_pairs(name):
        prompts = _measured(pairs.data, Prompt, tokens, system, counts=True)
        if section.kind is Prompt:
            return prompts
        groups = pairs.prompts or prompts.count
        answers = pairs.samples_per_prompt
        count = pairs.labels or (groups and groups * comb(answers, 2))
        if pairs.labels and groups:
            answers = min(answers, 2 * pairs.labels / groups)
        return RowSizes(
            prompt=prompts.prompt,
            answer=pairs.max_new_tokens,
            answers=answers,
            count=count,
            groups=groups,
        )
    if section.kind is None or section.data is None:
        return RowSizes()
    counts = "steps" not in type(section).model_fields
    rows = _measured(section.data, section.kind, tokens, system, counts=counts)
    if not isinstance(section, SFTSection) or section.teacher is None:
        return rows
    each = section.teacher.samples_per_prompt
    longest = section.teacher.max_new_tokens
    number = rows.count and rows.count * each
    return replace(rows, answer=longest, answers=each, count=number, groups=number)


def _measured(
    data: DataConfig,
    kind: type,
    tokens: Callable[[Conversation], int],
    system: int,
    *,
    counts: bool,
) -> RowSizes:
    """Mean lengths of the first rows of files; with `counts` all rows are read."""
    if data.on_hub:
        return RowSizes()
    most = data.limit if counts else min(SAMPLE, data.limit or SAMPLE)
    read = data.model_copy(update={"strict": False, "limit": most})
    groups = set[str]()
    sides = set[int]()
    prompts = []
    answers = []
    count = 0
    longest: list[Conversation] = [(), ()]
    for count, row in enumerate(file_rows(read, kind), 1):
        prompt, replies = _parts(row)
        longest = [
            max(pair, key=_letters)
            for pair in zip(longest, (prompt, max(replies, key=_letters, default=())), strict=True)
        ]
        groups.add(group_of(row))
        sides.update(hash((prompt, reply)) for reply in replies)
        if count <= SAMPLE:
            prompts.append(system + tokens(prompt))
            answers += map(tokens, replies)
    if not prompts:
        return RowSizes()
    own = len(groups) if kind in (Comparison, Feedback) else count
    return RowSizes(
        prompt=round(fmean(prompts)),
        answer=round(fmean(answers)) if answers else None,
        answers=len(sides) / own or 2.0,
        count=count if counts else None,
        groups=own,
        longest=(system + tokens(longest[0]), tokens(longest[1])),
    )


def _text(turn: Message) -> str:
    """All parts of a turn that a chat template writes, without the marks around them."""
    return "".join((turn.tools, turn.reasoning, turn.content, *turn.tool_calls))


def _letters(turns: Conversation) -> int:
    return sum(len(_text(turn)) for turn in turns)


def _parts(row: Record) -> tuple[Conversation, list[Conversation]]:
    """The prompt of a row, and the answers to it."""
    prompt = prompt_of(row)
    if isinstance(row, Demonstration):
        return prompt, [row.messages[len(prompt) :]]
    if isinstance(row, StepLabels):
        return prompt, [(assistant("\n".join(row.steps)),)]
    sides = ("chosen", "rejected", "response")
    return prompt, [getattr(row, side) for side in sides if hasattr(row, side)]
