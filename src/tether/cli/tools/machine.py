"""Facts about this machine as tether uses it, for `tether info`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from tether import __version__
from tether.core.keeping import temporary_folder
from tether.core.rundir import cpuinfo, versions
from tether.core.threads import THREADS, fewer_cores, num_threads, spin_while_waiting
from tether.models.cpu import kernels
from tether.models.cpu.memory import machine_memory
from tether.models.loading import multiplies_bfloat16_fast, pick_device, pick_dtype

EXTRAS = {
    "vllm": "vLLM",
    "ray": "Ray",
    "bitsandbytes": "4-bit weights",
    "math_verify": "answers of mathematics",
}
"""Libraries that are not always there, by the module that holds them."""
SANDBOX = """
import json, sys
from tether.rewards.guard import restrict
from tether.rewards.scratch import confine
space = confine(sys.argv[1], 2**20)
guards = restrict(sys.argv[1])
print(json.dumps([guards.files, guards.processes, space]))
"""


def machine_facts() -> Iterator[tuple[str, str]]:
    """Lines of a table: a subject, and how things are here."""
    libraries = versions(("torch", "transformers", "peft"))
    used = {"Python": platform.python_version(), **libraries}
    yield "tether", ", ".join([__version__, *map(" ".join, used.items())])
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "processor", _processor()
    memory = machine_memory()
    yield "memory", f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} of it available"
    yield "device", _device()
    yield "model.dtype = 'auto'", str(pick_dtype("auto")).removeprefix("torch.")
    kernels_there = kernels.library() is not None
    yield (
        "own kernels",
        "in use on the CPU"
        if kernels_there
        else "not in use: no C compiler, a warning above, or TETHER_KERNELS=0",
    )
    yield "threads", _threads()
    yield "sandbox", _sandbox()
    extras = [name for module, name in EXTRAS.items() if find_spec(module) is not None]
    yield "extras", ", ".join(extras) or "none"
    settings = sorted(
        name for name in os.environ if name.startswith("TETHER_") and "TOKEN" not in name
    )
    yield "settings", ", ".join(f"{name}={os.environ[name]}" for name in settings) or "none"


def _processor() -> str:
    pairs = [line.partition(":") for line in cpuinfo()]
    lines = {name.strip(): value.strip() for name, _, value in pairs}
    flags = set(lines.get("flags", "").split())
    kinds = {"AVX2": "avx2", "AVX-512": "avx512f", "bfloat16": "avx512_bf16", "AMX": "amx_bf16"}
    has = [name for name, flag in kinds.items() if flag in flags]
    name = lines.get("model name") or platform.processor() or "unknown"
    fast = "faster than" if multiplies_bfloat16_fast("\n".join(cpuinfo())) else "no faster than"
    return (
        f"{name}; {', '.join(has) or 'no AVX2'}; products of bfloat16 are {fast} those of float32"
    )


def _device() -> str:
    place = pick_device("auto")
    if place.type != "cuda":
        return "CPU: no CUDA device"
    names = [
        torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())
    ]
    return ", ".join(f"{card.name}, {card.total_memory / 1e9:.0f} GB" for card in names)


def _threads() -> str:
    count = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    if num_threads() > 1:
        count += f"; they {'spin' if spin_while_waiting() else 'sleep'} while they wait"
    return (
        f"{count}; {THREADS}={os.environ[THREADS]}"
        if THREADS in os.environ and fewer_cores() is not None
        else count
    )


def _sandbox() -> str:
    """The kernel's guards of a program that a model wrote, found by putting one under them."""
    with temporary_folder("tether-doctor") as folder:
        ended = subprocess.run(
            [sys.executable, "-c", SANDBOX, folder],
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode:
        return "cannot be put in place here"
    files, processes, space = json.loads(ended.stdout)
    return "; ".join(
        (
            "files by Landlock" if files else "files by an audit hook",
            "processes and sockets by seccomp"
            if processes
            else "processes and sockets by an audit hook",
            "disk by a file system of its own" if space else "disk by measurement",
            "memory by measurement",
        ),
    )
