"""The loop of preferences: the policy answers, pairs are chosen and judged, a reward model and a policy learn, and again.

As Stiennon et al. 2020 (https://arxiv.org/abs/2009.01325) and Bai et al. 2022 (https://arxiv.org/abs/2204.05862, online RLHF):
each round's answers come from the policy of the round before, so that the reward model is refreshed where its judgement is
needed. Each round's policy starts from the SFT model, the reference, and every label so far teaches its reward model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from tether.assemble import (
    ONLINE,
    BestOfNSection,
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
from tether.core.config import parts
from tether.core.errors import ConfigError, DataError, RunError
from tether.core.protocols import doing
from tether.core.rundir import RunDirectory, read_json, read_jsonl, write_json, write_jsonl
from tether.core.types import Comparison, Prompt, Sampling, Score
from tether.data.sources import Quarantine, read, split_by_group
from tether.learner.loop import endless
from tether.models.memory import release
from tether.pipelines.foundation import Foundation, FoundationConfig
from tether.pipelines.journey import run_direct, run_reward
from tether.pipelines.labelling import SCORED, Labeller, LoopSection, Pair
from tether.pipelines.measured import Progress
from tether.pipelines.opening import as_begun
from tether.preferences.annotators import in_true_order
from tether.preferences.pairs import PairsConfig, Response, Strategy, choose_pairs
from tether.preferences.rows import write_rows

POLICIES = ("direct", *(name for name in ONLINE if name != "sft"))


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
        if self.loop.judge == "gold" and getattr(getattr(self.policy[1], "evaluate", None), "keep", "last") == "best":
            raise ValueError(
                "rounds are compared by gold on the prompts that evaluate.keep = 'best' would choose by: leave it out"
            )
        if idle := self.pairs.model_fields_set - {"annotator_agreement", "num_annotators"}:
            raise ValueError(f"pairs.{sorted(idle)[0]} has no effect: [loop] says what is sampled and how much is judged")
        if self.loop.choose in ("disagreement", "information") and not self.reward.is_ensemble:
            raise ValueError(
                f"choose = '{self.loop.choose}' asks several reward models: set reward.members, without average or distill"
            )
        return self

    @property
    def teaches(self) -> bool:
        """Whether anything asks a reward model: the policy's training, or the choice of pairs."""
        return self.direct is None or self.loop.choose in SCORED

    @property
    def policy(self) -> tuple[str, Any]:
        """The stage that makes the policy, and its section."""
        name = next(name for name in POLICIES if getattr(self, name) is not None)
        return name, getattr(self, name)


class Loop:
    """Round after round, each in `round-NN`, started again where it was interrupted."""

    def __init__(self, config: LoopConfig, announce: Callable[[str], Progress] | None = None) -> None:
        self.root = Path(config.run)
        self.config = config = as_begun(config, self.root)
        self.announce = announce or (lambda phase: lambda done, total, metrics: None)
        # What judging costs and where its answers are kept may change; more rounds may follow.
        judge = config.loop.model and {**parts(config.loop.model, without=("server", "cache")), "at": config.loop.model.name}
        section = {**parts(config.loop, without=("rounds", "model")), "model": judge}
        self.run_directory = RunDirectory.open(self.root, {**parts(config, without=("run", "loop")), "loop": section})
        sampling = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.loop.temperature)
        self.ground = Foundation(config, self.root, sampling, config.engine_rows, self.announce)
        if config.loop.data is not None:
            self.ground.train_prompts = load_rows(config.loop.data, Prompt, Quarantine(self.root / "quarantine-loop.jsonl"))
        self.prompts, count = config.loop.prompts or len(self.ground.train_prompts), len(self.ground.train_prompts)
        if self.prompts > count:
            raise ConfigError(
                f"loop.prompts = {self.prompts}, and there are {count} to train on: raise samples_per_prompt instead"
            )
        self.labeller = Labeller(config.loop, self.ground)

    def run(self) -> dict[str, Any]:
        """Everything that is missing and can be had; returns (and writes) the summary, with `waiting` where people have work."""
        if self.config.sft is not None:
            self.ground.fine_tune()
        self.labeller.examine()
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
        if not (self.folder / "comparisons.jsonl").is_file() and (waiting := self._labelled(answers, chosen)):
            return {"waiting": {"round": self.number + 1, **waiting}}
        labels = [_comparisons(folder) for folder in self._folders()]
        counts = {"asked": len(chosen), "labels": len(labels[-1]), "labels_so_far": sum(map(len, labels))}
        found = {**counts, **self._trained()}
        if self.config.sft is not None:
            found |= self._measured(len(chosen))
        RunDirectory(self.folder).finish(found)
        return RunDirectory(self.folder).summary()

    def _answers(self) -> list[dict[str, Any]]:
        """What the newest policy says to this round's prompts, and what the newest reward model thinks of it."""
        path, ask = self.folder / "answers.jsonl", self.config.loop
        if path.is_file():
            return list(read_jsonl(path))
        asked = self._asked()
        source = self.ground.policy_model.source if self.previous is None else str(self.previous / self.config.policy[0])
        bar = self.loop.announce(f"answers {self.number + 1}")
        role, loaded = load_policy(source, self.ground.policy_model)
        engine = local_engine(role, loaded, max_rows=self.config.engine_rows)
        doing(bar, "sampling")
        total = len(asked) * ask.samples_per_prompt
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
        if self.previous is not None and self.loop.config.teaches:
            Round(self.loop, self.number - 1).taught()
            reward = learned_reward(self.previous / "reward" / "model", self.ground.policy_model)
            scores = list(reward.score([rollout for group in groups for rollout in group.rollouts]))
        found = iter(scores)
        rows = [_answer_row(group.prompt, [(r.text, next(found)) for r in group.rollouts]) for group in groups]
        write_jsonl(path, rows)
        release()
        return rows

    def _asked(self) -> dict[int, Prompt]:
        """The next prompts of endless epochs, none of them twice, by their places there."""
        prompts, size, found = self.ground.train_prompts, self.loop.prompts, {}
        places = range(self.number * size, self.number * size + 2 * len(prompts))
        for place, row in zip(places, endless(len(prompts), places, self.config.seed), strict=True):
            found.setdefault(row, place)
            if len(found) == size:
                break
        return {place: prompts[row] for row, place in found.items()}

    def _chosen(self, answers: Sequence[dict[str, Any]]) -> list[Pair]:
        """The pairs that are worth a label; never one that an earlier round had."""
        ask = self.config.loop
        scored = ask.choose in SCORED
        how: Strategy = "random" if scored and self.previous is None else ask.choose
        asked = [row["item"] for folder in self._folders()[:-1] for row in read_jsonl(folder / "pairs.jsonl")]
        responses, places = {}, {row["id"]: place for place, row in enumerate(answers)}
        for row in answers:
            known = zip(row["responses"], row["scores"], row["members"], strict=True)
            # A response goes by its text, which is the same in all rounds; one with a byte 0 fits into no file of comparisons.
            usable = ((text, *rest) for text, *rest in known if "\0" not in text)
            distinct = {
                text: Response(text, text, score, members=tuple(members))
                for text, score, members in usable
                if score is not None or how not in SCORED  # one whose score failed
            }
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
        labels, told = self.loop.labeller.label(self.folder, answers, chosen)
        if labels is None:
            return told
        if not labels:
            raise RunError(f"{self.folder}: no pair has a verdict of more than half: ask more people, or about more pairs")
        write_json(self.folder / "annotators.json", told)
        write_rows(self.folder / "comparisons.jsonl", labels)
        return None

    def _folders(self) -> list[Path]:
        """Of all rounds up to this one."""
        return [self.loop.root / f"round-{n + 1:02d}" for n in range(self.number + 1)]

    def _labels(self) -> list[Comparison]:
        """Of all rounds up to this one."""
        return [row for folder in self._folders() for row in _comparisons(folder)]

    def taught(self) -> dict[str, Any]:
        """The reward model of all labels so far; how well it ranks."""
        rows, (config, ground), by_gold = self._labels(), (self.config, self.ground), self.config.loop.judge == "gold"
        heldout = split_by_group(rows, config.reward.heldout_fraction, config.reward.seed)[1]
        gold = [in_true_order(c) for c in heldout] if by_gold else None
        model, folder, bar = ground.policy_model, self.folder / "reward", self.loop.announce(f"reward {self.number + 1}")
        reward = run_reward(config.reward, model, folder, config.seed, comparisons=rows, gold=gold, progress=bar)
        release()
        return {key: reward[key] for key in ("heldout_accuracy", "gold_accuracy") if key in reward}

    def _trained(self) -> dict[str, Any]:
        """A reward model, where one is needed, and the policy that is trained from the SFT model."""
        config, ground, (name, section) = self.config, self.ground, self.config.policy
        last = self.number + 1 == config.loop.rounds
        # Direct methods learn from labels: a reward model would only choose the next round's pairs.
        found = {"reward": self.taught()} if config.teaches and not (name == "direct" and last) else {}
        bar = lambda phase: self.loop.announce(f"{phase} {self.number + 1}")  # noqa: E731
        if name == "direct":
            rows, model = self._labels(), ground.policy_model
            summary = run_direct(section, model, self.folder / name, config.seed, rows=rows, progress=bar(name))
        else:
            phase, judged, model = f"{name} {self.number + 1}", config.loop.judge == "gold", self.folder / "reward" / "model"
            summary = ground.optimise(section, self.folder / name, model, name=name, phase=phase, by_gold=judged)
        release()
        return {**found, "alarms": len(summary.get("alarms", ())), "seconds": summary["seconds"]}

    def _measured(self, asked: int) -> dict[str, Any]:
        """Gold of the held-out answers, from the SFT model's and from the last round's, and what a hundred labels bought."""
        root = self.loop.root
        start = self.ground.measured(str(root / "sft" / "model"), root / "sft", "sft")
        after = self.ground.measured(str(self.folder / self.config.policy[0]), self.folder, f"round {self.number + 1}")
        before = start if self.previous is None else read_json(self.previous / "answers.json")
        total, gain = (self.ground.gained(base, after) for base in (start, before))
        bought = {key: gain["gold_gain"][key] * 100 / asked for key in ("value", "low", "high")}
        return {**total, "gold_gain_of_round": gain["gold_gain"], "gold_per_100_labels": bought, "kl": after["kl"]}


def _comparisons(folder: Path) -> list[Comparison]:
    return list(read(str(folder / "comparisons.jsonl"), Comparison, format="preference"))


def _answer_row(prompt: Prompt, answers: Sequence[tuple[str, Score | None]]) -> dict[str, Any]:
    known = [dict(score.parts) if score is not None else {} for _, score in answers]
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "responses": [text for text, _ in answers],
        "scores": [None if score is None else score.value for _, score in answers],
        "members": [[value for name, value in sorted(parts.items()) if name.startswith("member_")] for parts in known],
    }
