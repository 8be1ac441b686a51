"""Recipes: TOML files become frozen pydantic models, with dotted overrides, and nothing unknown slips through."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from tether.core.errors import ConfigError, MissingFileError
from tether.core.synonyms import KEYS, METHODS, NOTES, SECTIONS

RECIPE = "recipe"
"""The context in which a text that a person wrote is validated; code may say infinity."""
_NUMBERS = (int, float, int | None, float | None)
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Config(BaseModel):
    """The base of every config: frozen, an unknown key is an error, true is no number, and what a recipe says is finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in _NUMBERS:
            raise ValueError("a number belongs here")
        if info.context == RECIPE and isinstance(value, int | float) and not abs(value) < 2**63:
            raise ValueError("the number must be finite and smaller than 2**63")
        return value


ConfigT = TypeVar("ConfigT", bound=Config)


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
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except MissingFileError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a valid TOML file: byte {error.start} is not UTF-8. Save the file as UTF-8.") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a valid TOML file: its lists or tables are nested too deeply. Mend that.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}. Mend that line.") from error
    except ValueError:
        raise ConfigError(f"{path}: not a valid TOML file: a number has thousands of digits. Mend that.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Mend that, or name another file.") from None
    return build(kind, values, overrides, where=str(path))


def build(kind: type[ConfigT], values: Mapping[str, Any], overrides: Sequence[str] = (), where: str = "config") -> ConfigT:
    """Validate `values` with `overrides` on top; errors name the key, the reason and the nearest known key."""
    try:
        merged = json.loads(json.dumps(values, default=str))
        for override in overrides:
            _apply_override(merged, override)
        words = json.dumps(merged, ensure_ascii=False)
        words.encode()
    except RecursionError:
        raise ConfigError(f"{where}: lists or tables are nested too deeply. Mend that.") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: a text is not UTF-8. Write it in UTF-8.") from None
    if _NUL.search(words):
        raise ConfigError(f"{where}: a text holds a NUL character. Take it out.")
    try:
        return kind.model_validate(merged, context=RECIPE)
    except ValidationError as error:
        given = f" with {' '.join(overrides)!r:.200}" if overrides else ""
        raise ConfigError(f"{where}{given}: " + "; ".join(_explain(kind, merged, error.errors()))) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    *parents, last = key.strip().lstrip("-").split(".")
    if not separator or not all((*parents, last)):
        raise ConfigError(f"override {override!r} is not of the form key.sub=value, for example optimizer.learning_rate=1e-4")
    try:
        parsed = tomllib.loads(f"v = {raw}")
    except (ValueError, RecursionError):
        parsed = {}
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table. Give the whole value in its place.")
        node = child
    # More than one key: a text of several lines that only looks like TOML.
    node[last] = json.loads(json.dumps(parsed["v"], default=str)) if parsed.keys() == {"v"} else raw.strip()


def _explain(kind: type[BaseModel], values: Any, items: Sequence[Any]) -> list[str]:
    """One phrase for each key with a fault; the branches of a union, which pydantic reports one by one, are one fault."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        found.setdefault(_location(values, item), []).append(item)
    inner = [place for place in found if not any(place == other[: len(place)] for other in found if len(other) > len(place))]
    return [_phrase(kind, place, found[place]) for place in inner]


def _location(values: Any, item: Any) -> tuple[Any, ...]:
    """The keys down to a fault, without the names that pydantic gives to the branches of a union."""
    place, node = [], values
    for part in item["loc"]:
        known = part in node if isinstance(node, dict) else isinstance(node, list) and isinstance(part, int)
        if known:
            node = node[part]
        if known or (item["type"] == "missing" and part is item["loc"][-1]):
            place.append(part)
    return tuple(place)


def _phrase(kind: type[BaseModel], place: tuple[Any, ...], items: Sequence[Any]) -> str:
    location, item = ".".join(map(str, place)), items[0]
    if item["type"] == "extra_forbidden":
        return f"unknown key {location!r} ({_hint(kind, place)})"
    said = (
        "a table belongs here" if item["type"] == "model_type" else item["msg"].removeprefix("Value error, ") for item in items
    )
    message = ", or ".join(dict.fromkeys(said))
    if not location:
        return message
    if item["type"] == "missing":
        return f"key {location!r} is required"
    return f"key {location!r}: {message} (got {item['input']!r:.80})"


def _hint(kind: type[BaseModel], place: tuple[Any, ...]) -> str:
    """What somebody who wrote this key may want: another library's word, a key of a table in it, a slip of the fingers."""
    *outer, last = place
    word, known = str(last).lower().replace("-", "_"), _known_keys(kind, outer)
    if not outer and word in METHODS and METHODS[word][0] in known:
        return "{} is [{}] with {} = {!r}".format(word.upper(), *METHODS[word])
    if not outer and SECTIONS.get(word) in known:
        return f"did you mean [{SECTIONS[word]}]?"
    for depth in range(len(outer), -1, -1):
        for target in KEYS.get(word, ()):
            *parents, key = full = (*outer[:depth], *target.split("."))
            if key in _known_keys(kind, parents, exact=True):
                return f"did you mean {'.'.join(map(str, full))!r}?"
    if word in NOTES and "model" in kind.model_fields:
        return NOTES[word]
    deeper = [f"{table}.{last}" for table in known if last in _known_keys(kind, (*outer, table)) != known]
    near = deeper[:1] or difflib.get_close_matches(str(last), known, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"


def _known_keys(kind: type[BaseModel], location: Sequence[Any], *, exact: bool = False) -> list[str]:
    kinds = [kind]
    for part in location:  # what is no field is a place in a list or a name in a table, whose kind stays the same
        inside = [inner for k in kinds if part in k.model_fields for inner in _models(k.model_fields[part].annotation)]
        kinds = inside if exact else inside or kinds
    return list(dict.fromkeys(name for k in kinds for name in k.model_fields))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]


def parts(config: Config, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Its fields by name, less some."""
    return {name: getattr(config, name) for name in type(config).model_fields if name not in without}


def digest(value: Any) -> str:
    """A short content hash of any JSON value: equal configs have equal digests."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_override(word: str) -> bool:
    """Whether a word of a command line sets a key: `ppo.steps=3`, and not a path that has a = in it."""
    return re.match(r"-*\w+(\.\w+)*=", word) is not None and not Path(word[:200]).exists()


def packaged_recipe(name: str) -> Path:
    """The path of a recipe by its file name or by the name of a recipe that comes with tether."""
    path = Path(name)
    try:
        if (path.suffix == ".toml" and not is_override(name)) or path.exists():
            return path
    except OSError:  # no file can have such a name
        pass
    if is_override(name):
        names = ", ".join(sorted(_packaged()))
        raise ConfigError(f"{name!r:.80} is an override, and the recipe comes before it: a .toml file, or one of {names}.")
    if name not in (known := _packaged()):
        names = ", ".join(sorted(known))
        raise MissingFileError(
            f"no recipe named {name!r:.80}{_near(name)}. Packaged recipes: {names}; or give the path of a .toml file."
        )
    return known[name]


def _packaged() -> dict[str, Path]:
    return {path.stem: path for path in (Path(__file__).resolve().parent.parent / "recipes").glob("*.toml")}


def _near(name: str) -> str:
    near = difflib.get_close_matches(name, _packaged(), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
