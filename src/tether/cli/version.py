"""Versions, as a report of a fault should name them."""

from typing import Annotated

import typer

from tether import __version__


def _print_versions(wanted: bool) -> None:
    """Print them and leave."""
    if wanted:
        import platform
        from importlib.metadata import version

        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        print(f"tether {__version__} (Python {platform.python_version()}, {versions})")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="Versions of tether and of what it stands on.")
]
