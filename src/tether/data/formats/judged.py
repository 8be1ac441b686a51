"""Two answers to one prompt and the verdict on them, in a column of its own.

One function, `compared`, makes the comparison: it takes the prompt, the answers in the order of the
row, and the lean of the verdict. Each reader below says who is preferred by the documentation of
its data set.

Verdicts of one or several judges on two outputs: https://github.com/tatsu-lab/alpaca_eval,
https://github.com/princeton-nlp/LLMBar (https://arxiv.org/abs/2310.07641),
https://github.com/WeOpenML/PandaLM (https://arxiv.org/abs/2306.05087),
https://github.com/allenai/open-instruct and
https://huggingface.co/datasets/prometheus-eval/Preference-Collection. Where several rows judge one
pair, possibly in both orders, they share prompt and so `group`.

People's verdicts: HelpSteer2 and 3 (https://huggingface.co/datasets/nvidia/HelpSteer2,
https://huggingface.co/datasets/nvidia/HelpSteer3), PKU-SafeRLHF
(https://huggingface.co/datasets/PKU-Alignment/PKU-SafeRLHF), SHP
(https://huggingface.co/datasets/stanfordnlp/SHP) and summaries of posts and articles
(https://huggingface.co/datasets/openai/summarize_from_feedback, https://arxiv.org/abs/2009.01325).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation, assistant, user
from tether.data.formats import fields
from tether.data.formats.conversations import PROMPTS, TURNS_BEFORE, marked_turns
from tether.data.formats.json_rows import Row
from tether.data.formats.sides import (
    VERDICTS,
    Two,
    score_columns,
    side_of,
    side_of_word,
    two_answers,
)

# The scale of open-instruct's human evaluation: how far the vote leans to a, half a point of the
# scale being a half.
_SCALE = {
    "a-is-better": 1.0,
    "a-is-slightly-better": 0.5,
    "tie": 0.0,
    "b-is-slightly-better": -0.5,
    "b-is-better": -1.0,
}
_ANNOTATOR = re.compile(r"annotator_?(\d{1,9})")
_LEANS = {0.0: 0.0, 1.0: 1.0, 2.0: -1.0}
Answers = tuple[Conversation | str, Conversation | str]


def compared(
    prompt: Conversation,
    answers: Answers,
    lean: float,
    *,
    tie: bool | None = None,
    votes: Mapping[str, float] | None = None,
    probability: float | None = None,
    margin: float | None = None,
    models: Sequence[object] = (),
    facts: Mapping[str, object] | None = None,
) -> Comparison:
    """Two answers in the order of their row and the verdict: the first is better for `lean` > 0,
    a tie for 0.

    Args:
        tie: set separately from the lean, for verdicts in which too few lean.
        votes: of each annotator from +1 (the first is better) to -1.
        probability: that the first is better; by default 1, 0.5 or 0 as `lean` says.
        margin: how much better the first is, in the source's units.
        models: the writers of the answers. facts: further metadata.

    Raises:
        DataError: the prompt or an answer is empty, or the answers are equal and yet one is
            preferred.
    """
    chosen, rejected = ((assistant(side),) if isinstance(side, str) else side for side in answers)
    share = probability if probability is not None else (1.0 + (lean > 0) - (lean < 0)) / 2.0
    annotations = tuple(Annotation(name, vote) for name, vote in (votes or {}).items())
    pair = Comparison(
        prompt,
        chosen,
        rejected,
        margin=margin,
        probability=share,
        annotations=annotations,
    )
    pair = replace(pair, tie=lean == 0 if tie is None else tie)
    swapped = lean < 0
    names = zip(
        ("chosen_model", "rejected_model"),
        models[::-1] if swapped else models,
        strict=False,
    )
    metadata = {**dict(names), "chosen_position": 2 if swapped else 1, **(facts or {})}
    return fields.checked_comparison(replace(pair.swap() if swapped else pair, metadata=metadata))


def voted(
    prompt: Conversation,
    answers: Answers,
    votes: Mapping[str, float],
    *,
    probability: float | None = None,
    **more: Any,
) -> Comparison:
    """Two answers and the votes on them by annotator, each from +1 (the first is better) over 0 (a
    tie) to -1.

    More than half of the votes decide; without that it is a tie. `probability` is that of the first
    answer, by default its share of the votes with ties halved.
    """
    won = sum(lean > 0 for lean in votes.values())
    lost = sum(lean < 0 for lean in votes.values())
    share = probability if probability is not None else 0.5 + (won - lost) / (2 * len(votes))
    tie = 2 * max(won, lost) <= len(votes)
    return compared(prompt, answers, won - lost, tie=tie, votes=votes, probability=share, **more)


def _given(row: Row, name: str) -> object:
    """The verdict; a judge that failed left null, which is none."""
    if not fields.has(row, name):
        raise DataError(f"no verdict: {name} is null")
    return row[name]


def _on_scale(row: Row, name: str, most: int) -> float:
    """A whole number from -most to most."""
    value = fields.number(_given(row, name), name)
    if value not in range(-most, most + 1):
        raise DataError(
            f"unreadable verdict: {name} {value:g} is not a whole number from -{most} to {most}",
        )
    return value


def _one_of(row: Row, name: str, *values: float) -> float:
    value = fields.number(_given(row, name), name)
    if value not in values:
        raise DataError(
            f"unreadable verdict: {name} {value:g} is neither {values[0]:g} nor {values[1]:g}",
        )
    return value


def other_count(name: str, *values: float) -> Callable[[Sequence[Row]], str]:
    """A doubt about files whose column holds a number of another count of the two answers."""

    def doubt(rows: Sequence[Row]) -> str:
        other = sorted(fields.cell_numbers(rows, name) - {*values})
        if not other or not (0 in other or 0 in values):
            return ""
        return (
            f"column {name} holds {other[0]:g}, where {values[0]:g} and {values[1]:g} are the two "
            "answers. Write the better and the worse answer into columns chosen and rejected"
        )

    return doubt


def half_a_scale(rows: Sequence[Row]) -> str:
    """A doubt about `preference` of 0 and 1 alone: 0 is a tie there, and elsewhere it is one of the
    answers.
    """
    if {0, 1} <= (numbers := fields.cell_numbers(rows, "preference")) and max(numbers) <= 1:
        return (
            "column preference holds 0 and nothing above 1, where 1 and 2 are the two answers and "
            "0 is a tie. Write the better and the worse answer into columns chosen and rejected"
        )
    return ""


def read_alpaca_eval(row: Row) -> Iterator[Comparison]:
    """`preference` is 1 or 2 for the better output, 0 or 1.5 for a tie, between for a judge's
    probability of output 2.
    """
    preference = fields.number(_given(row, "preference"), "preference")
    if preference != 0 and not 1 <= preference <= 2:
        raise DataError(
            f"unreadable verdict: preference {preference:g} is neither 0 nor between 1 and 2",
        )
    probability = 0.5 if preference == 0 else 2.0 - preference
    yield voted(
        fields.prompt_turns(row, "instruction"),
        (fields.text(row, "output_1"), fields.text(row, "output_2")),
        {str(row.get("annotator") or "judge"): 2.0 * probability - 1.0},
        probability=probability,
        models=(row.get("generator_1"), row.get("generator_2")),
    )


def read_llmbar(row: Row) -> Iterator[Comparison]:
    """`label` names the better output, 1 or 2. The data set has neither ties nor names of
    annotators.
    """
    answers = (fields.text(row, "output_1"), fields.text(row, "output_2"))
    yield voted(
        fields.prompt_turns(row, *PROMPTS),
        answers,
        {"benchmark": _LEANS[_one_of(row, "label", 1, 2)]},
    )


def read_pandalm(row: Row) -> Iterator[Comparison]:
    """`annotator1` to `annotatorN` say 1 or 2 for the better response, 0 for a tie; nulls did not
    vote.
    """
    names = sorted(
        (name for name in row if _ANNOTATOR.fullmatch(name)),
        key=lambda name: int(_ANNOTATOR.sub(r"\1", name)),
    )
    verdicts = {name: fields.number(row[name], name) for name in names if fields.has(row, name)}
    for name, verdict in verdicts.items():
        if verdict not in _LEANS:
            raise DataError(f"unreadable verdict: {name} says {verdict:g}, not 0, 1 or 2")
    if not verdicts:
        raise DataError("no verdict: no annotator voted")
    models = str(row.get("cmp_key") or "").split("_")
    yield voted(
        fields.prompt_turns(row, "instruction"),
        (fields.text(row, "response1"), fields.text(row, "response2")),
        {name: _LEANS[verdict] for name, verdict in verdicts.items()},
        models=models if len(models) == 2 else (),
    )


def read_open_instruct(row: Row) -> Iterator[Comparison]:
    """`preference` is one of five points from a-is-better to b-is-better; the margin counts points,
    2, 1 or 0.
    """
    point = str(_given(row, "preference")).strip().lower()
    side = side_of_word(point, Two(("completion_a", "completion_b"), ("a", "b")), row)
    lean = _SCALE.get(point, side)
    if lean is None:
        raise DataError(
            f"unreadable verdict: preference {row['preference']!r:.40} is not a point of the scale",
        )
    yield voted(
        fields.prompt_turns(row, "prompt"),
        (fields.text(row, "completion_a"), fields.text(row, "completion_b")),
        {str(row.get("evaluator") or "annotator"): lean},
        margin=2.0 * lean if point in _SCALE else None,
        models=(row.get("model_a"), row.get("model_b")),
    )


def read_helpsteer2(row: Row) -> Iterator[Comparison]:
    """`preference_strength` goes from -3 (response 1 is much better) over 0 (a tie) to 3; the
    margin is its size.
    """
    strength = _on_scale(row, "preference_strength", 3)
    answers = (fields.text(row, "response_1"), fields.text(row, "response_2"))
    yield compared(marked_turns(row, "prompt"), answers, -strength, margin=-strength)


def read_helpsteer3(row: Row) -> Iterator[Comparison]:
    """`overall_preference` goes from -3 (response 1 is much better) to 3, as the score of each of
    `individual_preference`.
    """
    strength = _on_scale(row, "overall_preference", 3)
    name = "individual_preference"
    people = fields.sequence(row[name], name) if fields.has(row, name) else []
    votes = {
        f"annotator {number}": -_individual(person) / 3 for number, person in enumerate(people, 1)
    }
    answers = (fields.text(row, "response1"), fields.text(row, "response2"))
    yield compared(
        fields.prompt_turns(row, "context", "prompt"),
        answers,
        -strength,
        votes=votes,
        margin=-strength,
    )


def _individual(person: object) -> float:
    if not isinstance(person, dict):
        raise DataError(
            "not an annotation: individual_preference lists something other than "
            "objects with a score",
        )
    return _on_scale(person, "score", 3)


def read_safe_rlhf(row: Row) -> Iterator[Comparison]:
    """`better_response_id`, 0 or 1, is the more helpful response and decides; `safer_response_id`
    is not used.
    """
    better = _one_of(row, "better_response_id", 0, 1)
    answers = (fields.text(row, "response_0"), fields.text(row, "response_1"))
    models = (row.get("response_0_source"), row.get("response_1_source"))
    yield compared(
        fields.prompt_turns(row, *PROMPTS),
        answers,
        1.0 if better == 0 else -1.0,
        models=models if any(models) else (),
    )


def read_shp(row: Row) -> Iterator[Comparison]:
    """`labels` is 1 where people preferred `human_ref_A`, and 0 for `human_ref_B`; the margin is
    the difference of the scores.
    """
    lean = 1.0 if _one_of(row, "labels", 0, 1) == 1 else -1.0
    scored = all(fields.has(row, name) for name in ("score_A", "score_B"))
    margin = (
        fields.number(row["score_A"], "score_A") - fields.number(row["score_B"], "score_B")
        if scored
        else None
    )
    if margin is not None and margin * lean < 0:
        raise DataError(
            f"contradictory scores: labels {row['labels']} prefers the response of the lower score",
        )
    prompt = fields.prompt_turns(row, "history", *PROMPTS)
    answers = (fields.text(row, "human_ref_A"), fields.text(row, "human_ref_B"))
    yield compared(prompt, answers, lean, margin=margin)


def read_summaries(row: Row) -> Iterator[Comparison]:
    """`choice` is the index, 0 or 1, of the better of two `summaries` of `info.post` or
    `info.article`.
    """
    choice = _one_of(row, "choice", 0, 1)
    both = fields.sequence(row.get("summaries"), "summaries")
    if len(both) != 2 or not all(isinstance(item, dict) for item in both):
        raise DataError("not a pair: summaries needs two objects with a text")
    answers = tuple(fields.text(item, "text") for item in both)
    models = [item.get("policy") for item in both]
    lean = 1.0 if choice == 0 else -1.0
    votes = {fields.text(row, "worker"): lean} if fields.has(row, "worker") else {}
    prompt = (user(_to_summarise(row.get("info"))),)
    yield compared(
        prompt,
        (answers[0], answers[1]),
        lean,
        votes=votes,
        models=models if any(models) else (),
    )


def _to_summarise(info: object) -> str:
    """The text to summarise, after the paper: a post with its forum and title, or an article."""
    if not isinstance(info, dict) or not fields.has(info, "post", "article"):
        raise DataError("empty prompt: info has neither a post nor an article")
    heads = {
        "subreddit": "SUBREDDIT: r/",
        "title": "TITLE: ",
        "post": "POST: ",
        "article": "ARTICLE: ",
    }
    parts = [
        head + fields.text(info, name)
        for name, head in heads.items()
        if fields.optional(info, name).strip()
    ]
    return "\n\n".join([*parts, "TL;DR:"])


def read_prometheus(row: Row) -> Iterator[Comparison]:
    """`orig_preference` is A or B, the better one of the responses to `orig_instruction`; the rest
    of the row trains judges.
    """
    names = ("orig_response_A", "orig_response_B")
    lean, facts = side_of(
        _given(row, "orig_preference"),
        "orig_preference",
        Two(names, ("a", "b")),
        row,
    )
    answers = (fields.text(row, names[0]), fields.text(row, names[1]))
    yield compared((user(fields.text(row, "orig_instruction")),), answers, lean, facts=facts)


def read_two_answers(row: Row) -> Iterator[Comparison]:
    """The verdict is a word: the name of a side, A or B, its model, tie. Numbers are refused: they
    may count from 0 or 1.
    """
    two = two_answers(row)
    if two is None:
        raise DataError(
            "not a pair: no two columns of answers, for example response_a and response_b",
        )
    name, value = fields.first(row, *VERDICTS)
    lean, facts = side_of(value, name, two, row)
    first, second = (fields.turns(row[column], "assistant", column) for column in two.columns)
    yield compared(
        fields.prompt_turns(row, *PROMPTS, *TURNS_BEFORE),
        (first, second),
        lean,
        facts=facts,
    )


def are_scored(row: Row) -> bool:
    """True for two answers with a score each."""
    two = two_answers(row)
    return two is not None and bool(score_columns(row, two))


def read_scored(row: Row) -> Iterator[Comparison]:
    """The answer of the higher score is better, and equal scores tie; the margin is the
    difference.
    """
    two = two_answers(row)
    if two is None or not (names := score_columns(row, two)):
        raise DataError(
            "not a pair: no two answers with a score each, for example response_a, "
            "response_b, score_a, score_b",
        )
    one, other = (fields.number(row[name], name) for name in names)
    first, second = (fields.turns(row[column], "assistant", column) for column in two.columns)
    yield compared(
        fields.prompt_turns(row, *PROMPTS, *TURNS_BEFORE),
        (first, second),
        one - other,
        margin=one - other,
    )
