"""What every test may rely on: no network, few threads, and honest skips where a need is not
met.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: `settled_heap`
gc.set_threshold(10_000, 10, 10)
atexit.register(gc.freeze)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# what a test computes in is not the processor's choice
os.environ.setdefault("TETHER_CPU_DTYPE", "float32")
# tether compiles nothing, and bitsandbytes would load the compiler in every process
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# Read when torch loads; asking torch itself would load it for every test.
# processes side by side have one each, whatever the one that started them has
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "2")

REPOSITORY = Path(__file__).resolve().parent.parent
OF_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that pytest and torch themselves set as they go."""
SLOW_SECONDS = 3600
"""Longest time of a test that is marked slow and names no limit of its own."""
NUM_THREADS = int(os.environ["OMP_NUM_THREADS"])


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if "tether.algorithms" not in sys.modules:
    from jaxtyping import install_import_hook

    # Every shape annotation of the algorithms is checked at each call, for as long as the tests
    # run.
    install_import_hook("tether.algorithms", "beartype.beartype")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-slow",
        action="store_true",
        help=("run the tests marked slow along with the others"),
    )


@cache
def chromium() -> str | None:
    """The path of a Chromium that playwright can drive: its own, or the system's."""
    if not installed("playwright"):
        return None
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@cache
def unmet(marker: str) -> str | None:
    """Why a test with this marker cannot run here; None when it can."""
    match marker:
        case "gpu":
            import torch

            return None if torch.cuda.is_available() else "needs a CUDA device"
        case "browser":
            if not installed("playwright"):
                return "needs playwright: pip install 'tether-rlhf[browser]'"
            return None if chromium() else "needs a Chromium: playwright install chromium"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_wanted = config.getoption("--run-slow") or "slow" in config.getoption("-m")
    for item in items:
        if item.get_closest_marker("slow") and not slow_wanted:
            item.add_marker(pytest.mark.skip(reason="slow: run it with `make test-slow`"))
            continue
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
        for marker in item.iter_markers():
            if reason := unmet(marker.name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def few_threads() -> None:
    """Keep torch to a few threads, without loading it for a test that has no use for it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != NUM_THREADS:
        torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """A variable that a test leaves set is read by whatever runs after it in the same process."""
    before = dict(os.environ)
    yield
    changed = dict(os.environ.items() ^ before.items()).keys() - OF_LIBRARIES
    assert not changed, f"the test left the environment changed: {sorted(changed)}"


@pytest.fixture(autouse=True, scope="module")
def settled_heap() -> None:
    """What earlier modules loaded is searched for garbage no more: a million objects take half a
    second after every stage.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is left is looked through once, and not five times as pytest would."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tether_data() -> Path:
    """The folder of published data sets that TETHER_DATA names."""
    named = os.environ.get("TETHER_DATA")
    if not named:
        pytest.skip(
            "TETHER_DATA is not set: it names the folder of published data sets that this "
            "test reads",
        )
    folder = Path(named)
    if not folder.is_dir():
        pytest.fail(f"TETHER_DATA names {folder}, which is not a folder")
    return folder


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The Chromium for tests marked `browser`:
    `playwright.chromium.launch(executable_path=chromium_path)`.
    """
    path = chromium()
    if path is None:
        pytest.skip(unmet("browser") or "no Chromium")
    return path


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """A command that a test runs in this process takes over SIGINT and SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    if "tether.core.stopping" in sys.modules:
        sys.modules["tether.core.stopping"].Stopping.came = None


@pytest.fixture(autouse=True)
def nothing_left_by_functions() -> Iterator[None]:
    """A folder that a guarded function of one test changed to is not that of the next test's."""
    yield
    if "tether.rewards.surroundings" in sys.modules:
        sys.modules["tether.rewards.surroundings"]._LEFT.clear()
