"""Micro-batches of shapes of the stages of a recipe: the largest that their rows make."""

from __future__ import annotations

from tether.data.batches import TokenBatch, cut_batches, cut_together
from tether.models.trunk import Role
from tether.runner.planning.speeds import RowSizes
from tether.settings.reward import RewardSection
from tether.settings.sampling import SamplingSection
from tether.settings.supervised import DirectSection, KTOSection, ProcessSection, SFTSection
from tether.stages.learner import planner

Answered = RewardSection | ProcessSection | DirectSection | KTOSection
"""Stages that learn from prompts with answers."""


def conversation_tokens(rows: RowSizes, section: SFTSection) -> int:
    """Tokens of one. If they were not measured, a guess: half of the capacity of a packed row."""
    if rows.answer is None:
        return section.row_tokens // 2
    return min(rows.prompt + rows.answer_tokens, section.max_length)


def packed_batch(rows: RowSizes, section: SFTSection, role: Role) -> TokenBatch:
    """Micro-batch of full rows of conversations; one that is longer has a row of its own."""
    length = conversation_tokens(rows, section)
    room = section.row_tokens * section.packing
    longest = length if rows.answer is None else sum(rows.within(section.max_length))
    width = max(longest, room)
    limit = role.document_tokens(room)
    each = max(1, round(room / length)) if width == room else 1
    count = min(section.batch_size, each * section.rows_per_micro_batch)
    half = width // each // 2
    made = planner.shape_answers(count, half, 1, width // each - half)
    return planner.shape_batch([one for group in made for one in group], limit, room or None)


def pair_batch(
    rows: RowSizes,
    section: Answered,
    role: Role,
    count: int,
) -> TokenBatch:
    """Micro-batch of prompts with their answers, of an update that has so many prompts."""
    budget = section.micro_batch_tokens
    limit = role.document_tokens(budget)
    prompts = min(count, 2 + budget // rows.prompt)
    answers = max(1, round(rows.answers))
    groups = planner.shape_answers(prompts, rows.prompt, answers, rows.answer_tokens)
    prompt, answer = rows.within(section.max_length)
    groups[0] = planner.shape_answers(1, prompt, answers, answer)[0]
    cuts = cut_together(groups, budget, limit)
    return planner.largest_batch(([s for i in cut for s in groups[i]] for cut in cuts), limit)


def sample_batch(rows: RowSizes, section: SamplingSection, budget: int, role: Role) -> TokenBatch:
    """Micro-batch of a minibatch of samples."""
    parts = dict(section).get("minibatches", 1)
    # more would make no larger one
    prompts = min(-(-section.prompts_per_step // parts), 2 + 2 * budget // rows.prompt)
    answers = section.samples_per_prompt, section.max_new_tokens
    groups = planner.shape_answers(prompts, rows.prompt, *answers)
    (groups[0],) = planner.shape_answers(1, rows.longest_tokens[0], *answers)
    sequences = [s for group in groups for s in group]
    limit = role.document_tokens(budget)
    cuts = cut_batches(sequences, budget, document_tokens=limit)
    batches = ([sequences[i] for i in cut] for cut in cuts)
    return planner.largest_batch(batches, limit)
