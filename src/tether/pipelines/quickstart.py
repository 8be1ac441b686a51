"""The whole textbook in one command: SFT, preference collection, reward model, PPO, and a page that tells what happened."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from tether.assemble import PPOSection, RewardSection, SFTSection, encoder_of, load_policy, local_engine
from tether.core.config import Config, dump
from tether.core.protocols import Judge
from tether.core.rundir import RunDirectory, file_digest, read_json, read_jsonl, write_json
from tether.core.types import Comparison, Demonstration, Prompt, Sampling, Score, assistant, user
from tether.data.sources import split_by_group
from tether.evaluation.fluency import Fluency
from tether.evaluation.gold import GoldJudge
from tether.evaluation.winrate import bootstrap_mean, win_rate
from tether.models.config import ModelConfig
from tether.models.loading import LoadedModel, load_model
from tether.models.trunk import Role
from tether.pipelines.journey import after_sft, peak_rss_bytes, run_policy, run_reward, run_sft
from tether.preferences.annotators import LabelledPairs, in_true_order, label_pairs
from tether.stages.policy_gradient import PolicyGradient

DATA = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"
Progress = Callable[[int, int, Any], None]
ARMS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "beta0": {"kl": {"mode": "fixed", "coefficient": 0.0}},
    "random": {"reward_source": "random"},
}


class PairsSection(Config):
    """How preferences are collected."""

    num_prompts: int | None = Field(default=None, ge=4, description="ask for answers to so many training prompts; null: all")
    samples_per_prompt: int = Field(default=4, ge=2)
    temperature: float = Field(default=0.7, gt=0)
    annotator_agreement: float = Field(default=0.70, gt=0.5, lt=1, description="how often two annotators agree")
    num_annotators: int = Field(default=3, ge=1)


class QuickstartConfig(Config):
    """Everything that the quickstart does; `recipes/quickstart.toml` holds the values."""

    run: str = "runs/quickstart"
    seed: int = 0
    judge: Literal["gold", "letters"] = Field(
        "gold", description="`letters` counts a few letters: for smoke runs without a download"
    )
    max_prompts: int | None = Field(default=None, ge=4, description="use only the first so many prompts of each split")
    evaluation_samples: int = Field(default=1, ge=1, description="answers a held-out prompt in the final comparison")
    model: ModelConfig
    sft: SFTSection
    pairs: PairsSection = PairsSection()
    reward: RewardSection
    ppo: PPOSection
    arms: tuple[Literal["ppo", "beta0", "random"], ...] = ("ppo",)

    @model_validator(mode="after")
    def _check(self) -> QuickstartConfig:
        if "ppo" not in self.arms:
            raise ValueError("arms must contain 'ppo', the run that the others are compared with")
        for name, section in (("sft", self.sft), ("reward", self.reward), ("ppo", self.ppo)):
            if section.data is not None:
                raise ValueError(
                    f"{name}.data has no effect: the quickstart brings its own data. Remove it, or write a recipe of stages"
                )
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


class LetterJudge:
    """A judge for smoke runs on the random model: the share of vowels among a response's characters."""

    name = "letters"

    def score_texts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Any]:
        shares = [sum(c in "aeiou" for c in r.lower()) / max(1, len(r)) for r in responses]
        return [Score(s, {"vowels": s}) for s in shares]


class Quickstart:
    """Phases in order, each resumable; `announce(phase)` opens a progress bar for it."""

    def __init__(self, config: QuickstartConfig, announce: Callable[[str], Progress] | None = None) -> None:
        self.config = config
        self.root = Path(config.run)
        self.announce = announce or (lambda phase: lambda done, total, metrics: None)
        data = file_digest([DATA / "prompts.jsonl", DATA / "demonstrations.jsonl"])
        common = {k: v for k, v in dump(config).items() if k != "arms"}
        self.run_directory = RunDirectory.open(
            self.root, common, data={Path(k).name: v for k, v in data.items()}, seed=config.seed
        )
        prompts = [_prompt(row) for row in read_jsonl(DATA / "prompts.jsonl")]
        limit = config.max_prompts
        self.background = [p for p in prompts if p.metadata["split"] == "train"]
        self.train_prompts = self.background[:limit]
        self.pair_prompts = self.train_prompts[: config.pairs.num_prompts]
        self.heldout = [p for p in prompts if p.metadata["split"] == "heldout"][:limit]
        self.sampling = Sampling(max_new_tokens=config.ppo.max_new_tokens, temperature=config.ppo.temperature)
        self._judge: Judge | None = None

    @property
    def judge(self) -> Judge:
        """The gold judge, loaded when first asked."""
        if self._judge is None:
            if self.config.judge == "letters":
                self._judge = LetterJudge()
            else:
                from tether.models.embedder import SentenceEmbedder

                speaker = load_model(self.config.model)
                fluency = Fluency(Role(speaker.model), encoder_of(speaker))
                self._judge = GoldJudge(SentenceEmbedder(), fluency, self.background)
        return self._judge

    @property
    def policy_model(self) -> ModelConfig:
        return after_sft(self.config.model, self.root)

    def run(self) -> dict[str, Any]:
        """All phases; returns (and writes) the summary, which a finished run already has."""
        if self.run_directory.complete and self._nothing_to_do():
            return self.run_directory.summary()
        config, root, start = self.config, self.root, time.perf_counter()
        demonstrations = [
            Demonstration((user(row["prompt"]), assistant(row["response"])), row["id"])
            for row in read_jsonl(DATA / "demonstrations.jsonl")
        ][: config.max_prompts]
        summary: dict[str, Any] = {
            "sft": run_sft(
                config.sft, config.model, root / "sft", config.seed, demonstrations=demonstrations, progress=self.announce("sft")
            )
        }
        gc.collect()
        summary["pairs"] = self.collect_pairs()
        comparisons = self._comparisons()
        heldout = split_by_group(comparisons, config.reward.heldout_fraction, config.reward.seed)[1]
        summary["reward"] = run_reward(
            config.reward,
            self.policy_model,
            root / "reward",
            config.seed,
            comparisons=comparisons,
            gold=[in_true_order(c) for c in heldout],
            progress=self.announce("reward"),
        )
        gc.collect()
        for arm in self.arms:
            self._arm(arm)
            gc.collect()
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

    def collect_pairs(self) -> dict[str, Any]:
        """The SFT model answers every training prompt several times; annotators compare the answers."""
        folder = self.root / "pairs"
        if (folder / "summary.json").is_file():
            return read_json(folder / "summary.json")
        folder.mkdir(exist_ok=True)
        start = time.perf_counter()
        responses = self._sampled(folder / "responses.jsonl")
        prompts = self.pair_prompts
        flat = self.judge.score_texts(
            [p for p in prompts for _ in responses[p.id]], [r for p in prompts for r in responses[p.id]]
        )
        values = iter(s.value or 0.0 for s in flat)
        scores = [[next(values) for _ in responses[p.id]] for p in prompts]
        labelled = label_pairs(
            prompts,
            [responses[p.id] for p in prompts],
            scores,
            agreement=self.config.pairs.annotator_agreement,
            num_annotators=self.config.pairs.num_annotators,
            seed=self.config.seed,
        )
        with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_pair_row(c), ensure_ascii=False) + "\n" for c in labelled.comparisons)
        summary = _pairs_summary(labelled, len(prompts), time.perf_counter() - start)
        write_json(folder / "summary.json", summary)
        return summary

    def _sampled(self, path: Path) -> dict[str, list[str]]:
        """Responses by prompt id, written as they come, so that an interrupted collection goes on where it stopped."""
        pairs, bar = self.config.pairs, self.announce("pairs")
        done = {row["id"]: row["responses"] for row in read_jsonl(path)}
        missing = [(n, p) for n, p in enumerate(self.pair_prompts) if p.id not in done]
        if missing:
            loaded = load_model(self.policy_model)
            engine = local_engine(Role(loaded.model), loaded, max_rows=self.config.ppo.engine_rows)
            sampling = Sampling(max_new_tokens=self.config.ppo.max_new_tokens, temperature=pairs.temperature)
            chunk = max(1, self.config.ppo.engine_rows // pairs.samples_per_prompt) * 2
            for start in range(0, len(missing), chunk):
                part = missing[start : start + chunk]
                groups = engine.generate(
                    [p for _, p in part],
                    sampling,
                    num_samples=pairs.samples_per_prompt,
                    seed=self.config.seed,
                    ordinals=[n for n, _ in part],
                )
                with path.open("a", encoding="utf-8") as file:
                    for group in groups:
                        row = {"id": group.prompt.id, "responses": [r.text for r in group.rollouts]}
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
                        done[group.prompt.id] = row["responses"]
                bar(len(done), len(self.pair_prompts), {})
        return done

    def _comparisons(self) -> list[Comparison]:
        rows = []
        for row in read_jsonl(self.root / "pairs" / "pairs.jsonl"):
            metadata = {"gold_difference": row["gold_difference"]}
            rows.append(
                Comparison(
                    (user(row["prompt"]),),
                    (assistant(row["chosen"]),),
                    (assistant(row["rejected"]),),
                    id=row["id"],
                    group=row["group"],
                    margin=row["margin"],
                    metadata=metadata,
                )
            )
        return rows

    def _arm(self, arm: str) -> dict[str, Any]:
        section, folder = self.config.section(arm), self._folder(arm)
        return run_policy(
            section,
            self.policy_model,
            folder,
            self.config.seed,
            reward_folder=self.root / "reward" / "model",
            prompts=self.train_prompts,
            watch=self._watch,
            progress=self.announce(folder.name),
        )

    def _watch(self, stage: PolicyGradient, loaded: LoadedModel) -> Callable[[int, dict[str, float]], dict[str, float]]:
        """Gold on some held-out prompts every `evaluate_every` steps: measured, never trained on."""
        every, prompts = self.config.ppo.evaluate_every, self.heldout[:48]

        def observe(step: int, metrics: dict[str, float]) -> dict[str, float]:
            if not every or (step % every and step != stage.config.steps):
                return {}
            groups = stage.engine.generate(prompts, self.sampling, seed=self.config.seed + 7919)
            scores = self.judge.score_texts(prompts, [g.rollouts[0].text for g in groups])
            parts = {f"gold/{k}": sum(s.parts[k] for s in scores) / len(scores) for k in scores[0].parts}
            return {"gold/score": sum(s.value or 0.0 for s in scores) / len(scores), **parts}

        return observe

    def evaluate(self) -> dict[str, Any]:
        """Before and after on the same held-out prompts with the same randomness: gold scores, parts, win rates."""
        start, folder = time.perf_counter(), self.root / "evaluation"
        arms = {arm: self._folder(arm) for arm in self.arms}
        answers = {"before": self._answers(str(self.root / "sft" / "model"), folder / "before.json")}
        answers.update({arm: self._answers(str(path), folder / f"{arm}.json") for arm, path in arms.items()})
        prompts = [p for p in self.heldout for _ in range(self.config.evaluation_samples)]
        scores = {name: self.judge.score_texts(prompts, texts) for name, texts in answers.items()}
        groups = [p.id for p in prompts]
        summary: dict[str, Any] = {"arms": {}}
        for arm, path in arms.items():
            after, before = scores[arm], scores["before"]
            result = read_json(path / "summary.json")
            gains = [(a.value or 0.0) - (b.value or 0.0) for a, b in zip(after, before, strict=True)]
            result["proxy_gain"] = result["proxy_last"] - result["proxy_first"]
            result["gold_before"], result["gold_after"] = (sum(s.value or 0.0 for s in x) / len(x) for x in (before, after))
            result["gold_gain"] = bootstrap_mean(gains, groups).as_dict()
            result["gold_win_rate"] = win_rate([s.value for s in after], [s.value for s in before], groups=groups).as_dict()
            parts = {name: _mean_parts(s) for name, s in (("before", before), ("after", after))}
            result["gold_parts"] = {k: {"before": parts["before"][k], "after": parts["after"][k]} for k in parts["before"]}
            summary["arms"][arm] = result
        summary["ppo"] = summary["arms"]["ppo"]
        self._write_answers(folder / "answers.jsonl", prompts, answers, scores)
        before = self.run_directory.summary().get("evaluation", {}) if self.run_directory.complete else {}
        seconds = time.perf_counter() - start + before.get("seconds", 0.0)
        summary["evaluation"] = {"seconds": seconds, "num_prompts": len(self.heldout)}
        return summary

    def _answers(self, policy: str, path: Path) -> list[str]:
        if path.is_file():
            return read_json(path)
        role, loaded = load_policy(policy, self.policy_model)
        engine = local_engine(role, loaded, max_rows=self.config.ppo.engine_rows)
        bar = self.announce(f"evaluate {path.stem}")
        total = len(self.heldout) * self.config.evaluation_samples
        groups = engine.generate(
            self.heldout,
            self.sampling,
            num_samples=self.config.evaluation_samples,
            seed=self.config.seed + 104729,
            progress=lambda done: bar(done, total, {}),
        )
        texts = [r.text for g in groups for r in g.rollouts]
        write_json(path, texts)
        return texts

    def _write_answers(
        self, path: Path, prompts: Sequence[Prompt], answers: dict[str, list[str]], scores: dict[str, list[Any]]
    ) -> None:
        rows = []
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
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _mean_parts(scores: Sequence[Any]) -> dict[str, float]:
    return {key: sum(s.parts[key] for s in scores) / len(scores) for key in scores[0].parts}


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt((user(row["prompt"]),), row["id"], {"kind": row["kind"], "split": row["split"]})


def _pair_row(c: Comparison) -> dict[str, Any]:
    votes = {a.annotator: a.preference for a in c.annotations}
    return {
        "id": c.id,
        "group": c.group,
        "prompt": c.prompt[-1].content,
        "chosen": c.chosen[-1].content,
        "rejected": c.rejected[-1].content,
        "margin": c.margin,
        "votes": votes,
        "gold_difference": c.metadata["gold_difference"],
    }


def _pairs_summary(labelled: LabelledPairs, num_prompts: int, seconds: float) -> dict[str, Any]:
    return {
        "num_pairs": len(labelled.comparisons),
        "num_prompts": num_prompts,
        "annotator_agreement": labelled.annotator_agreement,
        "annotator_gold_agreement": labelled.annotator_gold_agreement,
        "majority_gold_agreement": labelled.majority_gold_agreement,
        "dropped_no_majority": labelled.dropped_no_majority,
        "dropped_equal": labelled.dropped_equal,
        "noise": labelled.noise,
        "seconds": seconds,
    }
