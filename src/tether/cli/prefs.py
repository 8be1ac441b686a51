"""The commands of a preference store: import, export, the choice of pairs, agreement, ranking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tether.cli.annotators import guidelines, invite, lock_out, serve
from tether.cli.options import (
    Columns,
    Options,
    Output,
    StoreArgument,
    as_options,
    columns_of,
    grouped,
    opened,
)
from tether.core.errors import ConfigError, DataError
from tether.core.types import Json
from tether.terminal.console import Terminal, print_line
from tether.terminal.tables import save, show_table

Round = Annotated[str | None, typer.Option("--round", help="Name of a batch of tasks.")]
STRATEGIES = (
    "Rule for choosing pairs: random, uncertain, information, disagreement, "
    "length_matched, ranking."
)
Names = Annotated[
    bool,
    typer.Option(
        "--names",
        help="Show the names of annotators instead of annotator-1, annotator-2 ...",
    ),
]

IMPORTED = {
    "rows": "rows", "answers": "new answers", "tasks": "new tasks", "judgments": "new judgments",
    "widened": "earlier pairs that more people judge now",
    "not_gold": "earlier pairs with judgments, which did not become gold questions",
    "repeated": "repeated judgments of one pair by one person, of which the latest "
        "counts",
    "replaced": "judgments in the store that later judgments of the same person replaced",
}  # fmt: skip
"""Counts that an import reports if they are above 0."""


@dataclass(frozen=True, kw_only=True)
class CaseOptions(Options):
    """Comparisons and tasks that are imported."""

    ask: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of people who judge each pair, including those who did already.",
        ),
    ] = None
    labels: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Store the labels in the file as judgments of an annotator NAME.",
        ),
    ] = ""
    gold: Annotated[
        bool,
        typer.Option(
            "--gold",
            help="Use the labels in the file as known answers of gold questions.",
        ),
    ] = False
    round: Round = None
    prefix: Annotated[
        str,
        typer.Option(help="Prefix for the names of annotators, to separate people of two sources."),
    ] = ""
    fields: Annotated[
        str,
        typer.Option(
            help="PROMPT,FIRST,SECOND: names of these fields in tasks of Label Studio "
            "or Argilla, if unusual.",
        ),
    ] = ""
    columns: Columns = ""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """Answers that are imported, and where they come from."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, for answers that have only the id of their prompt."),
    ] = None
    model: Annotated[
        str,
        typer.Option(help="Model that wrote the answers, if the file does not name the model."),
    ] = ""
    checkpoint: Annotated[
        str,
        typer.Option(
            help="Checkpoint that wrote the answers, if the file does not name the checkpoint.",
        ),
    ] = ""


@grouped
def import_(
    store: StoreArgument,
    files: Annotated[
        list[str],
        typer.Argument(
            help="Files of comparisons, of answers, or of tasks of Label Studio or Argilla.",
        ),
    ],
    *,
    format: Annotated[
        str,
        typer.Option(
            help="answers, label-studio, argilla, or a format of `tether data inspect`; "
            "auto detects the format.",
        ),
    ] = "auto",
    cases: CaseOptions,
    source: SourceOptions,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Read only this many rows of each file."),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with code 2 if a row was left out."),
    ] = False,
) -> None:
    """Import comparisons with their judgments, or answers, into a store. Creates the store if there
    is none.
    """
    from tether.annotation.answers import import_answers, read_answers
    from tether.annotation.importing import format_of, import_cases, read_cases
    from tether.data.sources import Quarantine

    layouts = {format_of(file) if format == "auto" else format for file in files}
    if "answers" in layouts and len(layouts) > 1:
        raise ConfigError(
            "some of these files contain answers, and others contain comparisons. "
            "Import them one after the other",
        )
    answers, quarantine = layouts == {"answers"}, Quarantine()
    useless = vars(cases if answers else source)
    if without := next((name for name, value in useless.items() if value), None):
        what = "answers: `tether prefs ask` makes pairs of them" if answers else "comparisons"
        raise ConfigError(f"--{without} has no effect on {what}")
    if cases.gold and cases.labels:
        raise ConfigError(
            "--gold and --labels both set the meaning of the labels in the file. Give "
            "only one of them",
        )
    split = tuple(name.strip() for name in cases.fields.split(",") if name.strip())
    if cases.fields and len(split) != 3:
        raise ConfigError(f"--fields names three fields, PROMPT,FIRST,SECOND, not {cases.fields!r}")
    rows: Iterator[Any]
    if answers:
        rows = read_answers(
            files,
            prompts=source.prompts,
            quarantine=quarantine,
            limit=limit,
            model=source.model,
            checkpoint=source.checkpoint,
        )
    else:
        rows = read_cases(
            files,
            format=format,
            quarantine=quarantine,
            fields=split,
            labels=cases.labels,
            gold=cases.gold,
            limit=limit,
            columns=columns_of(cases.columns),
        )
    with as_options():
        # The first row is read before the store is opened: without a usable one no new store is
        # made.
        first = list(islice(rows, 1))
        where, rows = opened(store, new=True), chain(first, rows)
        imported = (
            import_answers(where, rows)
            if answers
            else import_cases(where, rows, ask=cases.ask, round=cases.round, prefix=cases.prefix)
        )
    counts = ((name, imported[key]) for key, name in IMPORTED.items())
    show_table(Terminal(), "", [(name, f"{count:,}") for name, count in counts if count])
    if quarantine.count:
        print_line(f"{quarantine.count:,} rows were left out: {quarantine.top_reasons()}", err=True)
        if strict:
            raise DataError(
                f"{quarantine.count} rows cannot be used, and --strict was given. The "
                "others were imported",
            )


def _export(
    store: StoreArgument,
    file: Annotated[
        Path,
        typer.Argument(help="File to write. An existing file is replaced only by a complete file."),
    ],
    format: Annotated[str, typer.Option(help="jsonl, parquet, label-studio, argilla.")] = "jsonl",
    how: Annotated[
        str,
        typer.Option(help="Rule for labels: soft (the share of votes), majority, or dawid-skene."),
    ] = "soft",
    round: Round = None,
    names: Names = False,
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="Also export pairs with too few judgments. "
            "For other tools: also pairs without judgments.",
        ),
    ] = False,
    least: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Leave out pairs whose label has a smaller share of the votes.",
        ),
    ] = 0.0,
) -> None:
    """Write judged pairs as comparisons with every vote, or as tasks for other tools. Comments and
    secrets stay in the store.
    """
    from tether.annotation.exporting import export_labels
    from tether.annotation.label_studio import CONFIG

    which = {"round": round, "names": names, "unfinished": unfinished, "least": least}
    count = export_labels(opened(store), file, format, how=how, **which)  # type: ignore[arg-type]
    print_line(f"{count:,} rows in {file}")
    if format == "label-studio":
        interface = file.with_suffix(".xml")
        interface.write_text(CONFIG, encoding="utf-8")
        print_line(f"The labelling interface for these tasks is in {interface}")


def stats(store: StoreArgument) -> None:
    """Count judged and waiting pairs, and the judgments of each person."""
    from tether.annotation.exchange import workload

    where = opened(store)
    counts = [
        (name.replace("_", " "), f"{count:,}") for name, count in where.counts().items() if count
    ]
    show_table(Terminal(), "", [*counts, ("guidelines", f"version {where.guidelines().version}")])
    people = [
        (one.name, one.role, f"{one.judged:,}", _seconds(one.seconds), one.access)
        for one in workload(where)
    ]
    show_table(Terminal(), "", people, ("annotator", "role", "judged", "median seconds", "access"))
    if not where.counts()["judgments"]:
        print_line(f"There are no judgments yet. `tether prefs serve {store}` lets people judge.")


def agree(
    store: StoreArgument,
    round: Round = None,
    names: Names = False,
    windows: Annotated[
        int,
        typer.Option(min=0, help="Measure agreement over time, too, in this many parts."),
    ] = 0,
    output: Output = None,
) -> None:
    """Measure agreement beyond chance, the reliability of each annotator, and signs of votes without
    reading.
    """
    from dataclasses import asdict

    from tether.annotation.exchange import gold_answers, votes
    from tether.labels.agreement import agreement_report
    from tether.labels.quality import annotator_quality, suspicious

    console, where = Terminal(), opened(store)
    cast = list(votes(where, round=round, names=names))
    with_gold = list(votes(where, round=round, names=names, gold=True))
    if not with_gold:
        raise DataError(f"{store}: nobody has judged anything yet")
    report, gold = agreement_report(cast, windows=windows), gold_answers(where)
    quality, suspects = annotator_quality(with_gold, gold=gold), suspicious(with_gold, gold=gold)
    counts = (
        f"{report['num_votes']:,} judgments of {report['num_items']:,} pairs by "
        f"{report['num_annotators']} people"
    )
    show_table(console, counts, _figures(report), ("", "value [95%]", "pairs"))
    people = []
    for one in quality:
        shares = map(str, (one.others, one.gold, one.left))
        people.append(
            (
                one.annotator,
                f"{one.num_votes:,}",
                f"{one.accuracy:.0%}",
                *shares,
                _seconds(one.seconds),
            ),
        )
    show_table(
        console,
        "",
        people,
        ("annotator", "judged", "accuracy", "with others", "gold", "left", "median seconds"),
    )
    for suspect in suspects:
        console.print(
            f"[yellow]{escape(suspect.annotator)}[/]: {suspect.reason} (p = {suspect.p_value:.2g})",
            highlight=False,
        )
    save(
        console,
        output,
        {
            **report,
            "annotators": list(map(asdict, quality)),
            "suspicious": list(map(asdict, suspects)),
        },
    )


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(Options):
    """The pairs that people judge, by the names of `PairsConfig`."""

    num_pairs: Annotated[int, typer.Option("--pairs", min=1, help="Number of pairs.")] = 100
    strategy: Annotated[str, typer.Option(help=STRATEGIES)] = "random"
    overlap: Annotated[
        int,
        typer.Option("--ask", min=1, help="Number of people who judge each pair."),
    ] = 1
    shared_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Share of the pairs that --shared-ask people judge, to measure agreement.",
        ),
    ] = 0.0
    shared_overlap: Annotated[
        int | None,
        typer.Option(
            "--shared-ask",
            min=2,
            help="Number of people who judge each pair of --shared-share.",
        ),
    ] = None
    per_prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of pairs of one prompt; default 3."),
    ] = None
    ranked: Annotated[
        int | None,
        typer.Option(min=2, help="For the strategy ranking: number of answers of each prompt."),
    ] = None
    length_difference: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.99,
            help="For length_matched: maximum "
            "difference of lengths, as a share of the longer; default 0.1.",
        ),
    ] = None


@grouped
def _ask(
    store: StoreArgument,
    *,
    pairs: ChoiceOptions,
    round: Annotated[str, typer.Option(help="A name for this batch.")] = "",
    priority: Annotated[
        float,
        typer.Option(help="Priority of this batch. Batches with lower numbers come first."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed for the choice of pairs.")] = 0,
) -> None:
    """Choose pairs of answers in the store for people to judge. No pair is chosen twice."""
    from tether.annotation.answers import ask_pairs
    from tether.labels.pairs import PairsConfig
    from tether.settings.reading import build

    config = build(PairsConfig, {**vars(pairs), "seed": seed}, where="tether prefs ask")
    count = ask_pairs(opened(store), config, round=round, priority=priority)
    print_line(
        f"{count:,} pairs are to be judged"
        + ("" if count else ": the store has no others of this kind"),
    )


def _escalate(
    store: StoreArgument,
    below: Annotated[
        float,
        typer.Argument(
            min=0,
            max=1,
            help="Limit. The label of an escalated pair has a smaller "
            "share of the votes, or posterior.",
        ),
    ],
    how: Annotated[
        str,
        typer.Option(help="Rule for labels: soft (the share of votes) or dawid-skene."),
    ] = "soft",
    round: Round = None,
) -> None:
    """Send judged pairs with too little agreement to the experts."""
    from tether.annotation.rankings import escalate

    print_line(f"{escalate(opened(store), below, how, round=round):,} pairs wait for an expert now")  # type: ignore[arg-type]


def rank(
    store: StoreArgument,
    round: Round = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Write the answers to each prompt to this file, the best answer first.",
        ),
    ] = None,
) -> None:
    """Rank models, and the answers of each prompt, by all votes (Bradley-Terry)."""
    from tether.annotation.rankings import ranked, standings
    from tether.core.rundir import write_jsonl

    where = opened(store)
    if rows := standings(where, round=round):
        scores = [
            (one.model, f"{one.score:+.2f}", f"{one.won:,}", f"{one.tied:,}", f"{one.lost:,}")
            for one in rows
        ]
        show_table(Terminal(), "", scores, ("model", "log-odds", "won", "tied", "lost"))
    prompts = list(ranked(where, round=round)) if output or not rows else []
    if not rows and not prompts:
        raise DataError(f"{store}: nobody has judged anything yet")
    if output:
        write_jsonl(output, prompts)
        print_line(f"{len(prompts):,} prompts: {output}")
    elif not rows:
        print_line(
            f"No pair compares two models. To rank the answers to {len(prompts):,} "
            "prompts, give --output FILE",
        )


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f}"


FIGURES = {
    "raw": "the same choice", "raw_verdict": "the same choice, with both bad as a tie", "fleiss_kappa": "Fleiss's kappa",
    "alpha_nominal": "Krippendorff's alpha", "alpha_ordinal": "alpha, "
                                                              "ordinal", "alpha_interval": "alpha, interval",
}  # fmt: skip


def _figures(report: Json) -> Iterator[tuple[str, ...]]:
    """Rows of a table: all figures overall, two of each slice and window."""
    from tether.report.numbers import bracketed

    parts = {"": report["overall"]}
    parts |= {
        f"{name} = {value}: ": part
        for name, of in report["slices"].items()
        if len(of) > 1
        for value, part in of.items()
    }
    parts |= {f"part {number}: ": part for number, part in enumerate(report["windows"], 1)}
    for head, part in parts.items():
        for key in ("raw", "alpha_nominal") if head else FIGURES:
            figure = part[key]
            yield (
                head + FIGURES[key],
                bracketed(figure) or figure["reason"],
                f"{figure['num_items']:,}",
            )


COMMANDS = {
    "serve": serve, "import": import_, "export": _export, "stats": stats, "agree": agree, "ask": _ask, "invite": invite,
    "lock-out": lock_out, "escalate": _escalate, "rank": rank, "guidelines": guidelines,
}  # fmt: skip
