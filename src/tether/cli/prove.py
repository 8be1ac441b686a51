"""The command that proves a recipe's determinism on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.options import RecipeArgument, Words


def prove_recipe(
    recipe: RecipeArgument,
    words: Words = None,
    keep: Annotated[Path | None, typer.Option(help="Leave both runs in this folder instead of a temporary one.")] = None,
) -> None:
    """Run a stage twice, once interrupted, and compare weights and records bit for bit (exit 1)."""
    import tempfile

    from rich.console import Console

    from tether.cli.results import show_columns
    from tether.run.prove import CUTS, prove
    from tether.run.recipe import read_recipe

    chosen = [word for word in words or [] if "=" not in word]
    config = read_recipe(recipe, [word for word in words or [] if "=" in word])
    with tempfile.TemporaryDirectory(prefix="tether-prove-") as temporary:
        rows = prove(config, keep or Path(temporary), chosen)
    title = f"{sum(CUTS)} steps in one go and {'+'.join(map(str, CUTS))}"
    cells = [(row.stage, row.what, f"{row.count:,}", f"no: {row.difference}" if row.difference else "yes") for row in rows]
    show_columns(Console(), title, ("stage", "compared", "values", "the same"), cells)
    raise typer.Exit(int(any(row.difference for row in rows)))
