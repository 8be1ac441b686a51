"""`python -m tether.runner.member`: one job of a sweep, as `run_at_once` starts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tether.core.errors import TetherError
from tether.core.stopping import Interrupted, begin_program
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import recipe_type


def run_member(folder: str, recipe: str, *stages: str) -> None:
    """Run the job of one folder.

    Args:
        recipe: of the whole sweep, in JSON.
    """
    begin_program()
    try:
        run_recipe(build(recipe_type(), json.loads(recipe)), stages, only=Path(folder))
    except (TetherError, Interrupted) as end:
        print(end, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run_member(*sys.argv[1:])
