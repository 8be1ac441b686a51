"""Stages that learn from rows alone: demonstrations, judged steps of solutions, comparisons, single
verdicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from tether.core.errors import DataError
from tether.core.rundir import RunDirectory, write_json
from tether.core.types import Demonstration, Feedback, Json, Prompt, Sampling
from tether.data.calls import Calls
from tether.models.carried import Rounding, merged_weights, settle
from tether.models.loading import LoadedModel, save_model, weights_digest
from tether.models.quantized import dequantized
from tether.models.speech import write_speech
from tether.models.trunk import Role
from tether.runner.assembly.checks import file_rows
from tether.runner.assembly.job import Job
from tether.runner.assembly.manifest import stage_model
from tether.runner.assembly.roles import (
    encoder_of,
    frozen_role,
    local_engine,
    new_role,
    reward_role,
    save_trained,
    whole,
)
from tether.runner.methods.writing import written
from tether.settings.model import ModelConfig
from tether.settings.supervised import DirectSection, ProcessSection, SFTSection, SupervisedSection
from tether.stages.direct import Direct
from tether.stages.kto import KTO
from tether.stages.learner.ranks import Ranks
from tether.stages.process_reward import ProcessRewardModeling
from tether.stages.sft import SFT

MERGE_LOSES = 0.05
"""Share of fine-tuning's gain that a merge may lose before a note says so."""
MERGE_HOLDS = 0.99
"""Share of a merged change that rounded weights have to hold, or a note says so."""
CALLED, CALL_TOKENS = 64, 256
"""Prompts of demonstrated calls that are tried after fine-tuning, and tokens of a reply to them."""
CALLS_NEEDED = 0.95
"""Share of these replies with a call that can be read, or a note says what will follow."""


def train(
    job: Job[SupervisedSection],
    rows: Sequence[Any],
    run: RunDirectory,
    ranks: Ranks,
) -> Json:
    """Train on top of the model; the result is a model that all else starts from (SFT), or the role
    in `model` or `policy`.
    """
    if isinstance(job.settings, SFTSection) and job.settings.teacher:
        rows = written(job, job.settings.teacher, rows, run, ranks)
        run.update_manifest(written=len(rows))
    loaded = stage_model(job, run, ranks)
    stage = _stage(job, loaded, ranks)
    summary = stage.train(rows, run, job.progress)
    if isinstance(stage, SFT):
        merged = _save_merged(stage.role, loaded, job, run, ranks)
        summary = {**summary, **_loss_of_merged(stage, merged, summary, loaded)}
        if ranks.size == 1:
            summary |= _calls_read(merged, rows, loaded, job.seed)
    elif isinstance(job.settings, ProcessSection):
        save_trained(stage.role, loaded, run.path / "model", kind="process")
        write_json(run.path / "model" / "steps.json", {"delimiters": job.settings.delimiters})
    else:
        save_trained(stage.role, loaded, run.path / "policy", kind="policy")
    return loaded.noted(summary)


def check_verdicts(job: Job[SupervisedSection], _: ModelConfig) -> None:
    """Check that single verdicts are of both kinds. Reading ends as soon as both have occurred."""
    data = job.settings.data
    if job.settings.kind is not Feedback or data is None:
        return
    kinds = set[bool]()
    for row in file_rows(data, Feedback):
        kinds.add(row.desirable)
        if len(kinds) == 2:
            return
    if kinds:
        raise DataError(
            f"all responses of {', '.join(data.paths)} are "
            f"{'desirable' if kinds.pop() else 'undesirable'}: KTO learns from both "
            "kinds. Add responses of the other kind; desirable ones alone are demonstrations, for sft.",
        )


def _stage(
    job: Job[SupervisedSection],
    loaded: LoadedModel,
    ranks: Ranks,
) -> SFT | ProcessRewardModeling | Direct | KTO:
    """The trainer of a stage.

    The reference of a policy under an adapter is the bare trunk. A policy that is trained whole has
    a reference model of its own.
    """
    section = job.settings
    encoder = encoder_of(loaded)
    seed = job.seed
    if isinstance(section, ProcessSection):
        role = reward_role(loaded, section, seed)
        return ProcessRewardModeling(section, role, encoder, ranks=ranks)
    if isinstance(section, SFTSection):
        role = new_role(loaded, "sft", section.lora, seed=seed)
        return SFT(section, role, encoder, ranks=ranks)
    policy = new_role(loaded, "policy", section.lora, seed=seed)
    reference = None
    if section.needs_reference:
        # precomputed: asked before it changes
        on_trunk = section.lora is not False or section.precomputed
        reference = Role(policy.model) if on_trunk else frozen_role(loaded, seed, section.offload)
    if isinstance(section, DirectSection):
        return Direct(section, policy, reference, encoder, ranks=ranks)
    assert reference is not None
    return KTO(section, policy, reference, encoder, ranks=ranks)


def _save_merged(
    role: Role,
    loaded: LoadedModel,
    job: Job[SupervisedSection],
    run: RunDirectory,
    ranks: Ranks,
) -> Role:
    """A plain transformers folder `model`, adapters merged: the reference of all that follows.
    Returns the merged role.
    """
    role = whole(dequantized(role), loaded, job.seed)
    if ranks.first:
        rounding = Rounding(role.model.dtype)
        settled = settle(role.model, role.adapter, rounding)
        if rounding.share is not None and rounding.share < MERGE_HOLDS:
            loaded.note(_rounded_away(rounding))
        encoder = encoder_of(loaded)
        folder = run.path / "model"
        save_model(settled, loaded.tokenizer, encoder.templates, folder, stop_ids=loaded.stop_ids)
        write_speech(folder, encoder.describe(), str(settled.dtype).removeprefix("torch."))
        run.update_manifest(result={"digest": weights_digest(merged_weights(settled))})
        role = Role(settled)
    return role


def _rounded_away(rounding: Rounding) -> str:
    """A sentence on an adapter of which rounded weights hold a part."""
    layers = rounding.layers
    dtype = str(rounding.dtype).removeprefix("torch.")
    return (
        f"The adapter of {layers} {'layer is' if layers == 1 else 'layers are'} merged into {dtype} "
        f"weights, since DoRA, embeddings and convolutions cannot be computed beside them. The "
        f"rounded weights hold {rounding.share:.0%} of what it changed there. Plain adapters on "
        "linear layers, or model.dtype = 'float32', keep all of it."
    )


def _loss_of_merged(stage: SFT, merged: Role, summary: Json, loaded: LoadedModel) -> Json:
    """The held-out loss of the model that was saved, where its weights have less than float32.

    Parts that layers carry beside their weights are not rounded away (models.carried). All other
    parts are merged. A weight stays the same if its change is less than half a step of its dtype.
    """
    before = summary["eval_loss_before"]
    after = summary["eval_loss"]
    adapted = stage.config.lora is not False if isinstance(stage.config, SFTSection) else False
    rounded = merged.model.dtype != torch.float32
    if not (adapted and stage.heldout and rounded and stage.ranks.size == 1):
        return {}
    loss = SFT(stage.config, merged, stage.encoder).evaluate(stage.heldout)["loss"]
    lost = (loss - after) / (before - after) if before > after else 0.0
    if lost > MERGE_LOSES:
        loaded.note(
            f"{lost:.0%} of what fine-tuning gained is lost where the adapter is merged into "
            f"{str(merged.model.dtype)[6:]} weights: the held-out loss is {before:.4f} before "
            f"training, {after:.4f} after it, and {loss:.4f} with the merged model, from which "
            "later stages start. Plain adapters on linear layers lose nothing: set sft.lora.dora "
            "= false or name other sft.lora.targets, or set model.dtype = 'float32'",
        )
    return {"eval_loss_merged": loss}


def _calls_read(
    role: Role,
    rows: Sequence[Demonstration],
    loaded: LoadedModel,
    seed: int,
) -> Json:
    """The share of sampled replies with a call that can be read, where the demonstrated ones call.

    Reinforcement learning on calls that cannot be read comes to nothing: ReTool#10.
    """
    prompts = [
        Prompt(row.messages[:place])
        for row in rows
        for place, turn in enumerate(row.messages)
        if turn.tool_calls and row.messages[0].tools
    ][:CALLED]
    if not prompts:
        return {}
    engine = local_engine(role, loaded)
    try:
        groups = engine.generate(prompts, Sampling(CALL_TOKENS), seed=seed)
        share = statistics.fmean(
            Calls(engine.encoder, group.prompt.messages[0].tools).called(reply)
            for group in groups
            for reply in group.rollouts
        )
    except DataError as error:
        loaded.note(f"Whether the model's calls can be read was not tried: {error}")
        return {}
    fault = (
        f", and below {CALLS_NEEDED:.0%} reinforcement learning will likely fail, since a reply "
        "without one gets no result and hardly a reward: show more demonstrations, or train on them "
        "for longer"
    )
    loaded.note(
        f"{share:.0%} of {len(prompts)} replies that were sampled at demonstrated calls have a call "
        f"that can be read{fault if share < CALLS_NEEDED else ''}",
    )
    return {"calls_read": share}
