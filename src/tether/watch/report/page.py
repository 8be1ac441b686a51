"""One self-contained page from a run directory: no network, nothing in it that a model wrote can
act.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tether.core.types import Row
from tether.watch.report import about, reading, tiles
from tether.watch.report.evaluators import COLUMNS, evaluator_curves, evaluator_rows
from tether.watch.report.figures import (
    accuracy_figures,
    charts,
    loop_figures,
    loss_figures,
    parts_figures,
    reliability_figures,
    stage_figures,
    timeline_figures,
    write_trace,
)
from tether.watch.report.frame import Figures, page_path, write_page
from tether.watch.report.gains import Part, gold_parts
from tether.watch.report.measures import arm_table
from tether.watch.report.narrative import conclusion, control_of, loop_conclusion
from tether.watch.report.picture import picture
from tether.watch.report.plotting import Plot
from tether.watch.report.reading import (
    SUPERVISED,
    Journey,
    LoopRun,
    SubRun,
    printable,
    read_journey,
    read_loop,
    started_stages,
)
from tether.watch.report.rollouts import (
    answer_groups,
    packed_rollouts,
    three_answers,
    training_samples,
)
from tether.watch.report.sweep import STAGES_PAGE, TAX_COLUMNS, tax_rows, write_sweep
from tether.watch.report.sweeps import read_sweep


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write one HTML page about a run directory, whatever tether left in it, and give its path.

    The page needs no network and its policy forbids it; `output` defaults to `report.html` in the
    run. Beside each page go its picture (`report.svg`, `report.png`), and a trace for ui.perfetto.dev
    (`trace.json`, beside another page than the default one `NAME.trace.json`) where a stage has
    measured its phases. Of a stage's folder
    in a run that a command began, it is the run's page that is written. Of a sweep it is the page
    over all combinations; `stages.html` beside it has the stages in the folder itself.
    Parts that the run does not have are left out; damaged files are named at the foot of the page.

    Raises:
        MissingFileError: the run directory does not exist.
        RunError: it holds nothing of tether, or the output is a folder.
    """
    run = whole_run(Path(run))
    output = page_path(run / "report.html" if output is None else Path(output))
    if (sweep := read_sweep(run)) is not None:
        if output.parent == run and started_stages(run):
            _write_run(run, run / STAGES_PAGE)
        return write_sweep(sweep, output)
    return _write_run(run, output)


def _write_run(run: Path, output: Path) -> Path:
    if (rounds := read_loop(run)) is not None:
        return _write_loop(rounds, output)
    journey = read_journey(run)
    name = "trace.json" if output.parent == run else f"{output.stem}.trace.json"
    write_trace(journey, output.with_name(name))
    return _write_journey(journey, run, output)


def whole_run(folder: Path) -> Path:
    """The run directory whose page describes a folder: for a stage the run's, if a command began
    one; else the folder's own.
    """
    return (
        folder.parent if (folder.parent / "command.json").is_file() and folder.is_dir() else folder
    )


def _write_journey(journey: Journey, run: Path, output: Path) -> Path:
    policy = journey.judged
    parts = gold_parts(policy, journey.answers)
    control = control_of(policy.summary)
    judge = about.judge_of(journey)
    groups_text, groups = answer_groups(journey.answers, judge.label)
    drawn = _figures(journey, parts, judge)
    blocks = _blocks(journey)
    own = reading.mapping(policy.summary, "heldout")
    decoded = (tiles.CONTROL_COLUMNS, tiles.control_rows(control or own))
    supervised = list(_supervised(journey))
    measured = [(stage, rows) for stage in journey.stages if (rows := evaluator_rows(stage))]
    rollouts = packed_rollouts(journey.stages)
    return write_page(
        output,
        "page.html",
        journey.own.name,
        drawn,
        journey.notes,
        title=about.title(journey),
        about=about.facts(journey, run),
        verdict=conclusion(journey),
        price=about.price(journey.own, journey.stages),
        three=three_answers(journey.answers),
        judge=f"{judge.label}",
        held_out="" if journey.trained_on else "held-out ",
        gold=about.who_judged(journey, [part.name for part in parts]),
        decoded=decoded,
        by_reward=not control,
        parts=parts,
        policies=journey.arms,
        supervised=supervised,
        measured=measured,
        measured_columns=COLUMNS,
        tax=(["ability", "KL, nats", *TAX_COLUMNS], tax_rows(journey.policies, journey.stages)),
        round_columns=tiles.ROUND_OF_PAIRS,
        arms=arm_table(journey.compared, judge),
        controls=about.control_lines(journey.compared),
        groups_text=journey.held_out_words(groups_text),
        groups=groups,
        samples=[] if groups else training_samples(journey.stage("policy")),
        reward="reward" if journey.own_reward else "proxy",
        blocks=blocks,
        rollouts=rollouts,
    )


class Learned(NamedTuple):
    """A stage that learned from rows, its figures and numbers; of one in rounds a table of these,
    and some of their pairs.
    """

    stage: SubRun
    plots: list[Plot]
    facts: list[tiles.Tile]
    rounds: list[list[str]]
    samples: Sequence[Row]


def _supervised(journey: Journey) -> Iterator[Learned]:
    """Stages that learned from rows, the last one first."""
    reward = journey.stage("reward")
    pairs = journey.stage("pairs")
    judge = about.judge_of_labels(journey)
    for stage in reversed(
        [stage for stage in journey.stages if stage.kind in (*SUPERVISED, "pairs")],
    ):
        drawn = loss_figures(stage)
        facts = []
        if stage is reward:
            drawn = (
                accuracy_figures(stage.summary, pairs.summary, judge)
                + reliability_figures(stage.summary)
                + drawn
            )
        if stage in (reward, pairs):
            facts = tiles.reward_facts(
                reward.summary if stage is reward else {},
                pairs.summary if stage is pairs else {},
                judge,
            )
        yield Learned(
            stage,
            drawn,
            facts,
            tiles.pair_rounds(stage),
            training_samples(stage) if stage.kind == "rounds" else [],
        )


def _figures(journey: Journey, parts: Sequence[Part], judge: about.Judge) -> Figures:
    own = journey.own_reward
    return {
        "picture": picture(journey),
        "policy": charts("policy", journey.arms, own),
        "goodhart": charts(
            "goodhart",
            [arm for arm in journey.arms if reading.series(arm.metrics, "gold/score")],
            judge=judge,
        ),
        "curves": charts("curves", journey.arms, own),
        "health": charts("health", journey.arms, own),
        "evaluators": evaluator_curves(journey.stages),
        "parts": parts_figures(
            parts,
            [(arm.name, gold_parts(arm)) for arm in journey.arms[1:]],
            judge,
        ),
        "cost": [
            *[plot for arm in journey.arms[:1] for plot in timeline_figures(arm)],
            *charts("phases", journey.arms[:1]),
            *charts("cost", journey.arms),
        ],
        "stages": stage_figures(journey.stages),
    }


def _write_loop(rounds: LoopRun, output: Path) -> Path:
    return write_page(
        output,
        "loop.html",
        rounds.name,
        {"picture": loop_figures(rounds)},
        rounds.notes,
        title="Preferences, round by round",
        verdict=loop_conclusion(rounds),
        rounds=tiles.round_table(rounds),
        samples=training_samples(rounds.last),
    )


def _blocks(journey: Journey) -> list[tuple[str, str]]:
    """The resolved configs and manifests, of the whole and of each stage."""
    stages = [
        (f"{stage.name}: ", stage)
        for stage in journey.stages
        if stage.config is not journey.own.config
    ]
    values = [
        (before + key, getattr(run, key))
        for before, run in [("", journey.own), *stages]
        for key in ("config", "manifest")
    ]
    shown = [
        (title, json.dumps(value, indent=2, ensure_ascii=False))
        for title, value in values
        if value is not None
    ]
    return [(printable(title, 80), printable(text, 60_000)) for title, text in shown]
