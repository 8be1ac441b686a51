"""One self-contained page from a run directory: no network, nothing in it that a model wrote can act."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from tether.core.errors import RunError
from tether.core.files import whole_file
from tether.report import decoding, figures, overopt, rounds
from tether.report.answers import answer_groups, training_samples
from tether.report.narrative import Part, decimal, gold_parts, signed, verdict
from tether.report.numbers import alarm_rows, arm_table, reward_facts, tiles
from tether.report.plotting import Figure
from tether.report.reading import Journey, SubRun, mapping, number, printable, read_journey, section_of, stage_kind

HERE = Path(__file__).resolve().parent
STAGE_NAMES = ("sft", "pairs", "reward", "ppo")
Figures = Mapping[str, Sequence[Figure]]
"""By section, in the page's order; an empty list leaves its section out."""


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
    if (study := overopt.read_study(run)) is not None:
        page = _study_page(study)
    elif (loop := rounds.read_rounds(run)) is not None:
        page = _rounds_page(loop)
    else:
        page = _journey_page(read_journey(run))
    with whole_file(output) as temporary:
        temporary.write_bytes(page.encode("utf-8", "replace"))
    return output


def _journey_page(journey: Journey) -> str:
    parts, reward = gold_parts(journey), journey.reward.summary if journey.reward else {}
    groups_text, groups = answer_groups(journey.answers)
    return _fill(
        "page.html", journey.name, _figures(journey, parts, reward), journey.notes,
        verdict=verdict(journey),
        tiles=tiles(journey),
        decoded=(decoding.COLUMNS, decoding.rows(decoding.control_of(journey.policy.summary)) if journey.policy else []),
        parts=[(printable(p.name, 60), decimal(p.before), decimal(p.after), signed(p.change), p.direction) for p in parts],
        arms=arm_table(journey.arms),
        alarms=alarm_rows([*(stage for stage in journey.supervised if stage.alarms), *journey.arms]),
        facts=reward_facts(reward, journey.pairs),
        groups_text=groups_text,
        groups=groups,
        samples=[] if groups else training_samples(journey.policy),
        blocks=_blocks(journey),
    )  # fmt: skip


def _figures(journey: Journey, parts: Sequence[Part], reward: Mapping[str, Any]) -> Figures:
    others = [(arm.name, _parts_after(arm)) for arm in journey.arms[1:]]
    stages = {name: journey.summary.get(name) for name in STAGE_NAMES} | mapping(journey.summary.get("arms"))
    spent = [(name, seconds) for name, stage in stages.items() if (seconds := number(mapping(stage).get("seconds")))]
    return {
        "policy": figures.policy_figures(journey.arms),
        "goodhart": figures.goodhart_figures(journey.arms),
        "accuracy": figures.accuracy_figures(reward, journey.pairs) + figures.reliability_figures(reward),
        "curves": figures.curve_figures(journey.arms, figures.CURVES, "curve"),
        "health": figures.curve_figures(journey.arms, figures.HEALTH, "health"),
        "parts": figures.parts_figures([(p.name, p.before, p.after) for p in parts], others),
        "cost": figures.cost_figures(journey.policy, journey.arms, spent),
        "losses": figures.loss_figures([(section_of(s) or stage_kind(s), s) for s in journey.supervised]),
    }


def _study_page(study: overopt.Study) -> str:
    return _fill(
        "study.html", study.name, overopt.study_figures(study), study.notes,
        verdict=overopt.study_verdict(study),
        proxies=(overopt.PROXY_COLUMNS, overopt.proxy_rows(study)),
        policies=(overopt.POLICY_COLUMNS, overopt.policy_rows(study)),
        samples=training_samples(study.worst),
        worst=study.worst.name if study.worst else "",
    )  # fmt: skip


def _rounds_page(found: rounds.Rounds) -> str:
    rows, samples = (rounds.COLUMNS, rounds.round_rows(found)), training_samples(found.last)
    drawn = {"rounds": rounds.rounds_figures(found)}
    return _fill(
        "rounds.html", found.name, drawn, found.notes, verdict=rounds.rounds_verdict(found), rounds=rows, samples=samples
    )


def _fill(template: str, name: str, drawn: Figures, notes: Sequence[str], **values: Any) -> str:
    """A template with its figures, script and style put into it."""
    plotly, script = get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (plotly, script)]
    loader = FileSystemLoader(HERE)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawings = {figure.id: figure.drawing for group in drawn.values() for figure in group}
    return environment.get_template(template).render(
        name=printable(name, 120),
        notes=[printable(note, 400) for note in notes],
        figures=drawn,
        drawings=_embedded(drawings),
        plotly=plotly,
        script=script,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        hashes=" ".join(f"'sha256-{digest}'" for digest in hashes),
        uses_plots=bool(drawings),
        **values,
    )


def _embedded(value: Any) -> str:
    """JSON for a script element: no character in it can end the element or open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
    shown = [(title, json.dumps(value, indent=2, ensure_ascii=False)) for title, value in whole if value is not None]
    return [(printable(title, 80), printable(text, 60_000)) for title, text in shown]
