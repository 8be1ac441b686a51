"""Seconds of the parts of a stage, worked out from a model's shape, the rates of a device and the
lengths of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from tether.rewards.learned import MICRO_BATCH_TOKENS
from tether.runner.planning.devices import Device
from tether.settings.judges import FunctionJudge
from tether.settings.section import Section

OPENING = 5e5
"""Small operations' worth of time of a stage's start: model, adapters and engine are made."""
DISK = 2e9
LOADING = 0.005
"""Of adapters for servers: bytes a second of their folder, written once and read by each; seconds
to load and probe one.
"""
GOLD = "tether.quickstart.judges:gold"
"""The packaged judge that reads each answer with a model; of a user's function nothing is known
before it is called.
"""
EMBEDDER = 10.6e6
"""Weights of that judge's sentence embedder that multiply each token."""
BACKGROUND = 12_000
"""Tokens of the texts that it embeds at its start."""


@dataclass(frozen=True, kw_only=True)
class RowSizes:
    """Rows of a stage: mean lengths in tokens, and counts.

    - answer: None: the answers were not measured
    - answers: different answers to a prompt
    - longest: tokens of the longest prompt and of the longest answer, by which memory is counted.
      None: all are as long as the mean.
    - count, groups: rows and the different prompts in them; None: not counted
    """

    prompt: int = 128
    answer: int | None = None
    answers: float = 2.0
    count: int | None = None
    groups: int | None = None
    longest: tuple[int, int] | None = None

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer. If they were not measured, a guess: as many as of a prompt."""
        return self.prompt if self.answer is None else self.answer

    @property
    def longest_tokens(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest answer, as far as rows were measured."""
        prompt, answer = self.longest or (0, 0)
        return max(prompt, self.prompt), max(answer, self.answer_tokens)

    def within(self, limit: int) -> tuple[int, int]:
        """`longest_tokens` of rows of so many tokens at most: others are left out."""
        prompt, answer = self.longest_tokens
        answer = min(answer, limit - 1)
        return min(prompt, limit - answer), answer


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Times of a model's passes on a device.

    parameters, head: weights of all of it, and of its output layer; trunk: bytes.
    """

    device: Device
    parameters: int
    head: int
    tied: bool
    layers: int
    trunk: int

    def passes(self, tokens: int, counted: int, passes: float = 1.0, cuts: int = 0) -> float:
        """`passes` forward passes over tokens, in so many cuts; the output layer over counted ones
        only.
        """
        head = self.head
        device = self.device
        body = self.parameters - head * (1 if self.tied else 2)
        products = 2 * (body * tokens + head * counted) / device.products
        overhead = cuts * (self.layers + 1) * device.layer_pass
        return passes * (products + overhead)

    def decoding(self, rows: int, *, adapted: bool = False) -> float:
        """A token of all rows together."""
        # a GPU draws a token and reads the cache in the time of another pass
        products = self.passes(rows, rows, 1.0 + self.device.gpu)
        arithmetic = max(self.trunk / self.device.bandwidth, products)
        return arithmetic + (self.layers + 2) * self.device.layer_token(adapted)

    @property
    def opening(self) -> float:
        """The start of a stage, up to its first answer or update."""
        return OPENING * self.device.dispatch + self.saving

    @property
    def gold_opening(self) -> float:
        """The start of the gold judge: its models are loaded, and texts are embedded."""
        return self.opening + self.embedding(BACKGROUND)

    def embedding(self, tokens: float) -> float:
        """The gold judge's embedder reads so many tokens."""
        return 2 * EMBEDDER * tokens / self.device.products

    @property
    def saving(self) -> float:
        """The weights are written, or read."""
        return self.trunk / DISK

    def reading(self, answers: int, prompt: int, tokens: int) -> float:
        """A model reads answers, as a reward model does."""
        read = answers * (prompt + tokens)
        return self.passes(read, answers * tokens, 1.0, ceil(read / MICRO_BATCH_TOKENS))

    def judging(self, judge: object, answers: int, prompt: int, tokens: int) -> float:
        """A judge reads answers; the gold judge also embeds each, and the sentence that ends it."""
        embedded = self.embedding(answers * 1.5 * tokens) if is_gold(judge) else 0.0
        return self.reading(answers, prompt, tokens) + embedded

    def measurement(self, section: Any, prompt: int) -> tuple[float, float]:
        """One measurement of a stage on held-out prompts; and all controls: other decoding, before
        and after the training, and best of n, before it.
        """
        evaluate = section.evaluate
        tokens = section.max_new_tokens
        reads = reads_answers(evaluate.judge, section)

        def answered(answers: int) -> float:
            rows = min(answers, section.engine_rows)
            turns = ceil(answers / section.engine_rows) if answers else 0
            judging = reads * self.judging(evaluate.judge, answers, prompt, tokens)
            return turns * tokens * self.decoding(rows) + judging

        once = answered(evaluate.prompts * evaluate.samples_per_prompt)
        others = {*evaluate.temperatures} - {evaluate.temperature or section.temperature}
        chosen = answered(min(64, evaluate.prompts) * max(evaluate.best_of, default=0))
        return once, 2 * len(others) * once + chosen


LIVING = "people", "environment"
"""Judges that are no program of known time."""


def reads_answers(judge: object, section: Section) -> bool:
    """True if a model of known time reads each answer. The time of a user's function is unknown."""
    if isinstance(judge, FunctionJudge):
        return is_gold(judge)
    return section.scorer is not None if judge == "reward" else judge not in LIVING


def is_gold(judge: object) -> bool:
    """True of the packaged judge."""
    return isinstance(judge, FunctionJudge) and judge.call == GOLD
