"""The README.md of an exported model: what it is, what it learned from, what was measured of it and what was not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether import __version__
from tether.core.rundir import read_json
from tether.models.config import PACKAGE_PREFIX, TINY
from tether.models.packaged import PACKAGES
from tether.report.narrative import decimal, interval, whole
from tether.report.reading import SubRun, estimate, mapping, number, printable, read_sub_run

LISTED = 40
"""Rows of a table, at most."""
BOOKKEEPING = {"seconds", "peak_rss_bytes", "quarantine", "alarms", "reliability", "slices"}
HELD_OUT = re.compile("(gold|test|tests|heldout|heldout_(?!ties).*|eval_loss)$")
SECRET = re.compile(r"(?i)(?:^|_)(?:key|token|password|passwd|secret|credentials?)$")
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
LONG_PATH = re.compile(r"(?<![\w:/.~])(?:~|[A-Za-z]:(?=\\))?[/\\](?:[^\s/\\'\"|]+[/\\])+(?=[^\s/\\'\"|])")
TASKS = {
    "policy": ("text-generation", "AutoModelForCausalLM", "CausalLM"),
    "reward": ("text-classification", "AutoModelForSequenceClassification", "SequenceClassification"),
    "process": ("token-classification", "AutoModelForTokenClassification", "TokenClassification"),
}


@dataclass(frozen=True, slots=True)
class Card:
    """What a card is made of; `measured` is what the export found when it read its own folder."""

    kind: str
    base: str
    stage: Path | None
    checkpoint: Path | None
    adapter: bool
    dtype: str
    measured: Mapping[str, Any]


def model_card(card: Card) -> str:
    """The text: front matter in YAML as the hub reads it, then sections. Paths are cut to names and secrets are left out."""
    from huggingface_hub import ModelCardData

    lineage = list(_lineage(card.stage))
    sources = [
        (mapping(stage.manifest).get("model") or mapping(stage.config).get("model", {})).get("source") for stage in lineage
    ]
    origin = base_name(str(sources[-1])) if sources else card.base
    section = _section(lineage[0]) if lineage else ""
    data = ModelCardData(
        library_name="peft" if card.adapter else "transformers",
        base_model=None if origin.startswith(".") or origin == TINY else origin,
        pipeline_tag=TASKS[card.kind][0],
        license=next((p.license.lower() for p in PACKAGES.values() if p.source_model == origin), None),
        tags=["tether", f"{card.kind}-model", *([section] if section and section != card.kind else [])],
    )
    what = {"policy": "A language model", "reward": "A reward model", "process": "A process reward model"}[card.kind]
    made = f"{what} {'trained' if lineage else 'exported'} with tether{f', stage `{section}`' if section else ''}"
    parts = [
        f"---\n{data.to_yaml()}\n---\n",
        f"# {what}\n\n{made}, from `{origin}`{_checkpoint(card)}. "
        + (f"An adapter in {card.dtype}." if card.adapter else f"Weights in {card.dtype}."),
        "## How to load it\n\n" + _loading(card),
        "## Whether it is what was trained\n\n" + _fidelity(card),
        *(_stage(stage) for stage in lineage),
        "## What was not measured\n\n" + "\n".join(f"- {line}" for line in _unmeasured(card, lineage)),
        "## Versions\n\n" + _versions(lineage),
    ]
    return "\n\n".join(parts) + "\n"


def _lineage(stage: Path | None) -> Iterator[SubRun]:
    """The stage, and those whose results it stands on, the nearest first."""
    seen: set[Path] = set()
    while stage is not None and stage not in seen:
        seen.add(stage)
        yield read_sub_run(stage, [])
        source = Path(str(mapping(read_json(stage / "config.json").get("model")).get("source")))
        before = [source.parent, *(p / "sft" for p in stage.parents[:3] if source.parts[-2:] == ("sft", "model"))]
        stage = next((p.resolve() for p in before if (p / "config.json").is_file() and (p / "manifest.json").is_file()), None)


def _section(stage: SubRun) -> str:
    return next((key for key in mapping(stage.config) if key not in ("model", "seed", "round", "format")), "")


def base_name(source: str) -> str:
    """What strangers may call a model: no path of this machine, and nothing that a hub might take for an id of its own."""
    if source.startswith(PACKAGE_PREFIX):
        package = PACKAGES.get(source.removeprefix(PACKAGE_PREFIX))
        return package.source_model if package else source
    return "./" + "/".join(Path(source).resolve().parts[-2:]) if Path(source).expanduser().is_dir() else source


def _checkpoint(card: Card) -> str:
    return "" if card.checkpoint is None else f", at the checkpoint `{card.checkpoint.name}` of a training that went on"


def _loading(card: Card) -> str:
    _, auto, _ = TASKS[card.kind]
    lines = [f"from transformers import {auto}, AutoTokenizer", "", 'tokenizer = AutoTokenizer.from_pretrained("FOLDER")']
    local = card.base.startswith("./")
    labels = {"policy": "", "reward": ", num_labels=1", "process": ", num_labels=1"}[card.kind]
    if card.adapter:
        lines[0] = f"from peft import PeftModel\n{lines[0]}"
        lines.append(f'base = {auto}.from_pretrained("{"BASE" if local else card.base}"{labels})')
        lines += [] if card.kind == "policy" else ["base.config.pad_token_id = tokenizer.pad_token_id"]
        lines.append('model = PeftModel.from_pretrained(base, "FOLDER").eval()')
    else:
        lines.append(f'model = {auto}.from_pretrained("FOLDER").eval()')
    reply, waiting = ', {"role": "assistant", "content": "Hello!"}', ""
    if card.kind == "policy":
        reply, waiting = "", ", add_generation_prompt=True"
    lines += [f'talk = [{{"role": "user", "content": "Hi"}}{reply}]']
    lines += [f"text = tokenizer.apply_chat_template(talk, tokenize=False{waiting})"]
    lines += ['ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")', "logits = model(**ids).logits"]
    told = {
        "policy": "",
        "reward": "`logits[:, 0]` is the score of the conversation. The template ends it with the last reply's stop token, where "
        "the score is read, and padding is a token that ends nothing: both are needed for the score that was trained.",
        "process": "The logits at the last token of a step say how likely it is right: `sigmoid` of one, 1 − `softmax(...)[0]` "
        "of several.",
    }[card.kind]
    if card.adapter and local:
        told = f"`BASE` is the model of this run that the adapter stands on: `tether export RUN/sft BASE` writes it. {told}"
    return ("```python\n" + "\n".join(lines) + "\n```\n\n" + told).strip()


def _fidelity(card: Card) -> str:
    found, unit = card.measured, "nats of a token's log-probability" if card.kind == "policy" else "units of the score"
    told = [
        f"Read again in float32, it differs from what tether computes by at most {found['difference']:.2g} {unit} on a few short "
        "conversations."
    ]
    if found["constant"]:
        told.append(
            f"The library's classifier has no bias: scores lack a constant of {found['constant']:.6g} (`score_offset` of "
            "config.json), which tether adds when it loads the folder. Differences between scores need none of it."
        )
    told.append(
        "The text of the chat template, tokenized at once, gives the ids that were trained on."
        if found["same_ids"]
        else "**The text of the chat template, tokenized at once, does not always give the ids that were trained on**: tether "
        "tokenizes each turn by itself, and this tokenizer joins tokens across their borders."
    )
    return " ".join(told)


def _stage(stage: SubRun) -> str:
    section, config, manifest = _section(stage), mapping(stage.config), mapping(stage.manifest)
    recipe = json.dumps(_public({section: config.get(section), "seed": config.get("seed")}), indent=1, ensure_ascii=False)
    files = [f"| {Path(name).name} | `{str(sha)[:16]}` |" for name, sha in list(mapping(manifest.get("data")).items())[:LISTED]]
    rows = [f"| {_cell(name)} | {value} |" for name, value in _figures(stage.summary)][:LISTED]
    alarms = [
        f"| {number(a.get('step')) or 0:.0f} | {_cell(a.get('detector'))} | {_cell(a.get('message'))} |"
        for a in stage.alarms[:LISTED]
    ]
    watched = any("alarms" in row for row in stage.metrics)
    blocks = [f"## Stage `{section}`"]
    if files:
        blocks.append("\n".join(["| data | SHA-256, first 16 |", "|---|---|", *files]))
    elif section:
        blocks.append("The data was handed over by the pipeline; the run directory holds no digest of it.")
    if rows:
        blocks.append("\n".join(["| what was counted and measured | |", "|---|---|", *rows]))
    elif not stage.summary:
        blocks.append("This stage has no summary: it was not finished, and nothing was measured at its end.")
    if alarms:
        blocks.append("\n".join(["| step | alarm | |", "|---|---|---|", *alarms]))
    elif watched:
        blocks.append("The detectors noticed nothing.")
    blocks.append(f"<details><summary>recipe</summary>\n\n```json\n{recipe}\n```\n\n</details>")
    return "\n\n".join(blocks)


def _figures(summary: Mapping[str, Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Every number of a summary, with its interval where it has one."""
    for key, value in summary.items():
        name = f"{before}{str(key).replace('_', ' ')}"
        found = estimate(value)
        if key in BOOKKEEPING and depth == 0:
            continue
        if found is not None:
            count = "" if found.count is None else f", of {found.count:,}"
            value = whole(found.value) if found.low is None and found.value == round(found.value) else decimal(found.value)
            yield name, f"{value}{_interval(found)}{count}"
        elif isinstance(value, Mapping) and depth < 2:
            yield from _figures(value, f"{name}: ", depth + 1)


def _interval(found: Any) -> str:
    return f" ({told})" if (told := interval(found)) else ""


def _unmeasured(card: Card, lineage: Sequence[SubRun]) -> Iterator[str]:
    summary = lineage[0].summary if lineage else {}
    measured = {key for key, value in summary.items() if HELD_OUT.match(key) and value not in (None, {})}
    if not lineage:
        yield "Anything: this folder was not made by a run whose records are here."
    elif card.checkpoint is not None or not summary:
        yield "This very checkpoint: what stands above is of the stage's records, not of these weights."
    elif not measured:
        yield f"{'Answers to prompts' if card.kind == 'policy' else 'Pairs or solutions'} that it was not trained on."
    elif measured == {"heldout"} and card.kind == "policy":
        yield "What anybody but the training's own reward thinks of the answers: a policy may learn to please that alone."
    if card.kind == "reward":
        yield "How it ranks answers of other policies than those its comparisons are of, and how far optimisation may trust it."
    yield "What people think of this very model; harmlessness; other languages and domains than those of the data."


def _versions(lineage: Sequence[SubRun]) -> str:
    manifest = mapping(lineage[0].manifest) if lineage else {}
    packages = ", ".join(f"{name} {version}" for name, version in mapping(manifest.get("packages")).items())
    trained = (
        f"Trained with tether {manifest.get('tether')} (code {manifest.get('code_digest')}), {packages}. " if manifest else ""
    )
    return f"{trained}Exported with tether {__version__}."


def _cell(value: Any) -> str:
    return str(_public(printable(value, 300))).replace("|", "\\|").replace("\n", " ")


def _public(value: Any, key: str = "") -> Any:
    """The same without secrets, and with paths cut to their last name."""
    if isinstance(value, Mapping):
        return {str(k): _public(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item, key) for item in value]
    if isinstance(value, str):
        return "…" if SECRET.search(key) and key != "stop_token" else LONG_PATH.sub("", CREDENTIALS.sub("", value))
    return value
