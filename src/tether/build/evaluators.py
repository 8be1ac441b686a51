"""The table of evaluators, and `tether evaluate MODEL --suite NAME`: a policy measured, and beside
another.

A new evaluator is a file in evaluation/ and a row of `EVALUATORS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from tether.build.prompts import Row, faults_of, prompt_faults, usable_prompts, without
from tether.build.roles import encoder_of, load_policy, local_engine
from tether.core.errors import ConfigError, DataError
from tether.core.types import Json, Problem, Prompt, Sampling
from tether.data.sources import Quarantine, detect_format, read
from tether.evaluation.diversity import Diversity
from tether.evaluation.multiple_choice import MultipleChoice, check_question
from tether.evaluation.questions import read_questions
from tether.evaluation.refusal import Refusal
from tether.evaluation.short_answers import ShortAnswers
from tether.evaluation.suite import (
    FigureChange,
    MeasuredPolicy,
    PolicyEvaluator,
    Record,
    as_record,
    changes,
)
from tether.rewards.verifiable import VerifiableReward, problem_prompt
from tether.settings.rewards import Kind, Mark, VerifiableConfig
from tether.settings.section import DataConfig


class Material(NamedTuple):
    """Parts of an evaluator: a policy whose limits decide which rows it can take, the files
    it reads, and what is to be closed after use.
    """

    policy: MeasuredPolicy
    files: tuple[str, ...]
    limit: int | None
    quarantine: Quarantine
    closing: ExitStack


@dataclass(frozen=True)
class EvaluatorKind:
    """A row of the table: what it measures, the files it reads where none are named, and its maker.

    `data` says what its files hold.
    """

    help: str
    make: Callable[[Material], PolicyEvaluator]
    data: str
    files: tuple[str, ...] = ()


def _multiple_choice(material: Material) -> PolicyEvaluator:
    encoder = material.policy.encoder
    questions = read_questions(material.files, material.quarantine, material.limit)
    faults = faults_of(
        questions,
        lambda question: check_question(encoder.tokenizer, question, encoder.context_length),
    )
    usable = without(
        questions,
        faults,
        material.quarantine,
        "multiple_choice",
        noun="questions",
        entry=lambda question: Prompt((), question.id),
    )
    return MultipleChoice(usable)


CHECKS: Mapping[str, tuple[Kind, tuple[Mark, ...]]] = {
    "gsm8k": ("gsm8k", ("hashes", "boxed", "phrase", "last-number")),
    "math": ("math", ("boxed", "phrase")),
}
"""By format of a file: how answers are checked, and where they may stand; the first counts."""
ANSWER_TOKENS = 256


def _short_answers(material: Material) -> PolicyEvaluator:
    prompts = [problem_prompt(problem) for problem in _rows(material, material.files, Problem)]
    formats = sorted({detect_format(file).name for file in material.files})
    if len(formats) > 1:
        raise DataError(
            f"the problems have the formats {' and '.join(formats)}. Measure each by itself"
        )
    kind, marks = CHECKS.get(formats[0], ("numeric", ("hashes", "boxed", "phrase", "last-number")))
    check = VerifiableReward(VerifiableConfig(kind=kind, answer_in=marks))
    usable = _fitting(material, prompts, ANSWER_TOKENS, "short_answers")
    return ShortAnswers(usable, material.closing.enter_context(check), max_new_tokens=ANSWER_TOKENS)


def _refusal(material: Material) -> PolicyEvaluator:
    if len(material.files) != 2:
        raise ConfigError(
            "refusal reads two files: requests that do harm, then harmless ones. Give both, as "
            "--data refusal=HARMFUL --data refusal=HARMLESS"
        )
    sides = [
        _fitting(material, _rows(material, (file,), Prompt), 64, "refusal")
        for file in material.files
    ]
    return Refusal(sides[0], sides[1], max_new_tokens=64)


def _diversity(material: Material) -> PolicyEvaluator:
    prompts = _fitting(material, _rows(material, material.files, Prompt), 64, "diversity")
    return Diversity(prompts, Sampling(64, temperature=1.0))


def _rows(material: Material, files: Sequence[str], kind: type[Row]) -> list[Row]:
    how = {"quarantine": material.quarantine, "limit": material.limit}
    return [row for file in files for row in read(file, kind, **how)]


def _fitting(
    material: Material, prompts: Sequence[Prompt], max_new_tokens: int, name: str
) -> list[Prompt]:
    """The prompts that the template takes and that leave room for an answer."""
    encoder = material.policy.encoder
    faults = prompt_faults(prompts, encoder, max_new_tokens, encoder.context_length)
    return usable_prompts(prompts, faults, material.quarantine, name)


EVALUATORS: dict[str, EvaluatorKind] = {
    "multiple_choice": EvaluatorKind(
        "knowledge by likelihood, as lm-eval measures it",
        _multiple_choice,
        "questions with choices: ARC, HellaSwag, MMLU, or question, choices and answer",
    ),
    "short_answers": EvaluatorKind(
        "greedy answers to problems, checked",
        _short_answers,
        "problems with known answers, such as GSM8K or MATH",
    ),
    "refusal": EvaluatorKind(
        "refusals of harmful and of harmless requests, by their words",
        _refusal,
        "two files of prompts",
        ("tether:refusal_harmful", "tether:refusal_harmless"),
    ),
    "diversity": EvaluatorKind(
        "distinct n-grams and length of sampled answers",
        _diversity,
        "prompts",
        ("tether:heldout",),
    ),
}
SUITES: dict[str, tuple[str, ...]] = {
    "all": ("multiple_choice", "short_answers", "refusal", "diversity"),
    "tax": ("multiple_choice", "short_answers"),
    "manner": ("refusal", "diversity"),
}
"""Lists of evaluators by name; several names and evaluators may be joined by commas."""


class SuiteReport(TypedDict):
    """Figures of a model; with `against`, their distance above another model's."""

    model: str
    against: str | None
    evaluators: list[Record]
    base: list[Record]
    changes: dict[str, dict[str, FigureChange]]
    left_out: dict[str, Json]


def chosen_evaluators(suite: str, data: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The evaluators of a suite, each with its files.

    Args:
        data: `NAME=PATH`, several times for several files.

    Raises:
        ConfigError: there is no such suite or evaluator, or one has no files.
        MissingFileError: a file does not exist.
    """
    words = [word.strip().replace("-", "_") for word in suite.split(",") if word.strip()]
    names = [name for word in words for name in SUITES.get(word, (word,))]
    files: dict[str, list[str]] = {}
    for entry in data:
        name, path = (*entry.split("=", 1), "")[:2]
        if not path:
            raise ConfigError(f"--data is NAME=PATH, such as multiple_choice=arc.jsonl: {entry!r}")
        files.setdefault(name.strip().replace("-", "_"), []).append(path)
    if wrong := [name for name in (*names, *files) if name not in EVALUATORS]:
        raise ConfigError(
            f"no suite or evaluator is called {wrong[0]!r}. Suites: {', '.join(SUITES)}; "
            f"evaluators: {', '.join(EVALUATORS)}"
        )
    if idle := [name for name in files if name not in names]:
        raise ConfigError(f"--data {idle[0]}=… has no effect: the suite {suite!r} lacks {idle[0]}")
    chosen = {}
    for name in dict.fromkeys(names):
        given = tuple(files.get(name, EVALUATORS[name].files))
        if not given:
            raise ConfigError(
                f"{name} needs files ({EVALUATORS[name].data}): --data {name}=PATH, or choose a "
                "--suite without it"
            )
        chosen[name] = DataConfig(path=given).paths
    if not chosen:
        raise ConfigError(f"--suite is empty. Suites: {', '.join(SUITES)}")
    return chosen


def evaluate_model(
    model: str,
    suite: str,
    *,
    against: str | None = None,
    data: Sequence[str] = (),
    limit: int | None = None,
) -> SuiteReport:
    """Measure a model, and how far it lies above another one on the same rows.

    Args:
        model, against: a folder, a run or a hub id.
        limit: only so many rows of each file.

    Raises:
        ConfigError, DataError, MissingFileError, ModelError: as `chosen_evaluators`, the readers
            and `run.roles.load_policy`.
    """
    chosen = chosen_evaluators(suite, data)
    aside = {name: Quarantine() for name in (model, against) if name is not None}
    now = _records(model, chosen, limit, aside[model])
    base = [] if against is None else _records(against, chosen, limit, aside[against])
    differences = {
        record["evaluator"]: changes(start, record)
        for start, record in zip(base, now, strict=False)
    }
    return SuiteReport(
        model=model,
        against=against,
        evaluators=now,
        base=base,
        changes=differences,
        left_out={name: rows.summary() for name, rows in aside.items() if rows.count},
    )


def _records(
    model: str, chosen: Mapping[str, tuple[str, ...]], limit: int | None, quarantine: Quarantine
) -> list[Record]:
    role, loaded = load_policy(model)
    policy = MeasuredPolicy(role, encoder_of(loaded), local_engine(role, loaded))
    with ExitStack() as closing:
        evaluators = [
            EVALUATORS[name].make(Material(policy, files, limit, quarantine, closing))
            for name, files in chosen.items()
        ]
        return [
            as_record(name, "after", 0, evaluator(policy, 0))
            for name, evaluator in zip(chosen, evaluators, strict=True)
        ]
