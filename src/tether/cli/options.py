"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[str, typer.Argument(help="A recipe: a .toml file, or the name of one that comes with tether.")]
StudyArgument = Annotated[str, typer.Argument(help="A recipe of this command: a .toml file; without one the packaged one.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as ppo.kl.coefficient=0.1 or run=runs/mine.")]
Talker = Annotated[str, typer.Argument(help="A model folder, a hub id, or a run directory.")]
Format = Annotated[str, typer.Option(help="Name of a format; auto finds out.")]
Pairs = Annotated[int | None, typer.Option(min=1, help="Only the first so many pairs of each file.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write everything as JSON here.")]
