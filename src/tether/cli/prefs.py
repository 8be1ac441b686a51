"""The commands of a preference store: what goes in, what comes out, who judges, and how far they agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tether.preferences.store import Store

StoreArgument = Annotated[str, typer.Argument(help="A preference store: a file, or a PostgreSQL URL.")]
Round = Annotated[str | None, typer.Option("--round", help="Name of a batch of tasks.")]
Names = Annotated[bool, typer.Option("--names", help="Annotators by name; without it they are annotator-1, annotator-2 ...")]


def opened(where: str, *, new: bool = False) -> Store:
    """The store there; MissingFileError where there is none and it shall not be made."""
    from tether.core.errors import MissingFileError
    from tether.preferences.store import Store

    if not new and "://" not in where and not Path(where).is_file():
        raise MissingFileError(f"there is no preference store at {where}. `tether prefs import` makes one")
    return Store(where)


def import_(
    store: StoreArgument,
    files: Annotated[list[str], typer.Argument(help="Comparisons, answers to make pairs of, tasks of Label Studio or Argilla.")],
    format: Annotated[
        str, typer.Option(help="answers, label-studio, argilla, or a format of `tether data inspect`; auto finds out.")
    ] = "auto",
    ask: Annotated[int | None, typer.Option(min=1, help="Ask so many people about each pair, its judges included.")] = None,
    labels: Annotated[str, typer.Option(metavar="NAME", help="Count the file's labels as judgments of an annotator NAME.")] = "",
    gold: Annotated[bool, typer.Option("--gold", help="The file's labels are known answers of gold questions.")] = False,
    round: Round = None,
    prefix: Annotated[str, typer.Option(help="Goes before annotators' names, to keep people of two sources apart.")] = "",
    fields: Annotated[str, typer.Option(help="PROMPT,FIRST,SECOND: unusual names in Label Studio's or Argilla's tasks.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="Of answers that name their prompt by id: the file of prompts.")] = None,
    model: Annotated[str, typer.Option(help="Of answers that do not say: which model gave them.")] = "",
    checkpoint: Annotated[str, typer.Option(help="Of answers that do not say: which checkpoint gave them.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many of each file.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if any row had to be left out.")] = False,
) -> None:
    """Put comparisons, with the judgments that they have, or answers into a store, which is made where there is none."""
    from tether.core.errors import ConfigError, DataError
    from tether.data.sources import Quarantine
    from tether.preferences.answers import import_answers, read_answers
    from tether.preferences.importing import format_of, import_cases, read_cases

    layouts = {format_of(file) if format == "auto" else format for file in files}
    if "answers" in layouts and len(layouts) > 1:
        raise ConfigError("some of these files hold answers and others comparisons. Import them one after the other")
    answers, quarantine = layouts == {"answers"}, Quarantine()
    named = {"ask": ask, "labels": labels, "gold": gold, "round": round, "prefix": prefix, "fields": fields}
    useless = named if answers else {"prompts": prompts, "model": model, "checkpoint": checkpoint}
    if without := next((name for name, value in useless.items() if value), None):
        what = "answers: `tether prefs ask` makes pairs of them" if answers else "comparisons"
        raise ConfigError(f"--{without} has no effect on {what}")
    if gold and labels:
        raise ConfigError("--gold and --labels both say what the file's labels are; give one of them")
    if fields and fields.count(",") != 2:
        raise ConfigError(f"--fields names three fields, PROMPT,FIRST,SECOND, not {fields!r}")
    if answers:
        rows = read_answers(files, prompts=prompts, quarantine=quarantine, limit=limit, model=model, checkpoint=checkpoint)
        rows = _begun(rows)
        found = import_answers(opened(store, new=True), rows)
    else:
        split = tuple(name.strip() for name in fields.split(",") if name.strip())
        known = {"fields": split, "labels": labels, "gold": gold, "limit": limit}
        cases = _begun(read_cases(files, format=format, quarantine=quarantine, **known))
        found = import_cases(opened(store, new=True), cases, ask=ask, round=round, prefix=prefix)
    names = {"rows": "rows", "answers": "new answers", "tasks": "new tasks", "judgments": "new judgments"}
    _table("", {label: f"{getattr(found, name):,}" for name, label in names.items()})
    if found.widened:
        typer.echo(f"{found.widened:,} pairs that were there already are asked of {ask} people now.")
    if found.not_gold:
        typer.echo(f"{found.not_gold:,} pairs were judged already, and did not become gold questions.")
    if found.repeated:
        typer.echo(f"{found.repeated:,} judgments are by people who had judged the same pair before, and were left out.")
    if quarantine.count:
        typer.echo(f"{quarantine.count:,} rows were left out: {quarantine.top_reasons()}", err=True)
        if strict:
            raise DataError(f"{quarantine.count} rows cannot be used, and --strict was given. The others were imported")


def export(
    store: StoreArgument,
    file: Annotated[Path, typer.Argument(help="Where to write; it is replaced whole or not at all.")],
    format: Annotated[str, typer.Option(help="jsonl, parquet, label-studio, argilla.")] = "jsonl",
    how: Annotated[
        str, typer.Option(help="Labels by soft (the share of votes as probability), majority, or dawid-skene.")
    ] = "soft",
    round: Round = None,
    names: Names = False,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Also what waits for people; for other tools, what nobody has judged too."),
    ] = False,
    least: Annotated[
        float, typer.Option(min=0, max=1, help="Leave out pairs with a smaller share of votes (or posterior) behind the label.")
    ] = 0.0,
) -> None:
    """Write what was judged as comparisons with every vote, or as tasks to go on with elsewhere; never a comment or a secret."""
    from tether.preferences.exporting import export as run
    from tether.preferences.label_studio import CONFIG

    which = {"round": round, "unfinished": unfinished, "least": least}
    count = run(opened(store), file, format, how=how, names=names, **which)  # type: ignore[arg-type]
    typer.echo(f"{count:,} rows in {file}")
    if format == "label-studio":
        interface = file.with_suffix(".xml")
        interface.write_text(CONFIG, encoding="utf-8")
        typer.echo(f"The labelling interface for these tasks is in {interface}")


def stats(store: StoreArgument) -> None:
    """How far the work is, and who has done how much of it."""
    from rich.console import Console
    from rich.table import Table

    from tether.preferences.exchange import workload

    where = opened(store)
    counts = where.counts()
    rows = {name.replace("_", " "): f"{count:,}" for name, count in counts.items()}
    _table("", rows | {"guidelines": f"version {where.guidelines().version}"})
    table = Table("annotator", "role", "judged", "median seconds", "access", title_justify="left")
    for person in workload(where):
        seconds = "–" if person.seconds is None else f"{person.seconds:.0f}"
        table.add_row(person.name, person.role, f"{person.judged:,}", seconds, person.access)
    Console().print(table)


def agree(
    store: StoreArgument,
    round: Round = None,
    names: Names = False,
    windows: Annotated[int, typer.Option(min=0, help="Also over time, in so many parts.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything as JSON here.")] = None,
) -> None:
    """How far people agree beyond chance, how good each of them is, and who clicks without reading."""
    from dataclasses import asdict

    from rich.console import Console

    from tether.core.errors import DataError
    from tether.core.rundir import write_json
    from tether.preferences.agreement import agreement_report
    from tether.preferences.exchange import gold_answers, votes
    from tether.preferences.quality import annotator_quality, suspicious

    where, console = opened(store), Console()
    said = list(votes(where, round=round, names=names))
    everything = list(votes(where, round=round, names=names, gold=True))
    if not everything:
        raise DataError(f"{store}: nobody has judged anything yet")
    found, gold = agreement_report(said, windows=windows), gold_answers(where)
    quality, suspects = annotator_quality(everything, gold=gold), suspicious(everything, gold=gold)
    console.print(_agreement(found))
    console.print(_people(quality))
    for suspect in suspects:
        console.print(f"[yellow]{suspect.annotator}[/]: {suspect.reason} (p = {suspect.p_value:.2g})", highlight=False)
    if output:
        write_json(output, {**found, "annotators": [asdict(q) for q in quality], "suspicious": [asdict(s) for s in suspects]})
        console.print(f"Everything: {output}", highlight=False, soft_wrap=True)


def ask(
    store: StoreArgument,
    pairs: Annotated[int, typer.Option(min=1, help="How many pairs.")] = 100,
    strategy: Annotated[
        str, typer.Option(help="random, uncertain, information, disagreement, length_matched, ranking.")
    ] = "random",
    people: Annotated[int, typer.Option("--ask", min=1, help="How many people judge each.")] = 1,
    shared_share: Annotated[float, typer.Option(min=0, max=1, help="This share of them ...")] = 0.0,
    shared_ask: Annotated[int | None, typer.Option(min=2, help="... is judged by so many, to measure agreement.")] = None,
    per_prompt: Annotated[int | None, typer.Option(min=1, help="At most so many of one prompt; default 3.")] = None,
    ranked: Annotated[int | None, typer.Option(min=2, help="Of a ranking: so many answers of each prompt.")] = None,
    length_difference: Annotated[float | None, typer.Option(min=0, max=0.99, help="Of length_matched; default 0.1.")] = None,
    round: Annotated[str, typer.Option(help="A name for this batch.")] = "",
    priority: Annotated[float, typer.Option(help="Batches with lower numbers are asked first.")] = 0.0,
    seed: int = 0,
) -> None:
    """Choose pairs among the store's answers and ask people about them; a pair that was ever asked is not asked again."""
    from tether.core.config import build
    from tether.preferences.answers import ask as run
    from tether.preferences.pairs import PairsConfig

    values = {"strategy": strategy, "num_pairs": pairs, "overlap": people, "shared_share": shared_share}
    values |= {"shared_overlap": shared_ask, "per_prompt": per_prompt, "ranked": ranked, "length_difference": length_difference}
    config = build(PairsConfig, {**{k: v for k, v in values.items() if v is not None}, "seed": seed}, where="tether prefs ask")
    count = run(opened(store), config, round=round, priority=priority)
    typer.echo(f"{count:,} pairs are to be judged" + ("" if count else ": the store has no others of this kind"))


def invite(
    store: StoreArgument,
    name: Annotated[str, typer.Argument(help="Who is invited; who was already gets a new invitation, and the old one ends.")],
    role: Annotated[str | None, typer.Option(help="annotator, expert, admin; as before, and annotator for who is new.")] = None,
    days: Annotated[float, typer.Option(min=0.01, help="How long it can be used.")] = 30.0,
    address: Annotated[str, typer.Option(help="Where `tether prefs serve` is reached.")] = "http://127.0.0.1:8765",
) -> None:
    """Print an invitation. The link lets in whoever has it, it is shown this once, and the store keeps a digest of it only."""
    from typing import get_args

    from tether.core.errors import ConfigError
    from tether.preferences.tables import Role

    if role not in (None, *get_args(Role)):
        raise ConfigError(f"--role is one of {', '.join(get_args(Role))}, not {role!r}")
    secret = opened(store, new=True).invite(name, role, days)  # type: ignore[arg-type]
    typer.echo(f"{address.rstrip('/')}/join#{secret}")


def escalate(
    store: StoreArgument,
    below: Annotated[float, typer.Argument(min=0, max=1, help="Less than this share of votes, or posterior, behind the label.")],
    how: Annotated[str, typer.Option(help="Labels by soft (the share of votes) or dawid-skene.")] = "soft",
    round: Round = None,
) -> None:
    """Send judged pairs that people do not agree on enough to the experts."""
    from tether.preferences.followup import escalate as run

    typer.echo(f"{run(opened(store), below, how, round=round):,} pairs wait for an expert now")  # type: ignore[arg-type]


def rank(
    store: StoreArgument,
    round: Round = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write every prompt's answers, best first, with scores, as JSON lines.")
    ] = None,
) -> None:
    """Order models, and the answers of each prompt, by all votes (Bradley-Terry)."""
    from rich.console import Console
    from rich.table import Table

    from tether.core.errors import DataError
    from tether.core.rundir import write_jsonl
    from tether.preferences.followup import ranked, standings

    where = opened(store)
    if rows := standings(where, round=round):
        table = Table("model", "log-odds", "won", "tied", "lost", title_justify="left")
        for one in rows:
            table.add_row(one.model, f"{one.score:+.2f}", f"{one.won:,}", f"{one.tied:,}", f"{one.lost:,}")
        Console().print(table)
    found = list(ranked(where, round=round)) if output or not rows else []
    if not rows and not found:
        raise DataError(f"{store}: nobody has judged anything yet")
    if output:
        write_jsonl(output, found)
        typer.echo(f"{len(found):,} prompts: {output}")
    elif not rows:
        typer.echo(f"No two models are compared here. The answers of {len(found):,} prompts can be put in order: --output FILE")


def _begun(rows: Iterable[Any]) -> Iterator[Any]:
    """The same rows, the first of them read already: without a usable one no new store is made."""
    rest = iter(rows)
    return chain(list(islice(rest, 1)), rest)


def lock_out(
    store: StoreArgument,
    name: Annotated[str, typer.Argument(help="Whose access ends.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it back.")] = False,
) -> None:
    """End a person's access at once; what they judged stays."""
    opened(store).lock_out(name, not undo)
    typer.echo(f"{name} {'may enter again' if undo else 'is locked out'}")


def guidelines(
    store: StoreArgument,
    file: Annotated[Path | None, typer.Argument(help="Markdown; a changed text is a new version. Without it: show them.")] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Show an earlier version.")] = None,
) -> None:
    """Show the guidelines, or put new ones in force; every judgment names the version that stood beside it."""
    from tether.cli.serve import prepare, read_guidelines
    from tether.core.errors import ConfigError

    if file is not None and version is not None:
        raise ConfigError("--version shows a version, and a file makes a new one; give one of them")
    where = opened(store)
    if file is not None:
        prepare(where, read_guidelines(file), None)
        typer.echo(f"version {where.guidelines().version} is in force")
        return
    row = where.guidelines(version)
    if version is not None and not row.version:
        raise ConfigError(f"{store} has no version {version} of the guidelines; the latest is {where.guidelines().version}")
    typer.echo(f"version {row.version}\n\n{row.text}" if row.version else "there are no guidelines yet")


def _table(title: str, rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    for cells in rows.items():
        table.add_row(*cells)
    Console().print(table)


FIGURES = {
    "raw": "the same choice", "raw_verdict": "the same, both bad being a tie", "fleiss_kappa": "Fleiss's kappa",
    "alpha_nominal": "Krippendorff's alpha", "alpha_ordinal": "alpha, ordinal", "alpha_interval": "alpha, interval",
}  # fmt: skip


def _agreement(found: dict[str, Any]) -> Any:
    from rich.table import Table

    counts = f"{found['num_votes']:,} judgments of {found['num_items']:,} pairs by {found['num_annotators']} people"
    table = Table("", "value", "95%", "pairs", title=counts, title_justify="left")
    parts = {"": found["overall"]}
    slices = [(name, some) for name, some in found["slices"].items() if len(some) > 1]
    parts |= {f"{name} = {value}: ": part for name, some in slices for value, part in some.items()}
    parts |= {f"part {number}: ": part for number, part in enumerate(found["windows"], 1)}
    for head, part in parts.items():
        for key, label in FIGURES.items() if not head else (("raw", FIGURES["raw"]), ("alpha_nominal", FIGURES["alpha_nominal"])):
            figure = part[key]
            bounds = "" if figure["low"] is None else f"{figure['low']:.2f} to {figure['high']:.2f}"
            value = figure["reason"] if figure["value"] is None else f"{figure['value']:.3f}"
            table.add_row(head + label, value, bounds, f"{figure['num_items']:,}")
    return table


def _people(quality: list[Any]) -> Any:
    from rich.table import Table

    table = Table("annotator", "judged", "accuracy", "with others", "gold", "left", "median seconds", title_justify="left")
    for one in quality:
        shares = [f"{share.value:.0%} of {share.total}" if share.total else "–" for share in (one.others, one.gold, one.left)]
        seconds = "–" if one.seconds is None else f"{one.seconds:.0f}"
        table.add_row(one.annotator, f"{one.num_votes:,}", f"{one.accuracy:.0%}", *shares, seconds)
    return table


COMMANDS = {
    "import": import_, "export": export, "stats": stats, "agree": agree, "ask": ask, "invite": invite, "lock-out": lock_out,
    "escalate": escalate, "rank": rank,
    "guidelines": guidelines,
}  # fmt: skip
