"""Recipes from TOML files and tables, with dotted overrides on top."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from tether.core.command import command_line
from tether.core.errors import ConfigError, MissingFileError
from tether.core.rundir import nearby
from tether.core.types import Entries, Json
from tether.settings.config import RECIPE, Config, ConfigT
from tether.settings.messages import explain
from tether.settings.stages import STAGES
from tether.settings.synonyms import alike

_OTHER_LANGUAGES = (".yml", ".yaml", ".json", ".json5")


NOT_TOML = """recipes are written in TOML, in a .toml file. The difference:
  YAML or JSON                   TOML
  run: runs/mine                 run = "runs/mine"
  sft:                           [sft]
    epochs: 2                    epochs = 2
    data: {path: mine.jsonl}     data = { path = "mine.jsonl" }
`tether new sft` writes one to begin with."""


MOST_LEVELS = 100
"""Levels of tables and lists within each other that a recipe may have."""
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def load_recipe(path: str | Path, kind: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a TOML recipe, apply `key.sub=value` overrides and validate.

    Raises:
        MissingFileError: the recipe does not exist.
        ConfigError: the TOML is malformed, a key is unknown or a value does not fit.
    """
    path = Path(path)
    try:
        if not path.is_file():
            what = " (it is a folder)" if path.is_dir() else _near(path.stem)
            advice = "Give the path of a .toml file, or the name of a packaged recipe."
            raise MissingFileError(f"recipe not found: {path}{what}. {advice}")
        if path.suffix in _OTHER_LANGUAGES:
            raise ConfigError(f"{path}: {NOT_TOML}")
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (ConfigError, MissingFileError):
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a valid TOML file: byte {error.start} is not UTF-8. Save "
            "the file as UTF-8.",
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{path}: not a valid TOML file: its lists or tables are nested too deeply. Mend that.",
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}. Mend that line.") from error
    except ValueError:
        raise ConfigError(
            f"{path}: not a valid TOML file: a number has thousands of digits. Mend that.",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Mend that, or name another file.",
        ) from None
    return build(kind, values, overrides, where=str(path))


def build(
    kind: type[ConfigT],
    values: Entries,
    overrides: Sequence[str] = (),
    where: str = "config",
) -> ConfigT:
    """Validate `values` with `overrides` on top; errors name the key, the reason and the nearest
    known key.
    """
    try:
        merged = json.loads(json.dumps(values, default=str))
        for override in overrides:
            _apply_override(merged, override)
        if _deeper(merged, MOST_LEVELS):
            raise RecursionError
        words = json.dumps(merged, ensure_ascii=False)
        words.encode()
        if _NUL.search(words):
            raise ConfigError(f"{where}: a text holds a NUL character. Take it out.")
        return kind.model_validate(merged, context=RECIPE)
    except RecursionError:
        raise ConfigError(f"{where}: lists or tables are nested too deeply. Mend that.") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: a text is not UTF-8. Write it in UTF-8.") from None
    except ValidationError as error:
        given = f" with {' '.join(overrides)!r:.200}" if overrides else ""
        raise ConfigError(
            f"{where}{given}: {in_lines(explain(kind, merged, error.errors()))}",
        ) from None
    except MissingFileError:  # an OSError, too
        raise
    except OSError as error:
        raise ConfigError(
            f"{where}: no path can be {str(error.filename)!r:.200}: {error.strerror}. Name another.",
        ) from None


def as_toml(recipe: Config) -> str:
    """Text of a recipe's file, without keys that are unset."""
    values = recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    top = []
    sections = []
    for key, value in values.items():
        if key not in STAGES:
            top.append(_line(key, value))
            continue
        sections += ["", f"[{key}]"]
        sections += [_line(name, own) for name, own in value.items()]
    return "\n".join([*top, *sections, ""])


def _line(key: str, value: object) -> str:
    name = key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)
    return f"{name} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(_line(key, inner) for key, inner in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _deeper(value: object, levels: int) -> bool:
    """True if tables and lists lie within each other more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for outer in level for inner in _parts(outer)]
    return bool(level)


def _parts(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def in_lines(faults: Sequence[str]) -> str:
    """Faults in one line, or from four on in a line each."""
    return "; ".join(faults) if len(faults) < 4 else "".join(f"\n  {fault}" for fault in faults)


def _apply_override(values: Json, override: str) -> None:
    key, separator, raw = override.partition("=")
    key = key.strip().lstrip("-")
    if not separator or not all(key.split(".")):
        raise ConfigError(
            f"override {override!r} is not of the form key.sub=value, for example "
            "optimizer.learning_rate=1e-4",
        )
    given = toml_value(raw)
    value = raw.strip() if given is None else json.loads(json.dumps(given, default=str))
    set_key(values, key, value, f"override {override!r}")


def toml_value(text: str) -> object:
    """The value that a text is in TOML; None where it is none, or several lines that only look like
    it.
    """
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return None
    return parsed["v"] if parsed.keys() == {"v"} else None


def set_key(values: Json, key: str, value: object, where: str) -> None:
    """Write the value of a dotted key into tables of tables. A table that holds the rest of the key
    as one name has its value there.

    Args:
        where: the subject of the error.

    Raises:
        ConfigError: a part of the key before the last names a value.
    """
    node = values
    parent, _, rest = key.partition(".")
    while rest and (parent + "." + rest) not in node:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"{where}: {parent!r} is a value, not a table. Give the whole value in its place.",
            )
        parent, _, rest = rest.partition(".")
    node[f"{parent}.{rest}" if rest else parent] = value


def is_override(word: str) -> bool:
    """True if a word of a command line sets a key: `ppo.steps=3`, unlike a path with a = in it."""
    return re.match(r"-*\w+(\.\w+)*=", word) is not None and not Path(word[:200]).exists()


def packaged_recipe(name: str) -> Path:
    """The path of a recipe by its file name or by the name of a recipe that comes with tether."""
    path = Path(name)
    try:
        if (path.suffix == ".toml" and not is_override(name)) or path.exists():
            return path
    except OSError:  # no file can have such a name
        pass
    recipes = packaged_recipes()
    names = ", ".join(sorted(recipes))
    if is_override(name):
        raise ConfigError(
            f"{name!r:.80} is an override, and the recipe comes before it: a .toml "
            f"file, or one of {names}.",
        )
    if name not in recipes:
        advice = (
            f"Packaged recipes: {names}; or give the path of a .toml file. A model needs a method "
            f"and rows: `{command_line('sft', name[:80], 'ROWS')}`."
        )
        raise MissingFileError(
            f"no recipe named {name!r:.80}{_near(name)}. {advice} {nearby(Path(name[:200]))}".rstrip(),
        )
    return recipes[name]


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with tether, by name."""
    return {
        path.stem: path for path in (Path(__file__).resolve().parent / "recipes").glob("*.toml")
    }


def _near(name: str) -> str:
    near = alike(name, packaged_recipes())
    return f" ({near})" if near else ""
