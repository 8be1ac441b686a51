"""The loop of preferences: the policy answers, pairs are chosen and judged, a reward model and a policy learn, and again.

As Stiennon et al. 2020 (https://arxiv.org/abs/2009.01325) and Bai et al. 2022 (https://arxiv.org/abs/2204.05862, online RLHF):
each round's answers come from the policy of the round before, so that the reward model is refreshed where its judgement is
needed. Each round's policy starts from the SFT model, the reference, and every label so far teaches its reward model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from tether.assemble import (
    ONLINE,
    BestOfNSection,
    DataConfig,
    DirectSection,
    GRPOSection,
    OnlineDirectSection,
    PPOSection,
    ReinforceSection,
    SFTSection,
    learned_reward,
    load_policy,
    load_rows,
    local_engine,
)
from tether.assemble.judge_config import JudgeConfig
from tether.assemble.judges import configured
from tether.core.config import Config, parts
from tether.core.errors import DataError, RunError
from tether.core.rundir import RunDirectory, read_json, read_jsonl, write_json, write_jsonl
from tether.core.types import Comparison, Prompt, Sampling, Score, assistant
from tether.data.sources import Quarantine, group_of, read, split_by_group
from tether.learner.loop import epoch_order
from tether.models.memory import release
from tether.pipelines.foundation import Foundation, FoundationConfig, gain_over
from tether.pipelines.journey import run_direct, run_reward
from tether.pipelines.measured import Progress
from tether.pipelines.online import run_online
from tether.preferences.annotators import in_true_order, label_pairs
from tether.preferences.constitution import read_rubric
from tether.preferences.judge import PairJudge
from tether.preferences.pairs import PairsConfig, Response, Strategy, choose_pairs
from tether.preferences.rows import write_rows

POLICIES = ("direct", *(name for name in ONLINE if name != "sft"))
Pair = tuple[int, int, int]
"""Prompt, response, later response: places in a round's answers."""


class LoopSection(Config):
    """What a round asks for, and of whom."""

    rounds: int = Field(default=3, ge=1)
    prompts: int | None = Field(default=None, ge=2, description="prompts that the policy answers in a round; null: all")
    samples_per_prompt: int = Field(default=4, ge=2)
    temperature: float = Field(default=1.0, gt=0)
    labels: int = Field(ge=8, description="comparisons that are judged in a round")
    choose: Strategy = Field(default="random", description="which pairs; the first round, before any reward model, is random")
    judge: Literal["gold", "model", "people"] = Field(
        default="gold", description="simulated annotators of the gold judge; a language model; those who open the store's pages"
    )
    model: JudgeConfig | None = Field(default=None, description="of judge = 'model': which one, and what it goes by")
    store: str | None = Field(default=None, description="of people: the preference store, a path or a URL")
    ask: int = Field(default=1, ge=1, description="of people: how many judge each comparison")
    how: Literal["majority", "soft", "dawid-skene"] = Field(
        default="majority", description="of people: labels by majority, by the share of votes, by how reliable each annotator is"
    )
    data: DataConfig | None = Field(default=None, description="prompts of one's own, for a model that needs no SFT")

    @model_validator(mode="after")
    def _check_people(self) -> LoopSection:
        if (self.store is not None) != (self.judge == "people"):
            raise ValueError("judge = 'people' and store belong together: people judge what lies in a store")
        if (self.model is not None) != (self.judge == "model"):
            raise ValueError("judge = 'model' and [loop.model] belong together: say which model judges, and by what rubric")
        if self.ask > 1 and self.judge != "people":
            raise ValueError("ask has no effect on simulated annotators: set pairs.num_annotators")
        if self.how != "majority" and self.judge != "people":
            raise ValueError(f"how = '{self.how}' has no effect without people: it says what their votes make")
        if self.data is not None and self.judge == "gold":
            raise ValueError("the gold judge knows the packaged prompts alone: judge your own prompts by a model or by people")
        return self


class LoopConfig(FoundationConfig):
    """The common ground, what a round asks for, and one section that makes a policy."""

    run: str = "runs/loop"
    sft: SFTSection | None = None
    max_new_tokens: int = Field(default=48, ge=1, description="of every answer")
    engine_rows: int = Field(default=64, ge=1)
    loop: LoopSection
    direct: DirectSection | None = None
    ppo: PPOSection | None = None
    grpo: GRPOSection | None = None
    reinforce: ReinforceSection | None = None
    best_of_n: BestOfNSection | None = None
    online_direct: OnlineDirectSection | None = None

    @model_validator(mode="after")
    def _check(self) -> LoopConfig:
        named = [name for name in POLICIES if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"a loop trains one policy a round: give exactly one of [{'], ['.join(POLICIES)}]")
        if (self.sft is None) != (self.loop.data is not None):
            raise ValueError(
                "with prompts of your own (loop.data) name a fine-tuned model in model.source and leave [sft] out; "
                "without them keep [sft]"
            )
        if getattr(self.policy[1], "data", None) is not None:
            raise ValueError(f"{named[0]}.data has no effect: the loop's prompts are trained on. Set loop.data")
        if idle := self.pairs.model_fields_set - {"annotator_agreement", "num_annotators"}:
            raise ValueError(f"pairs.{sorted(idle)[0]} has no effect: [loop] says what is sampled and how much is judged")
        if self.loop.choose in ("disagreement", "information") and not self.reward.is_ensemble:
            raise ValueError(
                f"choose = '{self.loop.choose}' asks several reward models: set reward.members, without average or distill"
            )
        return self

    @property
    def policy(self) -> tuple[str, Any]:
        """The stage that makes the policy, and its section."""
        name = next(name for name in POLICIES if getattr(self, name) is not None)
        return name, getattr(self, name)


class Loop:
    """Round after round, each in `round-NN`, started again where it was interrupted."""

    def __init__(self, config: LoopConfig, announce: Callable[[str], Progress] | None = None) -> None:
        self.config, self.root = config, Path(config.run)
        self.announce = announce or (lambda phase: lambda done, total, metrics: None)
        settled = {**parts(config, without=("run", "loop")), "loop": parts(config.loop, without=("rounds",))}
        self.run_directory = RunDirectory.open(self.root, settled)
        sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.loop.temperature)
        self.ground = Foundation(config, self.root, sampling, config.engine_rows, self.announce)
        if config.loop.data is not None:
            self.ground.train_prompts = load_rows(config.loop.data, Prompt, Quarantine(self.root / "quarantine-loop.jsonl"))

    def run(self) -> dict[str, Any]:
        """Everything that is missing and can be had; returns (and writes) the summary, with `waiting` where people have work."""
        if self.config.sft is not None:
            self.ground.fine_tune()
        rounds: list[dict[str, Any]] = []
        for number in range(self.config.loop.rounds):
            one = Round(self, number)
            found = one.play()
            if "waiting" in found:
                return {"rounds": rounds, **found}
            rounds.append(found)
        self.run_directory.finish({"rounds": rounds, "policy": f"round-{len(rounds):02d}/{self.config.policy[0]}/policy"})
        return self.run_directory.summary()


@dataclass
class Round:
    """From the policy of the round before (the SFT model before the first) to the next one."""

    loop: Loop
    number: int

    def __post_init__(self) -> None:
        self.config, self.ground = self.loop.config, self.loop.ground
        self.folder = self.loop.root / f"round-{self.number + 1:02d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.previous = self.loop.root / f"round-{self.number:02d}" if self.number else None

    def play(self) -> dict[str, Any]:
        """Answers, pairs, labels, reward model, policy, measurement; each is kept and not made twice."""
        if (self.folder / "summary.json").is_file():
            return read_json(self.folder / "summary.json")
        answers = self._answers()
        chosen = self._chosen(answers)
        waiting = self._labelled(answers, chosen)
        if waiting is not None:
            return {"waiting": {"round": self.number + 1, **waiting}}
        labels = [_comparisons(folder) for folder in self._folders()]
        found = {"labels": len(labels[-1]), "labels_so_far": sum(map(len, labels)), **self._trained(labels)}
        if self.config.sft is not None:
            found |= self._measured(found["labels"])
        RunDirectory(self.folder).finish(found)
        return RunDirectory(self.folder).summary()

    def _answers(self) -> list[dict[str, Any]]:
        """What the newest policy says to this round's prompts, and what the newest reward model thinks of it."""
        path, ask = self.folder / "answers.jsonl", self.config.loop
        if path.is_file():
            return list(read_jsonl(path))
        prompts, size = self.ground.train_prompts, ask.prompts or len(self.ground.train_prompts)
        places = range(self.number * size, (self.number + 1) * size)
        orders = {epoch: epoch_order(len(prompts), self.config.seed, epoch) for epoch in {p // len(prompts) for p in places}}
        asked = {place: prompts[orders[place // len(prompts)][place % len(prompts)]] for place in places}
        source = self.ground.policy_model.source if self.previous is None else str(self.previous / self.config.policy[0])
        role, loaded = load_policy(source, self.ground.policy_model)
        engine = local_engine(role, loaded, max_rows=self.config.engine_rows)
        bar = self.loop.announce(f"answers {self.number + 1}")
        total = size * ask.samples_per_prompt
        groups = engine.generate(
            list(asked.values()),
            self.ground.sampling,
            num_samples=ask.samples_per_prompt,
            seed=self.config.seed,
            ordinals=list(asked),
            progress=lambda done: bar(done, total, {}),
        )
        del engine
        scores: list[Score | None] = [None] * total
        if self.previous is not None:
            reward = learned_reward(self.previous / "reward" / "model", self.ground.policy_model)
            scores = list(reward.score([rollout for group in groups for rollout in group.rollouts]))
        found = iter(scores)
        rows = [_answer_row(group.prompt, [(r.text, next(found)) for r in group.rollouts]) for group in groups]
        write_jsonl(path, rows)
        release()
        return rows

    def _chosen(self, answers: Sequence[dict[str, Any]]) -> list[Pair]:
        """The pairs that are worth a label; never one that an earlier round had."""
        ask = self.config.loop
        how: Strategy = ask.choose if self.previous is not None or ask.choose in ("length_matched", "ranking") else "random"
        asked = [row["item"] for folder in self._folders()[:-1] for row in read_jsonl(folder / "pairs.jsonl")]
        responses, places = {}, {row["id"]: place for place, row in enumerate(answers)}
        for row in answers:
            known = zip(row["responses"], row["scores"], row["members"], strict=True)
            # A response goes by its text, which is the same in all rounds; one with a byte 0 fits into no file of comparisons.
            usable = ((text, *rest) for text, *rest in known if "\0" not in text)
            distinct = {text: Response(text, text, score, members=tuple(members)) for text, score, members in usable}
            responses[row["id"]] = list(distinct.values())
        config = PairsConfig.model_validate({"strategy": how, "num_pairs": ask.labels, "seed": self.config.seed + self.number})
        found = []
        for pair in choose_pairs(responses, config, asked=asked):
            texts = answers[places[pair.prompt]]["responses"]
            found.append(((places[pair.prompt], *sorted((texts.index(pair.first), texts.index(pair.second)))), pair.item))
        if not found:
            raise DataError(f"{self.folder}: the answers give no pair to judge: they are all alike. Sample more, or hotter")
        write_jsonl(self.folder / "pairs.jsonl", [{"place": place, "item": item, "chosen_by": how} for place, item in found])
        return [place for place, _ in found]

    def _labelled(self, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> dict[str, Any] | None:
        """Write the labels to `comparisons.jsonl`; while people are at it, how far they are."""
        path = self.folder / "comparisons.jsonl"
        if path.is_file():
            return None
        if self.config.loop.judge == "people":
            return self._asked(answers, chosen, path)
        write_rows(path, (self._simulated if self.config.loop.judge == "gold" else self._asked_model)(answers, chosen))
        return None

    def _asked_model(self, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> list[Comparison]:
        """Soft labels of a language model that sees each pair in both orders."""
        config = self.config.loop.model
        assert config is not None
        judge = PairJudge(configured(config), read_rubric(config.rubric))
        rows = [self._pair(answers, *pair) for pair in chosen]
        bar = self.loop.announce(f"judge {self.number + 1}")
        found = judge.judge(rows, told=lambda done: bar(done // 2, len(rows), {}))
        failed = sum(one.log_odds is None for one in found)
        write_json(self.folder / "annotators.json", {"judge": judge.name, "failed": failed})
        return judge.label(rows, found)

    def _pair(self, answers: Sequence[dict[str, Any]], place: int, a: int, b: int) -> Comparison:
        """Two answers, in the order of their sampling."""
        row = answers[place]
        prompt = next(p for p in self.ground.train_prompts if p.id == row["id"])
        sides = [(assistant(row["responses"][k]),) for k in (a, b)]
        return Comparison(prompt.messages, *sides, id=f"{row['id']}-{a}{b}", group=group_of(prompt), probability=0.5)

    def _simulated(self, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> list[Comparison]:
        """Annotators who follow gold with the noise of the first round, as all pairs of its answers show it."""
        prompts = {p.id: p for p in self.ground.train_prompts}
        asked, responses = [prompts[row["id"]] for row in answers], [row["responses"] for row in answers]
        flat = iter(
            self.ground.judge.score_texts(
                [p for p, texts in zip(asked, responses, strict=True) for _ in texts], [t for texts in responses for t in texts]
            )
        )
        scores = [[next(flat).value or 0.0 for _ in texts] for texts in responses]
        known = self.loop.root / "round-01" / "annotators.json"
        labelled = label_pairs(
            asked,
            responses,
            scores,
            agreement=self.config.pairs.annotator_agreement,
            num_annotators=self.config.pairs.num_annotators,
            seed=self.config.seed,
            only=set(chosen),
            noise=read_json(known)["noise"] if known.is_file() else None,
        )
        gold = {"majority_gold_agreement": labelled.majority_gold_agreement, "dropped": labelled.dropped_no_majority}
        values = {"noise": labelled.noise, **gold, "gold_of_answers": statistics.fmean(s for row in scores for s in row)}
        write_json(self.folder / "annotators.json", values)
        return labelled.comparisons

    def _asked(self, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair], path: Path) -> dict[str, Any] | None:
        """Put the pairs into the store, and take their labels once all are judged."""
        from tether.preferences.exchange import comparisons
        from tether.preferences.store import Answer, Question, Store

        ask, name = self.config.loop, f"{self.loop.root.name}/{self.folder.name}"
        assert ask.store is not None
        model = self.ground.policy_model.source if self.previous is None else str(self.previous)
        how = {"temperature": ask.temperature, "max_new_tokens": self.config.max_new_tokens}
        store = Store(ask.store)
        try:
            questions = []
            for p, a, b in chosen:
                pair, scores = self._pair(answers, p, a, b), answers[p]["scores"]
                told = {"group": pair.group, "model": model, "sampling": how}
                texts = ((a, pair.chosen), (b, pair.rejected))
                sides = [Answer(pair.prompt, text, score=scores[k], **told) for k, text in texts]
                store.add_answers(sides)
                questions.append(Question(sides[0].prompt_id, sides[0].id, sides[1].id, ask.ask, strategy=ask.choose, round=name))
            store.add_questions(questions)
            tasks = store.round(name)
            if tasks["open"] or tasks["expert"]:
                return {"store": ask.store, **tasks}
            write_rows(path, comparisons(store, ask.how, round=name))
        finally:
            store.close()
        return None

    def _folders(self) -> list[Path]:
        """Of all rounds up to this one."""
        return [self.loop.root / f"round-{n + 1:02d}" for n in range(self.number + 1)]

    def _trained(self, labels: Sequence[Sequence[Comparison]]) -> dict[str, Any]:
        """A reward model of all labels so far, and the policy that is trained against it from the SFT model."""
        config, ground, (name, section) = self.config, self.ground, self.config.policy
        rows = [row for part in labels for row in part]
        found: dict[str, Any] = {}
        bar = lambda phase: self.loop.announce(f"{phase} {self.number + 1}")  # noqa: E731
        heldout = split_by_group(rows, config.reward.heldout_fraction, config.reward.seed)[1]
        gold = [in_true_order(c) for c in heldout] if config.loop.judge == "gold" else None
        if name != "direct" or self.number + 1 < config.loop.rounds:
            model, folder, seed = ground.policy_model, self.folder / "reward", config.seed
            reward = run_reward(config.reward, model, folder, seed, comparisons=rows, gold=gold, progress=bar("reward"))
            found["reward"] = {key: reward[key] for key in ("heldout_accuracy", "gold_accuracy") if key in reward}
            release()
        if name == "direct":
            summary = run_direct(section, ground.policy_model, self.folder / name, config.seed, rows=rows, progress=bar(name))
        else:
            judged = None
            if section.evaluate is not None and config.loop.judge == "gold":
                judged = (ground.heldout[: section.evaluate.prompts], ground.gold)
            summary = run_online(
                section,
                ground.policy_model,
                self.folder / name,
                config.seed,
                name=name,
                reward_folder=self.folder / "reward" / "model",
                prompts=ground.train_prompts,
                gold=judged,
                progress=bar(name),
            )
        release()
        return {**found, "alarms": len(summary.get("alarms", ())), "seconds": summary["seconds"]}

    def _measured(self, labels: int) -> dict[str, Any]:
        """Gold of the held-out answers, from the SFT model's and from the last round's, and what a hundred labels bought."""
        root = self.loop.root
        start = self.ground.measured(str(root / "sft" / "model"), root / "sft", "sft")
        after = self.ground.measured(str(self.folder / self.config.policy[0]), self.folder, f"round {self.number + 1}")
        before = start if self.previous is None else read_json(self.previous / "answers.json")
        scores = [self.ground.judged(found["texts"]) for found in (start, before, after)]
        total, gain = (gain_over(scores[2], base, self.ground.groups) for base in scores[:2])
        bought = gain["gold_gain"]["value"] * 100 / labels
        return {**total, "gold_gain_of_round": gain["gold_gain"], "gold_per_100_labels": bought, "kl": after["kl"]}


def _comparisons(folder: Path) -> list[Comparison]:
    rows = list(read(str(folder / "comparisons.jsonl"), Comparison, format="preference"))
    if not rows:
        raise RunError(f"{folder / 'comparisons.jsonl'} has no comparison with a majority: ask more people, or more pairs")
    return rows


def _answer_row(prompt: Prompt, answers: Sequence[tuple[str, Score | None]]) -> dict[str, Any]:
    known = [dict(score.parts) if score is not None else {} for _, score in answers]
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "responses": [text for text, _ in answers],
        "scores": [None if score is None else score.value for _, score in answers],
        "members": [[value for name, value in sorted(parts.items()) if name.startswith("member_")] for parts in known],
    }
