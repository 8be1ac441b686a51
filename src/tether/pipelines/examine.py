"""The doctor's rounds: a recipe's stages that sample, assembled and probed with a few prompts, or the files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tether.assemble import ONLINE, OnlineSection, OnlineStage, Recipe, describe_sections, load_rows, online_stage
from tether.core.errors import ConfigError, DataError, RunError
from tether.core.protocols import RewardSource
from tether.core.rundir import noted_path, read_json
from tether.core.types import Problem, Prompt, Rollout, Score, StopReason
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine
from tether.models.config import ModelConfig
from tether.models.loading import quiet
from tether.models.memory import release
from tether.models.saving import member_folders, read_role
from tether.models.trunk import Role
from tether.monitoring import doctor
from tether.monitoring.doctor import Finding, Healthy, Result, Untold
from tether.monitoring.doctor_log import check_rows
from tether.monitoring.stillness import moved
from tether.pipelines.journey import stage_model
from tether.report.reading import mapping, number, read_journey, section_of
from tether.rewards.control import RandomReward
from tether.rewards.function import FailureLimit
from tether.rewards.learned import LearnedReward
from tether.rewards.verifiable import VerifiableReward, problem_prompt, reasoning_gym_prompts
from tether.stages.experience import Experience, gather
from tether.stages.online_direct import OnlineDirect
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.reference import role_digest

RESPONSES, TOKENS = 16, 32
"""How many samples a probe takes at least, and of how many tokens at most."""


def examine_recipe(recipe: Recipe) -> dict[str, list[Result]]:
    """Assemble every stage of a recipe that samples, and examine it; nothing is trained and nothing written.

    Where SFT or the reward model are not trained yet, the base model and a random reward stand in, and the result says so.

    Raises:
        ConfigError: no stage of the recipe samples.
    """
    names = [name for name in describe_sections(recipe) if name in ONLINE]
    if not names:
        raise ConfigError(f"the recipe has no stage that samples ({', '.join(ONLINE)}), and the doctor examines no others")
    results = {}
    for name in names:
        section, model, folder, notes = _standing(recipe, name)
        stage, loaded = online_stage(section, model, folder, recipe.seed)
        prompts = _probe_prompts(section, name, stage.config.samples_per_prompt)
        trained = None if folder is None else _trained_encoder(folder, stage.encoder)
        results[name] = [*notes, *examine_stage(stage, prompts, reward_encoder=trained, digest=loaded.digest)]
        if callable(close := getattr(stage.reward, "close", None)):
            close()
        del stage, loaded
        release()
    return results


def examine_stage(
    stage: OnlineStage, prompts: Sequence[Prompt], *, reward_encoder: ChatEncoder | None = None, digest: str | None = None
) -> list[Result]:
    """All live checks of an assembled stage; weights, random state and training modes stay as they are.

    Args:
        reward_encoder: what the reward model was trained with, where there is one.
        digest: of the model that the reference should be.
    """
    devices = [stage.policy.device] if stage.policy.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        return _examined(stage, prompts, reward_encoder, digest)


def _examined(stage: OnlineStage, prompts: Sequence[Prompt], trained: ChatEncoder | None, digest: str | None) -> list[Result]:
    reward = _source(stage)
    members = getattr(reward, "members", None) or [getattr(reward, "role", None)]
    roles = {"policy": stage.policy, "reference": _reference(stage), "value model": getattr(stage, "value", None)}
    roles |= {f"reward model{f' {n}' if n else ''}": role for n, role in enumerate(members)}
    probe = _Probe(stage, prompts)
    results: list[Result] = [
        doctor.dropout(name, role, lambda role=role: probe.hidden(role)) for name, role in roles.items() if role is not None
    ]
    if any(isinstance(result, Finding) for result in results):
        return [*results, Untold("all else", "dropout would look like other faults: switch it off first")]
    results += [
        *_reference_checks(stage, probe, digest),
        doctor.temperature(probe.engine, probe.at, probe.entropy, probe.mask, stage.config.temperature, probe.tolerance),
        doctor.stop_tokens(stage.encoder, getattr(getattr(stage.engine, "encoder", stage.encoder), "stop_ids", ())),
        doctor.stop_counted(probe.ended.mask, probe.ended.rollouts, stage.encoder.pad_id),
        doctor.lost_updates(stage.learner.optimizer),
        *_reward_checks(stage, probe, trained),
    ]
    if isinstance(stage, PolicyGradient):
        config = stage.config
        results += [doctor.planned_epochs(config.epochs, config.minibatches, config.target_kl), *_shaping_checks(stage, probe)]
    else:
        results.append(Untold("KL sign", "this stage takes no KL off a reward"))
    return results


class _Probe:
    """A few samples of a stage's policy, and what its roles say about them."""

    def __init__(self, stage: OnlineStage, prompts: Sequence[Prompt]) -> None:
        self.stage, config = stage, stage.config
        self.limit = min(config.max_new_tokens, TOKENS)
        sampling = replace(config.sampling, max_new_tokens=self.limit)
        groups = stage.engine.generate(prompts, sampling, num_samples=config.samples_per_prompt, seed=config.seed)
        self.rollouts = [rollout for group in groups for rollout in group.rollouts]
        self.experience = self.gathered(self.rollouts)
        self.mask = self.experience.mask
        stop = stage.encoder.stop_ids[:1]
        short = [replace(r, response_ids=(*r.response_ids[:3], *stop), stop_reason=StopReason.STOP_TOKEN) for r in self.rollouts]
        self.ended = self.gathered(short)
        with torch.no_grad():
            self.states = [stage.policy.hidden(batch) for batch in self.experience.batches]
        self.logprobs, self.entropy = self._said(config.temperature)
        self.engine: Tensor | None = None
        if all(r.logprobs for r in self.rollouts):
            self.experience.put_rollout_logprobs()
            self.engine = self.experience.rollout_logprobs
        self.tolerance = 0.01 if stage.policy.model.dtype == torch.float32 else 0.12

    def gathered(self, rollouts: list[Rollout]) -> Experience:
        """The stage's own matrices for these rollouts, with scores that all differ."""
        stage = self.stage
        limit = stage.policy.document_tokens(stage.config.micro_batch_tokens)
        scores = [Score(0.5 + n, steps=((len(r.response_ids) - 1, 0.5 + n),)) for n, r in enumerate(rollouts)]
        size = stage.config.micro_batch_tokens
        return gather(rollouts, scores, stage.encoder, size, stage.policy.device, document_tokens=limit)

    @torch.no_grad()
    def hidden(self, role: Role) -> Tensor:
        return role.hidden(self.experience.batches[0]).float()

    def at(self, temperature: float) -> Tensor:
        """The policy's log-probabilities at a temperature."""
        return self._said(temperature)[0]

    @torch.no_grad()
    def asked(self, role: Role) -> Tensor:
        """A role's log-probabilities, from a pass of its own."""
        batches = self.experience.batches
        return self._matrix([role.logprobs(batch, self.stage.config.temperature)[0] for batch in batches])

    @torch.no_grad()
    def _said(self, temperature: float) -> tuple[Tensor, Tensor]:
        policy, pairs = self.stage.policy, zip(self.states, self.experience.batches, strict=True)
        found = [policy.logprobs_of(states, batch, temperature) for states, batch in pairs]
        return self._matrix([logprobs for logprobs, _ in found]), self._matrix([entropy for _, entropy in found])

    def _matrix(self, parts: Sequence[Tensor]) -> Tensor:
        """Values of counted tokens, micro-batch by micro-batch, as (sequences, time)."""
        matrix = torch.zeros(self.experience.mask.shape, device=self.experience.mask.device)
        batches: list[TokenBatch] = self.experience.batches
        for rows, batch, flat in zip(self.experience.rows, batches, parts, strict=True):
            matrix[rows, : batch.num_steps] = batch.scatter(flat)
        return matrix


def _source(stage: OnlineStage) -> RewardSource:
    """The reward itself: a limit of failures would end the examination that should report them, and remember the probe."""
    return stage.reward.source if isinstance(stage.reward, FailureLimit) else stage.reward


def _reference(stage: OnlineStage) -> Any:
    return stage.pairs.likelihoods.reference if isinstance(stage, OnlineDirect) else stage.reference


def _reference_checks(stage: OnlineStage, probe: _Probe, digest: str | None) -> list[Result]:
    reference = _reference(stage)
    if reference is None:
        return [Untold("reference", "the stage asks no reference"), Untold("shared weights", "the stage asks no reference")]
    held_elsewhere = any(p.is_meta for p in reference.model.parameters())
    digests = None if digest is None or held_elsewhere else (role_digest(reference), digest)
    return [
        doctor.wrong_reference(probe.logprobs, probe.asked(reference), probe.mask, digests),
        doctor.shared_weights(
            stage.learner.parameters, reference, lambda: probe.asked(stage.policy), lambda: probe.asked(reference)
        ),
    ]


def _reward_checks(stage: OnlineStage, probe: _Probe, trained: ChatEncoder | None) -> list[Result]:
    """Encoding, scores, their weight against the KL, and what the reward gives answers that nobody wants."""
    reward, odd_name = _source(stage), "empty or endless answers"
    if isinstance(reward, RandomReward):
        return [Untold(name, "the reward is random") for name in ("encoding", "scores", odd_name)]
    if trained is None:
        encoding: Result = Untold("encoding", "the reward is no model of this run")
    elif isinstance(reward, LearnedReward) and reward.foreign:
        encoding = Untold("encoding", "the reward model encodes the text anew")
    else:
        encoding = doctor.encodings(stage.encoder, trained, [r.prompt.messages for r in probe.rollouts])
    found = reward.score(probe.rollouts)
    sound = doctor.scores(found, checked=isinstance(reward, VerifiableReward))
    if not isinstance(sound, Healthy):
        return [encoding, sound, Untold(odd_name, "there are no sound scores to compare with")]
    known = [s.value for s in found if s.value is not None]
    scale, spread = [], float(torch.tensor(known).std(correction=0))
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
    return [encoding, sound, *scale, *doctor.empty_or_endless(known, paid)]


def _shaping_checks(stage: PolicyGradient, probe: _Probe) -> list[Result]:
    """What the stage's own `shape` and loss make of a policy that has drifted from its reference, and of scores alone."""
    config, state = stage.config, stage.state()
    drifted = torch.zeros_like(probe.logprobs)
    drifted[:: config.samples_per_prompt] = 1.0  # one sample of each group: a drift of all would vanish in the baseline
    try:
        calm = _shaped(stage, probe, torch.zeros_like(drifted))
        moved = _shaped(stage, probe, drifted)
        ended = [len(r.response_ids) for r in probe.rollouts]
        results: list[Result] = [doctor.score_once(calm, ended)]
        if not stage.kl_coefficient:
            return [*results, Untold("KL sign", "kl.coefficient = 0: no KL is paid")]
        place: Literal["reward", "loss"] = "loss" if config.kl.place == "loss" else "reward"
        change = float(((moved - calm) * drifted.bool().any(-1, keepdim=True)).sum())
        if place == "loss":
            change = _loss(stage, probe, 2.0) - _loss(stage, probe, 1.0)
        return [*results, doctor.kl_sign(change, stage.kl_coefficient, place)]
    finally:
        stage.load_state(state)


@torch.no_grad()
def _shaped(stage: PolicyGradient, probe: _Probe, drift: Tensor) -> Tensor:
    """Rewards where the policy stands `drift` nats a token above its reference."""
    experience = probe.gathered(probe.rollouts)
    experience.logprobs = probe.logprobs * probe.mask
    experience.reference_logprobs = (probe.logprobs - drift) * probe.mask
    return stage.shape(experience)


def _loss(stage: PolicyGradient, probe: _Probe, drift: float) -> float:
    """The loss of the first micro-batch at no advantage, the reference `drift` nats a token below the policy."""
    experience = probe.gathered(probe.rollouts)
    experience.logprobs, experience.reference_logprobs = probe.logprobs.clone(), probe.logprobs - drift
    experience.weights, experience.common = stage.weights(experience), [None] * len(experience.batches)
    experience.put_rollout_logprobs()
    try:
        return stage._accumulate(experience, 0, max(1, experience.token_counts()[0]))["loss"]
    finally:
        stage.learner.optimizer.zero_grad(set_to_none=True)


def _standing(recipe: Recipe, name: str) -> tuple[OnlineSection, ModelConfig, Path | None, list[Result]]:
    """A section, the model it stands on and its reward's folder; what is not trained yet has a stand-in and a note."""
    section, root, notes = getattr(recipe, name), Path(recipe.run), []
    scorer = "process" if section.reward_source == "process" else "reward"
    folder = root / scorer / "model" if section.reward_source in ("learned", "process") else None
    started = recipe.sft is None or (root / "sft" / "summary.json").is_file()
    if not started:
        notes.append(Untold("reference", "the SFT stage has not run: the base model stands in for its result"))
    trained = folder is not None and any((folder / file).is_file() for file in ("role.json", "ensemble.json", "objectives.json"))
    if folder is not None and not (started and trained):
        notes.append(Untold("scores", f"the {scorer} stage has not run on that model: a random reward stands in"))
        section, folder = section.model_copy(update={"reward_source": "random"}), None
    return section, stage_model(recipe, root) if started else recipe.model, folder, notes


def _probe_prompts(section: OnlineSection, name: str, samples: int) -> list[Prompt]:
    count = max(2, -(-RESPONSES // samples))
    if section.task is not None:
        task = section.task
        return reasoning_gym_prompts(task.name, count, task.seed, task.config, system=task.system or "")
    if section.data is None:
        raise ConfigError(f"the [{name}] section names no data: set {name}.data.path")
    limit = min(8 * count, section.data.limit or 8 * count)
    kind = Prompt if section.verifiable is None else Problem
    rows = load_rows(section.data.model_copy(update={"limit": limit}), kind, Quarantine())[:count]
    if not rows:
        raise DataError(f"none of the first {limit} rows of {', '.join(section.data.paths)} can be used: see tether data inspect")
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
            settings = mapping(mapping(stage.config).get(section_of(stage)))
            results[stage.name] = moved(_numbers(stage.metrics), settings, stage.summary)
    for arm in journey.arms:
        if not arm.metrics:
            continue
        own = folder / arm.name if (folder / arm.name / "metrics.jsonl").is_file() else folder
        settings = next((mapping(v) for k, v in mapping(arm.config).items() if k in ONLINE), {})
        reward = mapping(arm.manifest).get("reward") if settings.get("reward_source", "learned") == "learned" else None
        results[arm.name] = [*check_rows(_numbers(arm.metrics), settings), _saved_encoding(own, reward)]
    if not results:
        raise RunError(f"{folder} holds no steps of a stage. Give the folder of a run that has taken some.")
    return results


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None]]:
    """What is finite of a log's numbers, without the measurement before the first step."""
    return [{key: number(value) for key, value in row.items()} for row in rows if row.get("step") != 0]


def _saved_encoding(folder: Path, reward: Any) -> Result:
    """Policy and reward model, as they were saved, stand on one base and read in one way."""
    if reward is None:
        return Untold("encoding", "no reward model of this run's scored")
    scorer = noted_path(folder, str(reward))
    if scorer is None:
        return Untold("encoding", f"the reward model, {reward} when it scored, is not there")
    name, files = "encoding", [place / "role.json" for place in (folder / "policy", member_folders(scorer)[0])]
    missing = [file for file in files if not file.is_file()]
    if missing:
        return Untold(name, f"{missing[0]} is not there")
    policy, scorer = map(read_json, files)
    differing = [key for key in ("base_digest", "encoding") if policy[key] != scorer[key]]
    if "encoding" in differing:
        advice = "Train the reward model on this policy's base, with its template and system prompt."
        message = "The reward model was trained on another encoding than it scored."
        return Finding(name, "error", message, f"{files[0]} and {files[1]} differ in {' and '.join(differing)}", advice)
    return Healthy(name, f"policy and reward model have one encoding{'' if differing else ' and one base'}")
