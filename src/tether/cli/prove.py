"""The command that proves a recipe's determinism on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def prove(
    recipe: Annotated[str, typer.Argument(help="A recipe of stages or of the quickstart: a .toml file or a packaged name.")],
    stage: Annotated[str | None, typer.Argument(help="One stage of it, such as ppo; default: all.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides such as ppo.max_new_tokens=8.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Leave both runs in this folder instead of a temporary one.")] = None,
) -> None:
    """Run a stage twice for a few steps, in one go and interrupted, and compare weights and records bit for bit (exit 1)."""
    import tempfile

    from rich.console import Console
    from rich.table import Table

    from tether.core.config import packaged_recipe
    from tether.pipelines.prove import CUTS, read_recipe
    from tether.pipelines.prove import prove as run

    said = [*([stage] if stage and "=" in stage else []), *(overrides or [])]
    config = read_recipe(packaged_recipe(recipe), said)
    with tempfile.TemporaryDirectory(prefix="tether-prove-") as temporary:
        rows = run(config, keep or Path(temporary), [stage] if stage and "=" not in stage else [])
    steps = "+".join(map(str, CUTS))
    table = Table(
        "stage", "compared", "values", "the same", title=f"{sum(CUTS)} steps in one go and {steps}", title_justify="left"
    )
    for row in rows:
        table.add_row(row.stage, row.what, f"{row.count:,}", f"no: {row.difference}" if row.difference else "yes")
    Console().print(table)
    raise typer.Exit(int(any(row.difference for row in rows)))
