"""Faults that a stage would meet only after others were trained: they are looked for before the
first one begins.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from itertools import islice
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

import torch

from tether.core.errors import ConfigError, DataError, ModelError, RewardError, require
from tether.core.types import Problem, Prompt
from tether.data.calls import Calls
from tether.data.sources import Quarantine
from tether.evaluation.sycophancy import read_premise_pairs
from tether.judges.constitution import read_rubric
from tether.models.loading import add_adapter, check_model
from tether.models.pretrained import config_at_hand
from tether.models.saving import ENSEMBLE, read_role
from tether.models.trunk import Role, context_length
from tether.rewards.environments import environments_of
from tether.rewards.forms import check_arguments
from tether.rewards.loading import load_function
from tether.rewards.verifiable import PACKAGES, check_known, problem_prompt
from tether.runner.assembly.data.rows import records_of
from tether.runner.assembly.data.sources import check_sources
from tether.runner.assembly.engines import check_engine
from tether.runner.assembly.evaluation.suites import check_evaluators
from tether.runner.assembly.job import Job
from tether.runner.assembly.rewards import scoring_model
from tether.runner.assembly.roles import (
    encoder_at_hand,
    is_scorer,
    newest_policy,
    objective_names,
    reader_beside,
    scorer_folders,
)
from tether.runner.assembly.teachers import check_teachers
from tether.settings.judges import FunctionJudge, JudgeConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.needs import Needs
from tether.settings.reading import build
from tether.settings.recipe import BaseRecipe, scorer_faults
from tether.settings.sampling import OnlineSection, PolicySection, RewardedSection
from tether.settings.section import DataConfig, Section
from tether.stages.learner.planner import shape_model


def check_section(name: str, section: Section, model: ModelConfig) -> None:
    """Load the functions of a stage and check the files that it reads beside its rows, without a
    model.

    Raises:
        ConfigError: a function cannot be loaded, a judge cannot be asked, a library is missing, a
            store cannot be opened.
        MissingFileError, DataError: a file is not there, holds something else, or has too few rows.
    """
    for judge, data in section.judges():
        _check_judge(judge, data, scores=not section.compares)
    if isinstance(section, RewardedSection) and (check := section.reward_kind.check):
        pkgutil.resolve_name(check)(name, section)
    _check_on_model(name, section, model)
    if (measured := section.measurement) is not None:
        check_evaluators(name if measured is section else f"{name}.evaluate", measured)
        if measured.sycophancy is not None:
            read_premise_pairs(measured.sycophancy.files, measured.sycophancy.pairs)


def _check_on_model(name: str, section: Section, model: ModelConfig) -> None:
    """Check what settings ask of a model's architecture, on its shapes: layers for adapters, layers
    below them, room for answers.
    """
    if (config := config_at_hand(model)) is None:
        return
    if model.template:
        encoder_at_hand(model)
    answers = dict(section).get("max_new_tokens") or 0
    if (length := context_length(config.get_text_config())) <= answers:
        raise ConfigError(
            f"{name}.max_new_tokens = {answers} leaves no room for a prompt in the model's context "
            f"of {length} tokens. Lower it",
        )
    lora = dict(section).get("lora")
    if not isinstance(lora, LoraConfig):
        return
    try:
        with torch.device("meta"):
            shape = shape_model(config, torch.float32, "eager")
            depth = Role(add_adapter(shape, "checked", lora, scores=section.scores)).common_depth
    except ModelError as error:
        raise ConfigError(f"{name}: {error}") from error
    if dict(section).get("keep_states_gb") and not depth:
        raise ConfigError(
            f"{name}.keep_states_gb keeps what the layers below the first adapter compute, and "
            f"with {name}.lora.last_layers = {lora.last_layers} there are none in this model of "
            f"{len(Role(shape).decoder_layers)} layers. Lower last_layers, or leave keep_states_gb "
            "out",
        )


def check_online(job: Job[OnlineSection], model: ModelConfig) -> None:
    """Check engine, task and prompts before the first stage begins.

    Args:
        model: of the recipe, whose shapes are known before a stage is trained on it.
    """
    name = job.name
    section = job.settings
    if section.task is not None:
        require("reasoning-gym", "a reasoning-gym task", "verify")
    if section.engine.kind != "local":
        check_engine(section.engine, section.lora, quantize=model.quantize)
    if dict(section).get("thought_tokens") and config_at_hand(model) is not None:
        _ = encoder_at_hand(model).chat.closing
    if section.environment is not None:
        tools = environments_of(section.environment).tools
        if tools and config_at_hand(model) is not None:
            Calls(encoder_at_hand(model), tools)
    if isinstance(section, PolicySection) and section.teacher:
        check_teachers(name, section, model)
    if not (count := section.set_aside) or section.data is None:
        return
    if (there := rows_up_to(section.data, section.kind or Prompt, count + 1)) <= count:
        raise DataError(
            f"{name}.evaluate.prompts = {count}, and {name}.data has {there} prompts: none "
            "would be left to train on. Set evaluate.prompts lower, or give more prompts",
        )


def _check_function(call: str, key: str, data: DataConfig | None, kind: type = Prompt) -> None:
    """Check that a function is there, and that the rows have the columns that it takes."""
    function = load_function(call, key=key)
    rows = () if data is None else file_rows(data, kind)
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
        judge.server.key()
    elif not exists(folder := expanduser(str(judge.model))) or not newest_policy(Path(folder)):
        own = {"source": judge.model, "template": judge.template}
        model = build(ModelConfig, own, where="judge.model")
        check_model(model)
        if judge.template and config_at_hand(model) is not None:
            encoder_at_hand(model)


def check_functions(_: str, section: RewardedSection) -> None:
    """Check the functions of a reward."""
    for call in section.function.calls if section.function else ():
        _check_function(call, "function.call", section.data, section.kind or Prompt)


def check_answers(name: str, section: RewardedSection) -> None:
    """Check that answers can be checked: the library is there, and so is what all rows carry."""
    kind = section.verifiable and section.verifiable.kind
    if kind in PACKAGES:
        require(PACKAGES[kind], f"verifiable.kind = {kind!r}", "verify")
    if kind not in ("code", "numeric", "gsm8k"):
        return
    for data in filter(None, (section.data, *section.others())):
        for problem in file_rows(data, Problem):
            try:
                check_known(kind, problem_prompt(problem))
            except DataError as error:
                raise DataError(
                    f"{name}: {', '.join(data.paths)}, prompt {problem.id!r}: {error}. "
                    "Mend the row, or take it out",
                ) from error


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
        folder = scoring_model(section, Path(recipe.run))
        if folder is None or not isinstance(section, RewardedSection):
            continue
        if section.reward_model is not None or recipe.section(str(section.scorer)) is None:
            _check_scorer(name, section, folder, recipe.model)


def _check_scorer(name: str, section: RewardedSection, folder: Path, model: ModelConfig) -> None:
    """Check a scorer that the recipe itself does not train."""
    scorer = section.scorer
    if not is_scorer(folder):
        raise ConfigError(
            f"{name}.reward_source = {section.reward_source!r} needs a [{scorer}] section, or a "
            f"finished {scorer} stage in the run directory; or another reward_source: "
            "function, classifier, verifiable, environment"
            if section.reward_model is None
            else f"{name}.reward_model = {section.reward_model!r}: there is no trained reward model",
        )
    trained = read_role(next(iter(scorer_folders(folder).values())))
    if trained["kind"] != scorer:
        raise ConfigError(
            f"{name}.reward_source needs a {scorer} model, and {folder} is a {trained['kind']} "
            "model. Give another folder, or another reward_source",
        )
    if trained["adapter"] is None and dict(section).get("roles") == "shared":
        raise ConfigError(
            f"{folder} holds a whole model, not an adapter. Use {name}.roles = 'separate'",
        )
    given = (key for key in BY_TOKENS if key.partition(" ")[0] in dict(section))
    key = next((key for key in given if Needs(key).holds(section)), "")
    if key and not _reads_tokens(folder, trained["base"], model, key):
        raise ModelError(
            f"{folder} was trained with another tokenizer, template, system message or kind of "
            f"model than the policy has, and {name} has {key}, which goes by the policy's "
            "tokens. Set it otherwise, or train the reward model on the policy's base",
        )
    if scorer != "reward":
        return
    names = objective_names(folder)
    members = len(scorer_folders(folder)) if (folder / ENSEMBLE).is_file() else 1
    for fault in scorer_faults(name, section, objectives=names, members=members):
        raise ConfigError(fault)


BY_TOKENS = (
    "roles = 'shared'",
    "reward_source = 'process'",
    "objectives",
    "reward_per_token",
    "value_init = 'reward'",
)
"""Settings with which a scorer reads the tokens of the policy."""


def _reads_tokens(folder: Path, base: str, model: ModelConfig, key: str) -> bool:
    """True if a scorer on this base reads the tokens of this model, as far as shows without
    weights.
    """
    if (own := config_at_hand(model)) is None:
        return True
    other = config_at_hand(ModelConfig(source=base)) if key.startswith("roles") else None
    texts = [config.get_text_config() for config in (own, other or own)]
    kinds = {(text.model_type, text.hidden_size, text.num_hidden_layers) for text in texts}
    return len(kinds) == 1 and reader_beside(folder, model) is None


def check_test_judge(name: str, section: Section, reward: Section | None, folder: Path) -> None:
    """Check that there will be a test model by which held-out answers are to be judged.

    Args:
        reward: the recipe's section of the scorer; None: the recipe does not train one.
        folder: of the test model, beside the scorer.

    Raises:
        ConfigError: there will be none.
    """
    if all(judge != "test" for judge, _ in section.judges()):
        return
    makes_one = reward is not None and any(part.kind == "test model" for part in reward.parts())
    if not makes_one and (reward is not None or not folder.is_dir()):
        raise ConfigError(
            f"{name}.evaluate.judge = 'test' needs a test model in {folder}. Give the recipe a "
            "[reward] section with reward.test_share above 0",
        )


def rows_up_to(data: DataConfig, kind: type, count: int) -> int:
    """Number of rows, counted no further than `count`. Rows of the hub count as enough."""
    if data.on_hub:
        return count
    return sum(1 for _ in islice(file_rows(data, kind), count))


def file_rows(data: DataConfig, kind: type) -> Iterator[Any]:
    """The rows of files, one after another; none of the hub, whose data is left for when it is
    needed.
    """
    if not data.on_hub:
        yield from records_of(data, kind, Quarantine(keep=0))
