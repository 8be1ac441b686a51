"""Who judges the pairs of a loop's rounds: simulated annotators of the gold judge, a language model, or people in a store."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from tether.assemble import DataConfig
from tether.assemble.judge_config import JudgeConfig
from tether.assemble.judges import configured
from tether.core.config import Config, digest
from tether.core.errors import DataError, RunError
from tether.core.rundir import read_json, read_jsonl, write_json
from tether.core.types import Comparison, assistant
from tether.data.sources import group_of
from tether.pipelines.foundation import Foundation
from tether.pipelines.judging import describe, judge_files, reasons
from tether.preferences.annotators import label_pairs
from tether.preferences.constitution import read_rubric
from tether.preferences.judge import PairJudge
from tether.preferences.pairs import Strategy
from tether.rollout.served import DOWN, QUOTA, SPENT

Pair = tuple[int, int, int]
"""Prompt, response, later response: places in a round's answers."""
Labels = tuple[list[Comparison] | None, dict[str, Any]]
"""What was said, None while people are at it; and what is to be told of those who said it."""
SCORED = ("uncertain", "information", "disagreement")
"""Choices of pairs that ask a reward model."""
MOST_FAILED = 0.1


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
    agreement: str | None = Field(
        default=None, description="of judge = 'model': comparisons that people judged; how far it agrees with them is told first"
    )
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
        if self.agreement is not None and self.judge != "model":
            raise ValueError("agreement has no effect without a model that judges")
        if self.ask > 1 and self.judge != "people":
            raise ValueError("ask has no effect on simulated annotators: set pairs.num_annotators")
        if self.how != "majority" and self.judge != "people":
            raise ValueError(f"how = '{self.how}' has no effect without people: it says what their votes make")
        if self.data is not None and self.judge == "gold":
            raise ValueError("the gold judge knows the packaged prompts alone: judge your own prompts by a model or by people")
        of_each = self.samples_per_prompt * (self.samples_per_prompt - 1) // 2
        most = (self.prompts or self.labels) * (of_each if self.choose == "ranking" else min(3, of_each))
        if self.labels > most:
            raise ValueError(
                f"labels = {self.labels}, and {self.prompts} prompts give {most} pairs at most: ask for more answers"
            )
        return self


class Labeller:
    """Has pairs judged as the recipe says; one for all rounds, so that a budget is spent once."""

    def __init__(self, section: LoopSection, ground: Foundation) -> None:
        self.section, self.ground = section, ground
        self.prompts = {prompt.id: prompt for prompt in ground.train_prompts}

    @cached_property
    def judge(self) -> PairJudge:
        """The language model that judges."""
        config = self.section.model
        assert config is not None
        return PairJudge(configured(config, self.ground.root), read_rubric(config.rubric), temperature=config.temperature)

    def examine(self) -> None:
        """How far the language model agrees with people, before any label of it is used: `judge.json`."""
        path = self.ground.root / "judge.json"
        if self.section.agreement is not None and not path.is_file():
            found = judge_files(self.judge, [self.section.agreement], announce=self.ground.announce).report
            write_json(path, {"judge": self.judge.name, **next(iter(found.values()))})

    def label(self, folder: Path, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> Labels:
        """The labels of a round's chosen pairs.

        Raises:
            RunError: the language model failed too often; what it has said is kept, and asked no second time.
        """
        if missing := {row["id"] for row in answers} - self.prompts.keys():
            raise DataError(f"{folder}: its prompt {min(missing)!r} is no longer among those of the loop. Take the same prompts")
        ways = {"gold": self._simulated, "model": self._judged, "people": self._asked}
        return ways[self.section.judge](folder, answers, chosen)

    def _simulated(self, folder: Path, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> Labels:
        """Annotators who follow gold with the noise of the first round, as all pairs of its answers show it."""
        asked, responses = [self.prompts[row["id"]] for row in answers], [row["responses"] for row in answers]
        flat = iter(
            self.ground.judge.score_texts(
                [p for p, texts in zip(asked, responses, strict=True) for _ in texts], [t for texts in responses for t in texts]
            )
        )
        scores = [[next(flat).value or 0.0 for _ in texts] for texts in responses]
        known, config = folder.parent / "round-01" / "annotators.json", self.ground.config
        labelled = label_pairs(
            asked,
            responses,
            scores,
            agreement=config.pairs.annotator_agreement,
            num_annotators=config.pairs.num_annotators,
            seed=f"{config.seed}/{folder.name}",
            only=set(chosen),
            noise=read_json(known)["noise"] if known.is_file() else None,
        )
        told = {name: getattr(labelled, name) for name in ("noise", "majority_gold_agreement", "dropped_no_majority")}
        return labelled.comparisons, {**told, "gold_of_answers": statistics.fmean(s for row in scores for s in row)}

    def _judged(self, folder: Path, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> Labels:
        """Soft labels of a language model that sees each pair in both orders."""
        rows, judge = [self._pair(answers, *pair) for pair in chosen], self.judge
        bar = self.ground.announce(f"judge {folder.name}")
        found = judge.judge(rows, told=lambda done: bar(done // 2, len(rows), {}))
        why = reasons(found)
        if why.total() > MOST_FAILED * len(rows) or why.keys() & {SPENT, DOWN, QUOTA}:
            listed = "; ".join(f"{reason} ({count})" for reason, count in why.most_common(3))
            raise RunError(
                f"{judge.name} left {why.total()} of {len(rows)} pairs of {folder} without a label: {listed}. "
                "Mend that and start the loop again: what it has judged is kept, and only the rest is asked"
            )
        told = describe(rows, found, judge.temperature)
        return judge.label(rows, found), {**told, "judge": judge.name, "usage": dict(judge.model.usage())}

    def _asked(self, folder: Path, answers: Sequence[dict[str, Any]], chosen: Sequence[Pair]) -> Labels:
        """Put the pairs into the store, and take their labels once all are judged."""
        from tether.preferences.exchange import comparisons
        from tether.preferences.store import Answer, Question, Store

        ask, known = self.section, list(read_jsonl(folder / "pairs.jsonl"))
        # Another loop may have a folder of this name and the same store: a round is known by its pairs, too.
        name = f"{folder.parent.name}/{folder.name}/{digest([row['item'] for row in known])[:6]}"
        model = self.ground.policy_model.source if folder.name == "round-01" else f"{folder.parent.name} before {folder.name}"
        how = {"temperature": ask.temperature, "max_new_tokens": self.ground.sampling.max_new_tokens}
        assert ask.store is not None
        store = Store(ask.store)
        try:
            questions = []
            for (p, a, b), row in zip(chosen, known, strict=True):
                pair, scores = self._pair(answers, p, a, b), answers[p]["scores"]
                told = {"group": pair.group, "model": model, "sampling": how}
                sides = [Answer(pair.prompt, text, score=scores[k], **told) for k, text in ((a, pair.chosen), (b, pair.rejected))]
                store.add_answers(sides)
                strategy = row["chosen_by"]
                questions.append(Question(sides[0].prompt_id, sides[0].id, sides[1].id, ask.ask, strategy=strategy, round=name))
            store.add_questions(questions)
            tasks = store.round(name)
            waits = tasks["open"] or tasks["expert"]
            labels = None if waits else list(comparisons(store, ask.how, round=name))
            return labels, {"store": ask.store, **tasks}
        finally:
            store.close()

    def _pair(self, answers: Sequence[dict[str, Any]], place: int, a: int, b: int) -> Comparison:
        """Two answers, in the order of their sampling."""
        row = answers[place]
        prompt = self.prompts[row["id"]]
        sides = [(assistant(row["responses"][k]),) for k in (a, b)]
        return Comparison(prompt.messages, *sides, id=f"{row['id']}-{a}-{b}", group=group_of(prompt), probability=0.5)
