"""The command that lets people judge in their browsers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli.prefs import StoreArgument, opened

if TYPE_CHECKING:
    from tether.preferences.store import Store

WIDE = "This server listens beyond this machine: who can reach {where} sees its door, though it takes an invitation to pass."
BARE = "Over http, invitations and sessions cross the network in the clear: put a proxy with https before it and give --address."


def serve(
    store: StoreArgument,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine it wants care.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    address: Annotated[str, typer.Option(help="What people open behind a proxy, such as https://judge.example.org.")] = "",
    guidelines: Annotated[Path | None, typer.Option(help="Markdown beside each task; a changed text is a new version.")] = None,
    criterion: Annotated[list[str] | None, typer.Option(help="Rate each answer by it, 1 to 5; may be repeated.")] = None,
    lease_minutes: Annotated[float, typer.Option(help="How long a task is somebody's.")] = 30.0,
    gold_every: Annotated[int, typer.Option(min=0, help="Every how many tasks one has a known answer, if there are any.")] = 10,
    rest_every: Annotated[int, typer.Option(min=0, help="Judgments after which a pause is offered; 0: never.")] = 50,
    seed: Annotated[int, typer.Option(help="Decides which answer stands on the left.")] = 0,
) -> None:
    """Let invited people judge in their browsers: annotators, experts for disputed pairs, an administrator."""
    from tether.core.config import build
    from tether.preferences.server.app import listen, run_server
    from tether.preferences.server.site import LOOPBACK, SiteConfig

    given = {"host": host, "port": port, "address": address, "lease_minutes": lease_minutes, "gold_every": gold_every}
    config = build(SiteConfig, {**given, "rest_every": rest_every, "seed": seed}, where="tether prefs serve")
    text = None if guidelines is None else read_guidelines(guidelines)
    where = opened(store)
    put_in_force(where, text, criterion)
    socket, config = listen(config)
    if config.host not in LOOPBACK:
        typer.secho(f"{WIDE.format(where=config.origin)} {'' if config.secure else BARE}", fg="yellow", err=True)
    if secret := first_admin(where):
        typer.echo("There is no administrator yet. This link is for you, valid for a day, shown this once:")
        typer.echo(f"{config.origin}/join#{secret}")
    typer.echo(
        f"Judging at {config.origin}; Ctrl-C ends it. Invite people: tether prefs invite {store} NAME --address {config.origin}"
    )
    run_server(where, config, socket)
    where.close()


def put_in_force(store: Store, text: str | None, criteria: list[str] | None) -> None:
    """Put guidelines and criteria in force as a new version, unless they are already."""
    from tether.preferences.store import checked_criteria

    now = store.guidelines()
    wanted = now.text if text is None else text.strip(), now.criteria if criteria is None else checked_criteria(criteria)
    if wanted != (now.text, now.criteria):
        store.set_guidelines(wanted[0], "command line", wanted[1])


def first_admin(store: Store) -> str | None:
    """An invitation for an administrator where there is none yet."""
    people = store.annotators()
    if any(person.role == "admin" and not person.disabled for person in people):
        return None
    names = {person.name for person in people}
    name = next(name for name in ("admin", *(f"admin {number}" for number in range(2, len(names) + 3))) if name not in names)
    return store.invite(name, "admin", days=1.0)


def read_guidelines(path: Path) -> str:
    from tether.core.errors import ConfigError, MissingFileError

    if not path.is_file():
        raise MissingFileError(f"there are no guidelines at {path}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: guidelines are text in UTF-8: {error}") from error


def engine(
    model: Annotated[str, typer.Option(help="A model's folder or name: the base under the adapters that a run sends.")],
    host: Annotated[str, typer.Option(help="Where to listen; only within a network that is trusted.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16; as in the run that it samples for.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Responses decoded at once.")] = 64,
) -> None:
    """Serve tether's engine to runs with engine.addresses. It takes adapters by name from folders that it can read."""
    from tether.cli.progress import starting

    with starting("loading the model"):
        from tether.core.config import build
        from tether.models.config import ModelConfig
        from tether.run.engines import engine_server
        from tether.run.models import open_model

        loaded = open_model(build(ModelConfig, {"source": model, "dtype": dtype}, where="tether engine"))
    server = engine_server(loaded, (host, port), rows)
    typer.echo("Sampling at http://{}:{}; Ctrl-C ends it.".format(*server.server_address[:2]))
    server.serve_forever()


def rewards(
    recipe: Annotated[str, typer.Argument(help="A recipe, or the settings that a run wrote for its servers.")],
    stage: Annotated[str | None, typer.Argument(help="Which of its stages; unset: the one that samples.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen; only within a network that is trusted.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8100,
) -> None:
    """Serve a stage's reward to runs with reward_servers.addresses. It runs the reward function that the recipe names."""
    from tether.cli.progress import starting

    with starting("loading what scores"):
        from tether.run.reward_servers import server_of

        server = server_of(recipe, stage, (host, port))
    typer.echo("Scoring at http://{}:{}; Ctrl-C ends it.".format(*server.server_address[:2]))
    server.serve_forever()
