"""Facts of a page before any result: a run's method, model, data, machine, and the source of its
gold scores.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tether.core.amounts import duration, gigabytes, plural
from tether.core.types import Row
from tether.settings.synonyms import shown_name
from tether.watch.report.numbers import SENTENCES, thousands
from tether.watch.report.reading import Journey, SubRun, finite, listed, mapping, printable

NAMES = SENTENCES["methods"]
GOLD = SENTENCES["gold"]
PARTS = SENTENCES["parts"]
CALLED_GOLD = re.compile(r"\bgold\b", re.IGNORECASE)
"""In the name of a judge."""
PYTHON = "python:"
"""Before the names of functions that a Python call handed over."""
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
    """The method of what was trained last, a policy or what a supervised stage made, the model as
    the recipe names it, and the stages that are not finished.
    """
    made = [journey.stage(*kinds) for kinds in (("direct", "rounds"), ("reward",), ("sft",))]
    last = next((stage for stage in (*journey.arms[:1], *made) if stage.name), None)
    other = "pairs" if journey.stage("pairs").name else "evaluate"
    method = method_name(last) if last else NAMES[other]
    parts = [" of ".join(filter(None, (method, Path(_source(_models(journey)[::-1])).name)))]
    parts += [
        f"{stage.title} not finished: step {finite(stage.metrics[-1], 'step') or 0:,.0f}"
        for stage in journey.stages
        if stage.metrics and not stage.summary
    ]
    return ", ".join(parts)


def _models(journey: Journey) -> list[Row]:
    """The notes on the models of all stages; the recipe's come last."""
    stages = (*journey.stages, journey.own)
    return [mapping(one, "model") for one in (*(one.manifest for one in stages), journey.recipe)]


def _source(models: Sequence[Row]) -> str:
    return next((str(one["source"]) for one in models if one.get("source")), "")


def price(own: SubRun, stages: Iterable[SubRun]) -> str:
    """Prompts of the comparison, time and memory of all that was run; empty where nothing was
    noted.
    """
    stages = list(stages)
    compared = [finite(one.summary, "num_prompts") for one in stages if one.section == "evaluate"]
    summaries = [run.summary for run in (own, *stages)]

    def noted(key: str) -> list[float]:
        return [finite(summary, key) or 0.0 for summary in summaries]

    whole, *parts = noted("seconds")
    sizes = (
        (sum(filter(None, compared)), partial(plural, what="prompt"), " compared"),
        (whole or sum(parts), duration, " in all"),
        (max(noted("peak_rss_bytes")), gigabytes, " of RAM"),
        (max(noted("peak_gpu_bytes")), gigabytes, " of GPU memory"),
    )
    return ", ".join(f"{show(size)}{of}" for size, show, of in sizes if size)


def facts(journey: Journey, run: Path) -> list[tuple[str, list[str]]]:
    """A name and lines for everything that is known of what was run, where and when."""
    stages = journey.stages
    manifests = [
        manifest for stage in (*stages, journey.own) if (manifest := mapping(stage.manifest))
    ]
    seeds = [
        seed
        for stage in (journey.own, *stages)
        if (seed := mapping(stage.config).get("seed")) is not None
    ]
    started = min(
        (str(manifest["started"]) for manifest in manifests if "started" in manifest),
        default="",
    )
    rows = (
        ("model", [_source(_models(journey))]),
        ("method", [" → ".join(dict.fromkeys(short_method(stage) for stage in stages))]),
        ("data", [line for stage in stages for line in _data(stage)]),
        ("date", [started.replace("T", " ").replace("Z", " UTC")]),
        ("machine", [_machine(manifests[0], _models(journey))] if manifests else []),
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
        (str(manifest.get("cwd", ".")), _command(list(map(str, listed(manifest, "argv")))))
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
    files = mapping(stage.manifest, "data")
    rows = finite(stage.manifest, "rows")
    if paths := list(files) or mapping(stage.settings, "data").get("path"):
        packaged = "tether/settings/recipes/quickstart/"
        each = [str(path) for path in (paths if isinstance(paths, list) else [paths])]
        names = ", ".join(
            f"tether:{Path(path).stem}" if packaged in path else path for path in each
        )
        yield f"{stage.title}: {names}{f' ({thousands(rows)} rows)' if rows else ''}"


def _machine(manifest: Row, models: Sequence[Row]) -> str:
    cores = manifest.get("cpu_count")
    memory = finite(manifest, "memory_bytes")
    on = (
        next((one for model in models if (one := model.get(key)) and one != usual), "")
        for key, usual in (("device", "cpu"), ("dtype", "auto"))
    )
    size = (f"{cores} cores" if cores else "", f"{memory / 1e9:.0f} GB" if memory else "")
    parts = (manifest.get("processor") or manifest.get("platform"), *size, *on)
    return " · ".join(str(one) for one in parts if one)


def _versions(manifest: Row) -> str:
    versions = {
        **mapping(manifest, "packages"),
        "tether": manifest.get("tether"),
        "Python": manifest.get("python"),
    }
    return " · ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name))


class Judge(NamedTuple):
    """The judge of answers: its name, empty if it is not known, its words on itself, and whether
    training maximises it.

    In a text, `{judge}` is its name, and `{judge:score}` the gold score, or the score by this name.
    """

    name: str = ""
    says: str = ""
    is_reward: bool = False

    @property
    def is_gold(self) -> bool:
        """True for a judge that is called so, or has no name."""
        return not self.name or bool(CALLED_GOLD.search(self.name))

    def __format__(self, noun: str) -> str:
        name = "gold" if self.is_gold else self.name
        return f"gold {noun}" if noun and self.is_gold else f"{noun} by {name}" if noun else name

    @property
    def label(self) -> Judge:
        """For names of numbers and figures, where no long name has a place."""
        return self if self.is_gold else Judge("the judge")


GOLD_JUDGE = Judge()


def judge_of(journey: Journey) -> Judge:
    """The judge of a run's answers: by its manifests, that of [evaluate] first, else by its
    recipe.
    """
    stages = sorted(journey.stages, key=lambda stage: stage.section != "evaluate")
    noted = next(
        (judge for stage in stages if (judge := mapping(stage.manifest, "judge"))),
        {},
    )
    name = printable(function_name(noted.get("name")), 60)
    if not name:
        judges = [mapping(journey.recipe, "evaluate").get("judge")]
        judges += [mapping(arm.settings, "evaluate").get("judge") for arm in journey.arms]
        name = GOLD["test"] if "test" in judges else next(filter(None, map(_called, judges)), "")
    rewards = {_called(arm.settings.get("function")) for arm in journey.arms}
    rewards |= {str(arm.settings.get("reward_source")) for arm in journey.arms}
    return Judge(name, str(noted.get("says") or ""), bool(name) and name in rewards)


def judge_of_all(journeys: Iterable[Journey]) -> Judge:
    """The judge of several runs' answers: the first that is not called gold."""
    return next((one for one in map(judge_of, journeys) if not one.is_gold), GOLD_JUDGE)


def judge_of_labels(journey: Journey) -> Judge:
    """The judge whose scores simulated annotators vote by."""
    return Judge(_called(journey.stage("pairs").settings.get("judge")))


def _called(function: object) -> str:
    """The function that a table of settings names; empty where it names none."""
    return printable(function_name(mapping(function).get("call")), 60)


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
    name, says, is_reward = judge = judge_of(journey)
    if not judge.is_gold:
        words = ["judge-is-reward" if is_reward else "judge-says" if says else "judge"]
    else:
        words = ["what", *(["says" if says else "name"] if name else [])]
    sentences = [GOLD[word].format(name=name, says=says) for word in words]
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
