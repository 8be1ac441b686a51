r"""Rewards that need no model: the answer in a response is checked against the known one.

The known answer travels in `Prompt.metadata["answer"]`; for a reasoning-gym task `metadata` also
holds `task`, `config` and `entry`. `problem_prompt` and `reasoning_gym_prompts` make such prompts.
A wrong answer, or none, scores 0; a check that failed (too slow, crashed, a known answer that
cannot be read) scores None.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from tether.core.errors import DataError, require
from tether.core.once import once
from tether.core.types import Facts, Json, JsonValue, Message, Problem, Prompt, Rollout, Score, user
from tether.data.formats.fields import fold
from tether.rewards import code
from tether.rewards.answers import find_answer, format_part
from tether.rewards.code_tests import CodeTest, read_tests
from tether.rewards.mathematics import known_number, same_gsm8k, same_mathematics, same_number
from tether.rewards.parts import RewardParts
from tether.rewards.sandbox import CheckResult, Sandbox
from tether.settings.rewards import Kind, VerifiableConfig

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

_LOG = logging.getLogger("tether.rewards")

CODE_GRACE = 5.0
PACKAGES = {"math": "math-verify", "gsm8k": "math-verify", "reasoning-gym": "reasoning-gym"}
ANSWER_TAG_INSTRUCTION = (
    "Write your final answer, and nothing else, between <answer> and </answer>."
)

_Outcome = tuple[dict[str, float], str]
"""The parts of a score, and why it is not full."""
_Check = tuple[Json, Callable[[JsonValue], _Outcome]] | Score
"""A request to a worker about a response, and the way from its result to an outcome. A failed score
needs no request.
"""


class VerifiableReward(AbstractContextManager["VerifiableReward"]):
    """Implements core.protocols.RewardSource: 1 for the known answer, 0 otherwise, plus
    `format_weight` for the format.

    Parts: `correct` (reasoning-gym: the task's own score, from 0 to 1) and, with a format, `format`
    (0 or 1). Close it after use; its worker processes also end with this one.

    Raises:
        ConfigError: the kind needs a package that is not installed.
    """

    name = "verifiable"

    def __init__(self, config: VerifiableConfig) -> None:
        kind = config.kind
        if kind in PACKAGES:
            require(PACKAGES[kind], f"verifiable.kind = {kind!r}", "verify")
        self.config = config
        settings: Json = {
            "kind": kind,
            "marks": config.marks,
            "pattern": config.pattern,
            "tolerance": config.tolerance,
        }
        target = "tether.rewards.verifiable:make_check"
        seconds = config.time_limit
        if kind == "code":  # a program's time is up before its worker's is
            target = "tether.rewards.code:make_runner"
            settings = {"seconds": seconds}
            seconds += CODE_GRACE
            if missing := code.missing_guards():
                once(
                    _LOG.warning,
                    "Programs run with fewer guards (docs/trust/safety.md says which): "
                    "this machine lacks %s.",
                    missing,
                )
        self._sandbox = Sandbox(
            target,
            settings,
            workers=config.workers,
            seconds=seconds,
            memory_mb=config.memory_mb,
            guarded=kind != "code",
        )

    def __exit__(self, *_: object) -> None:
        self._sandbox.close()

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score a rollout, in their order.

        Raises:
            DataError: a prompt does not carry what its check needs.
        """
        checks = [self._check(rollout) for rollout in rollouts]
        requests = [check[0] for check in checks if not isinstance(check, Score)]
        replies = iter(self._sandbox.run(requests))
        return [
            check if isinstance(check, Score) else self._score(next(replies), check[1])
            for check in checks
        ]

    def _check(self, rollout: Rollout) -> _Check:
        if self.config.kind != "code":
            needed = (
                ("answer", "task", "config", "entry")
                if self.config.kind == "reasoning-gym"
                else ("answer",)
            )
            return {
                "text": rollout.whole_text,
                **_metadata(rollout.prompt, needed),
            }, lambda result: result
        try:
            tests = read_tests(tests_in(rollout.prompt))
        except DataError as error:
            return Score(None, reason=f"{rollout.prompt.id or 'a prompt'}: {error}")
        program = find_answer(rollout.whole_text, self.config.marks)
        return code.request(program or "", tests), partial(
            self._program_outcome,
            rollout.whole_text,
            program,
            tests,
        )

    def _program_outcome(
        self,
        text: str,
        program: str | None,
        tests: Sequence[CodeTest],
        outcomes: Sequence[code.Outcome],
    ) -> _Outcome:
        """A program that hangs, dies or fails its tests is wrong (0); None is left for a worker
        that could not run it.
        """
        share, reason = code.verdicts(tests, outcomes)
        correct = share if self.config.credit == "share" else float(share == 1.0)
        if program is None:
            correct = 0.0
            reason = f"no program found (looked for: {', '.join(self.config.marks)})"
        return {"correct": correct, **format_part(self.config.pattern, text)}, reason

    def _score(self, reply: CheckResult, outcome: Callable[[object], _Outcome]) -> Score:
        if reply.failure:
            return Score(None, reason=f"the check {reply.failure}: {reply.detail}")
        parts, reason = outcome(reply.result)
        return Score(
            parts["correct"] + self.config.format_weight * parts.get("format", 0.0),
            parts,
            reason,
        )


def checked_reward(parts: RewardParts) -> VerifiableReward:
    """The reward by a recipe's checks."""
    return VerifiableReward(parts.settings)


def problem_prompt(problem: Problem) -> Prompt:
    """The prompt of a problem, its answer in `metadata["answer"]`."""
    return Prompt(
        problem.prompt,
        problem.id,
        {**problem.metadata, "answer": problem.answer},
        problem.row,
    )


def check_known(kind: Kind, prompt: Prompt) -> None:
    """Check that the check of this kind can use what a prompt carries.

    Raises:
        DataError: its tests test nothing, or its known answer is no number where numbers are
            compared.
    """
    if kind == "code":
        read_tests(tests_in(prompt))
    elif kind in ("numeric", "gsm8k"):
        known_number(_metadata(prompt, ("answer",))["answer"])


def tests_in(prompt: Prompt) -> object:
    """The tests that a prompt carries, for `code.read_tests`.

    Raises:
        DataError: it carries none.
    """
    return prompt.metadata.get("tests") or _metadata(prompt, ("answer",))["answer"]


def reasoning_gym_prompts(
    task: str,
    size: int,
    seed: int = 0,
    config: Facts | None = None,
    *,
    system: str | None = None,
) -> list[Prompt]:
    """Prompts of a reasoning-gym task, the same in every process for the same arguments and version
    of that library.

    Args:
        config: the task's own settings.
        system: a system turn, since no question says where its answer belongs; "" for none; None:
            the usual one.

    Raises:
        ConfigError: reasoning-gym is not installed.
        DataError: there is no such task, it does not take this config, or it cannot make an entry.
    """
    require("reasoning-gym", "a reasoning-gym task", "verify")
    whole = {"size": size, "seed": seed, **(config or {})}
    with Sandbox(
        "tether.rewards.verifiable:make_entry_maker",
        workers=1,
        seconds=60.0,
        memory_mb=4096,
    ) as sandbox:
        replies = sandbox.run(
            [{"task": task, "config": whole, "index": index} for index in range(size)],
        )
    prompts = []
    system = ANSWER_TAG_INSTRUCTION if system is None else system
    opening = (Message("system", system),) if system else ()
    for index, reply in enumerate(replies):
        if reply.failure:
            raise DataError(
                f"reasoning-gym task {task!r}, entry {index}, config {whole}: "
                f"{reply.failure}: {reply.detail}",
            )
        question, answer, entry = reply.result
        facts = {"answer": answer, "task": task, "config": whole, "entry": entry}
        prompts.append(Prompt((*opening, user(question)), f"{task}-{index}", facts))
    return prompts


def _metadata(prompt: Prompt, needed: Sequence[str]) -> Json:
    missing = [name for name in needed if name not in prompt.metadata]
    if missing:
        raise DataError(
            f"prompt {prompt.id or prompt.text[:40]!r} has no metadata {', '.join(missing)}, "
            "which its check needs. "
            "Make prompts with problem_prompt or reasoning_gym_prompts (tether.rewards.verifiable).",
        )
    return {name: prompt.metadata[name] for name in needed}


# What follows runs in the workers.


def make_check(
    kind: str,
    marks: Sequence[str],
    pattern: str | None,
    tolerance: float,
) -> Callable[..., _Outcome]:
    """The check of one response: `text`, and what its prompt carries, to parts and a reason."""
    judge: Callable[..., float] = {
        "math": same_mathematics,
        "gsm8k": same_gsm8k,
        "numeric": partial(same_number, tolerance=tolerance),
        "exact": lambda given, answer: float(fold(given) == fold(str(answer))),
        "reasoning-gym": score_entry,
    }[kind]
    if kind in PACKAGES:
        # now: a check's time is for the check
        importlib.import_module(PACKAGES[kind].replace("-", "_"))

    def check(text: str, **metadata: JsonValue) -> _Outcome:
        given = find_answer(text, marks)
        correct = 0.0 if given is None else float(judge(given, **metadata))
        if not math.isfinite(correct):
            raise ValueError(f"the task's scorer returned {correct}")
        reason = (
            f"no answer found (looked for: {', '.join(marks)})"
            if given is None
            else f"answered {given[:80]!r}"
        )
        return {"correct": correct, **format_part(pattern, text)}, "" if correct >= 1 else reason

    return check


def score_entry(given: str, answer: JsonValue, task: str, config: Json, entry: str) -> float:
    """The task's own score of an answer. If a scorer raises on this answer and accepts the known
    one, the answer is wrong.
    """
    dataset = _dataset(task, json.dumps(config))
    original = ast.literal_eval(entry)
    try:
        return dataset.score_answer(given, original)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  (published scorers raise whatever their parsing raises)
        dataset.score_answer(answer, original)
        return 0.0


@lru_cache(maxsize=32)
def _dataset(task: str, config: str) -> ProceduralDataset:
    from reasoning_gym import create_dataset

    return create_dataset(task, **json.loads(config))


def make_entry_maker() -> Callable[..., tuple[str, object, str]]:
    """Entries as Python literals: JSON has no tuples, and scorers that compare tuples would call
    every answer wrong.
    """
    import numpy
    import reasoning_gym  # noqa: F401  (now: an entry's time is for the entry)

    numpy.set_printoptions(legacy="1.25")  # a number of numpy's is written as a plain one

    def make(task: str, config: Json, index: int) -> tuple[str, object, str]:
        entry = _dataset(task, json.dumps(config))[index]
        literal = repr(entry)
        if ast.literal_eval(literal) != entry:
            raise ValueError("the entry holds values that cannot be written down")
        return entry["question"], entry["answer"], literal

    return make
