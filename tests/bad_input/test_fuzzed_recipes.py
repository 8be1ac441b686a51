"""Recipes with anything in them are accepted or refused in one sentence; what is accepted and small
trains, or says why not.
"""

from __future__ import annotations

import copy
import json
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.every_stage import loop_recipe, recipe

from tether.core.errors import TetherError
from tether.runner.assembly.checks import check_section
from tether.runner.assembly.data.rows import check_data
from tether.runner.run import run_recipe
from tether.settings.reading import build, load_recipe
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES

RECIPES = sorted(
    (Path(__file__).resolve().parents[2] / "src" / "tether" / "settings" / "recipes").glob(
        "**/*.toml",
    ),
)
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 10**18, -(10**30), 1e-300, 1e308, float("nan"), float("inf"), 0.5, "", " ", "x", "nan", "1",
    "../x", "/nowhere/x.jsonl", "~/none", "$NOTHING/x", "tether:nothing", "tether:prompts", "hub:a/b", "hub:", "x" * 4000,
    "é\u202e", "a\nb", "a\x00b", "\ud800", "{interpolated}", "${a}", "%(a)s", [], [[]], [1], ["x"], ["x", 1, None], {},
    {"": 1}, {"x": {}},
    {"path": 1}, {"path": "tether:prompts"}, {"call": "os:getcwd"}, {"call": "nothing"}, "best", "learned", "function", "tiny",
]  # fmt: skip


def tables() -> list[dict[str, Any]]:
    """Every packaged recipe that can be read without its data, and one with all stages."""
    here = Path("/nowhere")
    texts = [tomllib.loads(path.read_text(encoding="utf-8")) for path in RECIPES]
    return [values for values in texts if values.keys() & {"model", *STAGES}] + [
        loop_recipe(here / "run"),
    ]


def fields(kind: Any, deep: int = 4) -> Iterator[tuple[str, ...]]:
    """The paths to all keys that a recipe may have."""
    from tether.settings.messages import models_of

    for name, field in kind.model_fields.items():
        yield (name,)
        for inner in models_of(field.annotation) if deep else ():
            yield from ((name, *path) for path in fields(inner, deep - 1))


KEYS = sorted(set(fields(Recipe)))


def bent(draw: random.Random, tables: list[dict[str, Any]]) -> dict[str, Any]:
    """A recipe with one to five of its values, or of any keys that there are, set to something
    else, moved, or taken away.
    """
    values = copy.deepcopy(draw.choice(tables))
    for _ in range(draw.randint(1, 5)):
        path = (
            draw.choice([draw.choice(KEYS), *places(values)])
            if draw.random() < 0.7
            else draw.choice(KEYS)
        )
        node: Any = values
        for key in path[:-1]:
            inner = node.get(key) if isinstance(node, dict) else None
            if not isinstance(inner, dict):
                if not isinstance(node, dict):
                    break
                inner = node[key] = {}
            node = inner
        if not isinstance(node, dict):
            continue
        match draw.randint(0, 5):
            case 0:
                node.pop(path[-1], None)
            case 1 if path[-1] in node:
                node[draw.choice(KEYS)[-1]] = node.pop(path[-1])
            case 2 if path[-1] in node:
                node[path[-1]] = draw.choice(
                    [
                        [node[path[-1]]],
                        {path[-1]: node[path[-1]]},
                        json.dumps(node[path[-1]], default=str),
                    ],
                )
            case _:
                node[path[-1]] = copy.deepcopy(draw.choice(STRANGE))
    return values


def places(values: Any, *outer: str) -> list[tuple[str, ...]]:
    """The paths to the keys of a table, and of those in it."""
    own = [((*outer, key), value) for key, value in values.items()]
    return [place for place, _ in own] + [
        p for place, v in own if isinstance(v, dict) for p in places(v, *place)
    ]


def outcome(values: dict[str, Any], folder: Path) -> Any:
    """The recipe, or the sentence with which it is refused; any other exception goes on to whoever
    runs the tests.
    """
    try:
        built = build(Recipe, values)
        for name in built.stages:
            section = built.section(name)
            if section.data is not None and not any(
                path.startswith("hub:") for path in section.data.paths
            ):
                check_data(name, section)
            check_section(name, section, built.model)
    except TetherError as error:
        words = str(error)
        assert words.strip() and len(words) < 20_000 and "Traceback" not in words
        return words
    return built


def check(folder: Path, count: int, seed: int) -> int:
    draw, accepted, sources = random.Random(seed), 0, tables()
    for number in range(count):
        values = bent(draw, sources)
        try:
            accepted += not isinstance(outcome(values, folder), str)
        except Exception as error:
            raise AssertionError(
                f"recipe {number} of seed {seed}: {type(error).__name__}: {error}\n{values!r:.3000}",
            ) from error
    return accepted


def test_three_hundred_recipes_are_read_or_refused(tmp_path):
    assert 0 < check(tmp_path, 300, seed=1) < 300


@pytest.mark.slow
def test_ten_thousand_recipes_are_read_or_refused(tmp_path):
    assert 0 < check(tmp_path, 10_000, seed=2) < 10_000


def test_texts_of_recipes_are_read_or_refused(tmp_path):
    """Bytes cut, doubled, swapped: what is no TOML any more, and keys twice."""
    draw, path = random.Random(3), tmp_path / "a.toml"
    for number in range(300):
        lines = draw.choice(RECIPES).read_text(encoding="utf-8").splitlines()
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(lines))
            match draw.randint(0, 3):
                case 0:
                    lines.insert(draw.randrange(len(lines)), lines[place])
                case 1:
                    lines[place] = lines[place][: draw.randint(0, len(lines[place]))]
                case 2:
                    lines[place] += draw.choice(
                        ["]", '"', "=", "[[x]]", "\\u0000", "\t\x01", "'''", "#", "9" * 5000],
                    )
                case 3:
                    lines[place] = lines[place].replace(
                        "=",
                        draw.choice(["==", "= =", ":", "=[", ".x="]),
                        1,
                    )
        path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
        try:
            load_recipe(path, Recipe)
        except TetherError:
            pass
        except Exception as error:
            raise AssertionError(f"text {number}: {error!r}\n{path.read_text()}") from error


def small(draw: random.Random, folder: Path, number: int) -> dict[str, Any]:
    """One stage of the tiny recipe with one or two of its keys set to something that fits their
    type more often than not.
    """
    values = recipe(folder, folder / f"run-{number}")
    name = draw.choice([n for n in values if n in STAGES and n != "rounds"])
    section = copy.deepcopy(values[name])
    section |= {"steps": 1} if "steps" in section else {"epochs": 1}
    own = [path for path in KEYS if path[0] == name and len(path) in (2, 3)]
    for _ in range(draw.randint(1, 2)):
        path = draw.choice(own)
        value = draw.choice(
            [
                0,
                1,
                2,
                3,
                0.1,
                0.5,
                0.9,
                1e-6,
                True,
                False,
                "mean",
                "zero",
                "random",
                "none",
                1e6,
                -1,
                None,
            ],
        )
        inner = section
        if len(path) == 3:
            inner = section.setdefault(path[1], {})
        if isinstance(inner, dict):
            inner[path[-1]] = value
    more = (
        {"reward_source": "random"} if "reward_source" in STAGES[name].section.model_fields else {}
    )
    return {"run": values["run"], "model": values["model"], name: more | section}


def shortened(values: dict[str, Any]) -> dict[str, Any]:
    """The recipe with one step or epoch, and a budget, whatever lengths it was given."""
    name = next(key for key in values if key in STAGES)
    section = values[name]
    length = {key: min(section[key], 1) for key in ("steps", "epochs") if section.get(key)}
    return {**values, name: {**section, **length, "budget": 0.5}}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sixty_accepted_recipes_train_a_step_or_say_why_not(tmp_path):
    draw, trained, refused, number = random.Random(4), 0, 0, 0
    while trained + refused < 60:
        number += 1
        values = small(draw, tmp_path, number)
        if isinstance(outcome(values, tmp_path), str):
            continue
        built = build(Recipe, shortened(values))
        try:
            results = run_recipe(built)
        except TetherError as error:
            words = str(error)
            assert words.strip() and len(words) < 20_000 and "Traceback" not in words, number
            refused += 1
        except Exception as error:
            raise AssertionError(
                f"recipe {number}: {type(error).__name__}: {error}\n{values!r:.3000}",
            ) from error
        else:
            assert list(results) == list(built.stages), (number, results)
            assert (Path(built.run) / built.stages[0] / "summary.json").is_file(), number
            trained += 1
    assert trained > 30


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"kl": {"mode": "adaptive", "horizon": 0.5}},
            "kl.horizon = 0.5 is too short for steps of 4",
        ),
        ({"evaluate": {"judge": {"model": "x" * 4000}}}, "model source 'x"),
    ],
)
def test_a_short_horizon_and_a_long_model_name_are_refused(tmp_path, table, words):
    own = {"data": {"path": "tether:prompts"}, "prompts_per_step": 2, "samples_per_prompt": 2}
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}}
    values["ppo"] = {**own, "reward_source": "random", **table}
    assert words in str(outcome(values, tmp_path))
