"""Fair comparisons: contestants in processes of their own take turns in one run; the others stand
still meanwhile.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.contestant import MARK

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Side:
    """Who competes: a script of this folder, the Python it runs in, and settings that differ from
    the task's.
    """

    name: str
    script: str
    python: str = sys.executable
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


class Contestant:
    """One side's process."""

    def __init__(self, side: Side, task: dict[str, Any], folder: Path) -> None:
        self.side, self.rounds = side, []
        path = folder / f"{side.name.replace('/', '-')}.json"
        path.write_text(json.dumps({**task, **side.settings}))
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        self.log = (folder / f"{path.stem}.log").open("w+")
        self.process = subprocess.Popen(
            [side.python, str(FOLDER / side.script), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={
                **os.environ,
                **quiet,
                "DO_NOT_TRACK": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                **side.environment,
            },
            start_new_session=True,
        )
        self.facts = self.listen()
        self.stand(still=True)

    def listen(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            self.log.write(line)
        self.log.seek(0)
        raise SystemExit(f"{self.side.name} ended early:\n{self.log.read()[-3000:]}")

    def stand(self, *, still: bool) -> None:
        os.killpg(self.process.pid, signal.SIGSTOP if still else signal.SIGCONT)

    def play(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.stand(still=False)
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        result = self.listen()
        self.stand(still=True)
        return result

    def leave(self) -> None:
        """The process group was made here, so it is ours to end."""
        self.stand(still=False)
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def contest(sides: list[Side], task: dict[str, Any], rounds: int = 3) -> dict[str, dict[str, Any]]:
    """Every side once to warm up, then `rounds` times in turn.

    Returns for each side its rates (amount per second) of the rounds, start-up seconds, peak memory
    in GB, and what its process said of itself.
    """
    contestants: list[Contestant] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            contestants = [Contestant(side, task, Path(folder)) for side in sides]
            results: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
            for _ in range(rounds + 1):
                for contestant in contestants:
                    results[contestant.side.name].append(contestant.play())
        finally:
            for contestant in contestants:
                contestant.leave()
    return {
        c.side.name: {
            "rates": [r["amount"] / r["seconds"] for r in results[c.side.name][1:]],
            "first_round": results[c.side.name][0]["seconds"],
            "peak": max(r["peak"] for r in results[c.side.name]),
            "losses": results[c.side.name][0].get("losses", []),
            **c.facts,
        }
        for c in contestants
    }


def ratio(results: dict[str, dict[str, Any]], ours: str, peer: str) -> tuple[float, float, float]:
    """Smallest, median and largest of the ratios of the rates, round by round."""
    ratios = [a / b for a, b in zip(results[ours]["rates"], results[peer]["rates"], strict=True)]
    return min(ratios), statistics.median(ratios), max(ratios)


def machine() -> str:
    """The processor, its cores, the widest bfloat16 instructions that it has, and the versions that
    matter.
    """
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
        flags = next((line for line in lines if line.startswith("flags")), "")
    except (OSError, StopIteration):
        model, flags = platform.processor(), ""
    wide = [name for name in ("amx_bf16", "avx512_bf16", "avx512f") if name in flags]
    return (
        f"{model}, {os.cpu_count()} cores{', ' + wide[0] if wide else ''}; Python "
        f"{platform.python_version()}, "
        f"torch {torch.__version__}, transformers {version('transformers')}"
    )


def matrix_rate(seconds: float = 0.5, tries: int = 5) -> float:
    """FLOP/s of this machine's own bfloat16 matrix product, in the shapes of a small model's
    layers, weights packed if it can.

    The best of several tries, for a machine that others use too.
    """
    import torch

    left, right = torch.randn(1024, 576).bfloat16(), torch.randn(1536, 576).bfloat16()
    packs = not torch.cuda.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    packed = torch.ops.mkldnn._reorder_linear_weight(right, 1024) if packs else None
    best = 0.0
    with torch.no_grad():
        for _ in range(tries):
            count, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                if packed is None:
                    torch.matmul(left, right.T)
                else:
                    torch.ops.mkldnn._linear_pointwise(left, packed, None, "none", [], "")
                count += 1
            best = max(best, count * 2 * 1024 * 576 * 1536 / (time.perf_counter() - start))
    return best


def bandwidth(seconds: float = 1.0) -> float:
    """Bytes a second that a sum over more memory than the caches hold reads."""
    import torch

    values = torch.ones(2**26)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        values.sum()
        count += 1
    return count * values.numel() * 4 / (time.perf_counter() - start)
