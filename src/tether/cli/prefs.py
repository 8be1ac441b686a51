"""The commands of a preference store, with the choice of pairs, agreement and ranking."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.annotators import guidelines, invite, lock_out, serve
from tether.cli.import_export import export_from, import_into
from tether.cli.options import (
    Options,
    Output,
    Round,
    StoreArgument,
    grouped,
    opened,
    output_option,
)
from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import save, show_table
from tether.core.command import command_line
from tether.core.errors import DataError
from tether.core.types import Json

STRATEGIES = (
    "Rule for choosing pairs: random, uncertain, information, disagreement, "
    "length_matched, ranking."
)


def stats(store: StoreArgument) -> None:
    """Count judged and waiting pairs, and the judgments of each person."""
    from tether.people.annotation.exchange import workload

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
        print_line(
            f"There are no judgments yet. `{command_line('prefs', 'serve', store)}` lets people judge.",
        )


def agree(
    store: StoreArgument,
    round: Round = None,
    names: Annotated[
        bool,
        typer.Option(
            "--names",
            help="Show names with --output, too, instead of annotator-1, annotator-2 ...",
        ),
    ] = False,
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

    from tether.people.annotation.exchange import gold_answers, votes
    from tether.people.labels.agreement import agreement_report
    from tether.people.labels.quality import annotator_quality, suspicious

    console = Terminal()
    where = opened(store, round=round)
    names = names or output is None  # who reads the screen has the store; a file goes on to others
    cast = list(votes(where, round=round, names=names))
    with_gold = list(votes(where, round=round, names=names, gold=True))
    if not with_gold:
        raise DataError(
            f"{store}: no annotator has judged any of these pairs yet, and agreement leaves "
            "experts' judgments out",
        )
    report = agreement_report(cast, windows=windows)
    gold = gold_answers(where)
    report["questions"] = {
        name: agreement_report(list(votes(where, round=round, question=name)))["overall"]
        for name in where.questions()
    }
    quality = annotator_quality(with_gold, gold=gold)
    suspects = suspicious(with_gold, gold=gold)
    counts = (
        f"{report['num_votes']:,} judgments of {report['num_items']:,} pairs by "
        f"{report['num_annotators']} people"
    )
    show_table(console, counts, _figures(report), ("", "value [95%]", "pairs"))
    people = [
        (
            one.annotator,
            f"{one.num_votes:,}",
            f"{one.accuracy:.0%}",
            *map(str, (one.others, one.gold, one.left)),
            _seconds(one.seconds),
        )
        for one in quality
    ]
    show_table(
        console,
        "",
        people,
        ("annotator", "judged", "accuracy", "with others", "gold", "left", "median seconds"),
    )
    for suspect in suspects:
        print_line(f"{suspect.annotator}: {suspect.reason} (p = {suspect.p_value:.2g})")
    save(
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
    from tether.people.annotation.answers import ask_pairs
    from tether.people.labels.pairs import PairsConfig
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
    from tether.people.annotation.rankings import escalate

    sent = escalate(opened(store, round=round), below, how, round=round)  # type: ignore[arg-type]
    print_line(f"{sent:,} pairs wait for an expert now")


def rank(
    store: StoreArgument,
    round: Round = None,
    output: Annotated[
        Path | None,
        output_option(
            "Write the answers to each prompt to this file, the best answer first.",
        ),
    ] = None,
) -> None:
    """Rank models, and the answers of each prompt, by all votes (Bradley-Terry)."""
    from tether.core.rundir import write_jsonl
    from tether.people.annotation.rankings import ranked, standings

    where = opened(store, round=round)
    if rows := standings(where, round=round):
        scores = [
            (one.model, f"{one.score:+.2f}", f"{one.won:,}", f"{one.tied:,}", f"{one.lost:,}")
            for one in rows
        ]
        show_table(Terminal(), "", scores, ("model", "log-odds", "won", "tied", "lost"))
    prompts = list(ranked(where, round=round)) if output or not rows else []
    if not rows and not prompts:
        raise DataError(f"{store}: nobody has judged any of these pairs yet")
    if output:
        write_jsonl(output, prompts)
        print_line(f"{len(prompts):,} prompts: {output}")
    elif not rows:
        print_line(
            f"No pair compares two models. To rank the answers to {len(prompts):,} "
            "prompts, give --output FILE",
        )


def find(
    store: StoreArgument,
    text: Annotated[str, typer.Argument(help="Text in the prompt or an answer.")] = "",
    state: Annotated[str, typer.Option(help="open, done, expert or settled.")] = "",
    annotator: Annotated[str, typer.Option(help="Name of a person who judged the pair.")] = "",
    tag: Annotated[
        str,
        typer.Option(help="Round, strategy, or a fact on the pair: its value, or NAME=VALUE."),
    ] = "",
) -> None:
    """Find pairs by a text, a state, a person or a tag, and show what people said of them."""
    from tether.people.annotation.searching import Search, search
    from tether.settings.reading import build

    given = {"text": text, "state": state, "annotator": annotator, "tag": tag}
    number, rows = search(opened(store), build(Search, given, where="tether prefs find"))
    cells = (
        (
            str(one.number),
            one.state,
            one.first.prompt[-1].spoken[:200],
            ", ".join(f"{vote.annotator}: {vote.choice}" for vote in one.opinions),
        )
        for one in rows
    )
    columns = ("pair", "state", "prompt", "judgments")
    show_table(Terminal(), "", cells, columns)
    print_line(f"{number:,} pairs, {len(rows):,} shown")


def correct(
    store: StoreArgument,
    files: Annotated[
        list[str],
        typer.Argument(
            help="Pairs with a judge's verdicts and the names of both models, as `tether duel "
            "--output` writes them.",
        ),
    ],
    round: Round = None,
    output: Output = None,
) -> None:
    """Correct a judge's win rates by people's votes on a random part of the pairs
    (prediction-powered inference).
    """
    from tether.core.types import Comparison
    from tether.data.sources import Quarantine, read
    from tether.people.annotation.rankings import corrected
    from tether.watch.report.numbers import bracketed, percent

    aside = Quarantine(keep=0)
    rows = [row for file in files for row in read(file, Comparison, quarantine=aside)]
    contests = corrected(opened(store, round=round), rows, round=round)
    cells = [
        (
            "{first} against {second}".format(**one),
            f"{one['pairs']:,}",
            bracketed(one["judge"], percent),
            f"{one['voted']:,}",
            *(bracketed(one[key], percent) for key in ("people", "corrected")),
        )
        for one in contests
    ]
    columns = ("models", "pairs", "by the judge", "voted on", "by people", "corrected")
    show_table(Terminal(), "Wins of the first model, ties half [95%]", cells, columns)
    if aside.count:
        print_line(f"{aside.count:,} pairs are left out: {aside.top_reasons()}")
    if idle := len(rows) - sum(one["pairs"] for one in contests):
        print_line(f"{idle:,} pairs without a verdict, or without both models, are left out")
    save(output, {"contests": contests, "left_out": aside.summary()})


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f}"


FIGURES = {
    "raw": "the same choice", "raw_verdict": "the same choice, with both bad as a tie", "fleiss_kappa": "Fleiss's kappa",
    "alpha_nominal": "Krippendorff's alpha", "alpha_ordinal": "alpha, ordinal", "alpha_interval": "alpha, interval",
}  # fmt: skip


def _figures(report: Json) -> Iterator[tuple[str, ...]]:
    """Rows of a table: all figures overall, two of each slice and window."""
    from tether.watch.report.numbers import bracketed

    parts = {"": report["overall"]}
    parts |= {f"{name}: ": part for name, part in report["questions"].items()}
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
    "serve": serve, "import": import_into, "export": export_from, "stats": stats, "agree": agree, "ask": _ask, "invite": invite,
    "lock-out": lock_out, "escalate": _escalate, "rank": rank, "find": find, "correct": correct, "guidelines": guidelines,
}  # fmt: skip
