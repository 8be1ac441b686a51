"""`python -m tools.dev.stub`: writes src/tether/__init__.pyi, by which editors know the front
door's functions and their keys.

They are made of the sections' config classes; `make check` compares.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import tether
from tether.api.methods import names, takes
from tether.settings.reference import given_type
from tether.settings.stages import STAGES
from tether.settings.synonyms import METHODS

PLACE = Path(tether.__file__).with_name("__init__.pyi")
HEAD = '''\
"""The front door, for editors and type checkers. Written by `python -m tools.dev.stub`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tether.api.methods import load as load
from tether.api.methods import names as names
from tether.api.methods import recipes as recipes
from tether.api.methods import run as run
from tether.api.runs import Policy as Policy
from tether.api.runs import RewardModel as RewardModel
from tether.api.runs import Run as Run
from tether.api.workbench import load_model as load_model
from tether.cli.terminal.bars import OnStep
from tether.core.errors import ConfigError as ConfigError
from tether.core.errors import DataError as DataError
from tether.core.errors import MissingFileError as MissingFileError
from tether.core.errors import ModelError as ModelError
from tether.core.errors import RewardError as RewardError
from tether.core.errors import RunError as RunError
from tether.core.errors import TetherError as TetherError
from tether.core.errors import TrainingError as TrainingError

__version__: str
'''
ARGUMENTS = {
    "model": "model: str | Path | Run | Mapping[str, Any]",
    "data": "data: Any = ...",
    "prompts": "prompts: Any = ...",
    "reward": (
        "reward: Callable[..., Any] | Sequence[Callable[..., Any]] | Run | str | Path | None = ..."
    ),
    "judge": "judge: Callable[..., Any] | Mapping[str, Any] | str | None = ...",
    "reward_weights": "reward_weights: Sequence[float] | None = ...",
    "tools": "tools: Sequence[Callable[..., object]] | None = ...",
    "run": "run: str | Path | None = ...",
    "seed": "seed: int = 0",
    "track": "track: str | Sequence[str] = ()",
    "on_step": "on_step: OnStep | None = ...",
    "progress": "progress: bool = True",
}


def text() -> str:
    """The stub, laid out as `ruff format` leaves it."""
    whole = HEAD + "".join(_function(name) for name in names())
    layout = [sys.executable, "-m", "ruff", "format", "--stdin-filename", PLACE, "-"]
    return subprocess.run(layout, input=whole, stdout=subprocess.PIPE, text=True, check=True).stdout


def _function(name: str) -> str:
    kind = STAGES[name] if name in STAGES else STAGES[METHODS[name][0]]
    fields = kind.section.model_fields
    first, last = takes(name)
    keys = [
        (f"    {ARGUMENTS[key] if key in ARGUMENTS else _field(key, fields[key])},")
        for key in (*first, "*", *last)
        if key != "*"
    ]
    keys.insert(len(first), "    *,")
    what = (
        f"{kind.help}."
        if name in STAGES
        else "{} with {} = {!r}.".format(kind.help, *METHODS[name][1:])
    )
    return "\n".join([f"\ndef {name}(", *keys, ") -> Run:", f'    """{what}"""', ""])


def _field(name: str, field: FieldInfo) -> str:
    plain = field.default if isinstance(field.default, int | float | str | None) else ...
    default = (
        "..." if field.default is PydanticUndefined or plain is ... else _literal(field.default)
    )
    return f"{name}: {_typed(given_type(field.annotation, field.metadata))} = {default}"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _typed(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if origin is Literal:
        return f"Literal[{', '.join(map(_literal, inner))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(_typed(part) for part in inner))
    if origin is tuple:
        return "Sequence[Any]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "Mapping[str, Any]"
    if origin is dict:
        return "Mapping[str, Any]"
    if origin is not None:  # Annotated
        return _typed(given_type(inner[0], inner[1:]))
    return annotation.__name__ if annotation in (int, float, str, bool) else "Any"


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
    sys.stdout.write(f"{PLACE}\n")
