"""The locks that make installs from: every requirement is in them, in the version of
constraints.txt.
"""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.dev.lock import LOCKS, closure, pins, wanted

FILES = sorted(LOCKS.glob("*.txt"))


def pinned(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.\-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_versions_are_those_of_the_constraints(path):
    known = pins()
    assert pinned(path) and {name: known.get(name) for name in pinned(path)} == pinned(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_requirement_is_locked(path):
    """Torch has a step of its own; an extra may ask for tether itself."""
    needed = [Requirement(line) for line in wanted()[path.stem]]
    names = {canonicalize_name(one.name) for one in needed if one.marker is None} - {
        "torch",
        "tether-rlhf",
    }
    assert names <= pinned(path).keys()


def test_default_extras_of_make_have_locks():
    assert {"tether", "dev", "browser", "preferences", "verify"} <= {path.stem for path in FILES}


def test_a_lock_holds_what_its_packages_need():
    """transformers needs tokenizers, which needs huggingface-hub."""
    assert {"transformers", "tokenizers", "huggingface-hub"} <= closure(["transformers"]) & pinned(
        LOCKS / "tether.txt",
    ).keys()
