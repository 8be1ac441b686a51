"""Every stage on a tiny random model, six steps each: the recipes that tests kill and resume.

Whatever decides a later step is switched on: dropout, an adaptive KL coefficient, a running
baseline, moving averages, weights that are kept by a measurement.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tether.core.rundir import ENGINE, read_jsonl

WORDS = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
FAST = {"optimizer": {"learning_rate": 1e-2}}
SUPERVISED = {"checkpoint_every": 1, **FAST}
SAMPLED = {
    **{
        "steps": 6,
        "prompts_per_step": 3,
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "sample_rows": 6,
    },
    **{"checkpoint_every": 1, **FAST},
}
AVERAGED = {**SAMPLED, "ema_decay": 0.5}
SHORT = {"steps": 2}
JUDGED = {
    "data": {"path": "tether:heldout", "limit": 6},
    "judge": {"call": "tether.quickstart.judges:letters"},
    "max_new_tokens": 8,
}
SENT = re.compile(r"policy-[0-9a-f]{8}-[0-9]+-")
"""Beginnings of names of weights for servers, with a number of the start and one of the update."""
KEPT = {**SAMPLED, "evaluate": {"every": 2, "prompts": 4, "keep": "best"}}


def recipe(folder: Path, run: Path) -> dict[str, Any]:
    """The values of a recipe with a section of every stage that needs no pairs of its own; its rows
    are written into `folder`.
    """
    pairs = [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in WORDS]
    verdicts = [
        {"prompt": w, "completion": w + end, "label": end == "!"}
        for w in WORDS
        for end in ("!", "?")
    ]
    problems = [{"question": w, "answer": str(n)} for n, w in enumerate(WORDS)]
    steps = [
        {"prompt": w, "completions": [w, "so", "end"], "labels": [True, n % 2 == 0, n % 2 == 0]}
        for n, w in enumerate(WORDS * 2)
    ]
    talks = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w}]}
        for w in WORDS
    ]
    prompts = _written(folder / "prompts.jsonl", ({"prompt": w} for w in WORDS))
    whole, dropout = {"heldout_fraction": 0.0}, {"lora": {"dropout": 0.2}}
    rewarded = {
        "evaluate_every": 2,
        "head_dropout": 0.2,
        "prompts_per_update": 2,
        "epochs": 2,
        **dropout,
        **SUPERVISED,
    }
    return {
        "run": str(run),
        "model": {"source": "tiny", "dtype": "float32"},
        "sft": {
            "data": _written(folder / "sft.jsonl", talks),
            "epochs": 1,
            "batch_size": 2,
            **whole,
            **dropout,
            **SUPERVISED,
        },
        "reward": {
            "data": _written(folder / "pairs.jsonl", pairs),
            "heldout_fraction": 0.5,
            **rewarded,
        },
        "process": {
            **{
                "data": _written(folder / "steps.jsonl", steps),
                "delimiters": ["\n"],
                "heldout_fraction": 0.3,
            },
            **{
                "solutions_per_update": 2,
                "epochs": 1,
                "head_dropout": 0.2,
                **dropout,
                **SUPERVISED,
            },
        },
        "direct": {
            "data": prompts | {"path": prompts["path"].replace("prompts", "pairs")},
            "prompts_per_update": 2,
            **whole,
        }
        | {"reference_logprobs": "precomputed", **SUPERVISED},
        "kto": {
            "data": _written(folder / "verdicts.jsonl", verdicts),
            "prompts_per_update": 2,
            **whole,
            **SUPERVISED,
        },
        "ppo": {
            "data": prompts,
            **KEPT,
            "kl": {"mode": "adaptive", "target": 0.1, "horizon": 30},
            "normalize_scores": True,
        },
        "grpo": {
            **{
                "data": _written(folder / "problems.jsonl", problems),
                "algorithm": "dapo",
                **AVERAGED,
            },
            **{
                "reward_source": "verifiable",
                "verifiable": {"kind": "exact", "format_pattern": ".*[a-z].*"},
            },
        },
        "reinforce": {
            "data": prompts,
            "algorithm": "reinforce",
            **AVERAGED,
            "baseline": "running_mean",
        },
        "distill": {
            "data": prompts,
            **{**SAMPLED, "evaluate": {**KEPT["evaluate"], "judge": JUDGED["judge"]}},
            "divergence": "jsd",
            "teacher": [
                {"model": "start", "system": "shout", "follow": 0.5},
                {"model": "start", "system": "{prompt}, and again", "weight": 2.0},
            ],
        },
        "best_of_n": {"data": prompts, **KEPT, "reward_source": "random"},
        "online_direct": {"data": prompts, **AVERAGED},
        "rounds": {
            **{"data": prompts, "rounds": 2, "samples_per_prompt": 4, "max_new_tokens": 8},
            "direct": {"prompts_per_update": 4, **whole, **SUPERVISED},
        },
    }


def loop_recipe(run: Path) -> dict[str, Any]:
    """The values of a recipe that repeats: two rounds of pairs, labels, reward model and policy."""
    fast = {**SUPERVISED, "optimizer": {"learning_rate": 1e-3}}
    few = {
        name: {"path": f"tether:{name}", "limit": 12}
        for name in ("demonstrations", "prompts", "heldout")
    }
    letters = {"call": "tether.quickstart.judges:letters"}
    asked = {
        "prompts": 8,
        "samples_per_prompt": 4,
        "labels": 12,
        "choose": "uncertain",
        "max_new_tokens": 8,
        "temperature": 1.0,
    }
    sampled = {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 2, "sample_rows": 8}
    return {
        **{
            "run": str(run),
            "seed": 3,
            "repeat": 2,
            "model": {"source": "tiny", "dtype": "float32"},
        },
        "sft": {
            "data": few["demonstrations"],
            "epochs": 1,
            "batch_size": 8,
            "row_tokens": 256,
            **fast,
        },
        "pairs": {"data": few["prompts"], "judge": letters, **asked},
        "reward": {"prompts_per_update": 4, "heldout_fraction": 0.25, **SUPERVISED},
        "ppo": {**sampled, **SUPERVISED},
        "evaluate": {
            "data": few["heldout"],
            "judge": letters,
            "max_new_tokens": 8,
            "temperature": 1.0,
        },
    }


def members_recipe(folder: Path, run: Path) -> dict[str, Any]:
    """The values of a recipe with reward models of several kinds: members that are distilled into
    one, beside one that judges.
    """
    values = recipe(folder, run)
    values["reward"] |= {
        "members": 2,
        "distill": "mean",
        "test_share": 0.3,
        "epochs": 1,
        "heldout_fraction": 0.4,
    }
    return {key: values[key] for key in ("run", "model", "reward", "ppo")}


def sampled_recipe(folder: Path, run: Path, **sections: Any) -> dict[str, Any]:
    """The values of a recipe of [sft] and a [grpo] of two steps on problems that are checked, and
    further sections.
    """
    values = recipe(folder, run)
    stages = {"sft": values["sft"], "grpo": {**values["grpo"], **SHORT, "samples_per_prompt": 3}}
    return {"run": values["run"], "model": values["model"], **stages, **sections}


def sweep_recipe(folder: Path, run: Path) -> dict[str, Any]:
    """The values of a recipe whose combinations of two keys are runs of their own."""
    keys = {"sft.batch_size": [2, 3], "grpo.kl.coefficient": [0.01, 0.05]}
    return sampled_recipe(folder, run, sweep=keys)


def arms_recipe(folder: Path, run: Path) -> dict[str, Any]:
    """The values of a recipe that trains two controls beside its policy, and compares them."""
    controls = {name: {"grpo": {"reward_source": name}} for name in ("random", "majority")}
    return sampled_recipe(folder, run, arms=controls, evaluate=JUDGED)


def measured_recipe(folder: Path, run: Path) -> dict[str, Any]:
    """The values of a recipe whose policy is measured by several evaluators, along the way and at
    the end, and keeps the best weights by one of them.
    """
    values = recipe(folder, run)
    further = {"evaluators": {"diversity": {"limit": 4}, "refusal": {"limit": 3}}}
    along = {"every": 1, "prompts": 4, "keep": "best", "keep_by": "diversity.distinct_1", **further}
    values["reward"] |= {"epochs": 1, "test_share": 0.3, "heldout_fraction": 0.4}
    values["ppo"] |= {**SHORT, "evaluate": {**along, "judge": "test", "sycophancy": {"pairs": 4}}}
    stages = {key: values[key] for key in ("run", "model", "sft", "reward", "ppo")}
    return {**stages, "evaluate": {**JUDGED, **further}}


def served_recipe(folder: Path, run: Path, address: str) -> dict[str, Any]:
    """The values of a recipe whose policy is sampled by a server of the model `tiny`, two steps
    ahead of its learning.

    The server decodes each prompt alone: with others it would round otherwise.
    """
    values = sampled_recipe(folder, run, deterministic=True)
    ahead = {"max_staleness": 2, "importance": "truncate", "filter_groups": False, "steps": 4}
    engine = {"kind": "served", "addresses": [address]}
    policy = {"grpo": {**values["grpo"], **ahead, "engine": engine}}
    return {key: values[key] for key in values if key != "sft"} | policy


def results(run: Path) -> dict[str, Any]:
    """What a run amounts to, by file: bytes of weights, rows of records, summaries; without times
    and sizes of memory.
    """
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if "checkpoints/" in name or not path.is_file():
            continue
        if path.suffix == ".safetensors":
            found[name] = {
                key: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                for key, tensor in load_file(path).items()
            }
        elif path.suffix == ".jsonl":
            found[name] = [timeless(row) for row in read_jsonl(path)]
        elif path.name in ("summary.json", "answers.json"):
            found[name] = timeless(json.loads(path.read_text(encoding="utf-8")))
    return found


def everything(run: Path) -> dict[str, str]:
    """Every file and empty folder below a folder with a digest of its bytes; JSON is without times,
    sizes of memory and the folder's place.

    Of a page, its picture, a trace and the records of servers, which show times, the name alone counts. The
    names of weights for servers are without their number of the start.
    """
    return {
        SENT.sub("policy-", str(path.relative_to(run))): _digest_of(path, run)
        for path in sorted(run.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


def _digest_of(path: Path, run: Path) -> str:
    shows_times = path.suffix in (".html", ".svg", ".png") or path.name == "trace.json"
    if path.is_dir() or shows_times or path.parent.name == ENGINE:
        return ""
    text = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        words = text.decode().replace(str(run), "RUN").replace(str(run.parent), "AROUND")
        values = (
            [json.loads(line) for line in words.split("\n") if line]
            if path.suffix == ".jsonl"
            else json.loads(words)
        )
        text = json.dumps(timeless(values)).encode()
    return hashlib.sha256(text).hexdigest()


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The files in which two runs differ."""
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def timeless(value: Any) -> Any:
    """Without what the clock, the memory of the process and the load of servers say, at any depth."""
    if isinstance(value, dict):
        kept = {
            k: v
            for k, v in value.items()
            if not (
                k.startswith(("time", "memory/", "engine/"))
                or k.endswith(("second", "bytes"))
                or "seconds" in k
            )
        }
        return {
            k: timeless(v) for k, v in kept.items() if k not in ("run", "started", "cwd", "argv")
        }
    return [timeless(item) for item in value] if isinstance(value, list) else value


def _written(path: Path, rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path)}


def toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{json.dumps(key)} = {toml(item)}' for key, item in value.items())}}}"
        )
    return json.dumps(value)
