"""What a fleet of engine servers costs the learner, measured, and where a run of up to 1,000 GPUs
would wait, simulated.

    python -m benchmarks.fleet [--servers 1 4 16 64 256] [--json FILE] [--smoke]

Measured: tether's own engine of servers (`rollout.served`) against as many stand-ins on the
loopback, which answer at once and compute nothing. So all seconds are the learner's side:
publishing an adapter, having it loaded and probed everywhere, sending requests and reading answers.

Simulated: a step of GRPO on servers and a learner, event by event, with those measured costs, a
long tail of lengths, and the speeds at the head of this file, which are published or assumed and
were not measured here. It answers where the next bottleneck is, not how fast a run would be.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tether.core.rundir import write_json
from tether.core.types import Prompt, Sampling, user

PROMPTS, SHORT, LONG = 256, 16, 192
"""Of a measured round: prompts and, of each of 8 answers, tokens."""
SAMPLES = 8


# Measured: stand-ins for servers.


class StandIn(BaseHTTPRequestHandler):
    """Many servers on one port, told apart by the first part of the path; each answers at once."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body after its head would wait for the other side's receipt
    held: dict[str, dict[str, None]] = {}  # noqa: RUF012  (of the class on purpose: every request is a new object)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        _, server, *_ = self.path.split("/")
        held = self.held.setdefault(server, {})
        self.answer(
            {"data": [{"id": "base", "max_model_len": 4096}, *({"id": name} for name in [*held])]},
        )

    def do_POST(self) -> None:
        _, server, *rest = self.path.split("/")
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        held, what = self.held.setdefault(server, {}), rest[-1]
        if what == "load_lora_adapter":
            held[body["lora_name"]] = None
        elif what == "unload_lora_adapter":
            held.pop(body["lora_name"], None)
        if what != "generate":
            return self.answer({})
        params, ids = body["sampling_params"], body["token_ids"]
        if "prompt_logprobs" in params:
            return self.answer(
                {"prompt_logprobs": [None, *({str(i): {"logprob": -1.0}} for i in ids[1:])]},
            )
        rows = [{"token": "a", "logprob": -1.0}] * params["max_tokens"]
        one = {
            "token_ids": [7] * params["max_tokens"],
            "logprobs": {"content": rows},
            "finish_reason": "length",
        }
        self.answer(
            {"model": body["model"], "choices": [{**one, "index": n} for n in range(params["n"])]},
        )


class Crowd(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


def serve(pipe: Any) -> None:
    server = Crowd(("127.0.0.1", 0), StandIn)
    pipe.send(server.server_address[1])
    server.serve_forever(poll_interval=0.05)


@contextmanager
def crowd() -> Iterator[str]:
    """Stand-ins in a process of their own; the beginning of their address."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def measured(counts: Sequence[int], rounds: int, prompts: int) -> dict[int, dict[str, float]]:
    """By number of servers: seconds until all have new weights, milliseconds a request,
    microseconds a token of an answer.
    """
    from tether.build.models import open_model
    from tether.build.roles import encoder_of
    from tether.models.loading import add_adapter
    from tether.models.trunk import Role
    from tether.rollout.served import ServedEngine
    from tether.servers.launch import Servers
    from tether.settings.engine import EngineConfig
    from tether.settings.model import LoraConfig, ModelConfig

    loaded = open_model(ModelConfig.model_validate({"source": "tiny", "dtype": "float32"}))
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=0), "policy")
    rows = [
        Prompt((user(f"What is {number} times two?"),), str(number)) for number in range(prompts)
    ]
    results = {}
    for count in counts:
        with crowd() as address, tempfile.TemporaryDirectory() as place:
            addresses = {f"s{n}": f"{address}/{n}" for n in range(count)}
            config = EngineConfig(
                kind="served",
                addresses=tuple(addresses.values()),
                tolerance=1e9,
                start_seconds=60,
            )
            fleet = Servers(lambda host, port: [], [], Path(place), addresses)
            engine = ServedEngine(
                role,
                encoder_of(loaded),
                fleet,
                Path(place),
                config,
                context_length=256,
                ours=True,
            )
            updates: list[float] = []
            requests: dict[int, list[float]] = {SHORT: [], LONG: []}
            try:
                for version in range(1, rounds + 1):
                    start = time.perf_counter()
                    engine.update_weights(version)
                    updates.append(time.perf_counter() - start)
                    for tokens, seconds in requests.items():
                        start = time.perf_counter()
                        groups = engine.generate(
                            rows,
                            Sampling(max_new_tokens=tokens),
                            num_samples=SAMPLES,
                        )
                        seconds.append((time.perf_counter() - start) / prompts)
                        assert len(groups) == prompts and all(
                            r.policy_version == version for g in groups for r in g.rollouts
                        )
                threads = threading.active_count()
            finally:
                engine.close()
        short, long = (statistics.median(seconds) for seconds in requests.values())
        token = (long - short) / SAMPLES / (LONG - SHORT)
        results[count] = {
            "update_s": round(statistics.median(updates), 4),
            "request_ms": round(1e3 * (short - token * SAMPLES * SHORT), 3),
            "token_us": round(1e6 * token, 2),
            "threads": threads,
        }
        print(json.dumps({"servers": count, **results[count]}), flush=True)
    return results


# Simulated: one model, split over servers (a server is `server_gpus` GPUs) and a learner.


@dataclass(frozen=True)
class Model:
    """Bytes and speeds; assumed unless a source is named."""

    name: str
    parameters: float
    adapter_bytes: float
    server_gpus: int
    """GPUs that hold one copy."""
    decode: float
    """Tokens a second of one server with its batch full."""
    slot: float
    """Tokens a second of one answer."""
    learn: float
    """Tokens a second and GPU of the learner."""


MODELS = (
    # The learner's speed: prime-rl's published 13.3k tokens a second on one H100 (Qwen3-0.6B, LoRA,
    # 10.9% MFU).
    Model("0.6B", 0.6e9, 20e6, 1, 20_000, 200.0, 13_300),
    # Scaled by the parameters from that, at the same share of the peak; servers as vLLM users
    # report for one H100 or a pair.
    Model("8B", 8e9, 80e6, 1, 5_000, 80.0, 13_300 * 0.6 / 8),
    Model("70B", 70e9, 400e6, 4, 2_500, 30.0, 13_300 * 0.6 / 70),
)
LENGTH, TAIL, LIMIT = 1000, 0.7, 8192
"""Answers: the median of a lognormal distribution, its sigma, and where they are cut."""
DISK = 2e9
"""Bytes a second that the shared file system gives to all readers together."""
NETWORK = 12.5e9
"""Bytes a second into one host (100 Gbit/s): what whole weights would come through, if all hosts
pass them on at once.
"""


@dataclass
class Costs:
    """The measured side: seconds of the learner a request, a token of an answer, and a server of an
    update of weights.
    """

    request: float
    token: float
    update: float


def course(
    model: Model,
    servers: int,
    learner_gpus: int,
    prompts: int,
    staleness: int,
    costs: Costs,
    steps: int,
) -> tuple[float, float, float]:
    """(seconds a step, idle share of the servers, idle share of the learner), without the first
    `staleness + 2` steps.

    A server gives each of its answers `slot` tokens a second, and all together `decode`; an answer
    goes to the first free slot. The requests of step t leave once the weights of step t - staleness
    are on all servers; a step is learned from when its last answer is there and the step before is
    learned from. That is what `max_staleness` does.
    """
    chance, slots = random.Random(0), max(1, int(model.decode / model.slot))
    free = [0.0] * (servers * slots)
    publish = costs.update * servers + model.adapter_bytes * servers / DISK
    learned: list[float] = []
    work: list[tuple[float, float]] = []
    learning: list[float] = []
    read = 0.0
    for step in range(steps):
        tokens, ends, sent = (
            0.0,
            list[tuple[float, float]](),
            learned[step - staleness - 1] + publish if step > staleness else 0.0,
        )
        for _ in range(prompts):
            sent += costs.request
            for _ in range(SAMPLES):
                length = min(LIMIT, LENGTH * chance.lognormvariate(0, TAIL))
                begin = max(heapq.heappop(free), sent)
                heapq.heappush(free, begin + length / model.slot)
                work.append((begin, begin + length / model.slot))
                ends.append((begin + length / model.slot, length))
                tokens += length
        for end, length in sorted(ends):  # one process reads all answers
            read = max(read, end) + length * costs.token
        learning.append(tokens / (model.learn * learner_gpus))
        learned.append(max(read, learned[-1] + publish if learned else 0.0) + learning[-1])
    first = min(staleness + 2, steps - 2)
    span = learned[-1] - learned[first]
    busy = sum(max(0.0, min(end, learned[-1]) - max(begin, learned[first])) for begin, end in work)
    busy_learner = sum(learning[first + 1 :])
    return span / (steps - 1 - first), 1 - busy / (servers * slots * span), 1 - busy_learner / span


def simulated(
    model: Model,
    gpus: int,
    staleness: int,
    costs: Costs,
    *,
    steps: int = 16,
) -> dict[str, Any]:
    """The best split of so many GPUs over servers and learner, and who waits in it; the batch is 4
    prompts a GPU.
    """
    prompts, rows = 4 * gpus, []
    for share in (0.1, 0.25, 0.4, 0.5, 0.6, 0.75):
        servers = max(1, int(gpus * share) // model.server_gpus)
        learners = gpus - servers * model.server_gpus
        if learners > 0:
            rows.append(
                (
                    *course(model, servers, learners, prompts, staleness, costs, steps),
                    servers,
                    learners,
                ),
            )
    whole, servers_idle, learner_idle, servers, learners = min(rows)
    longest = LIMIT / model.slot
    return {
        "model": model.name,
        "gpus": gpus,
        "staleness": staleness,
        "servers": servers,
        "learner_gpus": learners,
        "step_s": round(whole, 1),
        "samples_per_s": round(prompts * SAMPLES / whole, 1),
        "servers_idle": round(servers_idle, 2),
        "learner_idle": round(learner_idle, 2),
        "send_and_read_s": round(
            prompts * (costs.request + SAMPLES * 1.25 * LENGTH * costs.token),
            2,
        ),
        "publish_s": round(costs.update * servers, 2),
        "read_adapters_s": round(model.adapter_bytes * servers / DISK, 2),
        "longest_answer_s": round(longest, 1),
        "adapters_GB": round(model.adapter_bytes * servers / 1e9, 2),
        "whole_weights_GB": round(2 * model.parameters * servers / 1e9, 1),
        "whole_weights_s": round(2 * model.parameters / NETWORK, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("two servers, one round, one simulated machine"),
    )
    asked = parser.parse_args()
    numbers = measured([2], 1, 32) if asked.smoke else measured(asked.servers, 5, PROMPTS)
    most = max(numbers)
    pieces = Costs(
        numbers[most]["request_ms"] / 1e3,
        numbers[most]["token_us"] / 1e6,
        numbers[most]["update_s"] / most,
    )
    machines = (8,) if asked.smoke else (8, 64, 256, 1000)
    table = [
        simulated(model, gpus, ahead, pieces)
        for model in MODELS
        for gpus in machines
        for ahead in (0, 1, 2, 4)
    ]
    for line in table:
        print(json.dumps(line))
    if asked.json:
        write_json(asked.json, {"measured": numbers, "simulated": table})
