"""`python -m tools.dev.lock`: what `make` installs without a search, a file for tether itself and
one an extra.

pip looks for versions that fit together for minutes, although constraints.txt names each. A lock is
the packages that tether, or an extra of it, needs, with those that they need, in the versions of
constraints.txt. Run it where all extras are installed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "locks"
HEAD = (
    "# Written by `python -m tools.dev.lock` from pyproject.toml and constraints.txt; "
    "installed by make with --no-deps.\n"
)


def pins() -> dict[str, str]:
    """Versions by canonical name, as constraints.txt has them."""
    lines = re.findall(
        r"^([\w.\-]+)==(\S+)",
        (ROOT / "constraints.txt").read_text(encoding="utf-8"),
        re.M,
    )
    return {canonicalize_name(name): version for name, version in lines}


def wanted() -> dict[str, list[str]]:
    """The requirements of tether ("tether"), and of each extra that this environment can hold."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"tether": project["dependencies"], **project["optional-dependencies"]}


def closure(lines: Iterable[str]) -> set[str]:
    """Names of what these requirements need, torch's own needs left to the installation of
    torch.
    """
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(line) for line in lines]
    while left:
        one = left.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (
            (one.marker and not one.marker.evaluate({"extra": ""}))
            or (name, extras) in seen
            or name in ("torch", "tether-rlhf")
        ):
            continue
        seen.add((name, extras))
        for line in _requires(name):
            inner = Requirement(line)
            if inner.marker is None or any(
                inner.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                inner.marker = None
                left.append(inner)
    return {name for name, _ in seen}


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        raise SystemExit(
            f"{name} is not installed here: install every extra, then run this again",
        ) from None


def lock(lines: Iterable[str], known: dict[str, str]) -> str:
    """The text of a lock; names without a pin are left to pip."""
    return HEAD + "".join(
        f"{name}=={known[name]}\n" for name in sorted(closure(lines)) if name in known
    )


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    known = pins()
    for extra, lines in wanted().items():
        try:
            text = lock(lines, known)
        except SystemExit as missing:
            print(f"{extra}: no lock: {missing}")
            continue
        (LOCKS / f"{extra}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
