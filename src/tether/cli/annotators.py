"""The commands of a preference store for the people who judge: invitations, guidelines, the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli.options import Host, Options, Port, PublicAddress, StoreArgument, grouped, opened
from tether.cli.terminal.console import print_line
from tether.core.command import command_line
from tether.core.errors import ConfigError, MissingFileError

if TYPE_CHECKING:
    from tether.people.annotation.store import Store

WIDE = (
    "Other machines can reach this server. Everybody who can reach {where} sees the "
    "login page. Only invited people can log in."
)
BARE = (
    "Over http, invitations and sessions cross the network unencrypted. Put a proxy "
    "with https in front of the server, and give --address."
)


def invite(
    store: StoreArgument,
    name: Annotated[
        str,
        typer.Argument(help="Name of the person. A new invitation replaces an earlier invitation."),
    ],
    role: Annotated[
        str | None,
        typer.Option(
            help="annotator, expert or admin; default: the present role, or "
            "annotator for a new person.",
        ),
    ] = None,
    days: Annotated[
        float,
        typer.Option(min=0.01, help="Number of days for which the invitation is valid."),
    ] = 30.0,
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="The port of `tether prefs serve` on this machine."),
    ] = 8765,
    address: PublicAddress = "",
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


def lock_out(
    store: StoreArgument,
    name: Annotated[str, typer.Argument(help="Name of the person.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give the access back.")] = False,
) -> None:
    """End a person's access at once. The person's judgments stay."""
    opened(store).lock_out(name, not undo)
    print_line(f"{name} {'can log in again' if undo else 'is locked out'}")


def guidelines(
    store: StoreArgument,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Markdown file with new guidelines. Without a file, the "
            "command shows the guidelines.",
        ),
    ] = None,
    version: Annotated[int | None, typer.Option(min=1, help="Show an earlier version.")] = None,
) -> None:
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

    host: Host = "127.0.0.1"
    port: Port = 8765
    address: PublicAddress = ""
    lease_minutes: Annotated[
        float,
        typer.Option(help="Minutes for which a task is reserved for one person."),
    ] = 30.0
    gold_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="One of this many tasks is a gold question, if there are gold questions.",
        ),
    ] = 10
    rest_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of judgments after which the page offers a pause; 0 means never.",
        ),
    ] = 50
    quota: Annotated[
        int,
        typer.Option(min=0, help="Most judgments that one annotator may give; 0 means any number."),
    ] = 0
    seed: Annotated[int, typer.Option(help="Random seed for the side of each answer.")] = 0


@grouped
def serve(
    store: StoreArgument,
    *,
    site: SiteOptions,
    guidelines: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file, shown beside each task. A changed text becomes a new version.",
        ),
    ] = None,
    criterion: Annotated[
        list[str] | None,
        typer.Option(
            "--criterion",
            "--question",
            metavar="NAME[:KIND]",
            help="Criterion or further question; may be repeated. Without KIND people rate each "
            "answer from 1 to 5. KIND asks which answer is better: two (no ties), three, or scale "
            "(and by how much).",
        ),
    ] = None,
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
