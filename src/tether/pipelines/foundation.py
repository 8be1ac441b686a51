"""What every method starts from: an SFT model, preferences of noisy annotators, a reward model, and a judge never trained on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tether.assemble import RewardSection, SFTSection, encoder_of, load_policy, local_engine
from tether.core.config import Config
from tether.core.protocols import Judge, doing
from tether.core.rundir import append_jsonl, read_json, read_jsonl, write_json, write_jsonl
from tether.core.types import Comparison, Demonstration, Prompt, Rollout, Sampling, Score, assistant, user
from tether.data.sources import split_by_group
from tether.evaluation.decoding import answers_at, control, other_temperatures
from tether.evaluation.distance import kl_to_reference
from tether.evaluation.fluency import Fluency
from tether.evaluation.gold import GoldJudge
from tether.evaluation.winrate import before_and_after, mean_estimate
from tether.models.config import ModelConfig
from tether.models.loading import load_model
from tether.models.memory import release
from tether.models.trunk import Role
from tether.pipelines.journey import after_sft, run_reward, run_sft
from tether.pipelines.measured import Progress
from tether.pipelines.online import run_online
from tether.preferences.annotators import LabelledPairs, in_true_order, label_pairs

DATA = Path(__file__).resolve().parent.parent / "recipes" / "quickstart"


class PairsSection(Config):
    """How preferences are collected."""

    num_prompts: int | None = Field(default=None, ge=4, description="ask for answers to so many training prompts; null: all")
    samples_per_prompt: int = Field(default=4, ge=2)
    temperature: float = Field(default=0.7, gt=0)
    annotator_agreement: float = Field(default=0.70, gt=0.5, lt=1, description="how often two annotators agree")
    num_annotators: int = Field(default=3, ge=1)


class FoundationConfig(Config):
    """Settings of what comes before any policy optimisation."""

    seed: int = 0
    judge: Literal["gold", "letters"] = Field(
        default="gold", description="`letters` counts a few letters: for smoke runs without a download"
    )
    max_prompts: int | None = Field(default=None, ge=4, description="use only the first so many prompts of each split")
    evaluation_samples: int = Field(default=1, ge=1, description="answers a held-out prompt in the final comparison")
    evaluation_temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        default=(0.7, 0.5, 0.0), description="others at which both sides of it answer: what decoding alone gives"
    )
    model: ModelConfig
    sft: SFTSection
    pairs: PairsSection = PairsSection()
    reward: RewardSection

    @model_validator(mode="after")
    def _brings_its_data(self) -> FoundationConfig:
        for name, section in (("sft", self.sft), ("reward", self.reward)):
            if getattr(section, "data", None) is not None:
                raise ValueError(
                    f"{name}.data has no effect: this pipeline brings its own data. Remove it, or write a recipe of stages"
                )
            if getattr(section, "objectives", None) is not None:
                raise ValueError(
                    f"{name}.objectives has no effect: this pipeline brings its own data. Remove it, or write a recipe of stages"
                )
        return self


class SeedsConfig(FoundationConfig):
    """Several foundations, one a seed, on which something is compared."""

    run: str
    seeds: tuple[int, ...] = Field(default=(0, 1), min_length=1)
    max_new_tokens: int = Field(
        default=48, ge=1, description="of every answer: those of the pairs, of training and of evaluation"
    )
    temperature: float = Field(default=1.0, gt=0)
    engine_rows: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _check_seeds(self) -> SeedsConfig:
        if "seed" in self.model_fields_set:
            raise ValueError("seed has no effect here: name the seeds that each arm is run with in `seeds`")
        return self

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_new_tokens=self.max_new_tokens, temperature=self.temperature)

    def foundation(self, seed: int, announce: Callable[[str], Progress]) -> Foundation:
        """The common ground of a seed; its folders are those of a quickstart."""
        values = {k: v for k, v in self.model_dump(exclude_unset=True).items() if k in FoundationConfig.model_fields}
        config = FoundationConfig.model_validate({**values, "seed": seed})
        return Foundation(config, Path(self.run) / f"seed-{seed}", self.sampling, self.engine_rows, announce)

    def common(self, section: Any, name: str) -> dict[str, Any]:
        """The settings above that a section has too.

        Raises:
            ValueError: it sets one of them, or brings data of its own.
        """
        if section.data is not None:
            raise ValueError(f"{name}: data has no effect, all learn from the same")
        said = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        common = {key: value for key, value in said.items() if hasattr(section, key)}
        for key in common.keys() & section.model_fields_set:
            raise ValueError(f"{name}: set {key} for all at once, outside of it")
        return common


class LetterJudge:
    """A judge for smoke runs on the random model: the share of vowels among a response's characters."""

    name = "letters"

    def score_texts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Any]:
        shares = [sum(c in "aeiou" for c in r.lower()) / max(1, len(r)) for r in responses]
        return [Score(s, {"vowels": s}) for s in shares]


class Foundation:
    """SFT, pairs and reward model under one folder, each resumable; `announce(phase)` opens a progress bar for it.

    Args:
        sampling, engine_rows: how answers are drawn, for the pairs (at their own temperature) and for the evaluation.
    """

    def __init__(
        self,
        config: FoundationConfig,
        root: Path,
        sampling: Sampling,
        engine_rows: int,
        announce: Callable[[str], Progress],
    ) -> None:
        self.config, self.root, self.sampling, self.engine_rows, self.announce = config, root, sampling, engine_rows, announce
        prompts = [_prompt(row) for row in read_jsonl(DATA / "prompts.jsonl")]
        limit = config.max_prompts
        self.background = [p for p in prompts if p.metadata["split"] == "train"]
        self.train_prompts = self.background[:limit]
        self.pair_prompts = self.train_prompts[: config.pairs.num_prompts]
        self.heldout = [p for p in prompts if p.metadata["split"] == "heldout"][:limit]
        self._judge: Judge | None = None
        self._scores: dict[tuple[str, ...], list[Score]] = {}

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
        """What policies start from: the fine-tuned model, or the model itself where it comes fine-tuned."""
        fine_tuned: SFTSection | None = self.config.sft
        return self.config.model if fine_tuned is None else after_sft(self.config.model, self.root)

    def build(self) -> dict[str, Any]:
        """The three phases; returns their summaries."""
        config, summary = self.config, self.prepare()
        comparisons = self.comparisons()
        heldout = split_by_group(comparisons, config.reward.heldout_fraction, config.reward.seed)[1]
        summary["reward"] = run_reward(
            config.reward,
            self.policy_model,
            self.root / "reward",
            config.seed,
            comparisons=comparisons,
            gold=[in_true_order(c) for c in heldout],
            progress=self.announce("reward"),
        )
        release()
        return summary

    def prepare(self) -> dict[str, Any]:
        """The first two: an SFT model, and pairs of its answers with their labels."""
        summary: dict[str, Any] = {"sft": self.fine_tune()}
        summary["pairs"] = self.collect_pairs()
        return summary

    def fine_tune(self) -> dict[str, Any]:
        """The first alone."""
        config = self.config
        demonstrations = [
            Demonstration((user(row["prompt"]), assistant(row["response"])), row["id"])
            for row in read_jsonl(DATA / "demonstrations.jsonl")
        ][: config.max_prompts]
        folder, bar = self.root / "sft", self.announce("sft")
        summary = run_sft(config.sft, config.model, folder, config.seed, demonstrations=demonstrations, progress=bar)
        release()
        return summary

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
        write_jsonl(folder / "pairs.jsonl", map(_pair_row, labelled.comparisons))
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
            engine = local_engine(Role(loaded.model), loaded, max_rows=self.engine_rows)
            sampling = Sampling(max_new_tokens=self.sampling.max_new_tokens, temperature=pairs.temperature)
            doing(bar, "sampling")
            chunk = max(1, self.engine_rows // pairs.samples_per_prompt) * 2
            for start in range(0, len(missing), chunk):
                part = missing[start : start + chunk]
                groups = engine.generate(
                    [p for _, p in part],
                    sampling,
                    num_samples=pairs.samples_per_prompt,
                    seed=self.config.seed,
                    ordinals=[n for n, _ in part],
                )
                fresh = {group.prompt.id: [r.text for r in group.rollouts] for group in groups}
                append_jsonl(path, ({"id": name, "responses": texts} for name, texts in fresh.items()))
                done |= fresh
                bar(len(done), len(self.pair_prompts), {})
        return done

    def comparisons(self) -> list[Comparison]:
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

    def measured(self, source: str, folder: Path, name: str) -> dict[str, Any]:
        """A policy's answers to the held-out prompts, in `folder/answers.json`: texts, KL from the SFT model, lengths.

        Always with the same randomness, and under `decoded` at every other temperature.
        """
        if not (folder / "answers.json").is_file():
            role, loaded = load_policy(source, self.policy_model)
            engine, bar = local_engine(role, loaded, max_rows=self.engine_rows), self.announce(f"evaluate {name}")
            how: dict[str, Any] = {"num_samples": self.config.evaluation_samples, "seed": self.config.seed + 104729}
            temperatures = other_temperatures(self.sampling, self.config.evaluation_temperatures)
            found = {}
            for place, temperature in enumerate([self.sampling.temperature, *temperatures]):
                doing(bar, f"sampling at temperature {temperature:g}")
                found[temperature] = answers_at(temperature, engine, self.heldout, self.sampling, **how)
                bar(place + 1, 1 + len(temperatures), {})
            rollouts = found.pop(self.sampling.temperature)
            shared = role.adapter is not None or name in ("sft", "before")  # the trunk without its adapter is the SFT model
            reference = Role(role.model if shared else load_model(self.policy_model).model)
            moved = kl_to_reference(role, reference, rollouts, encoder_of(loaded), self.sampling.temperature)
            kl = {"kl": mean_estimate(moved, self.groups).as_dict()}
            decoded = {f"{temperature:g}": _texts(rows) for temperature, rows in found.items()}
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "answers.json", {**_texts(rollouts), **kl, "decoded": decoded})
        return read_json(folder / "answers.json")

    def gained(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
        """Gold before and after, gain and win rate with their intervals, parts, and what decoding alone gives.

        Args:
            before, after: of `measured`.
        """
        scores = self.judged(before["texts"]), self.judged(after["texts"])
        start, trained = ([s.value or 0.0 for s in side] for side in scores)
        found, parts = before_and_after(start, trained, self.groups), [mean_parts(side) for side in scores]
        assert found is not None
        gold = {f"gold_{name}": found[name]["value"] for name in ("before", "after")}
        gold |= {f"gold_{name}": found[name] for name in ("gain", "win_rate")}
        gold["gold_parts"] = {k: {"before": parts[0][k], "after": parts[1][k]} for k in parts[0]}
        if not (before.get("decoded") and after.get("decoded")):  # of an earlier revision
            return gold
        own = self.sampling.temperature
        told = control({own: start, **self._decoded(before)}, {own: trained, **self._decoded(after)}, self.groups, own)
        return {**gold, "gold_by_temperature": told.pop("by_temperature"), **told}

    def _decoded(self, found: Mapping[str, Any]) -> dict[float, list[float]]:
        return {float(t): [s.value or 0.0 for s in self.judged(side["texts"])] for t, side in found["decoded"].items()}

    def optimise(
        self, section: Any, folder: Path, reward_folder: Path, *, name: str = "ppo", phase: str = "", by_gold: bool = True
    ) -> dict[str, Any]:
        """Reinforcement learning on the training prompts; where the section evaluates, gold judges held-out ones on the way."""
        asked = section.evaluate if by_gold else None
        return run_online(
            section,
            self.policy_model,
            folder,
            self.config.seed,
            name=name,
            reward_folder=reward_folder,
            prompts=self.train_prompts,
            gold=(self.heldout[: asked.prompts], self.gold) if asked else None,
            progress=self.announce(phase or folder.name),
        )

    def judged(self, texts: Sequence[str]) -> list[Score]:
        """Gold scores of answers to the held-out prompts; those of the same answers once, whatever they are compared with."""
        if (key := tuple(texts)) not in self._scores:
            self._scores[key] = self.judge.score_texts(
                [p for p in self.heldout for _ in range(self.config.evaluation_samples)], texts
            )
        return self._scores[key]

    def gold(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Gold scores of rollouts, whatever their prompts."""
        return self.judge.score_texts([r.prompt for r in rollouts], [r.text for r in rollouts])

    @property
    def groups(self) -> list[str]:
        """The prompt of each of those answers."""
        return [p.id for p in self.heldout for _ in range(self.config.evaluation_samples)]


def _texts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Texts, how many came to their end, and how long they are on average, in tokens."""
    return {
        "texts": [r.text for r in rollouts],
        "finished": statistics.fmean(r.finished for r in rollouts),
        "length": statistics.fmean(len(r.response_ids) for r in rollouts),
    }


def mean_parts(scores: Sequence[Any]) -> dict[str, float]:
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
    agreements = ("annotator_agreement", "annotator_gold_agreement", "majority_gold_agreement")
    told = {name: getattr(labelled, name) for name in (*agreements, "dropped_no_majority", "dropped_equal", "noise")}
    return {"num_pairs": len(labelled.comparisons), "num_prompts": num_prompts, **told, "seconds": seconds}
