"""The stages of a recipe, one after another, each in a folder of its own and skipped when it is already complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tether.assemble import (
    DirectSection,
    KTOSection,
    ProcessSection,
    Recipe,
    RewardSection,
    SFTSection,
    direct_roles,
    encoder_of,
    learned_reward,
    reward_role,
    save_trained,
    settled,
    sft_role,
)
from tether.core.errors import ConfigError, MissingFileError, RunError
from tether.core.rundir import read_json, write_json
from tether.core.types import Comparison, Demonstration, Feedback, StepLabels
from tether.data.sources import split_by_group
from tether.learner.determinism import deterministic
from tether.models.config import ModelConfig
from tether.models.loading import load_model, save_model, weights_digest
from tether.models.memory import release
from tether.pipelines.measured import Progress
from tether.pipelines.online import run_online
from tether.pipelines.opening import check_data, finish_stage, open_stage, rows_of
from tether.pipelines.reward_members import RewardMembers
from tether.pipelines.reward_objectives import train_objectives
from tether.pipelines.rounds import run_rounds
from tether.stages.direct import Direct, DirectConfig
from tether.stages.kto import KTO, KTOConfig
from tether.stages.process_reward import ProcessRewardConfig, ProcessRewardModeling
from tether.stages.reward import RewardConfig, RewardModeling
from tether.stages.sft import SFT, SFTConfig

TEST_SEED = 15485863
"""Added to the seed by which the prompts of a test model are chosen: what is held out of them has the seed itself."""


def run_sft(
    section: SFTSection,
    model: ModelConfig,
    folder: Path,
    seed: int,
    *,
    demonstrations: Sequence[Demonstration] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune; the result is a plain transformers folder `folder/model`, adapters merged: the reference of all that follows."""
    section, run, done = open_stage(folder, "sft", section, model, seed)
    if done is not None:
        return done
    rows, quarantine = rows_of(demonstrations, section.data, Demonstration, run, "sft")
    loaded = load_model(model, seed=seed)
    run.update_manifest(model={"source": loaded.source, "digest": loaded.digest})
    role = sft_role(loaded, section.lora, seed)
    summary = SFT(settled(section, SFTConfig), role, encoder_of(loaded)).train(rows, run, progress)
    merged = role.model.merge_and_unload() if role.adapter is not None else role.model
    save_model(merged, loaded.tokenizer, encoder_of(loaded).template, folder / "model")
    run.update_manifest(result={"digest": weights_digest(merged)})
    return finish_stage(run, section, summary, quarantine)


def run_reward(
    section: RewardSection,
    model: ModelConfig,
    folder: Path,
    seed: int,
    *,
    comparisons: Sequence[Comparison] | None = None,
    gold: Sequence[Comparison] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train the reward model on top of `model`; the result is the role in `folder/model`, or those that are named there.

    With `section.test_share` a second model, of labels that the first one never sees, goes to `folder/test`.

    Args:
        gold: the held-out pairs in their true order, if anybody knows it; reported apart from the noisy labels.
    """
    section, run, done = open_stage(folder, "reward", section, model, seed)
    if done is not None:
        return done
    if section.objectives is not None:
        summary = train_objectives(section, folder, partial(run_reward, model=model, seed=seed), progress)
        return finish_stage(run, section, summary, None)
    rows, quarantine = rows_of(comparisons, section.data, Comparison, run, "reward")
    tests = {name: rows_of(None, data, Comparison, run, name)[0] for name, data in section.test.items()}
    apart: dict[str, Any] = {}
    if section.test_share:
        rows, others = split_by_group(rows, section.test_share, seed + TEST_SEED)
        plain = {"data": None, "test": {}, "test_share": 0.0, "members": 1, "average": False, "distill": None}
        own = section.model_copy(update=plain)
        apart = {"test_model": run_reward(own, model, folder / "test", seed, comparisons=others)}
        release()
    loaded = load_model(model, seed=seed)
    run.update_manifest(model={"source": loaded.source, "digest": loaded.digest})
    if section.members > 1:
        stage = RewardMembers(section, model, loaded, seed)
    else:
        stage = RewardModeling(settled(section, RewardConfig), reward_role(loaded, section, seed), encoder_of(loaded))
    summary = {**stage.train(rows, run, progress), **apart}
    if gold:
        summary["gold_accuracy"] = stage.evaluate(stage.rankings(gold)[0])["accuracy"]
    summary["tests"] = {name: stage.evaluate(stage.rankings(test)[0], sum(c.tie for c in test)) for name, test in tests.items()}
    if isinstance(stage, RewardMembers):
        stage.save(run)
    else:
        save_trained(stage.role, loaded, folder / "model", kind="reward")
    return finish_stage(run, section, summary, quarantine)


def run_process(
    section: ProcessSection,
    model: ModelConfig,
    folder: Path,
    seed: int,
    *,
    solutions: Sequence[StepLabels] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a process (or outcome) reward model on top of `model`; the result is the role in `folder/model`."""
    section, run, done = open_stage(folder, "process", section, model, seed)
    if done is not None:
        return done
    rows, quarantine = rows_of(solutions, section.data, StepLabels, run, "process")
    loaded = load_model(model, seed=seed)
    run.update_manifest(model={"source": loaded.source, "digest": loaded.digest})
    role = reward_role(loaded, section, seed)
    summary = ProcessRewardModeling(settled(section, ProcessRewardConfig), role, encoder_of(loaded)).train(rows, run, progress)
    save_trained(role, loaded, folder / "model", kind="process")
    write_json(folder / "model" / "steps.json", {"delimiters": section.delimiters})
    return finish_stage(run, section, summary, quarantine)


def run_direct(
    section: DirectSection | KTOSection,
    model: ModelConfig,
    folder: Path,
    seed: int,
    *,
    rows: Sequence[Comparison | Feedback] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Learn from comparisons or verdicts without a reward model; the result is the role in `folder/policy`."""
    name, kind = ("kto", Feedback) if isinstance(section, KTOSection) else ("direct", Comparison)
    section, run, done = open_stage(folder, name, section, model, seed)
    if done is not None:
        return done
    found, quarantine = rows_of(rows, section.data, kind, run, name)
    loaded = load_model(model, seed=seed)
    run.update_manifest(model={"source": loaded.source, "digest": loaded.digest})
    policy, reference = direct_roles(loaded, section, model, seed)
    if isinstance(section, KTOSection):
        assert reference is not None
        stage: Any = KTO(settled(section, KTOConfig), policy, reference, encoder_of(loaded))
    else:
        stage = Direct(settled(section, DirectConfig), policy, reference, encoder_of(loaded))
    summary = stage.train(found, run, progress)
    save_trained(policy, loaded, folder / "policy", kind="policy")
    return finish_stage(run, section, summary, quarantine)


def run_stage(
    name: str,
    section: Any,
    model: ModelConfig,
    folder: Path,
    seed: int,
    *,
    reward_folder: Path | None,
    rows: Sequence[Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The stage of a section's name, on `rows` or on the section's own data."""
    match name:
        case "sft":
            return run_sft(section, model, folder, seed, demonstrations=rows, progress=progress)
        case "reward":
            return run_reward(section, model, folder, seed, comparisons=rows, progress=progress)
        case "process":
            return run_process(section, model, folder, seed, solutions=rows, progress=progress)
        case "direct" | "kto":
            return run_direct(section, model, folder, seed, rows=rows, progress=progress)
        case "rounds":
            reward = None if section.method == "spin" or reward_folder is None else partial(learned_reward, reward_folder, model)
            return run_rounds(section, model, folder, seed, reward=reward, rows=rows, progress=progress)
    return run_online(section, model, folder, seed, name=name, reward_folder=reward_folder, prompts=rows, progress=progress)


def run_recipe(recipe: Recipe, stages: Sequence[str], progress: Callable[[str], Progress] | None = None) -> dict[str, Any]:
    """Run the named stages of a recipe in order; each finds its predecessors' results in the run directory.

    Raises:
        ConfigError: a stage that the recipe has no section for, or whose section names no data.
        DataError: a stage's data is something else, by its first rows; of all stages before the first is trained.
    """
    root, results = Path(recipe.run), {}
    for name in stages:
        if getattr(recipe, name) is None:
            raise ConfigError(f"the recipe has no [{name}] section")
        if not (root / name / "summary.json").is_file():
            check_data(name, getattr(recipe, name))
    root.mkdir(parents=True, exist_ok=True)
    with deterministic() if recipe.deterministic else contextlib.nullcontext():
        for name in stages:
            section = getattr(recipe, name)
            model = recipe.model if name == "sft" else stage_model(recipe, root)
            if name != "sft":
                _check_base(root, name)
            bar = progress(name) if progress else None
            reward = root / ("process" if getattr(section, "reward_source", None) == "process" else "reward") / "model"
            results[name] = run_stage(name, section, model, root / name, recipe.seed, reward_folder=reward, progress=bar)
            release()
    return results


def _check_base(root: Path, name: str) -> None:
    """A finished stage stands on the SFT model that is there now.

    Raises:
        RunError: it was trained on one that is gone.
    """
    manifests = {stage: root / stage / "manifest.json" for stage in ("sft", name)}
    if (root / name / "summary.json").is_file() and all(path.is_file() for path in manifests.values()):
        made = read_json(manifests["sft"]).get("result", {}).get("digest")
        stood_on = read_json(manifests[name]).get("model", {}).get("digest")
        if made and stood_on and made != stood_on:
            raise RunError(
                f"{root / name} was trained on another SFT model than the one that is in {root / 'sft'} now. Delete "
                f"{root / name} to train it again, and every stage that stands on it."
            )


def stage_model(recipe: Recipe, root: Path) -> ModelConfig:
    """What the stages after SFT stand on: the SFT model if the recipe makes one, the base model otherwise."""
    if recipe.sft is None:
        return recipe.model
    if not (root / "sft" / "summary.json").is_file():
        raise MissingFileError(f"{root / 'sft'} has no finished SFT stage; run it first (tether sft RECIPE).")
    return after_sft(recipe.model, root)


def after_sft(model: ModelConfig, root: Path) -> ModelConfig:
    """The same settings on the fine-tuned folder, which carries its own template."""
    return ModelConfig.model_validate(
        {**model.model_dump(), "source": str(root / "sft" / "model"), "fallback": None, "chat_template": None}
    )
