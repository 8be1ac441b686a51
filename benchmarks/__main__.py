"""`python -m benchmarks [NAME] [OPTIONS]`: one benchmark, or all of them one after another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("rollout",)


def main() -> int:
    names, options = NAMES, sys.argv[1:]
    if options and options[0] in NAMES:
        names, options = (options[0],), options[1:]
    elif options and not options[0].startswith("-"):
        print(f"no benchmark is called {options[0]!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return max(subprocess.call([sys.executable, str(FOLDER / f"{name}.py"), *options]) for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
