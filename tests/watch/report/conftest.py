"""Runs with invented numbers, and a Chromium where there is one."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that writes invented runs; it is no test, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(
        "synthetic_run",
        Path(__file__).with_name("synthetic_run.py"),
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium: $TETHER_CHROMIUM, or the one on the path."""
    path = (
        os.environ.get("TETHER_CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
    )
    if path is None:
        pytest.skip("no Chromium: install one or set TETHER_CHROMIUM")
    return path
