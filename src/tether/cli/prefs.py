"""The commands of a preference store, with the choice of pairs, agreement and ranking; for
the people who judge: invitations, guidelines, the server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tether.cli.options import Options, opened
from tether.cli.terminal.console import print_line
from tether.core.command import command_line
from tether.core.errors import ConfigError, MissingFileError

if TYPE_CHECKING:
    from tether.people.annotation.store import Store

from collections.abc import Iterator

from tether.cli.import_export import export_from, import_into
from tether.cli.terminal.console import save, show_table
from tether.core.errors import DataError
from tether.core.types import Json

WIDE = (
    "Other machines can reach this server. Everybody who can reach {where} sees the "
    "login page. Only invited people can log in."
)
BARE = (
    "Over http, invitations and sessions cross the network unencrypted. Put a proxy "
    "with https in front of the server, and give --address."
)


def invite(
    store: str,
    name: str,
    role: str | None = None,
    days: float = 30.0,
    port: int = 8765,
    address: str = "",
) -> None:
    """Print a link that invites a person. The link contains a secret and is shown only once. The store
    keeps only a digest of the secret.
    """
    from tether.people.annotation.server.address import Address
    from tether.people.annotation.store import check_person
    from tether.settings.reading import build

    place = build(Address, {"port": port, "address": address}, where="tether prefs invite")
    check_person(name, role)
    secret = opened(store, new=True).invite(name, role, days)  # type: ignore[arg-type]
    print_line(f"{place.origin}/join#{secret}")
    if not address:
        print_line(
            f"The link works while `{command_line('prefs', 'serve', store, '--port', port)}` runs.",
            err=True,
        )


def lock_out(store: str, name: str, undo: bool = False) -> None:
    """End a person's access at once. The person's judgments stay."""
    opened(store).lock_out(name, not undo)
    print_line(f"{name} {'can log in again' if undo else 'is locked out'}")


def guidelines(store: str, file: Path | None = None, version: int | None = None) -> None:
    """Show the guidelines, or set new guidelines. Every judgment has the version of its guidelines."""
    if file is not None and version is not None:
        raise ConfigError(
            "--version shows a version, and a file sets a new version. Give only one of them",
        )
    where = opened(store)
    if file is not None:
        print_line(
            f"version {where.set_guidelines(read_guidelines(file), 'command line')} is in force",
        )
        return
    row = where.guidelines(version)
    if version is not None and not row.version:
        raise ConfigError(
            f"{store} has no version {version} of the guidelines; the latest is "
            f"{where.guidelines().version}",
        )
    print_line(
        f"version {row.version}\n\n{row.text}" if row.version else "there are no guidelines yet",
    )


@dataclass(frozen=True, kw_only=True)
class SiteOptions(Options):
    """The address of the pages and the rules of handing out work, by the names of `SiteConfig`."""

    host: str = "127.0.0.1"
    port: int = 8765
    address: str = ""
    lease_minutes: float = 30.0
    gold_every: int = 10
    rest_every: int = 50
    quota: int = 0
    seed: int = 0


def serve(
    store: str,
    *,
    site: SiteOptions,
    guidelines: Path | None = None,
    criterion: list[str] | None = None,
) -> None:
    """Serve pages on which invited people judge: annotators, experts for disputed pairs, and
    administrators.
    """
    from tether.people.annotation.server.address import LOOPBACK, listen
    from tether.people.annotation.server.app import run_server
    from tether.people.annotation.server.site import SiteConfig
    from tether.settings.reading import build

    config = build(SiteConfig, vars(site), where="tether prefs serve")
    text = None if guidelines is None else read_guidelines(guidelines)
    where = opened(store)
    socket, config = listen(config)
    where.set_guidelines(text, "command line", criterion)
    if config.host not in LOOPBACK:
        print_line(
            f"{WIDE.format(where=config.origin)} {'' if config.secure else BARE}",
            err=True,
        )
    if secret := first_admin(where):
        print_line(
            "There is no administrator yet. Become administrator with this link, which "
            "is valid for a day and shown only once:",
        )
        print_line(f"{config.origin}/join#{secret}")
    print_line(
        f"People judge at {config.origin}. Ctrl-C ends the server. To invite people: "
        f"{command_line('prefs', 'invite', store, 'NAME', '--address', config.origin)}",
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


def stats(store: str) -> None:
    """Count judged and waiting pairs, and the judgments of each person."""
    from tether.people.annotation.exchange import workload

    where = opened(store)
    counts = [
        (name.replace("_", " "), f"{count:,}") for name, count in where.counts().items() if count
    ]
    show_table([*counts, ("guidelines", f"version {where.guidelines().version}")])
    people = [
        (one.name, one.role, f"{one.judged:,}", _seconds(one.seconds), one.access)
        for one in workload(where)
    ]
    show_table(people, ("annotator", "role", "judged", "median seconds", "access"))
    if not where.counts()["judgments"]:
        print_line(
            f"There are no judgments yet. `{command_line('prefs', 'serve', store)}` lets people judge.",
        )


def agree(
    store: str,
    round: str | None = None,
    names: bool = False,
    windows: int = 0,
    output: Path | None = None,
) -> None:
    """Measure agreement beyond chance, the reliability of each annotator, and signs of votes without
    reading.
    """
    from dataclasses import asdict

    from tether.people.annotation.exchange import gold_answers, votes
    from tether.people.labels.agreement import agreement_report
    from tether.people.labels.quality import annotator_quality, suspicious

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
    show_table(_figures(report), ("", "value [95%]", "pairs"), counts)
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

    num_pairs: int = 100
    strategy: str = "random"
    overlap: int = 1
    shared_share: float = 0.0
    shared_overlap: int | None = None
    per_prompt: int | None = None
    ranked: int | None = None
    length_difference: float | None = None


def _ask(
    store: str,
    *,
    pairs: ChoiceOptions,
    round: str = "",
    priority: float = 0.0,
    seed: int = 0,
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


def _escalate(store: str, below: float, how: str = "soft", round: str | None = None) -> None:
    """Send judged pairs with too little agreement to the experts."""
    from tether.people.annotation.rankings import escalate

    sent = escalate(opened(store, round=round), below, how, round=round)  # type: ignore[arg-type]
    print_line(f"{sent:,} pairs wait for an expert now")


def rank(store: str, round: str | None = None, output: Path | None = None) -> None:
    """Rank models, and the answers of each prompt, by all votes (Bradley-Terry)."""
    from tether.core.rundir import write_jsonl
    from tether.people.annotation.rankings import ranked, standings

    where = opened(store, round=round)
    if rows := standings(where, round=round):
        scores = [
            (one.model, f"{one.score:+.2f}", f"{one.won:,}", f"{one.tied:,}", f"{one.lost:,}")
            for one in rows
        ]
        show_table(scores, ("model", "log-odds", "won", "tied", "lost"))
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


def find(store: str, text: str = "", state: str = "", annotator: str = "", tag: str = "") -> None:
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
    show_table(cells, columns)
    print_line(f"{number:,} pairs, {len(rows):,} shown")


def correct(
    store: str,
    files: list[str],
    round: str | None = None,
    output: Path | None = None,
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
    show_table(cells, columns, "Wins of the first model, ties half [95%]")
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
