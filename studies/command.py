"""The command line of a study: a recipe, overrides of its keys, and the seeds that it is run
with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tether.core.errors import TetherError
from tether.core.stopping import AGAIN, Interrupted, begin_program
from tether.settings.reading import is_override

HERE = Path(__file__).resolve().parent
Study = Callable[[str, list[str], list[int]], None]
"""(recipe, overrides, seeds): a file or the name of a packaged recipe, `key.sub=value` each, and
numbers.
"""


def run_study(study: Study, name: str, text: str, seeds: Sequence[int]) -> None:
    """Run a study as a program, with the recipe `studies/NAME.toml` (--smoke: `NAME-smoke.toml`)
    unless another is named.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m studies.{name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[RECIPE] KEY=VALUE",
        help=("a .toml file, and overrides of its keys"),
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        help=(f"default: {' '.join(map(str, seeds))}, and 0 with --smoke"),
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a tiny random model: nothing of use is learned, in a minute"),
    )
    given = parser.parse_intermixed_args()
    recipe = str(HERE / f"{name}{'-smoke' if given.smoke else ''}.toml")
    if given.words and not is_override(given.words[0]):
        recipe, *given.words = given.words
    begin_program()
    try:
        study(recipe, given.words, given.seeds or ([0] if given.smoke else list(seeds)))
    except TetherError as error:
        _leave(str(error), 2)
    except Interrupted as stop:
        _leave(str(stop), stop.exit_code)
    except KeyboardInterrupt:
        _leave(f"interrupted; {AGAIN}", 130)


def _leave(message: str, code: int) -> None:
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr)
    raise SystemExit(code) from None
