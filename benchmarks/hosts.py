"""`python -m benchmarks.hosts --cuts 5 --json`: a run over two hosts of a Ray cluster, one of which
is cut off and comes back.

Two network namespaces of this machine, each with an address and a node of Ray of its own. GRPO on
the tiny model trains on the first, with an engine server on each. Then the second one's cable is
pulled for a while, again and again; whatever Ray ended there is started again, as a cluster's
manager would. Counted as in benchmarks.survival: groups lost, twice, or of other tokens than in a
run without disturbance. A server decodes together what comes together, and other batches round
otherwise: after enough updates a draw near a boundary gives another token, and all that follows
differs. `alike` is the number of steps before that, and `rounding` the most by which
log-probabilities of the same tokens differ until there, in nats: other weights would show.
`recovery_s`: from the moment the cable is back until that host samples again.
Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.survival import PROMPTS, Recorder, recipe, rounding

from tether.core.rundir import read_jsonl
from tether.core.stopping import Interrupted
from tether.runner.run import run_recipe

HOSTS = {"tether-a": "10.77.0.1", "tether-b": "10.77.0.2"}
FIRST, SECOND = HOSTS
PORT = 26379
RAY = Path(sys.executable).with_name("ray")
RAY_FLAGS = [
    "--num-cpus",
    "1",
    "--block",
    "--disable-usage-stats",
    "--object-store-memory",
    "100000000",
]


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def inside(host: str, *command: str, **how: Any) -> subprocess.Popen[Any]:
    """A program in a namespace, leader of a group of its own."""
    return subprocess.Popen(["ip", "netns", "exec", host, *command], start_new_session=True, **how)


def end(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Two hosts with a cable between them."""
    _remove()
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip(
            "link",
            "add",
            "cable-a",
            "netns",
            FIRST,
            "type",
            "veth",
            "peer",
            "name",
            "cable-b",
            "netns",
            SECOND,
        )
        for (host, address), cable in zip(HOSTS.items(), ("cable-a", "cable-b"), strict=True):
            ip("-n", host, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", host, "link", "set", cable, "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        _remove()


def _remove() -> None:
    for host in HOSTS:
        ip("netns", "del", host, check=False)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """A node of Ray on each host; the second is started again whenever it ends."""
    closing = threading.Event()
    nodes: list[subprocess.Popen[Any]] = []

    def node(host: str, *where: str) -> subprocess.Popen[Any]:
        words = [str(RAY), "start", *where, "--node-ip-address", HOSTS[host], *RAY_FLAGS]
        with (folder / f"{host}.log").open("ab") as log:
            nodes.append(
                inside(
                    host,
                    *words,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                ),
            )
        return nodes[-1]

    def keep() -> None:
        while not closing.is_set():
            process = node(SECOND, "--address", f"{HOSTS[FIRST]}:{PORT}")
            while process.poll() is None and not closing.wait(0.5):
                pass
            closing.wait(1.0)

    keeper = threading.Thread(target=keep)
    try:
        node(FIRST, "--head", "--port", str(PORT), "--include-dashboard=false")
        time.sleep(10.0)
        keeper.start()
        yield
    finally:
        closing.set()
        keeper.join()
        for process in nodes:
            end(process)


def train(folder: Path, name: str, calls: int | None) -> None:
    """The run itself, on the first host; what it sampled is left in a file."""
    from tether.scale.ray import connect, ray

    connect(f"{HOSTS[FIRST]}:{PORT}")
    while sum(node["Alive"] for node in ray.nodes()) < len(HOSTS):
        time.sleep(0.5)
    engine = {"kind": "served", "servers": 2, "restarts": 1000, "start_seconds": 300.0}
    with Recorder(calls) as recorder, contextlib.suppress(Interrupted):
        recipe_ = recipe(folder, name, 100_000, engine)
        run_recipe(recipe_.model_copy(update={"on": "ray"}))
    rows = [
        [*key, recorder.seen[key], recorder.tokens[key], recorder.logprobs[key]]
        for key in recorder.seen
    ]
    (folder / f"{name}.json").write_text(json.dumps({"calls": recorder.calls, "groups": rows}))


def states(folder: Path, name: str) -> dict[str, str]:
    """The state of each server, by the fleet's log."""
    return {
        row["server"]: row["after"]
        for row in read_jsonl(folder / name / "grpo" / "engine" / "fleet.jsonl")
    }


def wait_for(process: subprocess.Popen[Any], ready: Any, seconds: float = 300.0) -> float:
    """Seconds until something is so; an error if the run ends before, or it takes too long."""
    start = time.monotonic()
    while not ready():
        if process.poll() is not None or time.monotonic() - start > seconds:
            raise RuntimeError(
                f"not after {seconds:g} s"
                if process.poll() is None
                else (f"the run ended: {process.returncode}"),
            )
        time.sleep(0.1)
    return time.monotonic() - start


def measured(folder: Path, cuts: int, seconds: float) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.hosts", "--inside", str(folder)]
    recovered, noticed = [], []
    with network(), cluster(folder):
        run = inside(FIRST, *words, "wild")
        try:
            both = lambda: list(states(folder, "wild").values()).count("healthy") == 2  # noqa: E731
            wait_for(run, both)
            for _ in range(cuts):
                time.sleep(5.0)
                ip("-n", SECOND, "link", "set", "cable-b", "down")
                with contextlib.suppress(RuntimeError):
                    gone = lambda: {"dead", "restarting"} & {*states(folder, "wild").values()}  # noqa: E731
                    noticed.append(wait_for(run, gone, seconds))
                time.sleep(max(0.0, seconds - (noticed[-1] if noticed else 0.0)))
                ip("-n", SECOND, "link", "set", "cable-b", "up")
                recovered.append(wait_for(run, both))
            os.killpg(run.pid, signal.SIGINT)
            run.wait(120)
            wild = json.loads((folder / "wild.json").read_text())
            calm_run = inside(FIRST, *words, "calm", "--calls", str(wild["calls"]))
            calm_run.wait(3600)
        finally:
            end(run)
    return {"cuts": cuts, "cut_s": seconds, **compared(folder, wild, recovered, noticed)}


def compared(
    folder: Path,
    wild: dict[str, Any],
    recovered: list[float],
    noticed: list[float],
) -> dict[str, Any]:
    """What differs between the disturbed run and the calm one."""
    calm = json.loads((folder / "calm.json").read_text())
    counts = {(call, ordinal): count for call, ordinal, count, *_ in wild["groups"]}
    seen, quiet = ({(row[0], row[1]): row[3:] for row in run["groups"]} for run in (wild, calm))
    expected = {
        (call, call * PROMPTS + place) for call in range(wild["calls"]) for place in range(PROMPTS)
    }
    times = [row["time/step"] for row in read_jsonl(folder / "wild" / "grpo" / "metrics.jsonl")]
    other = [key for key in seen.keys() & quiet.keys() if seen[key][0] != quiet[key][0]]
    alike = min((call for call, _ in other), default=len(times))
    gaps = [
        rounding(seen[key], quiet[key]) for key in seen.keys() & quiet.keys() if key[0] <= alike
    ]

    def figures(some):
        return (
            {"median": round(statistics.median(some), 1), "max": round(max(some), 1)}
            if some
            else None
        )

    return {
        "steps": len(times),
        "groups": len(expected),
        "lost": len(expected - seen.keys()) + len(seen.keys() - expected),
        "twice": sum(count > 1 for count in counts.values()),
        "differs": len(other),
        "alike": alike,
        "rounding": max(gaps),
        "noticed_s": figures(noticed),
        "recovery_s": figures(recovered),
        "longest_step_s": round(max(times), 1),
        "median_step_s": round(statistics.median(times), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="without a cable")
    parser.add_argument("--json", action="store_true", help="the last line is JSON alone")
    parser.add_argument("--smoke", action="store_true", help="say what is needed, and do nothing")
    parser.add_argument("--inside", nargs=2, metavar=("FOLDER", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        train(Path(asked.inside[0]), asked.inside[1], asked.calls)
        return
    if asked.smoke:
        print(f"needs root: {os.geteuid() == 0}; Ray: {RAY.is_file()}")
        return
    # the nodes know each other by it
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory() as folder:
        result = measured(Path(folder), asked.cuts, asked.seconds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
