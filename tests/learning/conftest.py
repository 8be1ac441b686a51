"""The experiments stand beside the benchmarks, outside the installed package; here each is run
once, small, for several seeds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SEEDS = (0, 1, 2)


@pytest.fixture(scope="session")
def experiment() -> Callable[..., list[Any]]:
    """Name and sizes -> the results of all seeds."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import torch

    torch.set_num_threads(1)

    def run(name: str, **sizes: Any) -> list[Any]:
        module = importlib.import_module(f"benchmarks.learning.{name}")
        return [module.run(seed, **sizes) for seed in SEEDS]

    return run
