"""`python -m benchmarks.gpu --first`: checks of a first half hour on a card, the most valuable first.

Each check is a process with a bound on its time. Its outcome is appended to `gpu-first.md` as soon
as it ends, so that a session that is cut off keeps what it has. Checks that have an outcome there
are left out; delete the file to begin anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RECORD = Path(os.environ.get("OUT", ".")) / "gpu-first.md"
LINES = 40
"""Of a check's output, at most so many of the last."""
PYTEST = "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--tb=short"
CARD_TESTS = "tests/device/test_gpu.py"
NCCL = """
import torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sums = dist.new_group(backend="nccl")
flat = torch.ones(1000, device="cuda")
dist.all_reduce(flat, group=sums)
values = [None]
dist.all_gather_object(values, {"on": "the host"})
print(float(flat.sum()), values, torch.cuda.nccl.version())
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Check:
    """A command of Python's, and the seconds that it may take."""

    name: str
    command: Sequence[str]
    limit: int


CHECKS = (
    Check("versions", ("-c", "import torch; print(torch.__version__, torch.version.cuda, "
          "torch.cuda.get_device_name(), torch.cuda.mem_get_info())"), 60),
    Check("a carried change is rounded once, and what that costs",
          ("-m", *PYTEST, "tests/models/test_one_rounding.py"), 180),
    Check("recordings: failures, memory, adapters in place, many stop tokens",
          ("-m", *PYTEST, CARD_TESTS, "-k", "recording or recorded or graphs or in_place"), 300),
    Check("the host waits once a token", ("-m", *PYTEST, CARD_TESTS, "-k", "waits"), 120),
    Check("rollouts beside the plan", ("-m", "benchmarks.gpu", "--part", "rollouts"), 180),
    Check("PPO and fine-tuning on 7B beside the plan",
          ("-m", "benchmarks.gpu", "--part", "trunk"), 240),
    Check("an update beside the plan", ("-m", "benchmarks.gpu", "--part", "update"), 120),
    Check("sizes of passes are chosen, written down and kept",
          ("-m", *PYTEST, CARD_TESTS, "-k", "sizes"), 120),
    Check("a group of NCCL beside one of gloo", ("-c", NCCL), 60),
    Check("the same bits twice", ("-m", *PYTEST, CARD_TESTS, "-k", "same_bits"), 240),
    Check("families draw what the CPU draws", ("-m", *PYTEST, CARD_TESTS, "-k", "what_the_cpu"), 300),
    Check("lines at which the host waits", ("-m", "benchmarks.gpu", "--part", "waits"), 60),
)  # fmt: skip


def run_checks(checks: Sequence[Check] = CHECKS, record: Path = RECORD) -> int:
    """Run the checks that have no outcome yet; returns the number of those that failed."""
    before = record.read_text(encoding="utf-8") if record.is_file() else ""
    failed = 0
    for check in checks:
        if f"## {check.name}: " in before:
            continue
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, *check.command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=check.limit,
                check=False,
            )
            output, verdict = done.stdout, "passed" if done.returncode == 0 else "FAILED"
        except subprocess.TimeoutExpired as error:
            said = error.stdout or b""
            output = said.decode(errors="replace") if isinstance(said, bytes) else said
            verdict = f"CUT OFF after {check.limit} s"
        failed += verdict != "passed"
        seconds = time.perf_counter() - start
        last = "\n".join(output.splitlines()[-LINES:])
        with record.open("a", encoding="utf-8") as file:
            file.write(f"## {check.name}: {verdict}, {seconds:.0f} s\n\n```\n{last}\n```\n\n")
        print(f"{verdict:>8} {seconds:5.0f} s  {check.name}", flush=True)
    return failed
