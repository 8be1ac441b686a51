"""Prompts that a model can answer: all are encoded before the first is sampled from, and the others
are left out and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tether.core.digest import digest
from tether.core.errors import DataError
from tether.core.protocols import doing
from tether.core.rundir import read_if_there, write_json
from tether.core.types import Prompt
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine
from tether.evaluation.sycophancy import PremisePair, check_pair, read_premise_pairs
from tether.models.loading import LoadedModel
from tether.rollout.drawn import prompt_ids
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.roles import encoder_of

Row = TypeVar("Row")
Faults = Mapping[int, str]
"""By the place of a row: the reason why it cannot be used."""
_LOG = logging.getLogger("tether.data")


def faults_of(rows: Iterable[Row], check: Callable[[Row], object]) -> dict[int, str]:
    """The rows for which `check` raises a DataError."""
    faults = {}
    for place, row in enumerate(rows):
        try:
            check(row)
        except DataError as error:
            faults[place] = str(error)
    return faults


def prompt_faults(
    prompts: Iterable[Prompt],
    encoder: ChatEncoder,
    max_new_tokens: int,
    context_length: int,
) -> dict[int, str]:
    """The prompts that the template refuses, or that leave no room for a response.

    Which they are depends on the prompts, the encoder and the lengths alone, so a run that goes on
    finds the same ones. No ids are kept.
    """
    return faults_of(
        prompts,
        lambda prompt: prompt_ids(encoder, prompt, max_new_tokens, context_length),
    )


def drop_faulty(
    rows: Sequence[Row],
    faults: Faults,
    quarantine: Quarantine,
    name: str,
    *,
    noun: str,
    entry: Callable[[Row], Prompt],
) -> list[Row]:
    """The rows that have no fault, in their order; the others go to quarantine and, by reason, to
    the log.

    Args:
        name: of the section.
        noun: the word for rows.
        entry: the prompt that names a row in quarantine.

    Raises:
        DataError: all rows have faults.
    """
    for place, reason in faults.items():
        prompt = entry(rows[place])
        quarantine.add(prompt.id, None, reason, prompt.text)
    if faults:
        reasons = Counter(reason.partition(": ")[0] for reason in faults.values())
        counts = "; ".join(f"{reason} ({number})" for reason, number in reasons.most_common(3))
        if len(faults) == len(rows):
            raise DataError(
                f"[{name}]: none of {len(rows)} {noun} can be used: {counts}. The "
                f"first: {faults[0]}",
            )
        _LOG.warning(
            "[%s]: %d of %d %s are left out: %s",
            name,
            len(faults),
            len(rows),
            noun,
            counts,
        )
    return [row for place, row in enumerate(rows) if place not in faults]


def usable_prompts(
    prompts: Sequence[Prompt],
    faults: Faults,
    quarantine: Quarantine,
    name: str,
) -> list[Prompt]:
    """`without` of prompts."""
    return drop_faulty(
        prompts,
        faults,
        quarantine,
        name,
        noun="prompts",
        entry=lambda prompt: prompt,
    )


def usable_in(
    job: AnyJob,
    prompts: Sequence[Prompt],
    check: Callable[[Prompt], object],
) -> list[Prompt]:
    """The prompts that a stage can sample from; the others are counted in its summary.

    Args:
        check: raises a DataError where one cannot be read.

    Raises:
        DataError: no prompt can be used.
    """
    doing(job.progress, f"encoding {len(prompts):,} prompts")
    return usable_prompts(prompts, faults_of(prompts, check), job.quarantine, job.stage)


def usable_once(
    job: AnyJob,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    note: Path,
    load: Callable[[], LoadedModel],
) -> list[Prompt]:
    """`usable_in` for a stage that does not open its model at every start. The file `note` lists
    the omitted prompts, with digests of all prompts and of the model.

    Raises:
        DataError: no prompt can be used.
    """
    before = read_if_there(note)
    settings = job.model.model_dump(mode="json")
    made_of = digest([max_new_tokens, settings, [prompt.messages for prompt in prompts]])
    if before.get("made_of") == made_of:
        faults = {int(place): reason for place, reason in before["faults"].items()}
    else:
        doing(job.progress, f"encoding {len(prompts):,} prompts")
        loaded = load()
        faults = prompt_faults(prompts, encoder_of(loaded), max_new_tokens, loaded.context_length)
        write_json(
            note,
            {
                "made_of": made_of,
                "faults": {str(place): reason for place, reason in faults.items()},
            },
        )
    return usable_prompts(prompts, faults, job.quarantine, job.stage)


def usable_premises(
    files: Sequence[str],
    count: int | None,
    encoder: ChatEncoder,
    quarantine: Quarantine,
    name: str,
) -> list[PremisePair]:
    """The pairs of premises in two files that a model can be asked about; see `premise_pairs`.

    Raises:
        DataError: no pair can be used, or fewer than `count`.
    """

    def asked(pairs: list[PremisePair]) -> list[PremisePair]:
        faults = faults_of(pairs, lambda pair: check_pair(encoder, pair))
        return drop_faulty(
            pairs,
            faults,
            quarantine,
            name,
            noun="pairs of premises",
            entry=lambda pair: pair.first,
        )

    return read_premise_pairs(files, count, asked)
