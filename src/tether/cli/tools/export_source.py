"""The trained model that a path names, found and loaded: a run, a stage, a role or a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tether.core.errors import MissingFileError, ModelError, RunError
from tether.core.rundir import read_json
from tether.core.types import Json
from tether.models.adapter_folders import holds_adapter
from tether.models.loading import LoadedModel
from tether.models.pretrained import config_at_hand
from tether.models.saving import base_noted, is_role, member_folders, read_role
from tether.models.speech import read_speech
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import load_policy, load_scorer, new_head, new_role, newest_policy
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.stages import STAGES, making
from tether.stages.learner.checkpoint import complete_checkpoints, load_checkpoint, unnumbered
from tether.watch.report.reading import mapping, read_sub_run


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of an export.

    `stage` is the run directory of the model. `folder` is that of the role; None for a checkpoint
    or for a model that tether did not train.
    """

    kind: str
    source: str
    folder: Path | None = None
    stage: Path | None = None
    checkpoint: Path | None = None


def find_source(source: str) -> Source:
    """Find the trained model that a path or a model source names.

    Raises:
        MissingFileError, RunError, ModelError: nothing, something unfinished, or several models.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return Source(kind="policy", source=source)
    if (path.name.startswith("step-") and path.parent.name in ("checkpoints", "best")) or (
        path / "state.safetensors"
    ).is_file():
        return _checkpoint(path)
    policy = newest_policy(path)
    for place in (
        (policy,)
        if policy
        else (path, *(path / name / "model" for name in ("", *making("sft", "reward"))))
    ):
        if (members := member_folders(place)) != [place]:
            raise ModelError(
                f"{place} names several reward models. Export them one by one: "
                f"{', '.join(map(str, members))}",
            )
        if is_role(place):
            return Source(
                kind=read_role(place)["kind"],
                source=source,
                folder=place,
                stage=stage_of(place),
            )
        if holds_adapter(place) or (
            (place / "config.json").is_file() and "model_type" in read_json(place / "config.json")
        ):
            return Source(kind="policy", source=str(place), stage=stage_of(place))
    unfinished = sorted(path.glob("**/checkpoints/step-*"))
    if unfinished:
        raise RunError(
            f"{path} is not finished. Let it go on, or export a checkpoint of it: {unfinished[-1]}",
        )
    raise MissingFileError(
        f"{path} holds neither a trained role nor a model. Give the folder of a run, a stage, a "
        "role or a checkpoint.",
    )


def stage_of(folder: Path) -> Path | None:
    """The run directory of a result's stage."""
    for parent in list(folder.resolve().parents)[:2]:
        if (parent / "config.json").is_file() and section_of(
            read_json(parent / "config.json"),
        ) is not None:
            return parent
    return None


def section_of(config: Json) -> str | None:
    """The name of the section that a stage's config.json is of."""
    return next(
        (name for name in STAGES if name in config and "model" in config and "seed" in config),
        None,
    )


def standing(source: str) -> str:
    """Run, stage and step of the policy that `source` names; `source` itself if no run made it."""
    place = find_source(source)
    if place.stage is None:
        return source
    roots = (folder for folder in place.stage.parents[:3] if (folder / "command.json").is_file())
    root = next(roots, place.stage.parent)
    summary = read_sub_run(place.stage, []).summary
    measured = next(
        (
            summary[name]
            for name in ("gold", "test", "heldout")
            if "kept_step" in mapping(summary, name)
        ),
        {},
    )
    steps = (*(summary.get(name) for name in ("best_update", "steps", "updates")), 0)
    # -1: no update was measured, so that the last one is the result
    step = measured.get("kept_step", next(s for s in steps if s is not None and s >= 0))
    return f"Run {root.name}, stage {place.stage.relative_to(root)}, after step {step}"


def _checkpoint(path: Path) -> Source:
    if not (path / "COMPLETE").is_file():
        whole = ", ".join(other.name for other in complete_checkpoints(path.parent))
        raise RunError(
            f"{path} is not a whole checkpoint. "
            f"{f'There are {whole}.' if whole else 'There is no other.'}",
        )
    stage = path.resolve().parent.parent
    section = section_of(read_json(stage / "config.json"))
    if section is None:
        raise RunError(
            f"{stage / 'config.json'} is not that of a stage of tether, so nobody knows what "
            f"{path} is a checkpoint of.",
        )
    kind = section if STAGES[section].scores else "policy"
    return Source(kind=kind, source=str(path), stage=stage, checkpoint=path)


def load_source(source: Source, dtype: str) -> tuple[Role, LoadedModel]:
    """The role, on its base, without a loss of what shall be written in `dtype`.

    Raises:
        ModelError, MissingFileError, RunError: a part is missing or does not fit.
    """
    if source.checkpoint is not None and source.stage is not None:
        config = read_json(source.stage / "config.json")
        if (base := base_noted(source.stage)) is not None:
            config["model"] |= {"source": base, "fallback": None}
        return role_of_checkpoint(source.checkpoint, config)
    if source.kind != "policy":
        assert source.folder is not None
        (role,), loaded = load_scorer(source.folder)
        return role, loaded
    own = source.folder or source.stage
    settings = None if own else _exact(source.source, dtype)
    role, loaded = load_policy(str(source.folder or source.source), settings)
    # SFT's result: its system message stands in the recipe
    if source.stage is not None and source.folder is None:
        loaded = replace(
            loaded,
            system_prompt=read_json(source.stage / "config.json")["model"].get("system_prompt"),
        )
    return role, loaded


def _exact(source: str, dtype: str) -> ModelConfig | None:
    """Settings for a model that no run made, where a processor's own type would round its
    weights.
    """
    config = None
    with suppress(OSError, ValueError):  # for those who open it to name
        config = config_at_hand(ModelConfig(source=source))
    rounds = config is not None and config.dtype not in (None, torch.bfloat16)
    if read_speech(source) or not (rounds or dtype == "float32"):
        return None
    return ModelConfig(source=source, dtype="float32")


def role_of_checkpoint(path: Path, config: Json) -> tuple[Role, LoadedModel]:
    """The role as if its stage had ended at this step. A supervised stage that compares weights has
    the best so far. Others have the moving average, if one is kept, else the step's own.

    A checkpoint holds its parameters by number, in the order of `Role.parameters`; what other parts
    learned comes after them.

    Raises:
        RunError: it does not fit the model of its run.
    """
    name = section_of(config)
    assert name is not None
    tensors, _ = load_checkpoint(path)
    weights = (
        unnumbered("best", tensors) or unnumbered("ema", tensors) or unnumbered("master", tensors)
    )
    loaded = open_model(
        build(ModelConfig, config["model"], where=f"{path}: model"),
        seed=config["seed"],
    )
    lora = LoraConfig.model_validate(config[name]["lora"]) if config[name].get("lora") else False
    trains_head = STAGES[name].scores  # whose bias is the last of its weights
    head = new_head(loaded, outputs=len(weights[-1]) if weights else 1) if trains_head else None
    role = new_role(loaded, "own", lora, seed=0, head=head)
    parameters = role.parameters()
    if [tensor.shape for tensor in weights[: len(parameters)]] != [
        parameter.shape for parameter in parameters
    ]:
        raise RunError(
            f"{path} does not fit the model of its run, {loaded.source}. Has that changed since?",
        )
    with torch.no_grad():
        for parameter, tensor in zip(parameters, weights, strict=False):
            parameter.copy_(tensor)
    if head is not None and name == "reward" and head.outputs > 1:
        role.head = head.only(0)  # quality, without length
    role.train_mode(False)
    return role, loaded
