"""Faults that a stage would meet only after others were trained: they are looked for before the
first one begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

from tether.build.data.sources import check_sources
from tether.build.engines import check_engine
from tether.build.evaluation.suites import check_evaluators
from tether.build.rewards import reward_model_of
from tether.build.roles import is_scorer, newest_policy, objective_names, trained_scorer
from tether.core.errors import (
    ConfigError,
    DataError,
    MissingFileError,
    RewardError,
    require,
)
from tether.core.types import Comparison, Feedback, Problem, Prompt
from tether.data.sources import Quarantine, look, read, split_by_group
from tether.evaluation.sycophancy import read_premise_pairs
from tether.judges.constitution import read_rubric
from tether.models.loading import check_model
from tether.models.pretrained import check_model_folder
from tether.models.saving import ENSEMBLE
from tether.rewards.code import read_tests
from tether.rewards.forms import check_arguments
from tether.rewards.loading import load_function
from tether.rewards.verifiable import PACKAGES, problem_prompt, tests_in
from tether.settings.evaluation import EvaluateSection, EvaluationSection
from tether.settings.judges import FunctionJudge, JudgeConfig
from tether.settings.model import ModelConfig
from tether.settings.pairs import PairsSection
from tether.settings.reading import build
from tether.settings.recipe import BaseRecipe, scorer_faults
from tether.settings.reward import RewardSection
from tether.settings.sampling import OnlineSection, RewardedSection
from tether.settings.section import DataConfig, Section
from tether.settings.supervised import KTOSection


def check_section(name: str, section: Section, model: ModelConfig) -> None:
    """Load the functions of a stage and check the files that it reads beside its rows, without a
    model.

    Raises:
        ConfigError: a function cannot be loaded, a judge cannot be asked, a library is missing, a
            store cannot be opened.
        MissingFileError, DataError: a file is not there, holds something else, or has too few rows.
    """
    for judge, data in _judges(section):
        _check_judge(judge, data, scores=not isinstance(section, PairsSection))
    if isinstance(section, RewardedSection):
        _check_reward(name, section)
    if isinstance(section, OnlineSection):
        _check_online(name, section, model)
    heldout = section.evaluate if isinstance(section, OnlineSection) else section
    if isinstance(heldout, EvaluateSection | EvaluationSection):
        check_evaluators(name if heldout is section else f"{name}.evaluate", heldout)
        if heldout.sycophancy is not None:
            read_premise_pairs(heldout.sycophancy.files, heldout.sycophancy.pairs)
    if isinstance(section, PairsSection):
        _check_pairs(section)
    if isinstance(section, KTOSection) and section.data is not None:
        _check_classes(section.data)
    if isinstance(section, RewardSection):
        if section.teacher and trained_scorer(section.teacher) is None:
            raise ConfigError(
                f"{name}.teacher = {section.teacher!r}: there is no trained reward model",
            )
        for objective, data in (section.objectives or {}).items():
            _check_held_out(
                f"{name}.objectives.{objective}",
                data,
                section.heldout_fraction,
                section.seed,
            )


def _judges(section: Section) -> Iterator[tuple[Any, DataConfig | None]]:
    """The judges of a section, each with the source of its prompts."""
    if isinstance(section, PairsSection | EvaluationSection):
        yield section.judge, section.data
    elif isinstance(section, OnlineSection) and section.evaluate is not None:
        yield section.evaluate.judge, section.evaluate.data or section.data


def _check_function(call: str, key: str, data: DataConfig | None, kind: type = Prompt) -> None:
    """Check that a function is there, and that the rows have the columns that it takes."""
    function = load_function(call, key=key)
    rows = () if data is None else _rows(data, kind)
    prompts = (problem_prompt(row) if isinstance(row, Problem) else row for row in rows)
    try:
        check_arguments(function, prompts)
    except RewardError as error:
        raise ConfigError(f"{key} = {call!r}: {error}") from error


def _check_judge(judge: object, data: DataConfig | None, *, scores: bool) -> None:
    if isinstance(judge, FunctionJudge):
        _check_function(judge.call, "judge.call", data)
    if not isinstance(judge, JudgeConfig):
        return
    rubric = read_rubric(judge.rubric)
    if scores and not isinstance(rubric, str):
        raise ConfigError(
            f"{judge.rubric} holds principles for comparisons; scores need one rubric, in a text "
            "file",
        )
    if judge.server is not None:
        require("openai", "asking a server", "judge")
        judge.server.key()
    elif not exists(folder := expanduser(str(judge.model))) or not newest_policy(Path(folder)):
        check_model(build(ModelConfig, {"source": judge.model}, where="judge.model"))


def _check_reward(name: str, section: RewardedSection) -> None:
    for call in section.function.calls if section.function else ():
        _check_function(call, "function.call", section.data, section.kind or Prompt)
    if section.verifiable is not None and section.verifiable.kind == "code":
        _check_tests(name, section)
    if section.verifiable is not None and section.verifiable.kind in PACKAGES:
        require(
            PACKAGES[section.verifiable.kind],
            f"verifiable.kind = {section.verifiable.kind!r}",
            "verify",
        )
    if section.classifier is not None:
        source = Path(section.classifier.source).expanduser()
        if (source.is_dir() or section.classifier.source.startswith((".", "/", "~"))) and not (
            source / "config.json"
        ).is_file():
            raise MissingFileError(
                f"{name}.classifier.source: {source} holds no model: there is no config.json. "
                "Give a folder that has",
            )
        if source.is_dir():
            where = f"{name}.classifier"
            check_model_folder(
                "SequenceClassification",
                build(ModelConfig, {"source": str(source)}, where=where),
            )


def _check_tests(name: str, section: RewardedSection) -> None:
    """Check that programs can be run against the tests of all rows."""
    for data in filter(None, (section.data, *section.others())):
        for problem in _rows(data, Problem):
            try:
                read_tests(tests_in(problem_prompt(problem)))
            except DataError as error:
                raise DataError(
                    f"{name}: {', '.join(data.paths)}, prompt {problem.id!r}: {error}. "
                    "Mend the row, or take it out",
                ) from error


def _check_online(name: str, section: OnlineSection, model: ModelConfig) -> None:
    if section.task is not None:
        require("reasoning-gym", "a reasoning-gym task", "verify")
    if section.engine.kind != "local":
        check_engine(section.engine, section.lora, quantize=model.quantize)
    if section.evaluate is None:
        return
    if section.evaluate.data is None and section.data is not None:
        count = section.evaluate.prompts
        if (there := _rows_up_to(section.data, section.kind or Prompt, count + 1)) <= count:
            raise DataError(
                f"{name}.evaluate.prompts = {count}, and {name}.data has {there} prompts: none "
                "would be left to train on. Set evaluate.prompts lower, or give more prompts",
            )


def _check_pairs(section: PairsSection) -> None:
    if section.agreement is not None:
        look((section.agreement,), Comparison)
    if section.store is not None:
        from tether.annotation.store import Store

        with contextlib.closing(Store(section.store)):
            pass
    prompts = section.prompts or 0
    if (
        prompts
        and section.data is not None
        and (there := _rows_up_to(section.data, Prompt, prompts)) < prompts
    ):
        raise ConfigError(
            f"pairs.prompts = {prompts}, and there are {there} to use: raise "
            "samples_per_prompt instead",
        )


def _check_classes(data: DataConfig) -> None:
    """Check that answers are of both kinds. Reading ends as soon as both have occurred."""
    kinds = set[bool]()
    for row in _rows(data, Feedback):
        kinds.add(row.desirable)
        if len(kinds) == 2:
            return
    if kinds:
        raise DataError(
            f"all responses of {', '.join(data.paths)} are "
            f"{'desirable' if kinds.pop() else 'undesirable'}: KTO learns from both "
            "kinds. Add responses of the other kind; desirable ones alone are demonstrations, for sft.",
        )


def _check_held_out(name: str, data: DataConfig, fraction: float, seed: int) -> None:
    """Check that a row of an objective is held out. Reading ends at the first."""
    if any(split_by_group([row], fraction, seed)[1] for row in _rows(data, Comparison)):
        return
    if not any(path.startswith("hub:") for path in data.paths):
        raise DataError(
            f"{name}: no row is held out at heldout_fraction = {fraction:g}, and scores of "
            "objectives get one scale on held-out responses. Raise it, or give more prompts",
        )


def check_inputs(recipe: BaseRecipe) -> None:
    """Check that data, models and scorers of a recipe exist before a stage begins, and that each
    scorer can do all that its stage needs. A scorer may be one that the recipe trains.

    Raises:
        MissingFileError: see `check_sources`.
        ConfigError: there is none, or it cannot serve the stage.
    """
    check_sources(recipe)
    for name in recipe.stages:
        section = recipe.section(name)
        if isinstance(section, RewardedSection) and section.scorer is not None:
            elsewhere = section.reward_model is not None
            if elsewhere or recipe.section(section.scorer) is None:
                _check_scorer(name, section, section.scorer, Path(recipe.run))


def _check_scorer(name: str, section: RewardedSection, scorer: str, root: Path) -> None:
    """Check a scorer that the recipe itself does not train."""
    elsewhere = reward_model_of(section)
    folder = elsewhere or root / scorer / "model"
    if not is_scorer(folder):
        source = "learned" if scorer == "reward" else scorer
        raise ConfigError(
            f"{name}.reward_source = {source!r} needs a [{scorer}] section, or a "
            f"finished {scorer} stage in the run directory; or another reward_source: "
            "function, classifier, verifiable"
            if elsewhere is None
            else f"{name}.reward_model = {section.reward_model!r}: there is no trained reward model",
        )
    if scorer != "reward":
        return
    faults = scorer_faults(
        name,
        section,
        objectives=objective_names(folder),
        ensemble=(folder / ENSEMBLE).is_file(),
    )
    if first := next(faults, None):
        raise ConfigError(first)


def check_test_judge(name: str, section: Section, reward: object, folder: Path) -> None:
    """Check that there will be a test model by which held-out answers are to be judged.

    Args:
        reward: the recipe's section of the scorer; None: the recipe does not train one.
        folder: of the test model, beside the scorer.

    Raises:
        ConfigError: there will be none.
    """
    evaluate = section.evaluate if isinstance(section, OnlineSection) else None
    if evaluate is None or evaluate.judge != "test":
        return
    makes_one = isinstance(reward, RewardSection) and reward.test_share
    if not makes_one and (reward is not None or not folder.is_dir()):
        raise ConfigError(
            f"{name}.evaluate.judge = 'test' needs a test model in {folder}. Give the recipe a "
            "[reward] section with reward.test_share above 0",
        )


def _rows_up_to(data: DataConfig, kind: type, count: int) -> int:
    """Number of rows, counted no further than `count`. Rows of the hub count as enough."""
    if any(path.startswith("hub:") for path in data.paths):
        return count
    return sum(1 for _ in islice(_rows(data, kind), count))


def _rows(data: DataConfig, kind: type) -> Iterator[Any]:
    """The rows of files, one after another; none of the hub, whose data is left for when it is
    needed.
    """
    if not any(path.startswith("hub:") for path in data.paths):
        yield from read(
            data.paths,
            kind,
            quarantine=Quarantine(keep=0),
            **data.model_dump(exclude={"path"}),
        )
