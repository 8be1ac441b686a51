"""Recipes: TOML files become frozen pydantic models, with dotted overrides, and nothing unknown
slips through.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tether.core.errors import ConfigError, MissingFileError
from tether.core.stages import STAGES, making
from tether.core.synonyms import KEYS, METHODS, NOTES, SECTIONS, alike, did_you_mean
from tether.core.types import Json

RECIPE = "recipe"
"""The context in which a text that a person wrote is validated; code may say infinity."""
_OTHER_LANGUAGES = (".yml", ".yaml", ".json", ".json5")
NOT_TOML = """recipes are written in TOML, in a .toml file. The difference:
  YAML or JSON                   TOML
  run: runs/mine                 run = "runs/mine"
  sft:                           [sft]
    epochs: 2                    epochs = 2
    data: {path: mine.jsonl}     data = { path = "mine.jsonl" }
`tether new sft` writes one to begin with."""
_NUMBERS = (int, float, int | None, float | None)
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Layered(Json):
    """A table on top of defaults; `below` names the keys that come from those alone."""

    below: frozenset[str] = frozenset()


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> Layered:
    """The table `above` on top of the defaults `below`, tables within tables too."""
    tables = {key: value for key, value in below.items() if isinstance(value, Mapping)}
    inner = {
        key: layered(table, above.get(key, {}))
        for key, table in tables.items()
        if isinstance(above.get(key, {}), Mapping)
    }
    both = Layered({**below, **above, **inner})
    both.below = frozenset(both.keys() - (above.keys() - getattr(above, "below", frozenset())))
    return both


class Config(BaseModel):
    """The base of every config: frozen, an unknown key is an error, true is no number, and what a
    recipe says is finite.

    A table in which some keys are given keeps, for the others, the defaults of the place where it
    belongs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(value, bool)
            and cls.model_fields[info.field_name or ""].annotation in _NUMBERS
        ):
            raise ValueError("a number belongs here")
        if info.context == RECIPE and isinstance(value, int | float) and not abs(value) < 2**63:
            raise ValueError("the number must be finite and smaller than 2**63")
        return value

    @classmethod
    def preset(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults that depend on what is given; they come before those of the fields."""
        return {}

    @model_validator(mode="wrap")
    @classmethod
    def _fill(cls, values: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Lay this place's defaults under each table of `values`. Only what was given counts as
        set, and must have an effect.
        """
        if not isinstance(values, Mapping):
            return handler(values)
        defaults = {
            name: field.default
            for name, field in cls.model_fields.items()
            if isinstance(field.default, Config)
        }
        own = {
            name: default.model_dump(exclude_unset=True)
            for name, default in defaults.items()
            if name in values
        }
        below = layered({name: table for name, table in own.items() if table}, cls.preset(values))
        given = Layered(values)
        for name in below.keys() & defaults.keys() & given.keys():
            if type(given[name]) is type(defaults[name]):
                given[name] = given[name].model_dump(exclude_unset=True)
        given.below = getattr(values, "below", frozenset())
        both = layered(below, given)
        config = handler(both)
        config.model_fields_set.difference_update(both.below)
        return config

    @model_validator(mode="after")
    def _check_faults(self) -> Self:
        for kind in reversed(type(self).__mro__):
            for fault in vars(kind)["faults"](self) if "faults" in vars(kind) else ():
                raise ValueError(fault)
        return self

    def faults(self) -> Iterator[str]:
        """What of these settings has no effect or does not go together, in a sentence each; the
        first is the error.

        A class tells of its own: those that it stands on have been asked before.
        """
        yield from ()

    def idle(self, *options: str, because: str, table: str = "") -> Iterator[str]:
        """A fault for each of these options that was set, where none of them has an effect;
        `table`: what holds them.
        """
        for option in options:
            if option in self.model_fields_set:
                yield f"{table}{option} has no effect {because}"


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
        if path.suffix in _OTHER_LANGUAGES:
            raise ConfigError(f"{path}: {NOT_TOML}")
        values = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (ConfigError, MissingFileError):
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a valid TOML file: byte {error.start} is not UTF-8. Save "
            "the file as UTF-8."
        ) from None
    except RecursionError:
        raise ConfigError(
            f"{path}: not a valid TOML file: its lists or tables are nested too deeply. Mend that."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}. Mend that line.") from error
    except ValueError:
        raise ConfigError(
            f"{path}: not a valid TOML file: a number has thousands of digits. Mend that."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}. Mend that, or name another file."
        ) from None
    return build(kind, values, overrides, where=str(path))


def build(
    kind: type[ConfigT],
    values: Mapping[str, Any],
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
        raise ConfigError(
            f"{where}{given}: " + "; ".join(explain(kind, merged, error.errors()))
        ) from None
    except MissingFileError:  # an OSError, too
        raise
    except OSError as error:
        raise ConfigError(
            f"{where}: no path can be {str(error.filename)!r:.200}: {error.strerror}. Name another."
        ) from None


def _apply_override(values: Json, override: str) -> None:
    key, separator, raw = override.partition("=")
    *parents, last = key.strip().lstrip("-").split(".")
    if not separator or not all((*parents, last)):
        raise ConfigError(
            f"override {override!r} is not of the form key.sub=value, for example "
            "optimizer.learning_rate=1e-4"
        )
    try:
        parsed = tomllib.loads(f"v = {raw}")
    except (ValueError, RecursionError):
        parsed = {}
    node = values
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"override {override!r}: {parent!r} is a value, not a table. Give "
                "the whole value in its place."
            )
        node = child
    # More than one key: a text of several lines that only looks like TOML.
    node[last] = (
        json.loads(json.dumps(parsed["v"], default=str)) if parsed.keys() == {"v"} else raw.strip()
    )


def explain(kind: type[BaseModel], values: Any, items: Sequence[Any]) -> list[str]:
    """One phrase for each key with a fault; the branches of a union, which pydantic reports one by
    one, are one fault.
    """
    faults: dict[tuple[Any, ...], list[Any]] = {}
    for item in items:
        faults.setdefault(_location(values, item), []).append(item)
    inner = [
        place
        for place in faults
        if not any(place == other[: len(place)] for other in faults if len(other) > len(place))
    ]
    return [_phrase(kind, place, faults[place], values) for place in inner]


def _location(values: Any, item: Any) -> tuple[Any, ...]:
    """The keys down to a fault, without the names that pydantic gives to the branches of a
    union.
    """
    place, node = [], values
    for part in item["loc"]:
        is_key = (
            part in node
            if isinstance(node, dict)
            else isinstance(node, list) and isinstance(part, int) and part < len(node)
        )
        if is_key:
            node = node[part]
        if is_key or (item["type"] == "missing" and part is item["loc"][-1]):
            place.append(part)
    return tuple(place)


def _phrase(
    kind: type[BaseModel], place: tuple[Any, ...], items: Sequence[Any], values: Any
) -> str:
    location, item = ".".join(map(str, place)), items[0]
    if item["type"] == "extra_forbidden":
        return f"unknown key {location!r} ({key_hint(kind, place, values, item['input'])})"
    table = {"model_type": "a table belongs here"}
    reasons = (
        table.get(item["type"]) or item["msg"].removeprefix("Value error, ") for item in items
    )
    message = ", or ".join(dict.fromkeys(reasons))
    if not location:
        return message
    if item["type"] == "missing":
        return f"key {location!r} is required"
    got = "" if isinstance(item["input"], Mapping | BaseModel) else f" (got {item['input']!r:.80})"
    return f"key {location!r}: {message}{got}"


def key_hint(
    kind: type[BaseModel], place: tuple[Any, ...], values: Mapping[str, Any], given: Any
) -> str:
    """A guess at the key that was meant: another library's word, a key of another table, a slip of
    the fingers.
    """
    *outer, last = place
    word, keys = _word(last), _known_keys(kind, outer)
    if not outer and word in METHODS and METHODS[word][0] in keys:
        section, key, value = METHODS[word]
        same = [
            name
            for name in _known_keys(kind, (section,))
            if isinstance(given, Mapping) and name in given
        ]
        instead = f"; {word}.{same[0]} is {section}.{same[0]}" if same else ""
        return (
            f"{word.upper()} is [{section}] with {key} = {value!r}: write [{section}] and in "
            f'it {key} = "{value}"{instead}'
        )
    if not outer and SECTIONS.get(word) in keys:
        return f"did you mean [{SECTIONS[word]}]?"
    near = alike(str(last), keys, cutoff=0.65)
    if near and isinstance(given, Mapping):
        return near
    inside = {
        (str(last), *path): _meant(kind, outer, _word(path[-1]), values) for path in _leaves(given)
    }
    if lines := [
        f"{'.'.join(path)} is {' or '.join(map(repr, meant))}"
        for path, meant in inside.items()
        if meant
    ]:
        return "; ".join(lines)
    if meant := _around(kind, outer, word):
        return did_you_mean([meant])
    if "model" in kind.model_fields and (
        notes := [NOTES[w] for w in (word, *(_word(path[-1]) for path in inside)) if w in NOTES]
    ):
        return notes[0]
    if meant := _meant(kind, outer, word, values):
        return did_you_mean(meant)
    deeper = [
        (*outer, table, last)
        for table in keys
        if last in _known_keys(kind, (*outer, table)) != keys
    ]
    if near := did_you_mean([".".join(map(str, path)) for path in deeper[:1]]) or near:
        return near
    many = outer and outer[0] in STAGES and len(keys) > 24
    return (
        f"`tether explain {'.'.join(map(str, outer))}` lists its keys"
        if many
        else (f"known keys: {', '.join(sorted(keys))}")
    )


def _word(name: Any) -> str:
    return str(name).lower().replace("-", "_")


def _leaves(value: Any) -> Iterator[tuple[str, ...]]:
    """The paths to the values of a table."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from (
            ((key, *path) for path in _leaves(inner)) if isinstance(inner, Mapping) else ((key,),)
        )


def _around(kind: type[BaseModel], outer: Sequence[Any], word: str) -> str:
    """The key that another library's word stands for in this table, or in one around it; empty:
    none.
    """
    targets = [target.split(".") for target in KEYS.get(word, ())]
    paths = (
        (*outer[:depth], *path)
        for depth in range(len(outer), -1, -1)
        for path in targets
        if depth or path[0] not in STAGES
    )
    return next((".".join(map(str, path)) for path in paths if _is_key(kind, path)), "")


def _meant(
    kind: type[BaseModel], outer: Sequence[Any], word: str, values: Mapping[str, Any]
) -> list[str]:
    """The keys that a word may stand for: around here, else in the stages that the recipe has, else
    in any stage.
    """
    if around := _around(kind, outer, word):
        return [around]
    targets = [(word,), *(tuple(target.split(".")) for target in KEYS.get(word, ()))]
    stages = [
        name
        for name in (*making("direct", "policy"), *STAGES)
        if name in kind.model_fields and name not in outer
    ]
    own = [
        ".".join((n, *p))
        for n in STAGES
        if n in stages and n in values
        for p in targets
        if _is_key(kind, (n, *p))
    ]
    anywhere = (
        next((".".join((n, *p)) for n in stages if _is_key(kind, (n, *p))), "") for p in targets
    )
    return list(dict.fromkeys(own))[:3] or list(dict.fromkeys(filter(None, anywhere)))[:2]


def _is_key(kind: type[BaseModel], path: Sequence[Any]) -> bool:
    return path[-1] in _known_keys(kind, path[:-1], exact=True)


def _known_keys(
    kind: type[BaseModel], location: Sequence[Any], *, exact: bool = False
) -> list[str]:
    kinds = [kind]
    # what is no field is a place in a list or a name in a table, whose kind stays the same
    for part in location:
        inside = [
            inner
            for k in kinds
            if part in k.model_fields
            for inner in models_of(k.model_fields[part].annotation)
        ]
        kinds = inside if exact else inside or kinds
    return list(dict.fromkeys(name for k in kinds for name in k.model_fields))


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The tables that a key of this type may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models_of(inner)]


def digest(value: Any) -> str:
    """A short content hash of any JSON value: equal configs have equal digests."""
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_override(word: str) -> bool:
    """True if a word of a command line sets a key: `ppo.steps=3`, and not a path that has a = in
    it.
    """
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
            f"file, or one of {names}."
        )
    if name not in recipes:
        advice = f"Packaged recipes: {names}; or give the path of a .toml file."
        raise MissingFileError(f"no recipe named {name!r:.80}{_near(name)}. {advice}")
    return recipes[name]


def packaged_recipes() -> dict[str, Path]:
    """The recipes that come with tether, by name."""
    return {
        path.stem: path
        for path in (Path(__file__).resolve().parent.parent / "recipes").glob("*.toml")
    }


def _near(name: str) -> str:
    near = alike(name, packaged_recipes())
    return f" ({near})" if near else ""
