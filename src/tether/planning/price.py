"""A price before work: what each stage of a recipe will do, and the time and the memory that it
takes here, by the planner.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tether.core.errors import one_line
from tether.core.protocols import Announcer, doing
from tether.core.types import Facts
from tether.learner.checkpoint import complete_checkpoints
from tether.planning.devices import Device, machine_for
from tether.planning.memory import Planner
from tether.planning.plan import Plan, plan, shape_config
from tether.planning.shares import Price, StagePrice, budget_lines, ends_of, own_budget
from tether.planning.sizes import row_sizes
from tether.planning.speeds import RowSizes
from tether.report.doubts import ENOUGH_UPDATES
from tether.report.numbers import plural
from tether.settings.evaluation import EvaluationSection
from tether.settings.judges import FunctionJudge
from tether.settings.pairs import PairsSection
from tether.settings.parts import parts_of
from tether.settings.recipe import BaseRecipe
from tether.settings.reward import RewardSection
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import OnlineSection
from tether.settings.section import PromptedSection, Section
from tether.settings.stages import STAGES
from tether.settings.supervised import SFTSection, SupervisedSection
from tether.stages.reward import CENTERED

CLOSING = 2e5
"""Small operations' worth of time of writing the report."""
MEASURING = 10.0
"""Seconds after which a price measures no more memory: it is about time first of all."""
LONG = 3600.0
"""Seconds above which the price also names what would shorten the work."""
READING = 0.4
"""Of the time of learning from rows, what it takes to read them alone."""
SHORTER = (
    "steps",
    "prompts_per_step",
    "samples_per_prompt",
    "max_new_tokens",
    "epochs",
    "prompts",
    "samples",
    "rounds",
    "limit",
)
"""Keys of which half takes less time."""


def priced(recipe: BaseRecipe, stages: Sequence[str], device: Device | None = None) -> Price:
    """The price of what is left of these stages, here or on another device."""
    left = [
        name
        for name in stages
        if recipe.repeat or not (Path(recipe.run) / name / "summary.json").is_file()
    ]
    if not left:
        return Price([])
    until = time.monotonic() + MEASURING
    device = device or machine_for(recipe.model.device)
    sizes = row_sizes(recipe, left)
    made = plan(recipe, device, sizes=sizes, stages=left, advise=False, until=until)
    price = Price(costs(recipe, made, sizes), CLOSING * device.dispatch)
    if price.seconds is not None and price.seconds > LONG:
        price.shorter = _shorter(recipe, price, device, sizes)
    return price


def show_price(recipe: BaseRecipe, names: Sequence[str], progress: object) -> Price:
    """Show what is left of these stages, and what that takes here. A model that the planner cannot
    work out has no price.
    """
    shown = progress if isinstance(progress, Announcer) and progress.shows else None
    if (
        shown is None
        and recipe.budget is None
        and not any(own_budget(recipe, name) for name in names)
    ):
        return Price([])  # nobody wants to know
    if shown is not None:
        doing(shown("price"), "working out time and memory")
    try:
        price = priced(recipe, names)
    except Exception as error:  # noqa: BLE001  (of whatever kind: the run itself may be able to do it)
        if shown is not None:
            shown.note(
                "The time and memory that this takes are not known before it starts: "
                f"{one_line(error)}",
            )
        return Price([])
    if shown is not None:
        ends = ends_of(recipe, price)
        expected = {s.name: s.expected.within(ends[s.name] / s.rounds) for s in price.stages}
        shown.price([*price.lines(), *budget_lines(recipe, price)], expected)
    return price


def _shorter(
    recipe: BaseRecipe,
    price: Price,
    device: Device,
    sizes: Mapping[str, RowSizes],
) -> list[tuple[str, float]]:
    """The two halved keys after which the whole takes least, each by itself, with the seconds of
    the whole then.
    """
    assert price.seconds is not None
    config = shape_config(recipe.model)
    tried = []
    longest = sorted(
        (s for s in price.stages if s.seconds and s.name in STAGES),
        key=lambda stage: -(stage.seconds or 0.0),
    )
    for stage in longest[:2]:
        for text, section in _halved(stage.name, recipe.section(stage.name)):
            changed = recipe.model_copy(update={stage.name: section})
            planner = Planner(changed, device, config, RowSizes(), sizes, until=0.0)
            plans = planner.stages([stage.name])
            (cost,) = costs(changed, Plan(device, 0, plans), sizes)
            assert cost.seconds is not None and stage.seconds is not None
            tried.append((text, price.seconds - stage.seconds + cost.seconds))
    return sorted(tried, key=lambda change: change[1])[:2]


def _halved(name: str, section: Section) -> Iterator[tuple[str, Section]]:
    """One key at a time at half its value, where that is a section that a recipe may have."""
    for key in SHORTER:
        value = dict(section).get(key)
        if isinstance(value, int) and value > 1:
            with contextlib.suppress(ValidationError):
                half = {**section.model_dump(exclude_unset=True), key: value // 2}
                yield f"{name}.{key}={value // 2}", type(section).model_validate(half)


def costs(recipe: BaseRecipe, made: Plan, sizes: Mapping[str, RowSizes]) -> list[StagePrice]:
    """Each stage of a plan, with its steps counted."""
    prices = []
    for stage in made.stages:
        section = recipe.section(stage.name)
        rows = sizes.get(stage.name, RowSizes())
        rounds = recipe.repeat if recipe.repeat and stage.name != "sft" else 1
        work, steps, inner = _work(recipe, stage.name, section, rows)
        seconds = {phase.name: phase.seconds for phase in stage.phases}
        step = (
            sum(seconds.values())
            if inner is None
            else seconds["update"] + inner * seconds["rollout"]
        )
        after = stage.after
        if steps and isinstance(section, PromptedSection):  # all answers are judged at the end
            judging = seconds.get("judge", 0.0)
            step -= judging
            after += judging * steps
        before, each = stage.before, stage.each
        learns = not isinstance(section, OnlineSection | PromptedSection)
        updates = steps // _trainings(section) if steps and learns else ENOUGH_UPDATES
        if steps and isinstance(section, SupervisedSection | RewardSection):
            once = READING * step * steps / section.epochs
            first, along, last = _read_again(recipe, section, rows, updates)
            before += first * once
            each += along * once / steps
            after += last * once
        if steps is not None and rounds == 1:
            steps = max(0, steps - steps_done(Path(recipe.run) / stage.name))
        prices.append(
            StagePrice(
                name=stage.name,
                work=work,
                steps=steps,
                step=step + each,
                before=before,
                after=after,
                memory=stage.peak,
                whole=stage.whole,
                rounds=rounds,
                prompts=_prompts(section, rows),
                updates=updates,
                title=recipe.titles[stage.name],
                unpriced=_evaluators(section),
            ),
        )
    return prices


def _evaluators(section: Section) -> Sequence[str]:
    """The evaluators of a stage. Their rows are not counted."""
    if isinstance(section, OnlineSection):
        return list(section.evaluate.evaluators) if section.evaluate else []
    return list(section.evaluators) if isinstance(section, EvaluationSection) else []


def _read_again(
    recipe: BaseRecipe,
    section: SupervisedSection | RewardSection,
    rows: RowSizes,
    updates: int,
) -> tuple[float, float, float]:
    """Rows that a training only reads: before its first update, along with its updates, afterwards.

    The unit is one pass over the rows that it learns from.
    """
    held = section.heldout_fraction / (1 - section.heldout_fraction)
    every = section.evaluate_every
    evaluated = ceil(updates / every) if every else 0
    if isinstance(section, SFTSection):
        along = evaluated or section.epochs
        return held, held * (along - 1), held
    if not isinstance(section, RewardSection):
        return 0.0, held * evaluated, held
    pairs = recipe.section("pairs")
    # a judge that scores knows the true order of held-out pairs: they are ranked once more
    scored = section.data is None and pairs is not None and isinstance(pairs.judge, FunctionJudge)
    learned = (rows.groups or rows.count or CENTERED) * (1 - section.heldout_fraction)
    return 0.0, held * evaluated, held * (1 + scored) + min(1.0, CENTERED / learned)


def steps_done(folder: Path) -> int:
    """Steps of which a stage that goes on has the newest checkpoint."""
    whole = complete_checkpoints(folder / "checkpoints")
    return int(whole[-1].name.removeprefix("step-")) if whole else 0


def _work(
    recipe: BaseRecipe,
    name: str,
    section: Any,
    rows: RowSizes,
) -> tuple[str, int | None, float | None]:
    """A stage in words, its steps, and of rounds the turns of sampling that belong to one
    update.
    """
    if isinstance(section, OnlineSection):
        settings = dict(section)
        steps = plural(settings["steps"], "step")
        prompts = plural(settings["prompts_per_step"], "prompt")
        work = f"{steps} × {prompts} × {_answers(settings)}"
        return work, settings["steps"], None
    if isinstance(section, PairsSection | EvaluationSection):
        return _answering(recipe, name, section, rows)
    if isinstance(section, RoundsSection):
        size = section.prompts_per_round or rows.count
        rounds = plural(section.rounds, "round")
        work = f"{rounds} × {size or 'all'} prompts × {_answers(dict(section))}"
        if size is None:
            return work, None, 0.0
        updates = max(
            1,
            ceil(size * (1 - section.direct.heldout_fraction) / section.direct.prompts_per_update),
        )
        turns = ceil(size * section.samples_per_prompt / section.engine_rows)
        return (
            work,
            section.rounds * section.direct.epochs * updates,
            turns / (section.direct.epochs * updates),
        )
    settings = dict(section)
    times = _trainings(section)
    size = (
        settings.get("batch_size")
        or settings.get("solutions_per_update")
        or settings["prompts_per_update"]
    )
    if rows.count is None:
        return f"{section.epochs} passes over rows that nobody has counted", None, None
    learned = (rows.groups or rows.count) * (1 - section.heldout_fraction)
    updates = times * section.epochs * max(1, ceil(learned / size))
    passes = f"{section.epochs} passes" if section.epochs > 1 else "1 pass"
    return (
        f"{rows.count:,} rows × {passes}{f' × {times} models' if times > 1 else ''} in "
        f"{plural(updates, 'update')}",
        updates,
        None,
    )


def _answers(settings: Facts) -> str:
    answers = plural(settings["samples_per_prompt"], "answer")
    return f"{answers} × up to {settings['max_new_tokens']} tokens"


def _answering(
    recipe: BaseRecipe,
    name: str,
    section: PairsSection | EvaluationSection,
    rows: RowSizes,
) -> tuple[str, int | None, None]:
    """Of a stage that samples and learns nothing: turns of as many answers as are drawn at once."""
    models = 1
    if isinstance(section, PairsSection):
        answers = section.samples_per_prompt
    else:
        answers = section.samples * _temperatures(recipe, section)
        models = 1 + len(recipe.policies)
    prompts = _prompts(section, rows)
    of = f" of {models} models" if models > 1 else ""
    work = f"{prompts or 'all'} prompts × {plural(answers, 'answer')}{of}"
    return (
        work,
        None if prompts is None else models * ceil(prompts * answers / section.engine_rows),
        None,
    )


def _prompts(section: Section, rows: RowSizes) -> int | None:
    """Prompts that a stage answers without training. None for other stages, and if the rows are not
    counted.
    """
    if not isinstance(section, PromptedSection):
        return None
    return dict(section).get("prompts") or rows.count


def _temperatures(recipe: BaseRecipe, section: EvaluationSection) -> int:
    """Temperatures at which each side answers."""
    policies = map(recipe.section, (*recipe.policies, "pairs"))
    own = [section.temperature]
    own += [one.sampling.temperature for one in policies if hasattr(one, "sampling")]
    return len({next((t for t in own if t is not None), None), *section.temperatures})


def _trainings(section: Section) -> int:
    """Models that a stage trains one after another."""
    trained = ("objective", "member", "student")
    return sum(part.kind in trained for part in parts_of(section)) or 1
