"""The whole textbook in one command: SFT, preference collection, reward model, PPO, and a page that tells what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from tether.assemble import PPOSection
from tether.core.config import parts
from tether.core.rundir import RunDirectory, file_digest, read_json, write_jsonl
from tether.core.types import Prompt
from tether.models.memory import release
from tether.pipelines.foundation import DATA, Foundation, FoundationConfig
from tether.pipelines.measured import Progress, peak_rss_bytes
from tether.pipelines.opening import as_begun

ARMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "beta0": {"kl": {"mode": "fixed", "coefficient": 0.0}},
    "random": {"reward_source": "random"},
}


class QuickstartConfig(FoundationConfig):
    """Everything that the quickstart does; `recipes/quickstart.toml` holds the values."""

    run: str = "runs/quickstart"
    ppo: PPOSection
    arms: tuple[Literal["ppo", "beta0", "random"], ...] = ("ppo",)

    @model_validator(mode="after")
    def _check(self) -> QuickstartConfig:
        if "ppo" not in self.arms:
            raise ValueError("arms must contain 'ppo', the run that the others are compared with")
        if self.ppo.data is not None:
            raise ValueError("ppo.data has no effect: this pipeline brings its own data. Remove it, or write a recipe of stages")
        for arm in self.arms:
            try:
                self.section(arm)
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"the arm {arm!r} cannot be run: {reason}") from None
        return self

    def section(self, arm: str) -> PPOSection:
        """The settings of an arm: those of [ppo], and what makes it an arm of its own."""
        return PPOSection.model_validate({**self.ppo.model_dump(exclude_unset=True), **ARMS[arm]})


class Quickstart:
    """Phases in order, each resumable; `announce(phase)` opens a progress bar for it."""

    def __init__(self, config: QuickstartConfig, announce: Callable[[str], Progress] | None = None) -> None:
        self.root = Path(config.run)
        self.config = config = as_begun(config, self.root)
        self.announce = announce or (lambda phase: lambda done, total, metrics: None)
        data = file_digest([DATA / "prompts.jsonl", DATA / "demonstrations.jsonl"])
        common, read = parts(config, without=("run", "arms")), {Path(k).name: v for k, v in data.items()}
        self.run_directory = RunDirectory.open(self.root, common, data=read, seed=config.seed)
        self.foundation = Foundation(config, self.root, config.ppo.sampling, config.ppo.engine_rows, self.announce)

    def run(self) -> dict[str, Any]:
        """All phases; returns (and writes) the summary, which a finished run already has."""
        if self.run_directory.complete and self._nothing_to_do():
            return self.run_directory.summary()
        start = time.perf_counter()
        summary = self.foundation.build()
        for arm in self.arms:
            self.foundation.optimise(self.config.section(arm), self._folder(arm), self.root / "reward" / "model")
            release()
        summary.update(self.evaluate())
        summary["seconds"] = (
            sum(summary[name]["seconds"] for name in ("sft", "pairs", "reward", "ppo")) + summary["evaluation"]["seconds"]
        )
        summary["wall_seconds_of_this_start"] = time.perf_counter() - start
        summary["peak_rss_bytes"] = max(
            [peak_rss_bytes(), *(s.get("peak_rss_bytes", 0) for s in summary.values() if isinstance(s, dict))]
        )
        self.run_directory.finish(summary)
        return self.run_directory.summary()

    def _nothing_to_do(self) -> bool:
        folders = ["sft", "pairs", "reward", *(self._folder(arm).name for arm in self.arms)]
        evaluated = set(self.arms) <= set(self.run_directory.summary()["arms"])
        return evaluated and all((self.root / name / "summary.json").is_file() for name in folders)

    @property
    def arms(self) -> list[str]:
        """The arms asked for, and those that an earlier start has finished: a summary never loses a result."""
        return [arm for arm in ARMS if arm in self.config.arms or (self._folder(arm) / "summary.json").is_file()]

    def _folder(self, arm: str) -> Path:
        return self.root / ("ppo" if arm == "ppo" else f"ppo-{arm}")

    def evaluate(self) -> dict[str, Any]:
        """Before and after on the same held-out prompts with the same randomness: gold scores, parts, win rates."""
        start, folder, foundation = time.perf_counter(), self.root / "evaluation", self.foundation
        arms = {arm: self._folder(arm) for arm in self.arms}
        sources = {"before": self.root / "sft" / "model", **arms}
        answers = {name: foundation.measured(str(path), folder / name, name) for name, path in sources.items()}
        summary: dict[str, Any] = {"arms": {}}
        for arm, path in arms.items():
            result = read_json(path / "summary.json")
            result.setdefault("proxy_gain", result["proxy_last"] - result["proxy_first"])
            result.update(foundation.gained(answers["before"], answers[arm]))
            result["answers"] = {key: answers[arm][key] for key in ("kl", "length")} | {
                "length_before": answers["before"]["length"]
            }
            summary["arms"][arm] = result
        summary["ppo"] = summary["arms"]["ppo"]
        prompts = [p for p in foundation.heldout for _ in range(self.config.evaluation_samples)]
        self._write_answers(folder / "answers.jsonl", prompts, {name: found["texts"] for name, found in answers.items()})
        before = self.run_directory.summary().get("evaluation", {}) if self.run_directory.complete else {}
        seconds = time.perf_counter() - start + before.get("seconds", 0.0)
        summary["evaluation"] = {"seconds": seconds, "num_prompts": len(foundation.heldout)}
        return summary

    def _write_answers(self, path: Path, prompts: Sequence[Prompt], answers: dict[str, list[str]]) -> None:
        rows, scores = [], {name: self.foundation.judged(texts) for name, texts in answers.items()}
        for i, prompt in enumerate(prompts):
            others = {
                arm: {"response": answers[arm][i], "gold": scores[arm][i].value} for arm in self.config.arms if arm != "ppo"
            }
            rows.append(
                {
                    "id": prompt.id,
                    "kind": prompt.metadata["kind"],
                    "prompt": prompt.text,
                    "before": answers["before"][i],
                    "after": answers["ppo"][i],
                    "gold_before": scores["before"][i].value,
                    "gold_after": scores["ppo"][i].value,
                    "parts_before": scores["before"][i].parts,
                    "parts_after": scores["ppo"][i].parts,
                    "arms": others,
                }
            )
        write_jsonl(path, rows)
