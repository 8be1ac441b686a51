"""Facts of a page before any result: a run's method, model, data, machine, and the source of its
gold scores.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tether.report.numbers import SENTENCES, duration, percent, thousands
from tether.report.reading import Journey, Row, SubRun, finite, listed, mapping, present, printable
from tether.settings.synonyms import shown_name

NAMES, GOLD, PARTS = SENTENCES["methods"], SENTENCES["gold"], SENTENCES["parts"]
CALLED_GOLD = re.compile(r"\bgold\b", re.IGNORECASE)
"""In the name of a judge."""
PYTHON = "python:"
"""Before the names of functions that a Python call handed over."""
IDLE = 0.1
"""Share of a step that the learner may wait and yet be the one that takes the time."""
VERSIONS = ("tether", "Python", "torch", "transformers", "peft")


def anchor(name: str) -> str:
    """The anchor of a stage on the page."""
    return "stage-" + re.sub(r"[^\w-]", "-", name)


def method_name(stage: SubRun) -> str:
    """The name of a stage's method, in full."""
    own = shown_name(stage.section, stage.settings)
    names = (own, stage.section, stage.name, stage.name.partition("-")[0], stage.kind)
    return next((NAMES[name] for name in names if name in NAMES), stage.section or stage.name)


def short_method(stage: SubRun) -> str:
    """The abbreviation of a stage's method where it has one."""
    name = method_name(stage)
    abbreviation = re.search(r"\((.+)\)$", name)
    return abbreviation[1] if abbreviation else name[:1].lower() + name[1:]


def title(journey: Journey) -> str:
    """The method of what was trained last: a policy, else what a supervised stage made."""
    made = [journey.stage(*kinds) for kinds in (("direct", "rounds"), ("reward",), ("sft",))]
    last = next((stage for stage in (*journey.arms[:1], *made) if stage.name), None)
    return (
        method_name(last)
        if last
        else NAMES["pairs"]
        if journey.stage("pairs").name
        else NAMES["evaluate"]
    )


def _servers(stage: SubRun) -> Iterator[str]:
    """Shares of time for which engine servers worked and the learner waited, in a sentence."""
    shares = [
        [value for _, value in present(stage.metrics, f"engine/{name}")]
        for name in ("busy", "wait")
    ]
    if all(shares):
        busy, wait = map(statistics.fmean, shares)
        ahead = finite(stage.settings.get("max_staleness"))
        # of whole models a server has one
        turns = "turns" if ahead is None or stage.settings.get("lora") is False else "overlap"
        meaning = (
            "learner"
            if wait < IDLE
            else turns
            if not ahead
            else "sampling"
            if busy > 1 - 2 * IDLE
            else "neither"
        )
        yield SENTENCES["servers"]["shares"].format(
            busy=percent(busy),
            wait=percent(wait),
            meaning=SENTENCES["servers"][meaning],
        )


def facts(journey: Journey, run: Path) -> list[tuple[str, list[str]]]:
    """A name and lines for everything that is known of what was run, where and when."""
    stages = journey.stages
    manifests = [
        manifest for stage in (*stages, journey.own) if (manifest := mapping(stage.manifest))
    ]
    models = [mapping(manifest.get("model")) for manifest in manifests] + [
        mapping(journey.recipe.get("model")),
    ]
    seeds = [
        seed
        for stage in (journey.own, *stages)
        if (seed := mapping(stage.config).get("seed")) is not None
    ]
    seconds = finite(journey.own.summary.get("seconds")) or sum(
        finite(stage.summary.get("seconds")) or 0 for stage in stages
    )
    started = min(
        (str(manifest["started"]) for manifest in manifests if "started" in manifest),
        default="",
    )
    rows = (
        ("model", [next((str(model["source"]) for model in models if model.get("source")), "")]),
        ("method", [" → ".join(dict.fromkeys(short_method(stage) for stage in stages))]),
        ("data", [line for stage in stages for line in _data(stage)]),
        ("date", [started.replace("T", " ").replace("Z", " UTC")]),
        ("time", [duration(seconds) if seconds else ""]),
        ("servers", [line for stage in journey.arms for line in _servers(stage)]),
        ("machine", [_machine(manifests[0], models)] if manifests else []),
        ("versions", [_versions(manifests[0])] if manifests else []),
        ("seed", list(dict.fromkeys(str(seed) for seed in seeds))),
        ("run", [str(run)]),
        ("run again", _again(manifests)),
    )
    return [
        (name, [printable(line, 300) for line in lines if line])
        for name, lines in rows
        if any(lines)
    ]


def _again(manifests: Sequence[Row]) -> list[str]:
    """The commands that began the stages, each once, to be given in their working directory."""
    begun = [
        (str(manifest.get("cwd", ".")), _command(list(map(str, listed(manifest.get("argv"))))))
        for manifest in manifests
    ]
    return [f"cd {shlex.quote(cwd)} && {line}" for cwd, line in dict.fromkeys(begun) if line]


def _command(words: Sequence[str]) -> str:
    """The command line of a start, from the name of its program and its arguments."""
    if not words:
        return ""
    first, *rest = words
    if first == "__main__.py":  # of `python -m tether`
        first = "tether"
    return shlex.join([*(["python"] if first.endswith(".py") else []), first, *rest])


def _data(stage: SubRun) -> Iterator[str]:
    """The files that a stage read, and how many rows it found in them."""
    files = mapping(mapping(stage.manifest).get("data"))
    rows = finite(mapping(stage.manifest).get("rows"))
    if paths := list(files) or mapping(stage.settings.get("data")).get("path"):
        packaged = "tether/recipes/quickstart/"
        each = [str(path) for path in (paths if isinstance(paths, list) else [paths])]
        names = ", ".join(
            f"tether:{Path(path).stem}" if packaged in path else path for path in each
        )
        yield f"{stage.title}: {names}{f' ({thousands(rows)} rows)' if rows else ''}"


def _machine(manifest: Row, models: Sequence[Row]) -> str:
    cores = manifest.get("cpu_count")
    memory = finite(manifest.get("memory_bytes"))
    device = next(
        (device for model in models if (device := model.get("device")) and device != "cpu"),
        "",
    )
    dtype = next(
        (dtype for model in models if (dtype := model.get("dtype")) and dtype != "auto"),
        "",
    )
    size = (f"{cores} cores" if cores else "", f"{memory / 1e9:.0f} GB" if memory else "")
    return " · ".join(
        map(
            str,
            filter(
                None,
                (manifest.get("processor") or manifest.get("platform"), *size, device, dtype),
            ),
        ),
    )


def _versions(manifest: Row) -> str:
    versions = {
        **mapping(manifest.get("packages")),
        "tether": manifest.get("tether"),
        "Python": manifest.get("python"),
    }
    return " · ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name))


def judge_of(journey: Journey) -> tuple[str, str]:
    """The name of the judge of answers, and what it says of itself; that of [evaluate] goes
    first.
    """
    stages = sorted(journey.stages, key=lambda stage: stage.section != "evaluate")
    noted = next(
        (judge for stage in stages if (judge := mapping(mapping(stage.manifest).get("judge")))),
        {},
    )
    return function_name(noted.get("name")), str(noted.get("says") or "")


def function_name(call: object) -> str:
    """The name of a function or a model; of a function that Python handed over without its digest."""
    name = str(call or "")
    return name.removeprefix(PYTHON).partition("@")[0] if name.startswith(PYTHON) else name


def who_judged(journey: Journey, names: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Sentences on the source of gold scores, and the meaning of the parts of these names.

    A user's own judge explains its parts itself.
    """
    if not (
        any(policy.judged_by_gold for policy in journey.policies)
        or any("gold_after" in row for row in journey.answers)
    ):
        return [], []
    name, says = judge_of(journey)
    sentences = [
        GOLD["what"],
        *([GOLD["says" if says else "name"].format(name=name, says=says)] if name else []),
    ]
    if name and not CALLED_GOLD.search(name):
        maximised = {
            function_name(mapping(arm.settings.get("function")).get("call")) for arm in journey.arms
        }
        words = "judge-is-reward" if name in maximised else "judge-says" if says else "judge"
        sentences = [GOLD[words].format(name=name, says=says)]
    return sentences, [
        (part, PARTS[part])
        for part in names
        if part in PARTS and name.startswith("tether.quickstart.")
    ]


def control_lines(arms: Sequence[SubRun]) -> list[str]:
    """A sentence for each arm that is a control: what it takes away."""
    says = SENTENCES["controls"]
    return [
        says[source].format(arm=arm.name)
        for arm in arms
        if (source := str(arm.settings.get("reward_source"))) in says
    ]
