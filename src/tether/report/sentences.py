"""The sentences of the page, by section and name, from `sentences.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path

_FILE = Path(__file__).resolve().parent / "sentences.toml"
SENTENCES: dict[str, dict[str, str]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
