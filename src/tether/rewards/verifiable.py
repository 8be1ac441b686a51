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
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from tether.core.errors import DataError, require
from tether.core.once import once
from tether.core.types import Facts, Json, JsonValue, Message, Problem, Prompt, Rollout, Score, user
from tether.data.formats.fields import fold
from tether.data.formats.verdicts import boxed_answer
from tether.rewards import code
from tether.rewards.sandbox import CheckResult, Sandbox
from tether.settings.rewards import VerifiableConfig

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset
    from sympy import Basic, MatrixBase

_LOG = logging.getLogger("tether.rewards")

CODE_GRACE = 5.0
PACKAGES = {"math": "math-verify", "gsm8k": "math-verify", "reasoning-gym": "reasoning-gym"}
ANSWER_TAG_INSTRUCTION = (
    "Write your final answer, and nothing else, between <answer> and </answer>."
)

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_PHRASE = re.compile(
    r"(?:\banswer\s*[*_]*\s*(?:is|[:=])|^A:)[\s:*_]*(\S[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_EDGES = re.compile(r"^(?:[\s*]|\\[ ,;!])+|(?:[\s*.]|\\[ ,;!]|\\$)+$")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d)|\s*/\s*\d+)?")


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
        if config.kind in PACKAGES:
            require(PACKAGES[config.kind], f"verifiable.kind = {config.kind!r}", "verify")
        self.config = config
        settings: Json = {
            "kind": config.kind,
            "marks": config.marks,
            "pattern": config.pattern,
            "tolerance": config.tolerance,
        }
        target, seconds = "tether.rewards.verifiable:make_check", config.time_limit
        if config.kind == "code":  # a program's time is up before its worker's is
            target, settings = "tether.rewards.code:make_runner", {"seconds": seconds}
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
            guarded=config.kind != "code",
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
                "text": rollout.text,
                **_metadata(rollout.prompt, needed),
            }, lambda result: result
        try:
            tests = code.read_tests(tests_in(rollout.prompt))
        except DataError as error:
            return Score(None, reason=f"{rollout.prompt.id or 'a prompt'}: {error}")
        program = find_answer(rollout.text, self.config.marks)
        return code.request(program or "", tests), partial(
            self._program_outcome,
            rollout.text,
            program,
            tests,
        )

    def _program_outcome(
        self,
        text: str,
        program: str | None,
        tests: Sequence[code.CodeTest],
        outcomes: Sequence[code.Outcome],
    ) -> _Outcome:
        """A program that hangs, dies or fails its tests is wrong (0); None is left for a worker
        that could not run it.
        """
        share, reason = code.verdicts(tests, outcomes)
        correct = share if self.config.credit == "share" else float(share == 1.0)
        if program is None:
            correct, reason = 0.0, f"no program found (looked for: {', '.join(self.config.marks)})"
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


def problem_prompt(problem: Problem) -> Prompt:
    """The prompt of a problem, its answer in `metadata["answer"]`."""
    return Prompt(
        problem.prompt,
        problem.id,
        {**problem.metadata, "answer": problem.answer},
        problem.row,
    )


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
    system: str = ANSWER_TAG_INSTRUCTION,
) -> list[Prompt]:
    """Prompts of a reasoning-gym task, the same in every process for the same arguments and version
    of that library.

    Args:
        config: the task's own settings.
        system: a system turn, since no question says where its answer belongs; "" for none.

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
    for index, reply in enumerate(replies):
        if reply.failure:
            raise DataError(
                f"reasoning-gym task {task!r}, entry {index}, config {whole}: "
                f"{reply.failure}: {reply.detail}",
            )
        question, answer, entry = reply.result
        messages = ((Message("system", system),) if system else ()) + (user(question),)
        prompts.append(
            Prompt(
                messages,
                f"{task}-{index}",
                {"answer": answer, "task": task, "config": whole, "entry": entry},
            ),
        )
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


def format_part(pattern: str | None, text: str) -> dict[str, float]:
    """The part of a score for following a regular expression as a whole; nothing without one."""
    return (
        {}
        if pattern is None
        else {"format": float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)}
    )


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


def find_answer(text: str, marks: Sequence[str]) -> str | None:
    """The answer at the first of these marks that occurs; of a mark that occurs more than once, the
    last.
    """
    return next((answer for mark in marks if (answer := _FINDERS[mark](text)) is not None), None)


def _boxed(text: str) -> str | None:
    try:
        return boxed_answer(text)
    except DataError:
        return None


def _after_hashes(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] or None if mark else None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1].strip() or None if matches else None


_FINDERS: dict[str, Callable[[str], str | None]] = {
    "boxed": _boxed,
    "hashes": _after_hashes,
    "phrase": partial(_last, _PHRASE),
    "tag": partial(_last, _TAG),
    "last-number": lambda text: _last(_NUMBER, _plain(text)),
    "fence": code.fenced,
    "whole": lambda text: text.strip() or None,
}


def _plain(text: str) -> str:
    """Without currency signs, and with one kind of minus."""
    return re.sub(r"\\?[$€£]", "", text).replace("−", "-")


def _tidy(answer: str) -> str:
    r"""The content of a \boxed in it, without the marks of a sentence or of Markdown around it."""
    return _EDGES.sub("", _boxed(answer) or answer)


def parsed_number(text: str) -> Fraction | None:
    """The first number after the last equals sign: 1,000 and -$5 and .5 and 3/4 and 1e-3, whatever
    unit follows.
    """
    match = _NUMBER.search(_plain(_tidy(text)).rpartition("=")[2])
    try:
        return Fraction(re.sub(r"[,\s]", "", match[0])) if match else None
    except (ValueError, ZeroDivisionError):
        return None


def same_number(given: str, answer: object, tolerance: float = 0.0) -> float:
    right, value = parsed_number(str(answer)), parsed_number(given)
    if right is None:
        raise ValueError(f"the known answer {answer!r:.80} is no number")
    return float(value is not None and abs(value - right) <= tolerance * max(1, abs(right)))


def same_gsm8k(given: str, answer: object) -> float:
    """A number by its value, anything in LaTeX by what it means."""
    value = None if "\\" in _tidy(given) else parsed_number(given)
    return same_mathematics(given if value is None else str(value), answer)


def same_mathematics(given: str, answer: object) -> float:
    """Equal as written, or in the judgement of math-verify
    (https://github.com/huggingface/Math-Verify).
    """
    given, right = _tidy(given), _tidy(str(answer))
    if given == right:
        return 1.0
    from math_verify import verify

    meanings = _meanings(right)
    if not meanings:
        raise ValueError(f"math-verify cannot read the known answer {right!r:.80}")
    return float(
        verify(list(meanings), list(_meanings(given)), timeout_seconds=None, raise_on_error=True),
    )


@lru_cache(maxsize=512)
def _meanings(latex: str) -> tuple[Basic | MatrixBase | str, ...]:
    r"""The expressions in a LaTeX text; math-verify's other readings (the text itself, some number
    in it) say too little.

    With them `\frac \pi4 + 2 - \sqrt2` reads as 2.
    """
    from math_verify import LatexExtractionConfig, parse

    return tuple(
        parse(
            rf"\boxed{{{latex}}}",
            [LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=0,  # none: the worker's own limit holds
        ),
    )


def score_entry(given: str, answer: JsonValue, task: str, config: Json, entry: str) -> float:
    """The task's own score of an answer. If a scorer raises on this answer and accepts the known
    one, the answer is wrong.
    """
    dataset, original = _dataset(task, json.dumps(config)), ast.literal_eval(entry)
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
