"""Trained parts on disk: an adapter with its head beside the base they belong to, or a whole
model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tether.core.digest import digest
from tether.core.errors import MissingFileError, ModelError, one_line
from tether.core.keeping import durable
from tether.core.rundir import file_digest, noted_path, read_if_there, read_json, write_json
from tether.core.types import Facts, Json
from tether.models.carried import (
    MergedChange,
    base_weights,
    factors_of,
    merged_weights,
    order_settings,
    write_change,
)
from tether.models.heads import ScalarHead
from tether.models.loading import LoadedModel, save_model, with_adapter, with_dtype_of_base
from tether.models.pretrained import quiet
from tether.models.quantized import is_quantized
from tether.models.trunk import Role
from tether.settings.model import TINY

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from tether.models.trunk import Trunk


class RoleDescription(TypedDict):
    """role.json: the training of a role, and its base.

    The file has `quantize` only for a quantised base, and `base_seed` only if the base is the
    random tiny model. `base_revision` is there if the recipe pinned a revision of the hub.
    """

    quantize: str | None
    base_seed: int
    kind: str
    adapter: str | None
    base: str
    base_digest: str
    base_rounded_digest: str
    base_revision: str | None
    dtype: str
    encoding: Facts


def save_role(role: Role, loaded: LoadedModel, folder: Path, *, kind: str, encoding: Facts) -> None:
    """Write a trained role: `adapter/` (peft's format) or `model/` (transformers'),
    `head.safetensors`, and `role.json`, last.

    Its base is what was really loaded, whatever was asked for.
    """
    base = os.path.relpath(loaded.source, folder) if Path(loaded.source).is_dir() else loaded.source
    dtype = str(role.model.dtype).removeprefix("torch.")
    stands_on = {
        "adapter": role.adapter,
        "base": base,
        "base_digest": loaded.digest,
        "base_rounded_digest": loaded.rounded_digest,
    }
    if loaded.source == TINY:
        stands_on["base_seed"] = loaded.seed
    if loaded.config.revision is not None and loaded.source == loaded.config.source:
        stands_on["base_revision"] = loaded.config.revision
    if is_quantized(role.causal_model):
        stands_on["quantize"] = "nf4"
    described = {"kind": kind, **stands_on, "dtype": dtype, "encoding": encoding}
    with durable(folder, over=True) as unfinished:
        if role.adapter is None:
            save_model(
                role.causal_model,
                loaded.tokenizer,
                encoding["template"],
                unfinished / "model",
                stop_ids=loaded.stop_ids,
            )
        else:
            save_weights(role, unfinished)
        if role.head is not None:
            head = {k: v.contiguous() for k, v in role.head.state_dict().items()}
            save_file(head, unfinished / "head.safetensors")
        write_json(unfinished / "role.json", {"format": FORMAT, **described})


def save_weights(role: Role, folder: Path, *, merged: bool = False) -> None:
    """Write the weights that a role's tokens depend on: `adapter/` (peft's format), or `model/`
    (transformers') for a role without an adapter.

    Args:
        merged: for a reader that does not carry the changes of the role's layers. They are merged
            into the model, or into the adapter together with the role's own.
    """
    if merged and role.adapter is not None:
        write_change(
            folder / "adapter",
            MergedChange(factors_of(role.model, role.adapter), role.model.dtype),
        )
        return
    with quiet():
        if role.adapter is None:
            weights = (merged_weights if merged else base_weights)(role.causal_model)
            role.causal_model.save_pretrained(folder / "model", state_dict=weights)
            return
        role.model.save_pretrained(folder, selected_adapters=[role.adapter])
    if role.adapter != "adapter":
        (folder / role.adapter).rename(folder / "adapter")
    order_settings(folder / "adapter")
    (folder / "README.md").unlink(missing_ok=True)


FORMAT = 1
"""Format of role.json and of files that name several roles. This code refuses files with a higher
number.
"""


def read_versioned(path: Path, *keys: str) -> Json:
    """A file of values that tether wrote beside a model.

    Raises:
        ModelError: it is another program's, or of a newer tether.
        RunError: it is missing or damaged.
    """
    values = read_json(path)
    if not isinstance(values, dict):
        raise ModelError(
            f"{path} holds no object, so it is not what tether wrote. Run the stage "
            "that made it again.",
        )
    if values.get("format", 1) != FORMAT:
        raise ModelError(
            f"{path} has format {values['format']!r}, and this tether reads "
            f"{FORMAT}. Install a newer one.",
        )
    if missing := [key for key in keys if key not in values]:
        raise ModelError(
            f"{path} lacks {', '.join(missing)}: it was edited or cut. Run the stage "
            "that made it again.",
        )
    return values


def is_role(folder: Path) -> bool:
    """True if a folder holds a trained role."""
    return (folder / "role.json").is_file()


def read_role(folder: Path) -> RoleDescription:
    """role.json, with `base` the model to load under the role, or its own if it was trained whole.

    If the base is not at the place in role.json, the stage's manifest gives another place. There it
    is used if it is the same.

    Raises:
        MissingFileError: there is no role, or its base is missing.
        ModelError: role.json cannot be used.
    """
    if not is_role(folder):
        raise MissingFileError(
            f"{folder} holds no trained role (no role.json). Has the stage that makes it finished?",
        )
    usual = {"quantize": None, "base_seed": 0, "base_revision": None}
    needed = RoleDescription.__required_keys__ - usual.keys()
    role = cast(RoleDescription, usual | read_versioned(folder / "role.json", *needed))
    encoding = {"template", "system_prompt", "stop_ids"} <= set(role["encoding"])
    if role["kind"] not in ROLE_KINDS or role["dtype"] not in ROLE_DTYPES or not encoding:
        what = f"kind {role['kind']!r}, dtype {role['dtype']!r} or encoding is unknown"
        raise ModelError(f"{folder / 'role.json'}: {what}. Run the stage that made it again.")
    base = str(folder / "model") if role["adapter"] is None else _base_now(folder, role)
    revision = role["base_revision"] if base == role["base"] else None
    return {**role, "base": base, "base_revision": revision}


def _base_now(folder: Path, role: RoleDescription) -> str:
    local = (folder / role["base"]).resolve()
    if local.is_dir():
        return str(local)
    if not role["base"].startswith("."):
        return role["base"]
    noted = base_noted(folder.parent, role["base_digest"])
    if noted is None or not Path(noted).is_dir():
        raise MissingFileError(
            f"{folder} stands on the model in {local}, which is not there. Move both together, or "
            "train it again.",
        )
    return noted


def base_noted(stage: Path, digest: str | None = None) -> str | None:
    """The model that was loaded for a stage, by the stage's manifest: a name, or a folder where it
    lies now.

    Args:
        digest: of the weights that it must have had.
    """
    noted = read_if_there(stage / "manifest.json").get("model")
    if noted is None or digest not in (None, noted["digest"]):
        return None
    place = None if noted["source"] == TINY else noted_path(stage, noted["source"])
    return str(place or noted["source"])


ROLE_KINDS = ("policy", "reward", "process")
ROLE_DTYPES = ("float32", "bfloat16")
ENSEMBLE, OBJECTIVES = "ensemble.json", "objectives.json"
"""Files that name several roles which score together: members of an ensemble, or one role an
objective.
"""


def save_ensemble(
    folder: Path,
    members: Sequence[Path],
    objectives: Sequence[Facts] | None = None,
) -> None:
    """Write `ensemble.json`: the folders of the members' roles, seen from `folder`, and what their
    weights were.

    Args:
        objectives: what else is to be known of each member; the file is `objectives.json` then.
    """
    entries = [
        {"folder": os.path.relpath(member, folder), "digest": _weights_digest(member), **more}
        for member, more in zip(
            members,
            [{}] * len(members) if objectives is None else objectives,
            strict=True,
        )
    ]
    write_json(folder / (ENSEMBLE if objectives is None else OBJECTIVES), {"members": entries})


def member_folders(folder: Path) -> list[Path]:
    """Folders of the roles in `folder`: itself, or the members of the ensemble, or the objectives,
    that its file names.

    Raises:
        ModelError: a member is not the one that the ensemble was made of.
    """
    named = [folder / name for name in (ENSEMBLE, OBJECTIVES) if (folder / name).is_file()]
    if not named:
        return [folder]
    folders = []
    for member in read_versioned(named[0], "members")["members"]:
        folders.append((folder / member["folder"]).resolve())
        read_role(folders[-1])
        if _weights_digest(folders[-1]) != member["digest"]:
            raise ModelError(
                f"{folders[-1]} has changed since {named[0]} was written. Run the "
                "reward stage again.",
            )
    return folders


def _weights_digest(folder: Path) -> str:
    """Of adapter and head."""
    return digest(
        list(
            file_digest(
                [folder / "adapter" / "adapter_model.safetensors", folder / "head.safetensors"],
            ).values(),
        ),
    )


@contextmanager
def _usable(part: str, path: Path) -> Iterator[None]:
    """Any error within says that a saved part cannot be used: safetensors, peft and torch have an
    error of their own each.
    """
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"the {part} in {path} cannot be used: {one_line(error)}. {RESTORE}",
        ) from error


@torch.no_grad()
def refill_adapter(model: nn.Module, folder: Path, name: str) -> None:
    """Give the adapter `name` of a model the weights of the one saved in `folder`, which has the
    same settings.

    Raises:
        ModelError: they do not fit; peft would leave what its file lacks as it was initialised.
    """
    from peft import get_peft_model_state_dict

    path = folder / "adapter"
    with _usable("adapter", path):
        stored = load_file(path / "adapter_model.safetensors")
        own = get_peft_model_state_dict(model, adapter_name=name)
        if wrong := stored.keys() ^ own.keys():
            raise ValueError(f"{len(wrong)} tensors are missing or too many, such as {min(wrong)}")
        for key, tensor in own.items():
            if tensor.shape != stored[key].shape:
                shapes = (
                    f"shape {[*stored[key].shape]} in its file, {[*tensor.shape]} by its settings"
                )
                raise ValueError(f"size mismatch for {key}: {shapes}")
            tensor.copy_(stored[key])


LOADING = threading.Lock()
"""transformers changes torch for all threads while it makes a model."""


def refill_model(model: PreTrainedModel, folder: Path) -> None:
    """Give a whole model the weights of the one saved in `folder`, which has the same shape.

    Raises:
        ModelError: they do not fit.
    """
    with _usable("model", folder), LOADING, quiet():
        stored = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True)
        model.load_state_dict({**model.state_dict(), **stored.state_dict()})


def attach_adapter(model: Trunk, folder: Path, name: str) -> PeftModel:
    """`model` with the saved adapter of `folder` on it, called `name`, frozen, in the model's
    dtype.

    Raises:
        ModelError: it is missing or damaged, or does not fit.
    """
    from peft import PeftConfig

    path = folder / "adapter"
    with _usable("adapter", path), quiet():
        settings = PeftConfig.from_pretrained(str(path))
        settings.inference_mode = True  # peft freezes it then
        model = with_adapter(model, name, settings)
        # or peft looks for it where it lay when this was saved
        settings.base_model_name_or_path = None
    refill_adapter(model, folder, name)
    return with_dtype_of_base(model, name)


def load_head(folder: Path, device: torch.device, hidden: int | None = None) -> ScalarHead:
    """The saved scalar head.

    Args:
        hidden: the width of the trunk that it is for.

    Raises:
        ModelError: it is missing or damaged, or belongs to another trunk.
    """
    path = folder / "head.safetensors"
    with _usable("head", path):
        state = load_file(path)
        outputs, dim = state["linear.weight"].shape
        head = ScalarHead(dim, outputs=outputs)
        head.load_state_dict(state)
        if hidden not in (None, dim):
            raise ValueError(
                f"it is made for states of {dim} numbers, and this trunk's have {hidden}",
            )
        if not all(tensor.isfinite().all() for tensor in state.values()):
            raise ValueError("it has numbers that are not finite")
        return head.to(device).eval().requires_grad_(False)


RESTORE = "Restore the folder from a copy, or run the stage that made it again."


OTHER_DTYPE = (
    "{folder} was trained beside a base in {then}, and this one is held in {now}: what it computes "
    "differs by rounding. Set model.dtype = '{then}' to have it as it was."
)


def check_same_trunk(
    role: RoleDescription,
    loaded: LoadedModel,
    encoding: Facts,
    folder: Path,
) -> None:
    """A role's adapter works only on the very base it was trained on, and with its encoding.

    The same base in another dtype is used, with a note. Such runs move between a machine with
    float32 and one with bfloat16.
    """
    # the same weights are equal up to the rounding to bfloat16
    equal = role["base_rounded_digest"] == loaded.rounded_digest
    if not equal and role["base_digest"] != loaded.digest:
        raise ModelError(
            f"{folder} was trained on another base (weights {role['base_digest']}, this trunk has "
            f"{loaded.digest}). Train it on this run's SFT model, or give each role a model of "
            "its own: roles = 'separate'.",
        )
    if role["base_digest"] != loaded.digest:
        now = str(loaded.model.dtype).removeprefix("torch.")
        loaded.note(OTHER_DTYPE.format(folder=folder, then=role["dtype"], now=now))
    if role["quantize"] != loaded.config.quantize:
        raise ModelError(
            f"{folder} was trained with model.quantize = {role.get('quantize')!r}, and this trunk "
            f"is loaded with {loaded.config.quantize!r}. Set it as it was, or give each role a "
            "model of its own: roles = 'separate'.",
        )
    if role["encoding"] != encoding:
        raise ModelError(
            f"{folder} was trained with another chat template, system prompt or stop tokens than "
            "this model uses. Set model.chat_template, template, system_prompt or stop_tokens "
            "to what it was trained with, or train it again.",
        )
