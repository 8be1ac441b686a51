"""A function for every method: one call is one stage of a recipe, with the recipe's names, checks,
folder and resume.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tether.api.given import (
    are_conversations,
    data_values,
    model_values,
    reward_values,
    settings_values,
)
from tether.api.runs import Run
from tether.cli.terminal.bars import FINISHED, OnStep, bars
from tether.cli.terminal.console import Terminal, print_error
from tether.core.errors import ConfigError
from tether.core.stopping import Interrupted
from tether.core.types import Entries, Facts, Json
from tether.rewards.calling import in_place
from tether.runner.call import folder_of, recipe_of
from tether.runner.start import start_run
from tether.settings.messages import key_hint
from tether.settings.reading import build, in_lines, packaged_recipes
from tether.settings.recipe import BaseRecipe, read_recipe, recipe_type
from tether.settings.sampling import REWARD_KEYS
from tether.settings.stages import STAGES, StageKind, by_place, method_stage
from tether.settings.synonyms import FOREIGN, METHODS, advice

SHARED = ("seed", "track", "deterministic")
"""Keys of a recipe's top that every method takes; a seed is the section's, too."""


def method(name: str) -> Callable[..., Run]:
    """The function of a stage, or of a method that is a stage with one of its keys set
    (`tether.dpo`).
    """
    places, _ = takes(name)

    def call(*arguments: object, **given: Any) -> Run:
        by_place = dict(zip(places, arguments, strict=False))
        if any(key in FOREIGN for key in given):
            raise ConfigError(f"tether.{name}: {in_lines(list(_foreign(name, given)))}")
        if (
            len(arguments) > len(places)
            or by_place.keys() & given.keys()
            or "model" not in {**by_place, **given}
        ):
            raise TypeError(
                f"tether.{name}({', '.join(places)}, *, ...): a model first, and each argument once",
            )
        return _start(name, **by_place, **given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = _doc(*method_stage(name))
    call.__signature__ = _signature(name)
    return call


def _foreign(name: str, given: Facts) -> Iterator[str]:
    """Every argument that this method does not take, with its name here; arguments of TRL's
    trainers first.
    """
    kind = method_stage(name)[0]
    first, last = takes(name)
    for key in (key for key in given if key in FOREIGN):
        yield f"{key} is {advice(FOREIGN, key, [kind.name])} here"
    taken = {*FOREIGN, *first, *last, *SHARED, *kind.section.model_fields}
    for key in (key for key in given if key not in taken):
        values = {kind.name: dict(given)}
        hint = key_hint(recipe_type(), (kind.name, key), values, given[key])
        yield f"unknown key {key!r} ({_as_arguments(hint, kind.name)})"


@contextlib.contextmanager
def _in_python(section: str) -> Iterator[None]:
    """Settings that do not fit are named as arguments of the call."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(_as_arguments(str(error), section)) from None


def _as_arguments(text: str, section: str) -> str:
    """A message in which each key of the section, and of [model], is the argument that sets it."""
    text = re.sub(rf"'{section}\.(\w+)'", r"'\1'", text)
    text = re.sub(rf"(?<!key )'{section}\.(\w+)\.(\w+)'", r"\1={'\2': ...}", text)
    return re.sub(r"(?<!key )'model\.(\w+)'", r"model={'source': ..., '\1': ...}", text)


def names() -> list[str]:
    """The methods, in the order of a recipe's stages."""
    return [*STAGES, *METHODS]


def _doc(kind: StageKind, fixed: Json) -> str:
    what = (
        f"{kind.help}."
        if not fixed
        else f"{kind.help}: with {', '.join(f'{k} = {v!r}' for k, v in fixed.items())}."
    )
    return (
        f"{what}\n\nOther arguments are the keys of the [{kind.name}] section "
        f"(`tether explain {kind.name}`).\nCalled again with the same "
        "arguments it goes on where it was; finished, it gives the result at once.\n"
        "docs/guides/python.md tells what models, rows, rewards and judges may be.\n\nRaises:\n   "
        " TetherError: an argument does not fit; one sentence says which, and what to do.\n"
    )


def _start(
    name: str,
    *,
    model: Any = None,
    data: object = None,
    prompts: object = None,
    reward: object = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[object] | None = None,
    run: str | Path | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
    **settings: object,
) -> Run:
    """One stage, in the run of its own or in that of `model`; a comparison of policies always in
    that of theirs.
    """
    kind, _ = method_stage(name)
    compares = kind.makes == "verdict"
    model = _as_text(Run(model) if compares and not isinstance(model, Run) else model)
    if tools is not None:
        own = settings.get("environment", {})
        own = own if isinstance(own, Mapping) else {"call": own}
        settings = {**settings, "environment": {**own, "tools": tools}}
    if isinstance(prompts, int):  # how many of them, where that is a key
        settings = {**settings, "prompts": prompts}
        prompts = None
    if data is not None and prompts is not None:
        raise ConfigError(
            f"tether.{name}: data and prompts are the same rows here: give one of them",
        )
    rows = _as_text(data if prompts is None else prompts)
    base = model_values(model)
    root = folder_of(name, base, run)
    top = {key: settings.pop(key) for key in SHARED if key in settings and not compares}
    seed = {"seed": top["seed"]} if "seed" in top and "seed" in kind.section.model_fields else {}
    section = {**seed, **settings_values(settings, root, name)}
    word = "data" if prompts is None else "prompts"
    scorer = None
    values = rows if isinstance(rows, str) else data_values(rows, root, word)
    if reward is not None or reward_weights is not None:
        talks = isinstance(values, dict) and are_conversations(rows, values)
        scorer = reward_values(_as_text(reward), reward_weights, conversations=talks)
    with _in_python(kind.name):
        recipe = recipe_of(
            name,
            base,
            values,
            scorer,
            run=root,
            top=top,
            section=section,
            where=f"tether.{name}",
        )
    return _run(recipe, [kind.name], on_step, progress)


def _as_text(value: object) -> object:
    """A path, or the folder of a run, as text; anything else as it is."""
    value = value.path if isinstance(value, Run) else value
    return str(value) if isinstance(value, Path) else value


def run(
    recipe: str | Path | Entries,
    *overrides: str,
    budget: float | Mapping[str, float] | None = None,
    on_step: OnStep | None = None,
    progress: bool = True,
) -> Run:
    """Run all stages of a recipe that are not done yet: a file, the name of a packaged one, or its
    tables as a dict.

    Args:
        overrides: `"ppo.steps=3"`, as on the command line.
        budget: minutes of the whole run, as the recipe's key of that name.
    """
    if budget is not None:
        minutes = (
            budget["minutes"]
            if isinstance(budget, Mapping) and budget.keys() == {"minutes"}
            else budget
        )
        overrides = (*overrides, f"budget={minutes}")
    if isinstance(recipe, Mapping):
        config = build(recipe_type(), recipe, overrides, where="tether.run")
    else:
        config = read_recipe(str(recipe), overrides)
    return Run(_run(config, config.stages, on_step, progress).path)


def recipes() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(packaged_recipes())


def load(path: str | Path) -> Run:
    """The run in a folder: its summary, metrics, policy, page.

    Raises:
        MissingFileError: the folder does not exist.
    """
    return Run(path)


def _run(recipe: BaseRecipe, chosen: Sequence[str], on_step: OnStep | None, progress: bool) -> Run:
    from tether.cli.terminal.price import announce_price
    from tether.cli.terminal.results import show_verdict

    root = Path(recipe.run)
    console = Terminal(quiet=not progress)
    began = time.monotonic()
    guarded = None if on_step is None else in_place(on_step, "the function of on_step")
    with bars(console, guarded, recipe.titles) as announce, _stopped_in_one_line():
        priced = partial(announce_price, recipe, chosen, announce)
        _, page = start_run(recipe, chosen, announce, began=began, checked=priced)
    names = ", ".join(recipe.titles[name] for name in chosen)
    done = f"{names} done; page: {page}" if announce.worked else FINISHED
    console.print(f"[dim]{root}: {done}[/]", highlight=False, soft_wrap=True)
    if recipe.sweep is not None:
        note = f"Each combination is a run: tether.load({str(root / 'sweep')!r} and its name)"
        console.print(note, soft_wrap=True)
    elif progress and STAGES[chosen[-1]].makes != "pairs":
        show_verdict(root)
    return Run(root, chosen[-1])


@contextlib.contextmanager
def _stopped_in_one_line() -> Iterator[None]:
    """Ctrl-C in training ends a program with one line, as it ends a command; at a prompt of Python
    it goes on upwards.
    """
    try:
        yield
    except Interrupted as stop:
        if hasattr(sys, "ps1"):
            raise
        print_error(str(stop))
        raise SystemExit(stop.exit_code) from None


def takes(name: str) -> tuple[list[str], list[str]]:
    """The arguments of a method: those that may go by place, and the keys of its section."""
    kind, fixed = method_stage(name)
    fields = kind.section.model_fields
    first = by_place(name)
    scored = "reward" in first
    last = ["reward_weights"] if scored else []
    last += ["tools"] if "environment" in fields else []
    last += (
        ["on_step", "progress"]
        if kind.makes == "verdict"
        else ["run", "seed", "track", "on_step", "progress"]
    )
    hidden = {*fixed, "seed", "data", "judge", *(() if scored else REWARD_KEYS)}
    return first, [*last, *(key for key in fields if key not in hidden)]


def _signature(name: str) -> inspect.Signature:
    """The signature that `help` and notebooks show."""
    first, last = takes(name)
    word = inspect.Parameter.POSITIONAL_OR_KEYWORD
    only = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(key, kind, default=None)
        for keys, kind in ((first, word), (last, only))
        for key in keys
    ]
    parameters[0] = parameters[0].replace(default=inspect.Parameter.empty)
    return inspect.Signature(parameters)
