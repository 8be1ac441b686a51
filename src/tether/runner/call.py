"""The recipe of one method: of `tether.dpo(model, data)` in Python, of `tether dpo MODEL DATA` in a
shell.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tether.core.command import command_line
from tether.core.errors import ConfigError
from tether.core.rundir import stage_folder
from tether.core.stopping import run_of
from tether.core.types import Facts, Json
from tether.runner.assembly.roles import trained_scorer
from tether.runner.folder import check_start, remembered
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import BaseRecipe, recipe_type
from tether.settings.stages import STAGES, by_place, method_stage


def recipe_of(
    name: str,
    model: str | Json,
    data: str | Sequence[str] | Json | None,
    reward: str | Json | None = None,
    *,
    run: str | Path | None = None,
    top: Facts | None = None,
    section: Facts | None = None,
    overrides: Sequence[str] = (),
    where: str,
) -> BaseRecipe:
    """The recipe of a call: one stage, in a folder of its own or as the next one of a run.

    Args:
        model: a source, the folder of a run, or the keys of [model].
        data: a file, several, a data set of the hub, a run with judged pairs, or a `data` table.
        reward: a function (`FILE:FUNCTION`), a reward model, a classifier, `random`, or the keys of
            the section that say it.
        run: the folder; by default that of the run that is the model, else `runs/` and the name.
        top: keys of the recipe itself.
        section: other keys of the stage's section.
        overrides: `key=value`, on top of all.
        where: the subject of errors.

    Raises:
        ConfigError: an argument does not fit, or the folder holds a run of another model.
    """
    kind, fixed = method_stage(name)
    root = folder_of(name, model, run)
    values = {**fixed, **(section or {})}
    # a run's own pairs need no name
    if data is not None and data != str(root):
        values["data"] = data_of(data)
    if reward is not None:
        if "reward" not in by_place(name):
            raise ConfigError(f"{where} takes no reward: it learns from its rows alone")
        values |= reward_of(reward)
    before = remembered(root)[1]["config"] if run_of(root) == root else {}
    others = {
        key: value
        for key, value in before.items()
        if key not in ("run", "track", "deterministic", "budget", kind.name)
    }
    base = before["model"] if model == str(root) and before else model_of(model)
    if before and base != before["model"]:
        raise ConfigError(
            f"{root} holds a run of the model {before['model'].get('source')!r}: choose another "
            "folder with run=PATH",
        )
    given = {**others, "model": base, **(top or {}), kind.name: values, "run": str(root)}
    return build(recipe_type(), given, overrides, where=where)


def folder_of(name: str, model: str | Json, run: str | Path | None) -> Path:
    """The folder of a call's run."""
    if run is None and isinstance(model, str) and run_of(Path(model)) == Path(model):
        return Path(model)
    return Path("runs") / name if run is None else Path(run)


def finished_stages(root: Path) -> list[str]:
    """Names of a run's finished stages, in the order of a recipe."""
    return [name for name in STAGES if (stage_folder(root, name) / "summary.json").is_file()]


def model_of(model: str | Json) -> Json:
    """The `[model]` section: a source, or a run whose SFT model, or base, is the start.

    Raises:
        ConfigError: the run has trained a policy, which is an adapter and must be exported first.
    """
    if not isinstance(model, str):
        return model
    if run_of(root := Path(model)) != root:
        return {"source": model}
    done = finished_stages(root)
    if trained := [name for name in done if STAGES[name].trains_policy]:
        raise ConfigError(
            f"{root} has trained a policy ({trained[-1]}): to start another run from it, "
            f"export it (`{command_line('export', root, 'FOLDER')}`) and give that folder; to start from its SFT "
            f"model, give {root / 'sft' / 'model'}",
        )
    base = remembered(root)[1]["config"]["model"]
    if "sft" not in done:
        return base
    check_start(root / "sft")
    return build(ModelConfig, base, where="model").on_folder(root / "sft" / "model").model_dump()


def data_of(data: str | Sequence[str] | Json) -> Json:
    """A `data` table; `owner/name` that is no file is a data set of the hub, of which its training
    rows are meant.
    """
    if isinstance(data, dict):
        return data
    if not isinstance(data, str):
        return {"path": list(data)}
    if run_of(Path(data)) == Path(data):
        return {"path": str(stage_folder(Path(data), "pairs") / "pairs.jsonl")}
    is_hub = (
        data.count("/") == 1
        and not Path(data).exists()
        and not Path(data).suffix
        and data[0] not in "./~$"
        and not data.startswith(("hub:", "tether:"))
    )
    return {"path": f"hub:{data}:train" if is_hub else data}


def reward_of(reward: str | Json) -> Json:
    """The keys of a section that say what scores."""
    if not isinstance(reward, str):
        return reward
    if reward == "random":
        return {"reward_source": "random"}
    place, _, function = reward.rpartition(":")
    if place and function.isidentifier():
        return {"function": {"call": reward}}
    trained = trained_scorer(reward) is not None or run_of(Path(reward)) is not None
    return {"reward_model": reward} if trained else {"classifier": {"source": reward}}
