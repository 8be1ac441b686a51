"""The doctor's rounds: a recipe's stages that sample, assembled and probed with a few prompts, or the files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tether.core.errors import ConfigError, DataError, RunError
from tether.core.rundir import noted_path, read_json
from tether.core.stages import making
from tether.core.types import Problem, Prompt
from tether.cpu.memory import free_memory
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine
from tether.models.config import ModelConfig
from tether.models.loading import quiet
from tether.models.saving import member_folders, read_role
from tether.monitoring import doctor
from tether.monitoring.doctor import Healthy, Result, Unexamined
from tether.monitoring.doctor_log import check_rows
from tether.monitoring.stillness import check_movement
from tether.report.reading import finite, mapping, read_journey
from tether.rewards.control import RandomReward
from tether.rewards.function import FailureLimit
from tether.rewards.verifiable import VerifiableReward, problem_prompt, reasoning_gym_prompts
from tether.rollout.local import LocalEngine
from tether.run.check_stage import Probe, source, unseeded
from tether.run.online_sections import OnlineSection
from tether.run.online_stage import OnlineStage, online_stage
from tether.run.recipe import BaseRecipe, stage_model
from tether.run.rows import load_rows, named
from tether.stages.policy_config import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient

RESPONSES = 16
"""How many samples a probe takes at least."""


def examine_recipe(recipe: BaseRecipe) -> dict[str, list[Result]]:
    """Assemble every stage of a recipe that samples, and examine it; nothing is trained and nothing written.

    Where SFT or the reward model are not trained yet, the base model and a random reward stand in, and the result says so.

    Raises:
        ConfigError: no stage of the recipe samples.
    """
    names = [name for name in recipe.stages if isinstance(recipe.section(name), OnlineSection)]
    if not names:
        raise ConfigError(
            f"the recipe has no stage that samples ({', '.join(making('policy'))}), and before training the doctor examines no "
            f"others: `tether data inspect` looks at its data, and `tether doctor {recipe.run}` at the run afterwards"
        )
    results = {}
    for name in names:
        section, model, folder, notes = _standing(recipe, name)
        stage, _ = online_stage(section, model, folder, recipe.seed)
        prompts = _probe_prompts(recipe, section, name, stage.config.samples_per_prompt)
        trained = None if folder is None else _trained_encoder(folder, stage.encoder)
        results[name] = [*notes, *examine_stage(stage, prompts, reward_encoder=trained)]
        if isinstance(stage.reward, FailureLimit):
            stage.reward.close()
        del stage
        free_memory()
    return results


def examine_stage(stage: OnlineStage, prompts: Sequence[Prompt], *, reward_encoder: ChatEncoder | None = None) -> list[Result]:
    """Everything that a recipe can get wrong, on an assembled stage, which stays as it is; check_stage has the rest.

    Args:
        reward_encoder: what the reward model was trained with, where there is one.
    """
    with unseeded(stage):
        probe, config = Probe(stage, prompts), stage.config
        logprobs_at = lambda temperature: probe.measure(stage.policy, temperature)[0]  # noqa: E731
        engine_stops = stage.engine.encoder.stop_ids if isinstance(stage.engine, LocalEngine) else stage.encoder.stop_ids
        results = [
            doctor.temperature(probe.engine, logprobs_at, probe.entropy, probe.mask, config.temperature, probe.tolerance),
            doctor.stop_tokens(stage.encoder, engine_stops),
            *_reward_checks(stage, probe, reward_encoder),
        ]
        if isinstance(config, PolicyConfig):
            results.append(doctor.planned_epochs(config.epochs, config.minibatches, config.target_kl))
        return results


def _reward_checks(stage: OnlineStage, probe: Probe, trained: ChatEncoder | None) -> list[Result]:
    """Encoding, scores, their weight against the KL, and what the reward gives answers that nobody wants."""
    reward, odd_name = source(stage), "empty or endless answers"
    if isinstance(reward, RandomReward):
        return [Unexamined(name, "the reward is random") for name in ("encoding", "scores", odd_name)]
    if trained is None:
        encoding: Result = Unexamined("encoding", "the reward is no model of this run")
    else:
        encoding = doctor.encodings(stage.encoder, trained, [r.prompt.messages for r in probe.rollouts])
    scores = reward.score(probe.rollouts)
    sound = doctor.scores(scores, checked=isinstance(reward, VerifiableReward))
    if not isinstance(sound, Healthy):
        return [encoding, sound, Unexamined(odd_name, "there are no sound scores to compare with")]
    values = [s.value for s in scores if s.value is not None]
    scale, spread = [], float(torch.tensor(values).std(correction=0))
    penalty = stage.config.missing_stop_penalty
    if isinstance(stage, PolicyGradient):
        config = stage.config
        if config.kl.coefficient and config.kl.place != "loss":
            deviation = 1.0 if config.normalize_scores or config.scale_advantages else spread
            scale = [doctor.kl_scale(config.kl.coefficient, doctor.TYPICAL_KL, deviation)]
        penalty += config.overlong_penalty if config.overlong_buffer else 0.0
        penalty *= spread if config.normalize_scores else 1.0
    odd = doctor.odd_answers(probe.rollouts, stage.encoder, probe.limit)
    scored = {kind: [s.value for s in reward.score(rows) if s.value is not None] for kind, rows in odd.items()}
    paid = {kind: [v - penalty * (kind == "endless") for v in values] for kind, values in scored.items() if values}
    return [encoding, sound, *scale, *doctor.empty_or_endless(values, paid)]


def _standing(recipe: BaseRecipe, name: str) -> tuple[OnlineSection, ModelConfig, Path | None, list[Result]]:
    """A section, the model it stands on and its reward's folder; what is not trained yet has a stand-in and a note."""
    section, root, notes = recipe.section(name), Path(recipe.run), []
    scorer = "process" if section.reward_source == "process" else "reward"
    folder = root / scorer / "model" if section.reward_source in ("learned", "process") else None
    started = recipe.section("sft") is None or (root / "sft" / "summary.json").is_file()
    if not started:
        notes.append(Unexamined("reference", "the SFT stage has not run: the base model stands in for its result"))
    trained = folder is not None and any((folder / file).is_file() for file in ("role.json", "ensemble.json", "objectives.json"))
    if folder is not None and not (started and trained):
        notes.append(Unexamined("scores", f"the {scorer} stage has not run on that model: a random reward stands in"))
        section, folder = section.model_copy(update={"reward_source": "random"}), None
    return section, stage_model(recipe, root) if started else recipe.model, folder, notes


def _probe_prompts(recipe: BaseRecipe, section: OnlineSection, name: str, samples: int) -> list[Prompt]:
    count = max(2, -(-RESPONSES // samples))
    if section.task is not None:
        task = section.task
        return reasoning_gym_prompts(task.name, count, task.seed, task.config, system=task.system or "")
    source = named(section.data or (recipe.section("pairs") and recipe.section("pairs").data), name)
    limit = min(8 * count, source.limit or 8 * count)
    kind = Prompt if section.verifiable is None else Problem
    rows = load_rows(source.model_copy(update={"limit": limit}), kind, Quarantine())[:count]
    if not rows:
        raise DataError(f"none of the first {limit} rows of {', '.join(source.paths)} can be used: see tether data inspect")
    return rows if section.verifiable is None else [problem_prompt(row) for row in rows]


def _trained_encoder(folder: Path, encoder: ChatEncoder) -> ChatEncoder:
    """The encoder that a saved role was trained with."""
    folder = member_folders(folder)[0]
    role = read_role(folder)
    tokenizer, encoding = encoder.tokenizer, role["encoding"]
    if role["adapter"] is None:
        from transformers import AutoTokenizer

        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return ChatEncoder(tokenizer, tuple(encoding["stop_ids"]), encoding["template"], encoding["system_prompt"])


def examine_run(folder: Path) -> dict[str, list[Result]]:
    """The log checks of every stage in a run's folder, or of a stage's own: all of them where it sampled, else whether it moved.

    Raises:
        RunError: no stage in the folder has taken a step.
    """
    journey, results = read_journey(folder), {}
    for stage in journey.supervised:
        if stage.metrics:
            settings = mapping(mapping(stage.config).get(stage.section))
            results[stage.name] = [check_movement(_numbers(stage.metrics), settings, stage.summary)]
    for arm in journey.arms:
        if not arm.metrics:
            continue
        own = folder / arm.name if (folder / arm.name / "metrics.jsonl").is_file() else folder
        settings = next((mapping(v) for k, v in mapping(arm.config).items() if k in making("policy")), {})
        reward = mapping(arm.manifest).get("reward") if settings.get("reward_source", "learned") == "learned" else None
        results[arm.name] = [*check_rows(_numbers(arm.metrics), settings), _saved_encoding(own, reward)]
    if not results:
        raise RunError(f"{folder} holds no steps of a stage. Give the folder of a run that has taken some.")
    return results


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """The finite numbers of a log, without the measurement before the first step."""
    return [{key: finite(value) for key, value in row.items()} for row in rows if row.get("step") != 0]


def _saved_encoding(folder: Path, reward: Any) -> Result:
    """Policy and reward model, as they were saved, stand on one base and read in one way."""
    if reward is None:
        return Unexamined("encoding", "no reward model of this run's scored")
    scorer = noted_path(folder, str(reward))
    if scorer is None:
        return Unexamined("encoding", f"the reward model, {reward} when it scored, is not there")
    name, files = "encoding", [place / "role.json" for place in (folder / "policy", member_folders(scorer)[0])]
    missing = [file for file in files if not file.is_file()]
    if missing:
        return Unexamined(name, f"{missing[0]} is not there")
    policy, scorer = map(read_json, files)
    differing = [key for key in ("base_digest", "encoding") if policy[key] != scorer[key]]
    evidence = f"policy and reward model have one encoding{'' if differing else ' and one base'}"
    if "encoding" in differing:
        evidence = f"{files[0]} and {files[1]} differ in {' and '.join(differing)}"
    return doctor.diagnose(name, evidence, {"saved-encodings-differ": "encoding" in differing})
