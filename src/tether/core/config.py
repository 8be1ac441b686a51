"""Recipes: TOML files become frozen pydantic models, with dotted overrides, and nothing unknown slips through."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from tether.core.errors import ConfigError, MissingFileError


class Config(BaseModel):
    """The base of every config: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


ConfigT = TypeVar("ConfigT", bound=Config)


def load_recipe(path: str | Path, kind: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a TOML recipe, apply `key.sub=value` overrides and validate.

    Raises:
        MissingFileError: the recipe does not exist.
        ConfigError: the TOML is malformed, a key is unknown or a value does not fit.
    """
    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"recipe not found: {path}. Give the path of a .toml file, or the name of a packaged recipe.")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}. Mend that line.") from error
    return build(kind, values, overrides, where=str(path))


def build(kind: type[ConfigT], values: Mapping[str, Any], overrides: Sequence[str] = (), where: str = "config") -> ConfigT:
    """Validate `values` with `overrides` on top; errors name the key, the reason and the nearest known key."""
    merged = json.loads(json.dumps(values, default=str))
    for override in overrides:
        _apply_override(merged, override)
    try:
        return kind.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(kind, item) for item in error.errors())) from None


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, raw = override.partition("=")
    key = key.strip().lstrip("-")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form key.sub=value, for example optimizer.learning_rate=1e-4")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    *parents, last = key.split(".")
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
        node = child
    node[last] = value


def _explain(kind: type[BaseModel], item: Any) -> str:
    location = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(kind, item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {location!r} ({hint})"
    message = item["msg"].removeprefix("Value error, ")
    if not location:
        return message
    if item["type"] == "missing":
        return f"key {location!r} is required"
    return f"key {location!r}: {message} (got {item['input']!r})"


def _known_keys(kind: Any, location: Sequence[Any]) -> list[str]:
    for part in location:
        field = kind.model_fields.get(part) if isinstance(kind, type) and issubclass(kind, BaseModel) else None
        if field is None:
            return []
        choices = [field.annotation, *get_args(field.annotation)]
        kind = next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []


def dump(config: Config) -> dict[str, Any]:
    """The resolved config as plain JSON values."""
    return config.model_dump(mode="json")


def digest(value: Any) -> str:
    """A short content hash of any JSON value: equal configs have equal digests."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def packaged_recipe(name: str) -> Path:
    """The path of a recipe by its file name or by the name of a recipe that comes with tether."""
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return path
    folder = Path(__file__).resolve().parent.parent / "recipes"
    packaged = folder / f"{name}.toml"
    if not packaged.is_file():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.toml")))
        raise MissingFileError(f"no recipe named {name!r}. Packaged recipes: {names}; or give the path of a .toml file.")
    return packaged
