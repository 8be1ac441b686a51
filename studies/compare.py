"""Methods side by side, from one SFT model, one set of preferences and one reward model a seed,
each judged by the same judge.

The arms of a recipe are the methods, and [evaluate] names the judge. Every arm is trained in a
process of its own, so that its peak memory is its own. The same command goes on where it was
interrupted, also with more arms or seeds. The table is RUN/compare.md.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from studies.command import run_study
from tether.core.errors import ConfigError, TrainingError
from tether.core.rundir import read_json, write_json
from tether.core.stopping import Interrupted
from tether.core.types import Json
from tether.settings.recipe import BaseRecipe, read_recipe
from tether.settings.stages import STAGES

HEAD = (
    "| method | seed | gold gain | win rate | over SFT at its best decoding | wins | KL, nats "
    "| finished | seconds | GB |"
)


def compare(recipe: str, overrides: Sequence[str], seeds: Sequence[int]) -> Json:
    """Run what is missing of a recipe, once a seed in RUN/seed-N; returns (and writes) the summary.

    Raises:
        ConfigError: the recipe compares nothing.
        TrainingError: a process failed.
    """
    config = read_recipe(recipe, overrides)
    methods, root = methods_of(config), Path(config.run)
    for seed in seeds:
        _run_seed(recipe, overrides, config, seed)
    arms = {
        name: {str(seed): _row(root / f"seed-{seed}", stage) for seed in seeds}
        for stage, name in methods.items()
    }
    write_json(root / "summary.json", {"arms": arms})
    (root / "compare.md").write_text(table(arms), encoding="utf-8")
    return {"arms": arms}


def methods_of(config: BaseRecipe) -> dict[str, str]:
    """The names of the methods by the folders of their stages.

    Raises:
        ConfigError: there is none, nobody judges, or rounds would be compared.
    """
    methods = {
        stage: stage if stage in STAGES else config.arm_of(stage)[1] for stage in config.policies
    }
    if config.section("evaluate") is None or not methods:
        raise ConfigError(
            "a comparison needs methods, such as [arms.dpo.direct], and [evaluate] with their judge",
        )
    if config.repeat is not None:
        raise ConfigError(
            "repeat has no effect here: methods are compared after one round. Leave it out",
        )
    if len(set(methods.values())) < len(methods):
        raise ConfigError("an arm is called as another method is: give it another name")
    return methods


def _run_seed(recipe: str, overrides: Sequence[str], config: BaseRecipe, seed: int) -> None:
    """The common ground in one process, every arm in its own, and the judge over all of them."""
    folder = Path(config.run) / f"seed-{seed}"
    own = [f"run={json.dumps(str(folder))}", f"seed={seed}"]
    for stage in config.policies:
        section = stage if stage in STAGES else "arms.{1}.{0}".format(*config.arm_of(stage))
        own.append(f"{section}.seed={seed}")
    verdict = folder / "evaluate" / "summary.json"
    if verdict.is_file() and not read_json(verdict)["policies"].keys() >= set(config.policies):
        verdict.unlink()  # an arm is new: it answers too, and the others' answers are there
    ground = [stage for stage in config.stages if stage not in (*config.policies, "evaluate")]
    for stages in (ground, *([stage] for stage in config.policies), ["evaluate"]):
        summaries = [folder / stage / "summary.json" for stage in stages]
        if not all(path.is_file() for path in summaries):
            _tether("run", recipe, *stages, *overrides, *own)
        if not all(path.is_file() for path in summaries):
            raise TrainingError(
                f"{' and '.join(stages)} of seed {seed}: not finished; why stands above",
            )


def _tether(*words: str) -> None:
    """A command of tether in a process of its own.

    Raises:
        TrainingError: it failed.
        SystemExit: this process was interrupted, and with it that one, which has saved what it had.
    """
    # In a session of its own, Ctrl-C reaches the child through this process alone, once.
    child = subprocess.Popen([sys.executable, "-m", "tether", *words], start_new_session=True)
    try:
        code = child.wait()
    except (KeyboardInterrupt, Interrupted) as stop:
        child.terminate()
        child.wait()
        raise SystemExit(getattr(stop, "exit_code", 130)) from None
    finally:
        if child.poll() is None:  # a second signal
            child.terminate()
    if code:
        raise TrainingError(
            f"tether {' '.join(words)} ended with exit code {code}; its own message stands above",
        )


def _row(folder: Path, stage: str) -> Json:
    """What the judge says of an arm of a seed, and what the arm cost."""
    verdict = read_json(folder / "evaluate" / "summary.json")["policies"][stage]
    trained, answers = read_json(folder / stage / "summary.json"), verdict.pop("answers")
    return {
        **verdict,
        **{"kl": answers["kl"], "length": answers["length"]},
        **{key: trained[key] for key in ("seconds", "peak_rss_bytes")},
    }


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """The rows by arm and seed as Markdown: a line each, then the means over the seeds."""
    lines = [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    for name, seeds in arms.items():
        for seed, row in seeds.items():
            over = row.get("over_best_decoding", {})
            lines.append(
                f"| {name} | {seed} | {_bracketed(row['gold_gain'], '+.2f')} | "
                f"{_bracketed(row['gold_win_rate'], '.3f')} "
                f"| {_bracketed(over, '+.2f')} | {_bracketed(over.get('win_rate'), '.3f')} | "
                f"{row['kl']['value']:.1f} "
                f"| {row['finished']:.0%} | {row['seconds']:.0f} | "
                f"{row['peak_rss_bytes'] / 1e9:.2f} |",
            )
        if len(seeds) > 1:
            mean = partial(_mean, list(seeds.values()))
            peak = max(row["peak_rss_bytes"] for row in seeds.values()) / 1e9
            lines.append(
                f"| **{name}** | mean | **{mean('gold_gain', 'value'):+.2f}** | "
                f"{mean('gold_win_rate', 'value'):.3f} "
                f"| {mean('over_best_decoding', 'value'):+.2f} | "
                f"{mean('over_best_decoding', 'win_rate', 'value'):.3f} "
                f"| {mean('kl', 'value'):.1f} | {mean('finished'):.0%} | {mean('seconds'):.0f} | "
                f"{peak:.2f} |",
            )
    return "\n".join(lines) + "\n"


def _bracketed(estimate: Mapping[str, Any] | None, form: str) -> str:
    """A number with its interval, or with the words that there is none; empty where nothing was
    measured.
    """
    if not estimate:
        return ""
    interval = (
        "too few"
        if estimate["low"] is None
        else (f"{estimate['low']:{form}}, {estimate['high']:{form}}")
    )
    return f"{estimate['value']:{form}} [{interval}]"


def _mean(rows: Sequence[Any], *path: str) -> float:
    """The mean over the seeds of what lies at the end of the path; not a number where a seed has
    none.
    """
    values = [reduce(lambda inner, key: inner.get(key, {}), path, row) for row in rows]
    return statistics.fmean(
        value if isinstance(value, int | float) else math.nan for value in values
    )


def main(recipe: str, overrides: list[str], seeds: list[int]) -> None:
    """The study from the command line: its table is printed."""
    print(table(compare(recipe, overrides, seeds)["arms"]), end="")


if __name__ == "__main__":
    run_study(main, "compare", __doc__ or "", seeds=(0, 1))
