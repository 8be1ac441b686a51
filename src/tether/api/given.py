"""Arguments of a caller as values of a recipe: models, rows in memory, files, functions, trained
rewards.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from tether.api.rows import rows_in
from tether.api.runs import RewardModel, Run
from tether.core.errors import ConfigError
from tether.core.names import file_part
from tether.core.rundir import write_jsonl
from tether.core.types import Facts, Json
from tether.rewards.loading import register
from tether.runner.call import data_of, reward_of
from tether.settings.model import PACKAGE_PREFIX, TINY
from tether.settings.section import DataConfig

DATA_KEYS = DataConfig.model_fields.keys()


def model_values(model: object) -> str | Json:
    """A source or the folder of a run as text, or the keys of the `[model]` section."""
    if isinstance(model, Mapping):
        return dict(model)
    if isinstance(model, str):
        return model
    raise ConfigError(
        f"model is a {type(model).__name__}: give a hub id, a folder, "
        f"'{PACKAGE_PREFIX}NAME==VERSION', '{TINY}', a run, or "
        "the keys of a [model] section as a dict",
    )


def data_values(rows: object, root: Path, name: str) -> Json | None:
    """A `data` table. Files, hub data sets and a run's pairs are used as they are; rows in memory
    go into a file of the run.

    The file's name has a digest of its rows, so that a run is not continued with others.

    Args:
        rows: one or several paths, `owner/name` or `hub:owner/name:split`; a run with judged pairs;
            or rows in memory (`rows_in`). Also the keys of a `data` table, whose `path` may be rows
            in memory.

    Raises:
        ConfigError: there is no row, or one is nothing of the kind.
    """
    if rows is None:
        return None
    if (
        isinstance(rows, Mapping)
        and "path" in rows
        and (isinstance(rows["path"], str | Path) or rows.keys() <= DATA_KEYS)
    ):
        return _table_values(dict(rows), root, name)
    if isinstance(rows, Run):
        return data_of(str(rows.path))
    if isinstance(rows, str | Path):
        return data_of(str(rows))
    if isinstance(rows, list | tuple) and rows and all(map(_is_file, rows)):
        return data_of([*map(str, rows)])
    lines = rows_in(rows, name)
    text = "".join(json.dumps(line, ensure_ascii=False, sort_keys=True) for line in lines)
    path = (
        root
        / "data"
        / f"{file_part(name.replace('.', '-'))}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    )
    if not path.is_file():
        write_jsonl(path, lines)
    return {"path": str(path)}


def _table_values(table: Json, root: Path, name: str) -> Json:
    """The keys of a `data` table, whose `path` may be rows in memory."""
    path = table["path"]
    named = isinstance(path, str | Path) or (
        isinstance(path, list | tuple) and all(isinstance(one, str | Path) for one in path)
    )
    inner = {} if named else data_values(path, root, f"{name}.path")
    return {**table, **(inner or {})}


def _is_file(row: object) -> bool:
    """True for a path, and for the text of one that leads to a file."""
    return isinstance(row, Path) or (
        isinstance(row, str) and len(row) < 1024 and row.isprintable() and Path(row).is_file()
    )


def are_conversations(rows: object, values: Json | None) -> bool:
    """True if prompts in memory are lists of messages, as TRL's conversational data sets have them.

    Args:
        values: what `data_values` made of them.
    """
    if (
        values is None
        or isinstance(rows, str | Path | Run)
        or (isinstance(rows, Mapping) and "path" in rows)
    ):
        return False
    if not isinstance(values["path"], str):
        return False
    with Path(values["path"]).open(encoding="utf-8") as file:
        first = json.loads(file.readline())
    return isinstance(first.get("prompt", first.get("messages")), list)


def reward_values(reward: object, weights: Sequence[float] | None, *, conversations: bool) -> Json:
    """The keys of a section that say what scores: a function, a run or the folder of a reward
    model, a classifier, or several.

    Of several, runs, folders and classifiers are functions too: each is a model of its own, which
    scores texts.

    Args:
        weights: of several rewards; None: 1 each.
        conversations: the prompts are lists of messages, so a function in TRL's form gets
            completions of that shape.
    """
    calls: str | list[str] | None = register(reward) if callable(reward) else None
    if isinstance(reward, Sequence) and not isinstance(reward, str):
        calls = [register(_function(one)) for one in reward]
        if not calls:
            raise ConfigError("reward is an empty list: give a function, a run, or several of them")
    if calls is not None:
        values: Json = {"call": calls}
        values |= {"completions": "messages"} if conversations else {}
        values |= {} if weights is None else {"weights": list(weights)}
        return {"function": values}
    if weights is not None:
        raise ConfigError("reward_weights belong to several rewards: give reward=[f, g, ...]")
    if isinstance(reward, str):
        return reward_of(reward)
    raise ConfigError(
        f"reward is a {type(reward).__name__}: give a function (prompts, responses) -> a number "
        "for each, several of them, a run "
        "or the folder of a reward model, the hub id of a sequence classifier, or 'random'",
    )


def _function(reward: object) -> Callable[..., object]:
    """One of several rewards as a function: a function as it is, a run, a folder or a classifier as
    what scores texts.

    Raises:
        ConfigError: it is something else.
    """
    if callable(reward):
        return reward
    source = reward.path if isinstance(reward, Run) else reward
    if source == "random" or not isinstance(source, str | Path):
        raise ConfigError(
            f"one of several rewards is {reward!r:.60}: each is a function (prompts, responses), "
            "a run or the folder of a reward model, or the hub id of a sequence classifier",
        )
    return scored_by(str(source))


def scored_by(source: str) -> Callable[[Sequence[object], Sequence[str]], list[float | None]]:
    """A reward function that asks a trained reward model or a classifier; the model is opened at
    the first call.
    """

    def score(prompts: Sequence[object], responses: Sequence[str]) -> list[float | None]:
        return _opened(source).score(prompts, responses)

    score.__qualname__ = Path(source).name
    return score


@cache
def _opened(source: str) -> RewardModel:
    return RewardModel(source)


def settings_values(settings: Facts, root: Path, where: str) -> Json:
    """Keys of a section, with rows in memory and functions as values of `data` and `judge`."""
    values: Json = {}
    for key, value in settings.items():
        if key == "data":
            values[key] = data_values(value, root, f"{where}.data")
        elif key in ("judge", "environment") and callable(value):
            values[key] = {"call": register(value)}
        elif key == "tools":
            tools = [value] if callable(value) or isinstance(value, str) else value
            values[key] = [register(one) if callable(one) else one for one in tools]
        elif key == "call" and callable(value):
            values[key] = register(value)
        elif isinstance(value, Mapping):
            values[key] = settings_values(value, root, f"{where}.{key}")
        elif key == "judge":
            values[key] = value
        elif callable(value) and not isinstance(value, type):
            places = (
                "a reward goes to reward=, a judge to judge=, what watches the steps to on_step="
            )
            raise ConfigError(f"{where}.{key} is a function: {places}")
        else:
            values[key] = value
    return values
