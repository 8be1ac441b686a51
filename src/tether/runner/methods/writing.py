"""Demonstrations that a teacher writes, before a student learns from them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tether.core.budget import time_limit
from tether.core.errors import DataError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory, append_jsonl, read_jsonl
from tether.core.types import Demonstration, Prompt, Rollout, Sampling, assistant
from tether.models.cpu.memory import free_memory
from tether.runner.assembly.data.prompts import prompt_faults
from tether.runner.assembly.job import AnyJob, Job
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.runner.assembly.teachers import read_by
from tether.settings.model import ModelConfig
from tether.settings.supervised import SFTSection
from tether.settings.teacher import START, WritingConfig
from tether.stages.learner.ranks import Ranks

_LOG = logging.getLogger(__name__)
WRITTEN = "written.jsonl"
"""The teacher's answers, in the folder of the stage."""
AT_ONCE = 64
"""Answers that are sampled before they are written down."""


def check_writing(job: Job[SFTSection], _: ModelConfig) -> None:
    """Check before the first stage begins that what a teacher reads can be had.

    Raises:
        ConfigError: its function cannot be loaded.
    """
    if job.settings.teacher:
        read_by(job.settings.teacher)


def written(
    job: AnyJob,
    config: WritingConfig,
    prompts: Sequence[Prompt],
    run: RunDirectory,
    ranks: Ranks,
) -> list[Demonstration]:
    """A teacher's answers to the prompts; those that are empty or do not end are set aside. A run
    that goes on keeps what is written already.

    Raises:
        DataError: no answer can be used.
    """
    limit = time_limit()
    answers = ranks.once(lambda: _answers(job, config, prompts, run.path / WRITTEN))
    if limit.bounded and limit.spent > limit.seconds / 2:
        _LOG.warning(
            "[%s] the teacher's writing took %.0f s of the stage's %.0f s: give it more, or fewer prompts",
            job.stage,
            limit.spent,
            limit.seconds,
        )
    demonstrations = []
    for prompt, own in zip(prompts, answers, strict=True):
        for text, fault in own:
            if fault:
                job.quarantine.add(prompt.id, None, fault, text)
                continue
            demonstrations.append(
                Demonstration((*prompt.messages, assistant(text)), prompt.id, prompt.metadata),
            )
    if not demonstrations:
        raise DataError(
            f"[{job.stage}] the teacher wrote no answer that can be used: "
            f"{job.quarantine.top_reasons()}. Raise {job.stage}.data.teacher.max_new_tokens",
        )
    return demonstrations


def _answers(
    job: AnyJob,
    config: WritingConfig,
    prompts: Sequence[Prompt],
    path: Path,
) -> list[list[tuple[str, str]]]:
    """Of each prompt its answers, each with its fault: those of the file, and what is written now."""
    keys = [(place, prompt.text) for place, prompt in enumerate(prompts)]
    rows = {(row["place"], row["prompt"]): row["answers"] for row in read_jsonl(path)}
    missing = {place: prompts[place] for place, text in keys if (place, text) not in rows}
    if not missing:
        return [rows[key] for key in keys]
    _write(job, config, missing, path)
    free_memory()
    return _answers(job, config, prompts, path)


def _write(
    job: AnyJob,
    config: WritingConfig,
    prompts: Mapping[int, Prompt],
    path: Path,
) -> None:
    """Have the prompts answered, by their places, and append a row for each."""

    def note(places: Sequence[int], answers: Iterable[Sequence[tuple[str, str]]]) -> None:
        append_jsonl(
            path,
            [
                {"place": n, "prompt": prompts[n].text, "answers": own}
                for n, own in zip(places, answers, strict=True)
            ],
        )

    own = config.model != START
    role, loaded = load_policy(
        str(config.model) if own else job.model.source,
        job.model,
        job.seed,
        as_itself=own,
    )
    encoder = encoder_of(loaded)
    turns = read_by(config, encoder.system_prompt)
    read = [
        replace(prompt, messages=turns(prompt)) if turns else prompt for prompt in prompts.values()
    ]
    faults = prompt_faults(read, encoder, config.max_new_tokens, loaded.context_length)
    places = list(prompts)
    note([places[number] for number in faults], [[("", fault)] for fault in faults.values()])
    engine = local_engine(role, loaded, max_rows=AT_ONCE)
    fitting = [number for number in range(len(read)) if number not in faults]
    each = max(1, AT_ONCE // config.samples_per_prompt)
    for start in range(0, len(fitting), each):
        doing(job.progress, "a teacher writes", start, len(fitting))
        part = fitting[start : start + each]
        ordinals = [places[number] for number in part]
        groups = engine.generate(
            [read[number] for number in part],
            Sampling(config.max_new_tokens, config.temperature),
            num_samples=config.samples_per_prompt,
            seed=job.seed,
            ordinals=ordinals,
        )
        note(
            ordinals,
            ([(one.whole_text, _fault(one)) for one in group.rollouts] for group in groups),
        )


def _fault(answer: Rollout) -> str:
    """Why an answer cannot be imitated; empty if it can."""
    if not answer.finished:
        return "the teacher's answer does not end within max_new_tokens"
    return "" if answer.text.strip() else "the teacher's answer is empty"
