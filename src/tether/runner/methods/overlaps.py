"""Prompts of [evaluate] that are also training rows of the recipe: answers to them are not held
out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from tether.core.errors import TetherError
from tether.core.types import Problem, Prompt
from tether.data.seen import digest_of, shared_prompts
from tether.data.sources import Quarantine
from tether.rewards.verifiable import problem_prompt
from tether.runner.assembly.data.rows import load_rows
from tether.runner.assembly.job import AnyJob
from tether.settings.evaluation import EvaluationSection
from tether.settings.section import Section
from tether.stages.heldout import held_out_split

SENTENCE = (
    "[evaluate]: {count} of {total} prompts are among the rows of {stages}. Answers to them show "
    "what was learned by heart, too: they are not held out. Give evaluate.data other prompts."
)


def trained_prompts(
    sections: Mapping[str, Section],
    *,
    task: bool,
) -> dict[str, frozenset[str]]:
    """The prompts of every stage that trains, as far as its files can be read; equal prompts have
    equal digests, whatever the file.

    Args:
        sections: of the stages, by name.
        task: see `digest_of`.
    """
    trained = {}
    for name, section in sections.items():
        if section.data is None or section.kind is None:
            continue
        with contextlib.suppress(TetherError):  # the stage itself reports it
            rows = load_rows(section.data, section.kind, Quarantine(keep=0), whole=task)
            if section.set_aside:
                rows = [problem_prompt(row) if isinstance(row, Problem) else row for row in rows]
                rows, _ = held_out_split(rows, section.set_aside)
            trained[name] = frozenset(digest_of(row, task=task) for row in rows)
    return trained


def overlap_of(job: AnyJob) -> str:
    """A sentence on the prompts of an evaluation that other stages train on; empty without any."""
    section = job.settings
    data = section.data
    task = isinstance(section, EvaluationSection) and section.judge == "environment"
    with contextlib.suppress(TetherError):
        rows = [] if data is None else load_rows(data, Prompt, Quarantine(keep=0), whole=task)
        if shared := shared_prompts(rows, trained_prompts(job.others, task=task), task=task):
            stages = " and ".join(f"[{name}]" for name in shared["stages"])
            return SENTENCE.format(count=shared["count"], total=shared["total"], stages=stages)
    return ""
