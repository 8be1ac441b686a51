"""`python -m tether.runner.ranks.worker`: a rank of a training, as another process has started it."""

from __future__ import annotations

import json
import sys

from tether.core.errors import TetherError
from tether.core.stopping import Interrupted, begin_program
from tether.runner.ranks.restarts import Teller
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import recipe_type
from tether.stages.learner.ranks import LOST, LostRankError


def train_along(pipe: str, recipe: str, *stages: str) -> None:
    """Train as a rank, and report to the process that started it.

    Args:
        pipe: the descriptor of a pipe to that process; empty: none.
        recipe: in JSON.
    """
    begin_program()
    teller = Teller(int(pipe)) if pipe else None
    try:
        results = run_recipe(
            build(recipe_type(), json.loads(recipe)),
            stages,
            teller and teller.bar,
        )
        if teller:
            teller.tell("end", results)
    except (Exception, Interrupted) as end:
        if teller:
            teller.tell_end(end)
        elif isinstance(end, TetherError | Interrupted):
            print(end, file=sys.stderr)
        if not isinstance(end, TetherError | Interrupted):
            raise
        sys.exit(LOST if isinstance(end, LostRankError) else 1)


if __name__ == "__main__":
    train_along(*sys.argv[1:])
