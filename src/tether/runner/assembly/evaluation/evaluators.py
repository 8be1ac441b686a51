"""The table of evaluators: a new one is a file in evaluation/ and a row of `EVALUATORS`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from tether.core.errors import DataError
from tether.core.types import Problem, Prompt, Sampling
from tether.data.sources import Quarantine, detect_format, look, read
from tether.evaluation.best_of_n import BestOfStart
from tether.evaluation.decoding import Decoding
from tether.evaluation.diversity import Diversity
from tether.evaluation.held_out import HeldOutAnswers, HeldOutScores, Scorer
from tether.evaluation.likelihood import DistanceFromStart
from tether.evaluation.multiple_choice import ACCURACIES, MultipleChoice, check_question
from tether.evaluation.questions import read_questions
from tether.evaluation.short_answers import Refusal, ShortAnswers
from tether.evaluation.suite import MOMENTS, MeasuredPolicy, Moment, PolicyEvaluator
from tether.evaluation.sycophancy import Sycophancy, read_premise_pairs
from tether.models.trunk import Role
from tether.rewards.latex import read_number
from tether.rewards.verifiable import VerifiableReward, problem_prompt
from tether.runner.assembly.data.prompts import (
    Row,
    drop_faulty,
    faults_of,
    prompt_faults,
    usable_premises,
    usable_prompts,
)
from tether.runner.assembly.evaluation.harness import HarnessTasks, look_at_tasks
from tether.settings.rewards import Kind, Mark, VerifiableConfig


@dataclass(frozen=True, kw_only=True)
class JudgedAnswers:
    """Held-out answers of a recipe: who scores them, and the controls that belong to them.

    Args:
        reward: the training's own, which chooses the best of n.
        proxy: the same, where another judge scores.
        reference: the frozen start.
    """

    answers: HeldOutAnswers
    reward: Scorer
    proxy: Scorer | None = None
    reference: Role | None = None
    temperatures: Sequence[float] = ()
    best_of: Sequence[int] = ()

    @property
    def names(self) -> Iterator[str]:
        """The evaluators for which everything is there."""
        yield "held_out"
        sampled = self.answers.sampling.temperature > 0
        if self.reference is not None and sampled:
            yield "kl"
        if self.temperatures:
            yield "decoding"
        if self.best_of and sampled:
            yield "best_of_n"


class Material(NamedTuple):
    """Parts of an evaluator: a policy whose limits decide which rows it can take, and what is to be
    closed after use.

    Args:
        files, limit: of the evaluator's data; no more rows of each file than `limit`.
        exactly: `limit` is how many rows there have to be.
        judged: held-out answers, where a recipe measures them.
    """

    policy: MeasuredPolicy
    quarantine: Quarantine
    closing: ExitStack
    files: tuple[str, ...] = ()
    limit: int | None = None
    exactly: bool = False
    judged: JudgedAnswers | None = None

    @property
    def held_out(self) -> JudgedAnswers:
        """Held-out answers, which only a recipe has."""
        assert self.judged is not None
        return self.judged


@dataclass(frozen=True, kw_only=True)
class EvaluatorKind:
    """A row of the table: what it measures, its maker, and the files it reads where none are named.

    Args:
        data: what its files hold; empty: it measures a recipe's held-out answers.
        pair: it reads exactly two files.
        named: instead of a file a name will do.
        figures: the names of its figures; empty: those that `look` returns, or they depend on the
            judge.
        look: raises DataError where a file holds something else.
        moments: when a training runs it.
    """

    help: str
    make: Callable[[Material], PolicyEvaluator]
    data: str = ""
    pair: bool = False
    files: tuple[str, ...] = ()
    named: bool = False
    figures: tuple[str, ...] = ()
    look: Callable[[Sequence[str]], Collection[object] | None] = lambda files: look(files, Prompt)
    moments: Collection[Moment] = MOMENTS


def _kl(material: Material) -> PolicyEvaluator:
    judged = material.held_out
    assert judged.reference is not None
    return DistanceFromStart(judged.answers, judged.reference)


def _sycophancy(material: Material) -> PolicyEvaluator:
    files = material.files
    count = material.limit
    if count is not None and not material.exactly:
        count = min(count, len(read_premise_pairs(files)))
    encoder = material.policy.encoder
    pairs = usable_premises(files, count, encoder, material.quarantine, "sycophancy")
    return Sycophancy(pairs)


def _multiple_choice(material: Material) -> PolicyEvaluator:
    encoder = material.policy.encoder
    questions = read_questions(material.files, material.quarantine, material.limit)
    faults = faults_of(
        questions,
        lambda question: check_question(encoder.tokenizer, question, encoder.context_length),
    )
    return MultipleChoice(
        drop_faulty(
            questions,
            faults,
            material.quarantine,
            "multiple_choice",
            noun="questions",
            entry=lambda question: Prompt((), question.id),
        ),
    )


CHECKS: Mapping[str, tuple[Kind, tuple[Mark, ...]]] = {
    "gsm8k": ("gsm8k", ("hashes", "boxed", "phrase", "last-number")),
    "math": ("math", ("boxed", "phrase")),
    "numeric": ("numeric", ("hashes", "boxed", "phrase", "last-number")),
}
"""By format of a file: how answers are checked, and their possible places; the first counts. Other
formats are numeric where all known answers are numbers, else math.
"""
ANSWER_TOKENS = 256


def _short_answers(material: Material) -> PolicyEvaluator:
    prompts = [problem_prompt(problem) for problem in _rows(material, material.files, Problem)]
    formats = sorted({detect_format(file).name for file in material.files})
    if len(formats) > 1:
        raise DataError(
            f"the problems have the formats {' and '.join(formats)}. Measure each by itself",
        )
    numeric = all(read_number(str(prompt.metadata["answer"])) is not None for prompt in prompts)
    kind, marks = CHECKS.get(formats[0], CHECKS["numeric" if numeric else "math"])
    check = VerifiableReward(VerifiableConfig(kind=kind, answer_in=marks))
    return ShortAnswers(
        _fitting(material, prompts, ANSWER_TOKENS, "short_answers"),
        material.closing.enter_context(check),
        max_new_tokens=ANSWER_TOKENS,
    )


def _refusal(material: Material) -> PolicyEvaluator:
    sides = [
        _fitting(material, _rows(material, (file,), Prompt), 64, "refusal")
        for file in material.files
    ]
    return Refusal(sides[0], sides[1])


def _diversity(material: Material) -> PolicyEvaluator:
    prompts = _fitting(material, _rows(material, material.files, Prompt), 64, "diversity")
    return Diversity(prompts, Sampling(64, temperature=1.0))


def _rows(material: Material, files: Sequence[str], kind: type[Row]) -> list[Row]:
    aside = material.quarantine
    limit = material.limit
    return [row for file in files for row in read(file, kind, quarantine=aside, limit=limit)]


def _fitting(
    material: Material,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    name: str,
) -> list[Prompt]:
    """The prompts that the template takes and that leave room for an answer."""
    encoder = material.policy.encoder
    faults = prompt_faults(prompts, encoder, max_new_tokens, encoder.context_length)
    return usable_prompts(prompts, faults, material.quarantine, name)


EVALUATORS: dict[str, EvaluatorKind] = {
    "held_out": EvaluatorKind(
        help="scores of held-out answers by the recipe's judge",
        make=lambda material: HeldOutScores(material.held_out.answers, material.held_out.proxy),
    ),
    "kl": EvaluatorKind(
        help="distance from the start on held-out answers",
        make=_kl,
        figures=("kl",),
    ),
    "decoding": EvaluatorKind(
        help="scores of held-out answers at other temperatures",
        make=lambda material: Decoding(material.held_out.answers, material.held_out.temperatures),
        moments=("before", "after"),
    ),
    "best_of_n": EvaluatorKind(
        help="scores of the reward's favourites among answers of the start",
        make=lambda material: BestOfStart(
            material.held_out.answers,
            material.held_out.reward,
            material.held_out.best_of,
        ),
        moments=("before",),
    ),
    "multiple_choice": EvaluatorKind(
        help="knowledge by likelihood, as lm-eval measures it",
        make=_multiple_choice,
        data="questions with choices: ARC, HellaSwag, MMLU, or question, choices and answer",
        look=lambda files: read_questions(files, Quarantine(keep=0), 1),
        figures=(*ACCURACIES, "ece"),
    ),
    "short_answers": EvaluatorKind(
        help="greedy answers to problems, checked",
        make=_short_answers,
        data="problems with known answers, such as GSM8K or MATH",
        look=lambda files: look(files, Problem),
        figures=("accuracy", "finished"),
    ),
    "refusal": EvaluatorKind(
        help="refusals of harmful and of harmless requests, by their words",
        make=_refusal,
        data="two files: requests that do harm, then harmless ones",
        pair=True,
        files=("tether:refusal_harmful", "tether:refusal_harmless"),
        figures=("refused_harmful", "refused_harmless"),
    ),
    "diversity": EvaluatorKind(
        help="distinct n-grams and length of sampled answers",
        make=_diversity,
        data="prompts",
        files=("tether:heldout",),
        figures=("distinct_1", "distinct_2", "adjusted_distinct", "length"),
    ),
    "sycophancy": EvaluatorKind(
        help="dependence of answers on who asks",
        make=_sycophancy,
        data="two files of prompts whose rows go together",
        pair=True,
        files=("tether:sycophancy_one", "tether:sycophancy_two"),
        look=read_premise_pairs,
        figures=("shift", "log_odds", "size", "flipped"),
    ),
    "lm_eval": EvaluatorKind(
        help="tasks of lm-eval",
        make=lambda material: HarnessTasks(material.files, limit=material.limit),
        data="names of lm-eval, such as arc_easy, or YAML files",
        named=True,
        look=look_at_tasks,
    ),
}
