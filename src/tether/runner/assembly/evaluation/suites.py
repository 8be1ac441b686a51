"""Lists of evaluators, and two of the doors to them: a section of a recipe, and
`tether evaluate MODEL --suite NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypedDict

from tether.core.errors import ConfigError
from tether.core.types import Json
from tether.data.sources import Quarantine
from tether.evaluation.suite import FigureChange, MeasuredPolicy, Record, Suite, changes
from tether.runner.assembly.data.sources import check_data_paths
from tether.runner.assembly.evaluation.evaluators import EVALUATORS, Material
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.settings.evaluation import EvaluateSection, EvaluationSection, EvaluatorData
from tether.settings.section import DataConfig

SUITES: dict[str, tuple[str, ...]] = {
    "all": tuple(name for name, row in EVALUATORS.items() if row.data and not row.named),
    "tax": ("multiple_choice", "short_answers"),
    "manner": ("refusal", "diversity", "sycophancy"),
}
"""Lists of evaluators by name; several names and evaluators may be joined by commas."""


class SuiteReport(TypedDict):
    """Figures of a model; with `against`, their distance above another model's."""

    model: str
    against: str | None
    evaluators: list[Record]
    base: list[Record]
    changes: dict[str, dict[str, FigureChange]]
    left_out: dict[str, Json]


Chosen = Mapping[str, EvaluatorData]
"""Evaluators by name, each with its files as they lie on the disk."""


def with_files(chosen: Chosen, key: str, remedy: str) -> Chosen:
    """The evaluators of a recipe or a suite with all their files.

    Args:
        key: what names the files of an evaluator to the user, such as "--data NAME=PATH".
        remedy: what else to do where files are missing.

    Raises:
        ConfigError: one has no files, or measures held-out answers.
        MissingFileError: a file does not exist.
    """
    result = {}
    for name, data in chosen.items():
        row = EVALUATORS[name]
        if not row.data:
            raise ConfigError(
                f"{name} measures a recipe's held-out answers, and runs wherever the recipe has "
                f"[evaluate] or [STAGE.evaluate]. Take {name} out here",
            )
        files = data.files or row.files
        name_it = key.replace("NAME", name)
        if not files:
            noun = "tasks" if row.named else "files"
            raise ConfigError(f"{name} needs {noun} ({row.data}): {name_it}, or {remedy}")
        if row.pair and len(files) != 2:
            raise ConfigError(
                f"{name} reads {row.data}, and {len(files)} is named by {name_it}. Name two",
            )
        source = DataConfig(path=files)
        if not row.named:
            check_data_paths(source)
        result[name] = data.model_copy(update={"path": source.paths})
    return result


def recipe_evaluators(name: str, section: EvaluationSection | EvaluateSection) -> Chosen:
    """The evaluators that a section of a recipe names, with all their files.

    Raises:
        ConfigError: there is no such evaluator; and as `with_files`.
    """
    for key in section.evaluators:
        if key not in EVALUATORS:
            raise ConfigError(
                f"{name}.evaluators: no evaluator is called {key!r}. There are: "
                f"{', '.join(name for name, row in EVALUATORS.items() if row.data)}",
            )
    chosen = dict(section.evaluators)
    if (premises := section.sycophancy) is not None:
        if "sycophancy" in chosen:
            raise ConfigError(
                f"{name}.sycophancy and {name}.evaluators.sycophancy are two ways to say the same. "
                "Remove one",
            )
        own = {"sycophancy": EvaluatorData(path=premises.files, limit=premises.pairs)}
        chosen = own | chosen
    return with_files(chosen, f"{name}.evaluators.NAME.path", "leave it out")


def check_evaluators(name: str, section: EvaluationSection | EvaluateSection) -> None:
    """Check what a section of a recipe says of its evaluators, and look at their files.

    Raises:
        ConfigError, MissingFileError: as `recipe_evaluators`; or nothing measures `keep_by`.
        DataError: a file holds something else.
    """
    chosen = recipe_evaluators(name, section)
    looked = {key: EVALUATORS[key].look(data.files) for key, data in chosen.items()}
    if not isinstance(section, EvaluateSection):
        return
    own = (key for key, row in EVALUATORS.items() if not row.data and "along" in row.moments)
    measured = [*own, *chosen]
    _, evaluator, figure = section.kept_figure
    fault = ""
    if evaluator not in measured:
        fault = (
            f"nothing measures {evaluator!r} along the training. Measured are: "
            f"{', '.join(measured)}; name others in {name}.evaluators"
        )
    elif (
        figures := EVALUATORS[evaluator].figures or looked.get(evaluator)
    ) and figure not in figures:
        fault = f"{evaluator} has no figure {figure!r}. Figures: {', '.join(map(str, figures))}"
    if fault:
        raise ConfigError(f"{name}.keep_by = {section.keep_by!r}: {fault}")


def chosen_evaluators(suite: str, data: Sequence[str], limit: int | None = None) -> Chosen:
    """The evaluators of a suite, each with its files.

    Args:
        data: `NAME=PATH`, several times for several files.
        limit: only so many rows of each file.

    Raises:
        ConfigError: there is no such suite or evaluator, or one has no files.
        MissingFileError: a file does not exist.
    """
    words = [word.strip().replace("-", "_") for word in suite.split(",") if word.strip()]
    names = [name for word in words for name in SUITES.get(word, (word,))]
    files: dict[str, list[str]] = {}
    for entry in data:
        name, path = (*entry.split("=", 1), "")[:2]
        if not path:
            raise ConfigError(f"--data is NAME=PATH, such as multiple_choice=arc.jsonl: {entry!r}")
        files.setdefault(name.strip().replace("-", "_"), []).append(path)
    for name in (*names, *files):
        if name not in EVALUATORS:
            raise ConfigError(
                f"no suite or evaluator is called {name!r}. Suites: {', '.join(SUITES)}; "
                f"evaluators: {', '.join(name for name, row in EVALUATORS.items() if row.data)}",
            )
    for name in files:
        if name not in names:
            raise ConfigError(f"--data {name}=… has no effect: the suite {suite!r} lacks {name}")
    given = {
        name: EvaluatorData(path=tuple(files.get(name, ())), limit=limit)
        for name in dict.fromkeys(names)
    }
    if not given:
        raise ConfigError(f"--suite is empty. Suites: {', '.join(SUITES)}")
    return with_files(given, "--data NAME=PATH", "choose a --suite without it")


def suite_of(chosen: Chosen, material: Material, folder: Path | None = None) -> Suite:
    """The suite of these evaluators, run at the moments that the table has."""
    evaluators = [
        EVALUATORS[name].make(material._replace(files=data.files, limit=data.limit))
        for name, data in chosen.items()
    ]
    moments = {name: EVALUATORS[name].moments for name in chosen}
    return Suite(evaluators, folder, moments=moments)


def evaluate_model(
    model: str,
    suite: str,
    *,
    against: str | None = None,
    data: Sequence[str] = (),
    limit: int | None = None,
) -> SuiteReport:
    """Measure a model, and how far it lies above another one on the same rows.

    Args:
        model, against: a folder, a run or a hub id.
        limit: only so many rows of each file.

    Raises:
        ConfigError, DataError, MissingFileError, ModelError: as `chosen_evaluators`, the readers
            and `build.roles.load_policy`.
    """
    chosen = chosen_evaluators(suite, data, limit)
    for name, entry in chosen.items():
        EVALUATORS[name].look(entry.files)
    aside = {name: Quarantine() for name in (model, against) if name is not None}
    now = _records(model, chosen, aside[model])
    base = [] if against is None else _records(against, chosen, aside[against])
    differences = {
        record["evaluator"]: changes(start, record)
        for start, record in zip(base, now, strict=False)
    }
    return SuiteReport(
        model=model,
        against=against,
        evaluators=now,
        base=base,
        changes=differences,
        left_out={name: rows.summary() for name, rows in aside.items() if rows.count},
    )


def _records(model: str, chosen: Chosen, quarantine: Quarantine) -> list[Record]:
    role, loaded = load_policy(model)
    policy = MeasuredPolicy(role, encoder_of(loaded), local_engine(role, loaded))
    with ExitStack() as closing:
        return suite_of(chosen, Material(policy, quarantine, closing)).measure(policy, 0, "after")
