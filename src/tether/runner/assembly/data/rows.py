"""Rows of a stage: the reader of a data section, and a check of its first rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tether.core.errors import ConfigError
from tether.core.names import file_part
from tether.core.once import once
from tether.core.types import Demonstration, Problem, Prompt
from tether.data.sources import UNUSED_COLUMNS, Quarantine, look, read
from tether.runner.assembly.job import AnyJob
from tether.settings.sampling import SamplingSection
from tether.settings.section import PACKAGED, DataConfig, Section, calls_functions

T = TypeVar("T")


def records_of(data: DataConfig, kind: type[T], quarantine: Quarantine) -> Iterator[T]:
    """The rows of a data section as `kind`, one after another."""
    return read(
        data.paths,
        kind,
        format=data.format,
        columns=data.columns,
        limit=data.limit,
        strict=data.strict,
        quarantine=quarantine,
    )


def load_rows(
    data: DataConfig,
    kind: type,
    quarantine: Quarantine,
    *,
    whole: bool = False,
) -> list[Any]:
    """The rows of a data section as `kind`.

    Args:
        whole: prompts keep the columns of their rows (`Prompt.row`), under the same names in each.
            A column or a name of metadata that a prompt lacks is None there.
    """
    records = records_of(data, kind, quarantine)
    if not issubclass(kind, Prompt | Problem | Demonstration):
        return list(records)
    if not whole:
        return [replace(record, row={}) for record in records]
    prompts = list(records)
    names = dict.fromkeys(name for prompt in prompts for name in prompt.row)
    for name in names:  # functions get them
        del quarantine.unused[name]
    further = dict.fromkeys(name for prompt in prompts for name in prompt.metadata)
    return [
        replace(p, row={**{k: None for k in further if k not in p.metadata}, **names, **p.row})
        for p in prompts
    ]


def rows_of(
    job: AnyJob,
    data: DataConfig | None,
    kind: type,
    name: str = "",
) -> tuple[list[Any], Quarantine]:
    """Rows of a data section of a job, and what had to be set aside."""
    name = name or job.stage
    quarantine = fresh_quarantine(job, name)
    played = (one for one in job.others.values() if isinstance(one, SamplingSection))
    read = (job.settings, *(one.environment for one in played if one.environment))
    whole = (kind is not Demonstration or job.settings.online) and any(map(calls_functions, read))
    rows = load_rows(named(data, name), kind, quarantine, whole=whole)
    for column in job.settings.further_columns:
        del quarantine.unused[column]
    packaged = data is not None and all(Path(path).parent == PACKAGED for path in data.paths)
    # of the rows that come with tether ids and kinds are for people
    if quarantine.unused and not packaged:
        once(
            logging.getLogger("tether.data").warning,
            UNUSED_COLUMNS,
            f"[{name}]",
            quarantine.unused_columns(),
        )
    return rows, quarantine


def fresh_quarantine(job: AnyJob, name: str = "") -> Quarantine:
    """An empty one, with a file in the job's folder: a stage that goes on reads all rows again."""
    path = job.folder / f"quarantine-{file_part(name or job.stage)}.jsonl"
    path.unlink(missing_ok=True)
    return Quarantine(path)


def named(data: DataConfig | None, name: str) -> DataConfig:
    """A section's data.

    Raises:
        ConfigError: it names none.
    """
    if data is None:
        raise ConfigError(f"the [{name}] section names no data: set {name}.data.path")
    return data


def check_data(name: str, section: Section) -> None:
    """Read a few rows of everything that a stage will read, and keep none.

    Raises:
        ConfigError: it needs data and names none.
        DataError: a file holds something else.
    """
    if section.kind is not None:
        named(section.data, name)
    for data in filter(None, (section.data, *section.others())):
        look(
            data.paths,
            section.kind or section.record,
            format=data.format,
            strict=data.strict,
            columns=data.columns,
        )
