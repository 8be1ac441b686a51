"""The README.md of an exported model: what it is, what it learned from, what was measured of it and
what was not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tether import __version__
from tether.cli.tools.export_source import Source, section_of
from tether.core.rundir import read_json
from tether.core.secrets import redact_value, with_texts
from tether.core.types import Facts, Json
from tether.models.packaged import PACKAGES
from tether.settings.model import PACKAGE_PREFIX, TINY
from tether.watch.report.numbers import listing
from tether.watch.report.reading import SubRun, finite, mapping, printable, read_sub_run

LISTED = 40
"""Rows of a table, at most."""
LAYOUT: Json = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
"""Of the template: lines that hold a tag alone leave nothing behind."""
HELD_OUT = re.compile("(gold|test|tests|heldout|heldout_(?!ties).*|eval_loss)$")
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
LONG_PATH = re.compile(
    r"(?<![\w:/.~])(?:~|[A-Za-z]:(?=\\))?[/\\](?:[^\s/\\'\"|]+[/\\])+(?=[^\s/\\'\"|])",
)
TASKS = {
    "policy": ("text-generation", "CausalLM", "A language model"),
    "reward": ("text-classification", "SequenceClassification", "A reward model"),
    "process": ("token-classification", "TokenClassification", "A process reward model"),
}
"""By kind: the hub's name of the task, the library's, and what it is."""


def model_card(
    source: Source,
    base: str,
    dtype: str,
    check: Facts,
    *,
    adapter: bool,
    outputs: int,
    auto: str,
) -> str:
    """The text: front matter in YAML as the hub reads it, then sections. Paths are cut to names and
    secrets are left out.

    Args:
        base: the public name of the model below an adapter, or of the exported model.
        check: what the export found when it read its own folder.
        outputs: numbers that a head gives.
        auto: the library's class that loads it.
    """
    from huggingface_hub import ModelCardData

    kind = source.kind
    lineage = list(_lineage(source.stage))
    notes = [
        mapping(each.manifest).get("model") or mapping(each.config).get("model", {})
        for each in lineage
    ]
    origin = base_name(str(notes[-1].get("source"))) if notes else base
    section, summary = (
        (section_of(mapping(lineage[0].config)) or "", lineage[0].summary) if lineage else ("", {})
    )
    pipeline, _, what = TASKS[kind]
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        base_model=None if origin.startswith(".") or origin == TINY else origin,
        pipeline_tag=pipeline,
        license=next(
            (p.license.lower() for p in PACKAGES.values() if p.source_model == origin),
            None,
        ),
        tags=["tether", f"{kind}-model", *([section] if section and section != kind else [])],
    )
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        **LAYOUT,
    )
    environment.filters |= {"cell": _cell, "code": _code, "quoted": json.dumps}
    environment.filters |= {"number": finite, "mapping": mapping}
    return environment.get_template("model_card.md.jinja").render(
        {
            "kind": kind,
            "base": base,
            "dtype": dtype,
            "check": check,
            "checkpoint": source.checkpoint,
            "adapter": adapter,
        },
        outputs=outputs,
        lineage=lineage,
        origin=origin,
        section=section,
        auto=auto,
        what=what,
        front_matter=data.to_yaml(),
        policy=kind == "policy",
        local=base.startswith("./"),
        stages=[_stage(each) for each in lineage],
        summary=summary,
        measured=[
            key for key, value in summary.items() if HELD_OUT.match(key) and value not in (None, {})
        ],
        manifest=mapping(lineage[0].manifest) if lineage else {},
        version=__version__,
    )


def _lineage(stage: Path | None) -> Iterator[SubRun]:
    """The stage, and those whose results it builds on, the nearest first."""
    seen: set[Path] = set()
    while stage is not None and stage not in seen:
        seen.add(stage)
        yield read_sub_run(stage, [])
        source = Path(str(mapping(read_json(stage / "config.json"), "model").get("source")))
        before = [
            source.parent,
            *(p / "sft" for p in stage.parents[:3] if source.parts[-2:] == ("sft", "model")),
        ]
        stage = next(
            (
                p.resolve()
                for p in before
                if (p / "config.json").is_file() and (p / "manifest.json").is_file()
            ),
            None,
        )


def base_name(source: str) -> str:
    """Public name of a model, without a path of this machine. A hub cannot take it for an id of its
    own.
    """
    if source.startswith(PACKAGE_PREFIX):
        package = PACKAGES.get(source.removeprefix(PACKAGE_PREFIX))
        return package.source_model if package else source
    return (
        "./" + "/".join(Path(source).resolve().parts[-2:])
        if Path(source).expanduser().is_dir()
        else source
    )


def _stage(stage: SubRun) -> Json:
    """Entries of the card on a stage."""
    config = mapping(stage.config)
    section = section_of(config) or ""
    recipe = _public({section: config.get(section), "seed": config.get("seed")})
    files = list(mapping(stage.manifest, "data").items())[:LISTED]
    return {
        "section": section,
        "files": [(Path(name).name, str(sha)[:16]) for name, sha in files],
        "figures": list(listing(stage.summary))[:LISTED],
        "summary": stage.summary,
        "alarms": [
            {name: alarm.get(name) for name in ("step", "detector", "message")}
            for alarm in stage.alarms[:LISTED]
        ],
        "watched": any("alarms" in row for row in stage.metrics),
        "recipe": json.dumps(recipe, indent=1, ensure_ascii=False),
    }


def _cell(value: object) -> str:
    """A text as one cell of a table, in which no mark of HTML or Markdown acts: names and messages
    may be anybody's.
    """
    words = " ".join(str(_public(printable(value, 300))).split())
    return re.sub(r"[\\`|<]|\](?=[(\[])", lambda mark: f"&#{ord(mark[0])};", words)


def _code(value: object) -> str:
    """A text in backticks, from which it cannot break out."""
    return f"`{' '.join(printable(value, 300).replace('`', chr(0x2BC)).split())}`"


def _public(value: object) -> object:
    """The same without secrets, and with paths cut to their last name."""
    return with_texts(
        redact_value(value),
        lambda text: LONG_PATH.sub("", CREDENTIALS.sub("", text)),
    )
