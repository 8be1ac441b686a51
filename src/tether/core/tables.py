"""Tables in TOML that lie beside the module which reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tether.core.types import Json


def table_beside(module: str, name: str) -> Json:
    """The table `name` beside a module, which gives its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
