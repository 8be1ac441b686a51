"""One self-contained page from a run directory: no network, nothing in it that a model wrote can act."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from tether.core.errors import RunError
from tether.report.answers import answer_groups, training_samples
from tether.report.figures import CURVES, HEALTH, cost_figures, curve_figures, goodhart_figures, parts_figures, policy_figures
from tether.report.model_figures import accuracy_figures, loss_figures, reliability_figures
from tether.report.narrative import Part, decimal, gold_parts, verdict
from tether.report.numbers import alarm_rows, arm_table, reward_facts, tiles
from tether.report.overopt import (
    POLICY_COLUMNS,
    PROXY_COLUMNS,
    Study,
    policy_rows,
    proxy_rows,
    read_study,
    study_figures,
    study_verdict,
)
from tether.report.plotting import Figure
from tether.report.reading import Journey, SubRun, mapping, number, printable, read_journey
from tether.report.rounds import COLUMNS, Rounds, read_rounds, round_rows, rounds_figures, rounds_verdict

HERE = Path(__file__).resolve().parent
STAGE_NAMES = ("sft", "pairs", "reward", "ppo")


@dataclass(frozen=True, slots=True)
class Sections:
    """The figures of the page in its order; an empty list leaves its section out."""

    policy: Sequence[Figure]
    goodhart: Sequence[Figure]
    accuracy: Sequence[Figure]
    curves: Sequence[Figure]
    health: Sequence[Figure]
    parts: Sequence[Figure]
    cost: Sequence[Figure]
    losses: Sequence[Figure]

    @property
    def every(self) -> list[Figure]:
        groups = (self.policy, self.goodhart, self.accuracy, self.curves, self.health, self.parts, self.cost, self.losses)
        return [figure for group in groups for figure in group]


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write one HTML page about a run directory, whatever tether left in it, and give its path.

    The page needs no network and its policy forbids it; `output` defaults to `report.html` in the run. Parts that the run
    does not have are left out; damaged files are named at the foot of the page.

    Raises:
        MissingFileError: the run directory does not exist.
        RunError: it holds nothing of tether, or the output is a folder.
    """
    run = Path(run)
    output = run / "report.html" if output is None else Path(output)
    if output.is_dir():
        raise RunError(f"{output} is a folder. Give the path of the HTML file to write.")
    if (study := read_study(run)) is not None:
        page = render_study(study)
    elif (rounds := read_rounds(run)) is not None:
        page = render_rounds(rounds)
    else:
        page = render(read_journey(run))
    _write(output, page)
    return output


def render(journey: Journey) -> str:
    """The page as text."""
    sections, parts = _sections(journey)
    groups_text, groups = answer_groups(journey.answers)
    return fill(
        "page.html",
        journey.name,
        sections.every,
        journey.notes,
        verdict=verdict(journey),
        tiles=tiles(journey),
        figures=sections,
        parts=[(printable(p.name, 60), decimal(p.before), decimal(p.after), decimal(p.change, True), p.direction) for p in parts],
        arms=arm_table(journey.arms),
        alarms=alarm_rows(journey.arms),
        facts=reward_facts(journey.reward.summary if journey.reward else {}, journey.pairs),
        groups_text=groups_text,
        groups=groups,
        samples=[] if groups or not journey.policy else training_samples(journey.policy),
        blocks=_blocks(journey),
    )


def fill(template: str, name: str, drawn: Sequence[Figure], notes: Sequence[str], **values: Any) -> str:
    """A template with its figures, script and style put into it."""
    plotly, script = get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(
        name=printable(name, 120),
        notes=[printable(note, 400) for note in notes],
        drawings=embed({figure.id: figure.drawing for figure in drawn}),
        plotly=plotly,
        script=script,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        hashes=" ".join(f"'sha256-{_hash(text)}'" for text in (plotly, script)),
        uses_plots=bool(drawn),
        **values,
    )


def render_study(study: Study) -> str:
    """A study of overoptimisation as text."""
    figures = study_figures(study)
    return fill(
        "study.html",
        study.name,
        [figure for group in figures.values() for figure in group],
        study.notes,
        verdict=study_verdict(study),
        figures=figures,
        proxies=(PROXY_COLUMNS, proxy_rows(study)),
        policies=(POLICY_COLUMNS, policy_rows(study)),
        samples=training_samples(study.worst) if study.worst else [],
        worst=study.worst.name if study.worst else "",
    )


def render_rounds(found: Rounds) -> str:
    """A loop of preferences as text."""
    figures = rounds_figures(found)
    return fill(
        "rounds.html",
        found.name,
        figures,
        found.notes,
        verdict=rounds_verdict(found),
        figures=figures,
        rounds=(COLUMNS, round_rows(found)),
        samples=training_samples(found.last) if found.last else [],
    )


def embed(value: Any) -> str:
    """JSON for a script element: no character in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sections(journey: Journey) -> tuple[Sections, list[Part]]:
    reward = journey.reward.summary if journey.reward else {}
    parts, policy = gold_parts(journey), journey.policy
    others = [(arm.name, _parts_after(arm)) for arm in journey.arms[1:]]
    stages = [(name, number(mapping(journey.summary.get(name)).get("seconds"))) for name in STAGE_NAMES]
    stages += [(str(name), number(mapping(arm).get("seconds"))) for name, arm in mapping(journey.summary.get("arms")).items()]
    spent = [(name, seconds) for name, seconds in dict(stages).items() if seconds]
    return Sections(
        policy=policy_figures(journey.arms),
        goodhart=goodhart_figures(journey.arms),
        accuracy=accuracy_figures(reward, journey.pairs) + reliability_figures(reward),
        curves=curve_figures(journey.arms, CURVES, "curve"),
        health=curve_figures(journey.arms, HEALTH, "health"),
        parts=parts_figures([(p.name, p.before, p.after) for p in parts], others),
        cost=cost_figures(policy or SubRun("none"), journey.arms, spent),
        losses=loss_figures(journey.sft, journey.reward, journey.direct),
    ), parts


def _parts_after(arm: SubRun) -> dict[str, float]:
    stored = mapping(arm.summary.get("gold_parts"))
    found = {printable(name, 60): number(mapping(value).get("after")) for name, value in stored.items()}
    return {name: value for name, value in found.items() if value is not None}


def _blocks(journey: Journey) -> list[tuple[str, str]]:
    """The resolved configs and manifests, of the whole and of each stage."""
    whole = [("config", journey.config), ("manifest", journey.manifest)]
    for stage in journey.stages:
        if stage.config is not journey.config:
            whole += [(f"{stage.name}: config", stage.config), (f"{stage.name}: manifest", stage.manifest)]
    return [
        (printable(title, 80), printable(json.dumps(value, indent=2, ensure_ascii=False), 60_000))
        for title, value in whole
        if value is not None
    ]


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(output: Path, page: str) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(page.encode("utf-8", "replace"))
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
