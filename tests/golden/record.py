"""The golden run: every stage, the loop and the quickstart's smoke on the tiny model, as digests of
all that they leave.

`python -m tests.golden.record` writes `golden.json` beside this file, from the revision that is
checked out: before code moves, or after it where numbers were meant to change (with
OMP_NUM_THREADS=1 and TETHER_CPU_DTYPE=float32, as the test has them). With a FILE it is written
there. What is digested: weights by their bytes, records and summaries as JSON without times, sizes
of memory and paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("golden.json")
REPOSITORY = Path(__file__).resolve().parents[2]


def digest(value: Any) -> str:
    """Sixteen hex digits of bytes, or of a value as JSON; tensors by name in a mapping of bytes."""
    if (
        isinstance(value, dict)
        and value
        and all(isinstance(part, bytes) for part in value.values())
    ):
        value = {
            name: hashlib.blake2b(part, digest_size=8).hexdigest() for name, part in value.items()
        }
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def processor() -> str:
    """How this machine rounds: a digest of products, sums and exponentials in the shapes that the
    tiny model has.
    """
    import torch

    torch.set_num_threads(1)
    numbers = torch.arange(96 * 64, dtype=torch.float32).reshape(96, 64).sin()
    products = numbers @ numbers.T
    parts = [
        products,
        products.softmax(-1),
        products.exp().sum(-1),
        numbers.square().mean(-1).rsqrt(),
        (numbers.T @ products).tanh(),
    ]
    kernels = os.environ.get("TETHER_KERNELS", "1")
    return digest(
        {
            torch.__version__ + kernels + torch.backends.cpu.get_cpu_capability(): b"".join(
                part.contiguous().numpy().tobytes() for part in parts
            ),
        },
    )


def journeys(folder: Path) -> Iterator[tuple[str, Path]]:
    """Run each in `folder`; its name and its run directory, as it is finished."""
    from tests.every_stage import loop_recipe, recipe
    from tether.runner.run import run_recipe
    from tether.settings.reading import build
    from tether.settings.recipe import Recipe, read_recipe

    run_recipe(build(Recipe, recipe(folder, folder / "stages")))
    yield "stages", folder / "stages"
    run_recipe(build(Recipe, loop_recipe(folder / "loop")))
    yield "loop", folder / "loop"
    few = [
        "sft.data.limit=8",
        "pairs.data.limit=8",
        "ppo.evaluate.data.limit=8",
        "evaluate.data.limit=8",
    ]
    run_recipe(
        read_recipe(
            "smoke",
            [f"run={folder / 'smoke'}", *few, "arms.random.ppo.reward_source=random"],
        ),
    )
    yield "smoke", folder / "smoke"


def record() -> dict[str, Any]:
    """The digests of all files of all journeys, by journey, with what they were made on."""
    import torch

    from tests.every_stage import results

    found: dict[str, Any] = {
        "processor": processor(),
        "torch": torch.__version__,
        "revision": revision(),
        "files": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, run in journeys(Path(folder)):
            found["files"][name] = {path: digest(value) for path, value in results(run).items()}
    return found


def revision() -> str:
    """The commit that is checked out where this file lies."""
    asked = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    place.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
