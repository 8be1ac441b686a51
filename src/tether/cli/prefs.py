"""The commands of a preference store: what goes in, what comes out, who judges, and how far they
agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tether.cli.options import Columns, Options, Output, as_options, columns_of, grouped
from tether.core.errors import ConfigError, DataError, MissingFileError
from tether.core.types import Json
from tether.terminal.console import Terminal, print_line
from tether.terminal.tables import save, show_table

if TYPE_CHECKING:
    from tether.annotation.store import Store

StoreArgument = Annotated[
    str, typer.Argument(help="A preference store: a file, or a PostgreSQL URL.")
]
Round = Annotated[str | None, typer.Option("--round", help="Name of a batch of tasks.")]
STRATEGIES = "random, uncertain, information, disagreement, length_matched, ranking."
Names = Annotated[
    bool,
    typer.Option(
        "--names", help="Annotators by name; without it they are annotator-1, annotator-2 ..."
    ),
]

WIDE = (
    "This server listens beyond this machine: who can reach {where} sees its door, though it "
    "takes an invitation to pass."
)
BARE = (
    "Over http, invitations and sessions cross the network in the clear: put a proxy with "
    "https before it and give --address."
)


def opened(where: str, *, new: bool = False) -> Store:
    """The store there; MissingFileError where there is none and it shall not be made."""
    from tether.annotation.store import Store

    if not new and "://" not in where and not Path(where).is_file():
        raise MissingFileError(
            f"there is no preference store at {where}. `tether prefs import` makes one"
        )
    return Store(where)


IMPORTED = {
    "rows": "rows", "answers": "new answers", "tasks": "new tasks", "judgments": "new judgments",
    "widened": "pairs that were there already and are asked of more people now",
    "not_gold": "pairs that were judged already, and did not become gold questions",
    "repeated": "judgments by people who judged the same pair again, of which the last one counts",
    "replaced": "judgments in the store that later ones by the same people have replaced",
}  # fmt: skip
"""Counts that an import reports if they are above 0."""


@dataclass(frozen=True, kw_only=True)
class CaseOptions(Options):
    """Comparisons and tasks that are imported."""

    ask: Annotated[
        int | None,
        typer.Option(min=1, help="How many people judge each pair, those who did included."),
    ] = None
    labels: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Count the file's labels as judgments of an annotator NAME."
        ),
    ] = ""
    gold: Annotated[
        bool,
        typer.Option("--gold", help="The file's labels are known answers of gold questions."),
    ] = False
    round: Round = None
    prefix: Annotated[
        str,
        typer.Option(help="Goes before annotators' names, to keep people of two sources apart."),
    ] = ""
    fields: Annotated[
        str,
        typer.Option(
            help="PROMPT,FIRST,SECOND: unusual names in Label Studio's or Argilla's tasks."
        ),
    ] = ""
    columns: Columns = ""


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Options):
    """Answers that are imported, and where they come from."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="Of answers that name their prompt by id: the file of prompts."),
    ] = None
    model: Annotated[
        str, typer.Option(help="Of answers that do not say: which model gave them.")
    ] = ""
    checkpoint: Annotated[
        str, typer.Option(help="Of answers that do not say: which checkpoint gave them.")
    ] = ""


@grouped
def import_(
    store: StoreArgument,
    files: Annotated[
        list[str],
        typer.Argument(
            help="Comparisons, answers to make pairs of, tasks of Label Studio or Argilla."
        ),
    ],
    *,
    format: Annotated[
        str,
        typer.Option(
            help="answers, label-studio, argilla, or a format of `tether data "
            "inspect`; auto finds out."
        ),
    ] = "auto",
    cases: CaseOptions,
    source: SourceOptions,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first rows of each file.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 2 if any row had to be left out.")
    ] = False,
) -> None:
    """Put comparisons with their judgments, or answers, into a store; makes the store where there
    is none.
    """
    from tether.annotation.answers import import_answers, read_answers
    from tether.annotation.importing import format_of, import_cases, read_cases
    from tether.data.sources import Quarantine

    layouts = {format_of(file) if format == "auto" else format for file in files}
    if "answers" in layouts and len(layouts) > 1:
        raise ConfigError(
            "some of these files hold answers and others comparisons. Import them "
            "one after the other"
        )
    answers, quarantine = layouts == {"answers"}, Quarantine()
    useless = vars(cases if answers else source)
    if without := next((name for name, value in useless.items() if value), None):
        what = "answers: `tether prefs ask` makes pairs of them" if answers else "comparisons"
        raise ConfigError(f"--{without} has no effect on {what}")
    if cases.gold and cases.labels:
        raise ConfigError(
            "--gold and --labels both say what the file's labels are; give one of them"
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
                "others were imported"
            )


def _export(
    store: StoreArgument,
    file: Annotated[
        Path, typer.Argument(help="Where to write; it is replaced whole or not at all.")
    ],
    format: Annotated[str, typer.Option(help="jsonl, parquet, label-studio, argilla.")] = "jsonl",
    how: Annotated[
        str, typer.Option(help="Labels by soft (the share of votes), majority, or dawid-skene.")
    ] = "soft",
    round: Round = None,
    names: Names = False,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="Also what is not judged yet; for other tools, all."),
    ] = False,
    least: Annotated[
        float,
        typer.Option(min=0, max=1, help="Leave out labels with a smaller share of the votes."),
    ] = 0.0,
) -> None:
    """Write what was judged as comparisons with every vote, or as tasks for other tools; no
    comments, no secrets.
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
    """Count what is judged and what waits, and who has done how much."""
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
        print_line(
            f"Nobody has judged anything yet: `tether prefs serve {store}` lets people begin."
        )


def agree(
    store: StoreArgument,
    round: Round = None,
    names: Names = False,
    windows: Annotated[int, typer.Option(min=0, help="Also over time, in this many parts.")] = 0,
    output: Output = None,
) -> None:
    """Measure how far people agree beyond chance, how good each is, and who clicks without
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
            )
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

    num_pairs: Annotated[int, typer.Option("--pairs", min=1, help="How many pairs.")] = 100
    strategy: Annotated[str, typer.Option(help=STRATEGIES)] = "random"
    overlap: Annotated[int, typer.Option("--ask", min=1, help="How many people judge each.")] = 1
    shared_share: Annotated[float, typer.Option(min=0, max=1, help="This share of them ...")] = 0.0
    shared_overlap: Annotated[
        int | None,
        typer.Option(
            "--shared-ask", min=2, help="... is judged by this many, to measure agreement."
        ),
    ] = None
    per_prompt: Annotated[
        int | None, typer.Option(min=1, help="At most this many pairs of one prompt; default 3.")
    ] = None
    ranked: Annotated[
        int | None, typer.Option(min=2, help="Of a ranking: this many answers of each prompt.")
    ] = None
    length_difference: Annotated[
        float | None, typer.Option(min=0, max=0.99, help="Of length_matched; default 0.1.")
    ] = None


@grouped
def _ask(
    store: StoreArgument,
    *,
    pairs: ChoiceOptions,
    round: Annotated[str, typer.Option(help="A name for this batch.")] = "",
    priority: Annotated[
        float, typer.Option(help="Batches with lower numbers are asked first.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Decides which pairs are drawn.")] = 0,
) -> None:
    """Choose pairs among the store's answers for people to judge; a pair is asked once."""
    from tether.annotation.answers import ask_pairs
    from tether.labels.pairs import PairsConfig
    from tether.settings.reading import build

    config = build(PairsConfig, {**vars(pairs), "seed": seed}, where="tether prefs ask")
    count = ask_pairs(opened(store), config, round=round, priority=priority)
    print_line(
        f"{count:,} pairs are to be judged"
        + ("" if count else ": the store has no others of this kind")
    )


def _invite(
    store: StoreArgument,
    name: Annotated[
        str,
        typer.Argument(
            help="Who is invited; who was already gets a new invitation, and the old one ends."
        ),
    ],
    role: Annotated[
        str | None,
        typer.Option(help="annotator, expert, admin; as before, and annotator for who is new."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, help="How long it can be used.")] = 30.0,
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="The port of `tether prefs serve` on this machine."),
    ] = 8765,
    address: Annotated[
        str,
        typer.Option(help="Where it is reached from elsewhere, such as https://judge.example.org."),
    ] = "",
) -> None:
    """Print a link that invites a person. The secret lets its owner in. It is shown once, and the
    store keeps only its digest.
    """
    secret = opened(store, new=True).invite(name, role, days)  # type: ignore[arg-type]
    place = address.rstrip("/") or f"http://127.0.0.1:{port}"
    print_line(f"{place}/join#{secret}")
    if not address:
        print_line(f"It opens while `tether prefs serve {store} --port {port}` runs.", err=True)


def _escalate(
    store: StoreArgument,
    below: Annotated[
        float,
        typer.Argument(
            min=0, max=1, help="Less than this share of votes, or posterior, behind the label."
        ),
    ],
    how: Annotated[
        str, typer.Option(help="Labels by soft (the share of votes) or dawid-skene.")
    ] = "soft",
    round: Round = None,
) -> None:
    """Send judged pairs that people do not agree on enough to the experts."""
    from tether.annotation.rankings import escalate

    print_line(f"{escalate(opened(store), below, how, round=round):,} pairs wait for an expert now")  # type: ignore[arg-type]


def rank(
    store: StoreArgument,
    round: Round = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", dir_okay=False, help="Write each prompt's answers, best first, here."
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
            f"No two models are compared here. The answers of {len(prompts):,} prompts can "
            "be put in order: --output FILE"
        )


def lock_out(
    store: StoreArgument,
    name: Annotated[str, typer.Argument(help="Whose access ends.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it back.")] = False,
) -> None:
    """End a person's access at once; what they judged stays."""
    opened(store).lock_out(name, not undo)
    print_line(f"{name} {'may enter again' if undo else 'is locked out'}")


def _guidelines(
    store: StoreArgument,
    file: Annotated[
        Path | None,
        typer.Argument(help="Markdown; a changed text is a new version. Without it: show them."),
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Show an earlier version.")] = None,
) -> None:
    """Show the guidelines, or put new ones in force; every judgment names its version."""
    if file is not None and version is not None:
        raise ConfigError("--version shows a version, and a file makes a new one; give one of them")
    where = opened(store)
    if file is not None:
        print_line(
            f"version {where.set_guidelines(read_guidelines(file), 'command line')} is in force"
        )
        return
    row = where.guidelines(version)
    if version is not None and not row.version:
        raise ConfigError(
            f"{store} has no version {version} of the guidelines; the latest is "
            f"{where.guidelines().version}"
        )
    print_line(
        f"version {row.version}\n\n{row.text}" if row.version else "there are no guidelines yet"
    )


def serve(
    store: StoreArgument,
    host: Annotated[
        str, typer.Option(help="Where to listen; beyond this machine it wants care.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    address: Annotated[
        str,
        typer.Option(help="What people open behind a proxy, such as https://judge.example.org."),
    ] = "",
    guidelines: Annotated[
        Path | None,
        typer.Option(help="Markdown beside each task; a changed text is a new version."),
    ] = None,
    criterion: Annotated[
        list[str] | None, typer.Option(help="Rate each answer by it, 1 to 5; may be repeated.")
    ] = None,
    lease_minutes: Annotated[float, typer.Option(help="How long a task is somebody's.")] = 30.0,
    gold_every: Annotated[
        int,
        typer.Option(min=0, help="Every how many tasks one has a known answer, if there are any."),
    ] = 10,
    rest_every: Annotated[
        int, typer.Option(min=0, help="Judgments after which a pause is offered; 0: never.")
    ] = 50,
    seed: Annotated[int, typer.Option(help="Decides which answer stands on the left.")] = 0,
) -> None:
    """Let invited people judge in their browsers: annotators, experts for disputed pairs, an
    administrator.
    """
    from tether.annotation.server.address import LOOPBACK, listen
    from tether.annotation.server.app import run_server
    from tether.annotation.server.site import SiteConfig
    from tether.settings.reading import build

    given = {
        "host": host,
        "port": port,
        "address": address,
        "lease_minutes": lease_minutes,
        "gold_every": gold_every,
    }
    config = build(
        SiteConfig, {**given, "rest_every": rest_every, "seed": seed}, where="tether prefs serve"
    )
    text = None if guidelines is None else read_guidelines(guidelines)
    where = opened(store)
    where.set_guidelines(text, "command line", criterion)
    socket, config = listen(config)
    if config.host not in LOOPBACK:
        typer.secho(
            f"{WIDE.format(where=config.origin)} {'' if config.secure else BARE}",
            fg="yellow",
            err=True,
        )
    if secret := first_admin(where):
        print_line(
            "There is no administrator yet. This link is for you, valid for a day, shown this once:"
        )
        print_line(f"{config.origin}/join#{secret}")
    print_line(
        f"Judging at {config.origin}; Ctrl-C ends it. Invite people: tether prefs invite {store} "
        f"NAME --address {config.origin}"
    )
    run_server(where, config, socket)
    where.close()


def first_admin(store: Store) -> str | None:
    """An invitation for an administrator where there is none yet."""
    people = store.annotators()
    if any(person.role == "admin" and not person.disabled for person in people):
        return None
    names = {person.name for person in people}
    name = next(
        name
        for name in ("admin", *(f"admin {number}" for number in range(2, len(names) + 3)))
        if name not in names
    )
    return store.invite(name, "admin", days=1.0)


def read_guidelines(path: Path) -> str:
    if not path.is_file():
        raise MissingFileError(f"there are no guidelines at {path}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: guidelines are text in UTF-8: {error}") from error


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.0f}"


FIGURES = {
    "raw": "the same choice", "raw_verdict": "the same, both bad being a tie", "fleiss_kappa": "Fleiss's kappa",
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
    "serve": serve, "import": import_, "export": _export, "stats": stats, "agree": agree, "ask": _ask, "invite": _invite,
    "lock-out": lock_out, "escalate": _escalate, "rank": rank, "guidelines": _guidelines,
}  # fmt: skip
