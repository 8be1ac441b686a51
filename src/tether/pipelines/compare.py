"""Methods side by side: from one SFT model, one set of preferences and one reward model a seed, each judged by the same gold.

Every arm is trained in a process of its own, so that its peak memory is its own, and is started again where it was interrupted.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field, model_validator

from tether.assemble import Recipe, describe_sections
from tether.core.config import build, parts
from tether.core.errors import TrainingError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory, read_json
from tether.core.stopping import Interrupted
from tether.core.types import Feedback
from tether.pipelines.foundation import SeedsConfig
from tether.pipelines.journey import run_stage
from tether.pipelines.measured import Progress
from tether.pipelines.opening import as_begun

STOPPED = "stopped"
"""Stands where a child names a phase: what follows is how it was interrupted."""
SILENT: Progress = lambda done, total, metrics: None  # noqa: E731


class CompareConfig(SeedsConfig):
    """The common ground, and the arms: each a name and one stage section, as in a recipe."""

    run: str = "runs/compare"
    arms: dict[str, dict[str, Any]] = Field(min_length=1)

    @model_validator(mode="after")
    def _check_arms(self) -> CompareConfig:
        for name in self.arms:
            self.arm(name, self.seeds[0])
        return self

    def arm(self, name: str, seed: int) -> tuple[str, Any]:
        """The stage of an arm and its section, checked as a recipe's.

        Raises:
            ValueError: it has not exactly one section, or brings data or a length of its own.
        """
        values = {
            "run": self.run,
            "seed": seed,
            "model": self.model.model_dump(),
            "reward": self.reward.model_dump(exclude_unset=True),
        }
        recipe = build(Recipe, {**values, **self.arms[name]}, where=f"arm {name!r}")
        stages = [stage for stage in describe_sections(recipe) if stage in self.arms[name]]
        if len(stages) != 1 or stages[0] in ("sft", "reward"):
            raise ValueError(f"arm {name!r} needs exactly one section that makes a policy, such as [arms.{name}.ppo]")
        section = getattr(recipe, stages[0])
        common = self.common(section, f"arm {name!r}")
        return stages[0], type(section).model_validate({**section.model_dump(exclude_unset=True), **common, "seed": seed})


class Compare:
    """Seed by seed: the common ground, then every arm, then the judge over all of them."""

    def __init__(self, config: CompareConfig, announce: Callable[[str], Progress] | None = None) -> None:
        self.root = Path(config.run)
        self.config = config = as_begun(config, self.root)
        self.announce = announce or (lambda phase: SILENT)
        self.run_directory = RunDirectory.open(self.root, parts(config, without=("run", "arms", "seeds")))

    def run(self) -> dict[str, Any]:
        """Everything that is missing; returns (and writes) the summary."""
        summary: dict[str, Any] = {"arms": {name: {} for name in self.config.arms}, "seeds": {}}
        for seed in self.config.seeds:
            foundation = self.config.foundation(seed, self.announce)
            summary["seeds"][str(seed)] = foundation.build()
            for name in ("sft", *self.config.arms):
                if not (folder := foundation.root / "arms" / name / "answers.json").is_file():
                    self._in_a_process(seed, name)
                    assert folder.is_file()
            before, *after = [read_json(foundation.root / "arms" / n / "answers.json") for n in ("sft", *self.config.arms)]
            for name, answers in zip(self.config.arms, after, strict=True):
                result = foundation.gained(before, answers)
                trained = read_json(foundation.root / "arms" / name / "summary.json")
                cost = {key: trained[key] for key in ("seconds", "peak_rss_bytes")}
                measured = {key: answers[key] for key in ("kl", "finished", "length")}
                summary["arms"][name][str(seed)] = {**result, **measured, **cost}
        self.run_directory.finish(summary)
        (self.root / "compare.md").write_text(table(self.run_directory.summary()), encoding="utf-8")
        return self.run_directory.summary()

    def train(self, seed: int, name: str) -> None:
        """One arm, in this process: trained if it is one, then asked the held-out prompts."""
        foundation = self.config.foundation(seed, self.announce)
        folder, model = foundation.root / "arms" / name, foundation.policy_model
        if name != "sft":
            stage, section = self.config.arm(name, seed)
            comparisons = foundation.comparisons()
            rows = {
                "direct": comparisons,
                "kto": [Feedback(c.prompt, side, side is c.chosen) for c in comparisons for side in (c.chosen, c.rejected)],
            }.get(stage, foundation.train_prompts)
            bar = self.announce(name)
            run_stage(
                stage, section, model, folder, seed, reward_folder=foundation.root / "reward" / "model", rows=rows, progress=bar
            )
        source = str(foundation.root / "sft" / "model") if name == "sft" else str(folder)
        foundation.measured(source, folder, name)

    def _in_a_process(self, seed: int, name: str) -> None:
        command = [sys.executable, "-m", "tether.pipelines.compare", str(seed), name]
        bars: dict[str, Progress] = {name: self.announce(f"{name} · seed {seed}")}
        # In a session of its own, Ctrl-C reaches the child through its parent alone, once.
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(self.config.model_dump(mode="json", exclude_unset=True)))
            child.stdin.close()
            for line in child.stdout:
                phase, *place = json.loads(line)
                if phase == STOPPED:
                    raise Interrupted(place[0], signal.SIGTERM)
                if phase not in bars:
                    bars[phase] = self.announce(f"{phase} · seed {seed}")
                doing(bars[phase], *place) if len(place) == 1 else bars[phase](*place)
            code = child.wait()
        except (KeyboardInterrupt, Interrupted) as stop:
            _end(child, stop)
        finally:
            if child.poll() is None:
                child.terminate()
        if code:
            raise TrainingError(f"the arm {name!r} of seed {seed} ended with exit code {code}; its own message stands above")


def _end(child: subprocess.Popen[str], stop: BaseException) -> NoReturn:
    """Let the child end its step, or stop at once where a second signal comes; what it says last is what there is to say."""
    assert child.stdout is not None
    lines: list[str] = []
    for _ in range(2):
        child.terminate()
        with contextlib.suppress(KeyboardInterrupt, Interrupted):
            lines += child.stdout
            break
    child.wait()
    last = [text for phase, *place in map(json.loads, lines) if phase == STOPPED for text in place]
    raise Interrupted(last[-1], getattr(stop, "exit_code", 130) - 128) if last else stop


def table(summary: dict[str, Any]) -> str:
    """The summary as Markdown: a line an arm and seed, then the means."""
    lines = [
        "| method | seed | gold gain | win rate | over SFT at its best decoding | wins | KL, nats | finished | seconds | GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, seeds in summary["arms"].items():
        for seed, row in seeds.items():
            over = row.get("over_best_decoding", {})
            lines.append(
                f"| {name} | {seed} | {_told(row['gold_gain'], '+.2f')} | {_told(row['gold_win_rate'], '.3f')} "
                f"| {_told(over, '+.2f')} | {_told(over.get('win_rate'), '.3f')} | {row['kl']['value']:.1f} "
                f"| {row['finished']:.0%} | {row['seconds']:.0f} | {row['peak_rss_bytes'] / 1e9:.2f} |"
            )
        if len(seeds) > 1:
            mean = partial(_mean, list(seeds.values()))
            peak = max(row["peak_rss_bytes"] for row in seeds.values()) / 1e9
            lines.append(
                f"| **{name}** | mean | **{mean('gold_gain', 'value'):+.2f}** | {mean('gold_win_rate', 'value'):.3f} "
                f"| {mean('over_best_decoding', 'value'):+.2f} | {mean('over_best_decoding', 'win_rate', 'value'):.3f} "
                f"| {mean('kl', 'value'):.1f} | {mean('finished'):.0%} | {mean('seconds'):.0f} | {peak:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _told(found: dict[str, Any] | None, form: str) -> str:
    """A number with its interval; empty where an earlier revision did not measure it."""
    return f"{found['value']:{form}} [{found['low']:{form}}, {found['high']:{form}}]" if found else ""


def _mean(rows: Sequence[Any], *path: str) -> float:
    """The mean over the seeds of what lies at the end of the path; not a number where a seed has none."""
    found = [reduce(lambda inner, key: inner.get(key, {}), path, row) for row in rows]
    return statistics.fmean(value if isinstance(value, int | float) else math.nan for value in found)


class Lines:
    """A child's progress bar: lines of JSON for its parent, not many a second."""

    def __init__(self, phase: str) -> None:
        self.phase, self.last = phase, 0.0
        self.doing("loading")

    def doing(self, what: str) -> None:
        print(json.dumps([self.phase, what]), flush=True)

    def __call__(self, done: int, total: int, metrics: Any) -> None:
        if done == total or time.monotonic() - self.last > 0.5:
            self.last = time.monotonic()
            numbers = {k: v for k, v in dict(metrics).items() if isinstance(v, (int, float))}
            print(json.dumps([self.phase, done, total, numbers]), flush=True)


def main() -> None:
    """One arm of one seed; the settings come in on standard input, progress goes out line by line."""
    config = build(CompareConfig, json.load(sys.stdin), where="compare")
    Compare(config, Lines).train(int(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    from tether.core.errors import TetherError
    from tether.core.stopping import stop_on_sigterm

    stop_on_sigterm()
    try:
        main()
    except TetherError as error:
        print(f"tether: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Interrupted as stop:
        print(json.dumps([STOPPED, str(stop)]), flush=True)  # one message, by the process that was stopped
        raise SystemExit(stop.exit_code) from None
