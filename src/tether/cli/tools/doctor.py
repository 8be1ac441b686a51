"""The doctor's round of a recipe: its stages that sample, assembled and probed with a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tether.core.command import command_line
from tether.core.errors import ConfigError
from tether.core.protocols import RewardSource
from tether.core.types import Prompt, Score
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine
from tether.models.cpu.memory import free_memory
from tether.models.pretrained import tokenizer_of
from tether.models.saving import member_folders, read_role
from tether.rewards.control import CheckedControl, RandomReward
from tether.rewards.environments import EpisodeReward
from tether.rewards.learned import TextReward
from tether.rewards.limit import FailureLimit
from tether.rewards.verifiable import VerifiableReward
from tether.rollout.local import LocalEngine
from tether.runner.assembly.data.prompts import faults_of, usable_prompts
from tether.runner.assembly.data.rows import load_rows, named
from tether.runner.assembly.online import OnlineStage, check_prompt, online_stage, prompts_of
from tether.runner.assembly.rewards import scoring_model, task_prompts
from tether.runner.assembly.roles import is_scorer
from tether.runner.folder import check_start
from tether.runner.prepare import prepare
from tether.settings.model import ModelConfig
from tether.settings.policy import PolicyConfig
from tether.settings.recipe import BaseRecipe
from tether.settings.sampling import OnlineSection, SamplingSection
from tether.settings.section import calls_functions
from tether.settings.stages import making
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.rollouts import Experience
from tether.stages.teachers import TeacherReward
from tether.watch.monitoring import doctor
from tether.watch.monitoring.doctor import Healthy, Result, Unexamined
from tether.watch.monitoring.trends import HELD_PRICE

RESPONSES = 16
"""Least number of samples of a probe."""
TOKENS = 32
"""At most, of a sample of a probe."""


def examine_recipe(recipe: BaseRecipe) -> dict[str, list[Result]]:
    """Assemble every stage of a recipe that samples, and examine it, without training or writing.

    Before SFT or the reward model are trained, the base model and a random reward replace them. The
    result reports this.

    Raises:
        ConfigError: no stage of the recipe samples.
        TetherError: a run would be refused (`runner.prepare`).
    """
    names = [name for name in recipe.stages if recipe.section(name).online]
    if not names:
        raise ConfigError(
            f"the recipe has no stage that samples at every step ({', '.join(making('policy'))}), "
            "and before training the doctor examines no others: `tether data inspect` looks at "
            f"its data, and `{command_line('doctor', recipe.run)}` at the run afterwards",
        )
    prepare(recipe, starting=False)
    results = {}
    for name in names:
        section, model, folder, notes = _standing(recipe, name)
        stage, loaded = online_stage(section, model, folder, recipe.seed)
        prompts = _probe_prompts(recipe, section, name, stage.config.samples_per_prompt)
        faults = faults_of(prompts, partial(check_prompt, stage, loaded.context_length))
        prompts = usable_prompts(prompts, faults, Quarantine(), name)
        reward = source(stage)
        encoder = reward.encoder if isinstance(reward, TextReward) else stage.encoder
        trained = None
        if folder is not None:
            role = read_role(member_folders(folder)[0])
            whole = role["adapter"] is None
            tokenizer = tokenizer_of(role["base"]) if whole else encoder.tokenizer
            trained = ChatEncoder.described(tokenizer, role["encoding"])
        results[name] = [*notes, *examine_stage(stage, prompts, reward_encoder=trained)]
        if isinstance(stage.reward, FailureLimit):
            stage.reward.close()
        del stage
        free_memory()
    return results


def examine_stage(
    stage: OnlineStage,
    prompts: Sequence[Prompt],
    *,
    reward_encoder: ChatEncoder | None = None,
) -> list[Result]:
    """Everything that a recipe can get wrong, on an assembled stage, which stays as it is.

    Args:
        reward_encoder: what the reward model was trained with, where there is one.
    """
    with unseeded(stage):
        probe = Probe(stage, prompts)
        config = stage.config
        sampling = stage.engine if isinstance(stage.engine, LocalEngine) else stage
        results = [
            doctor.temperature(
                probe.engine,
                lambda temperature: probe.measure(temperature)[0],
                probe.entropy,
                probe.mask,
                config.temperature,
                probe.tolerance,
            ),
            doctor.stop_tokens(stage.encoder, sampling.encoder.stop_ids),
            *_reward_checks(stage, probe, reward_encoder),
        ]
        if isinstance(config, PolicyConfig):
            results.append(
                doctor.planned_epochs(config.epochs, config.minibatches, config.target_kl),
            )
        return results


def _reward_checks(stage: OnlineStage, probe: Probe, trained: ChatEncoder | None) -> list[Result]:
    """Encoding, scores, their weight against the KL, and the rewards of useless answers."""
    reward = source(stage)
    odd_name = "empty or endless answers"
    if isinstance(reward, RandomReward | CheckedControl | TeacherReward):
        return [
            Unexamined(name, "the reward is a control or the teachers")
            for name in ("encoding", "scores", odd_name)
        ]
    if trained is None:
        encoding: Result = Unexamined("encoding", "the reward is no model of this run")
    elif isinstance(reward, TextReward):
        encoding = doctor.diagnose(
            "encoding",
            "the reward model reads answers as text",
            {"encodings-differ": reward.encoder.describe() != trained.describe()},
        )
    else:
        encoding = doctor.encodings(
            stage.encoder,
            trained,
            [r.prompt.messages for r in probe.rollouts],
        )
    scores = reward.score(probe.rollouts)
    sound = doctor.scores(scores, checked=isinstance(reward, VerifiableReward))
    if not isinstance(sound, Healthy) or isinstance(reward, EpisodeReward):
        return [encoding, sound, Unexamined(odd_name, "no sound scores of answers to compare with")]
    values = [s.value for s in scores if s.value is not None]
    scale = []
    spread = float(torch.tensor(values).std(correction=0))
    penalty = stage.config.missing_stop_penalty
    if isinstance(stage, PolicyGradient):
        config = stage.config
        if config.kl.coefficient and config.kl.place != "loss":
            deviation = 1.0 if config.normalize_scores or config.scale_advantages else spread
            scale = [
                doctor.kl_scale(
                    config.kl.coefficient,
                    doctor.TYPICAL_KL,
                    deviation,
                    HELD_PRICE * doctor.TYPICAL_KL,
                ),
            ]
        penalty += config.overlong_penalty if config.overlong_buffer else 0.0
        penalty *= spread if config.normalize_scores else 1.0
    scored = {
        kind: [s.value for s in reward.score(rows) if s.value is not None]
        for kind, rows in doctor.odd_answers(probe.rollouts, stage.encoder, probe.limit).items()
    }
    paid = {
        kind: [v - penalty * (kind == "endless") for v in values]
        for kind, values in scored.items()
        if values
    }
    return [encoding, sound, *scale, *doctor.empty_or_endless(values, paid)]


def unseeded(stage: OnlineStage) -> AbstractContextManager[None]:
    """A context that leaves torch's random state as it was."""
    return torch.random.fork_rng(
        devices=[stage.policy.device] if stage.policy.device.type == "cuda" else [],
    )


class Probe:
    """A few samples of a stage's policy, and what it says about them."""

    def __init__(self, stage: OnlineStage, prompts: Sequence[Prompt]) -> None:
        self.policy = stage.policy
        config = stage.config
        self.limit = min(config.max_new_tokens, TOKENS)
        groups = stage.engine.generate(
            prompts,
            replace(config.sampling, max_new_tokens=self.limit),
            num_samples=config.samples_per_prompt,
            seed=config.seed,
        )
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.experience = Experience(
            self.rollouts,
            [Score(0.0)] * len(self.rollouts),
            stage.encoder,
            config.micro_batch_tokens,
            self.policy.device,
            document_tokens=self.policy.document_tokens(config.micro_batch_tokens),
        )
        self.mask = self.experience.mask
        _, self.entropy = self.measure(config.temperature)
        self.engine = (
            self.experience.rollout_logprobs if all(r.logprobs for r in self.rollouts) else None
        )
        self.tolerance = 0.01 if self.policy.model.dtype == torch.float32 else 0.12

    @torch.no_grad()
    def measure(self, temperature: float) -> tuple[Tensor, Tensor]:
        """The policy's (sequences, time) log-probabilities and entropies, from a pass of its own."""
        logprobs, entropies = (torch.zeros_like(self.experience.logprobs) for _ in range(2))
        for rows, batch in zip(self.experience.rows, self.experience.batches, strict=True):
            flat = self.policy.logprobs(batch, temperature)
            for matrix, values in zip((logprobs, entropies), flat, strict=True):
                matrix[rows, : batch.num_steps] = batch.scatter(values)
        return logprobs, entropies


def source(stage: OnlineStage) -> RewardSource:
    """The reward itself: a limit of failures would end the examination that should report them, and
    remember the probe.
    """
    return stage.reward.source if isinstance(stage.reward, FailureLimit) else stage.reward


def _standing(
    recipe: BaseRecipe,
    name: str,
) -> tuple[SamplingSection, ModelConfig, Path | None, list[Result]]:
    """A section, its start model and its reward's folder; a model before its training has a
    substitute and a note.
    """
    section = recipe.section(name)
    root = Path(recipe.run)
    notes = []
    folder = scoring_model(section, root)
    started = recipe.section("sft") is None or (root / "sft" / "summary.json").is_file()
    if not started:
        notes.append(
            Unexamined(
                "reference",
                "the SFT stage has not run: the base model stands in for its result",
            ),
        )
    if folder and not (started and is_scorer(folder)):
        notes.append(
            Unexamined(
                "scores",
                f"the {section.scorer} stage has not run on that model: a random reward stands in",
            ),
        )
        section = section.model_copy(update={"reward_source": "random"})
        folder = None
    model = recipe.model
    if started and recipe.section("sft") is not None:
        check_start(root / "sft")
        model = model.on_folder(root / "sft" / "model")
    return section, model, folder, notes


def _probe_prompts(
    recipe: BaseRecipe,
    section: OnlineSection,
    name: str,
    samples: int,
) -> list[Prompt]:
    count = max(2, -(-RESPONSES // samples))
    if section.task is not None:
        return task_prompts(section.task, count)
    source = named(section.data or (recipe.section("pairs") and recipe.section("pairs").data), name)
    return [
        *prompts_of(
            section,
            load_rows(
                source.model_copy(update={"limit": min(count, source.limit or count)}),
                section.kind or Prompt,
                Quarantine(),
                whole=calls_functions(section),
            ),
        ),
    ]
