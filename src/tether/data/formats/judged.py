"""Two answers to one prompt and the verdict on them: a table of columns and codings.

`read_sides` reads a layout by the names of its two answers and by its verdict. A coding is a function
that gives the `RowVerdict` of a row, from the columns that formats.toml names. Each says who is
preferred by the documentation of its data sets:

- judges' verdicts: https://github.com/tatsu-lab/alpaca_eval, https://github.com/princeton-nlp/LLMBar
  (https://arxiv.org/abs/2310.07641), https://github.com/WeOpenML/PandaLM
  (https://arxiv.org/abs/2306.05087), https://github.com/allenai/open-instruct,
  https://huggingface.co/datasets/prometheus-eval/Preference-Collection
- people's verdicts: https://huggingface.co/datasets/nvidia/HelpSteer2,
  https://huggingface.co/datasets/nvidia/HelpSteer3,
  https://huggingface.co/datasets/PKU-Alignment/PKU-SafeRLHF,
  https://huggingface.co/datasets/stanfordnlp/SHP
- summaries of posts and articles: https://huggingface.co/datasets/openai/summarize_from_feedback,
  https://arxiv.org/abs/2009.01325
- battles of two models: https://huggingface.co/datasets/lmsys/chatbot_arena_conversations,
  https://arxiv.org/abs/2306.05685, https://huggingface.co/datasets/lmarena-ai/arena-human-preference-55k
- a score for each answer: https://huggingface.co/datasets/llm-blender/Unified-Feedback,
  https://huggingface.co/datasets/openai/webgpt_comparisons (https://arxiv.org/abs/2112.09332),
  https://github.com/Linear95/DSP

Where several rows judge one pair, possibly in both orders, they share prompt and so `group`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import starmap

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation, Entries, Row, assistant, user
from tether.data.formats import fields
from tether.data.formats.conversations import PROMPTS, TURNS_BEFORE, marked_turns
from tether.data.formats.fields import (
    boolean,
    cell_numbers,
    checked_comparison,
    has,
    optional,
    sequence,
    split_transcript,
    system_turn,
    text,
    texts,
    turns_at,
)
from tether.data.formats.pairs import split_sides
from tether.data.formats.sides import (
    VERDICTS,
    Two,
    score_columns,
    side_of,
    side_of_word,
    two_answers,
)

_SCALE = {
    "a-is-better": 1.0,
    "a-is-slightly-better": 0.5,
    "tie": 0.0,
    "b-is-slightly-better": -0.5,
    "b-is-better": -1.0,
}
"""The points of open-instruct's human evaluation, each with its lean."""
_ANNOTATOR = re.compile(r"annotator_?(\d{1,9})")
_LEANS = {0.0: 0.0, 1.0: 1.0, 2.0: -1.0}
_WON = {"winner_model_a": 1.0, "winner_model_b": -1.0, "winner_tie": 0.0}
_HEADS = {
    "subreddit": "SUBREDDIT: r/",
    "title": "TITLE: ",
    "post": "POST: ",
    "article": "ARTICLE: ",
}
_WAY_OUT = "Write the better and the worse answer into columns chosen and rejected"


@dataclass(frozen=True)
class RowVerdict:
    """A verdict on two answers in the order of their row.

    - lean: above 0 the first is better, below 0 the second; 0 is a tie
    - margin: how much better the first is, in the source's units
    - votes: of each annotator from +1 (the first is better) to -1
    - probability: that the first is better; by default 1, 0.5 or 0 as the lean says
    - tie: set where it is not what the lean says
    - models: the writers of the answers
    - facts: metadata
    """

    lean: float
    _: KW_ONLY
    margin: float | None = None
    votes: Mapping[str, float] = field(default_factory=dict)
    probability: float | None = None
    tie: bool | None = None
    models: Sequence[object] = ()
    facts: Entries = field(default_factory=dict)


def compared(
    prompt: Conversation,
    sides: Sequence[Conversation],
    verdict: RowVerdict,
    *,
    beside: bool = True,
) -> Comparison:
    """Two answers in the order of their row, or two conversations that begin alike.

    Args:
        beside: the answers were judged beside each other, so their order may have counted.

    Raises:
        DataError: the prompt or an answer is empty, or the answers are equal and yet one is
            preferred.
    """
    lean = verdict.lean
    share = (1.0 + (lean > 0) - (lean < 0)) / 2.0
    pair = Comparison(
        *split_sides(prompt, *sides),
        margin=verdict.margin,
        tie=lean == 0 if verdict.tie is None else verdict.tie,
        probability=share if verdict.probability is None else verdict.probability,
        annotations=tuple(starmap(Annotation, verdict.votes.items())),
    )
    position = 2 if lean < 0 else 1
    facts: dict[str, object] = {"chosen_position": position} if beside else {}
    if any(verdict.models):
        writers = verdict.models[:: 3 - 2 * position]
        facts = (
            dict(
                zip(
                    ("chosen_model", "rejected_model"),
                    writers,
                    strict=True,
                ),
            )
            | facts
        )
    return checked_comparison(
        replace(pair if position == 1 else pair.swap(), metadata={**facts, **verdict.facts}),
    )


def read_sides(
    row: Row,
    answers: Sequence[str],
    verdict: RowVerdict,
    prompt: Sequence[str] = (*PROMPTS, *TURNS_BEFORE),
    models: Sequence[str] = (),
) -> Comparison:
    """Two columns with answers; `models` are those of their writers."""
    sides = [turns_at(row, name, "assistant") for name in answers]
    before = marked_turns(row, *prompt) or system_turn(row)
    writers = verdict.models or [row.get(name) for name in models]
    return compared(before, sides, replace(verdict, models=writers))


def _given(row: Row, name: str) -> str | float:
    """A verdict; a judge that failed left null, which is none."""
    if not has(row, name):
        raise DataError(f"no verdict: {name} is null")
    return row[name]


def _point(
    row: Row,
    name: str,
    wanted: Sequence[float],
    what: str,
) -> float:
    """A number, one of those that the scale has."""
    value = fields.number(_given(row, name), name)
    if value not in wanted:
        raise DataError(f"unreadable verdict: {name} {value:g} is {what}")
    return value


def by_number(
    row: Row,
    column: str,
    first: str,
    second: str,
    annotator: str = "",
) -> RowVerdict:
    """One number for the first answer and one for the second, by an annotator of this name."""
    low, high = points = sorted(map(float, (first, second)))
    value = _point(row, column, points, f"neither {low:g} nor {high:g}")
    lean = 1.0 if value == float(first) else -1.0
    return RowVerdict(lean, votes={annotator: lean} if annotator else {})


def numbered_otherwise(
    rows: Sequence[Row],
    column: str,
    *answers: str,
) -> str:
    """The reason why a file counts its answers otherwise; empty if it does not."""
    low, high = sorted(map(float, answers[:2]))
    other = sorted(cell_numbers(rows, column) - {low, high})
    if not other or (low and other[0]):
        return ""
    return (
        f"column {column} holds {other[0]:g}, where {low:g} and {high:g} are "
        f"the two answers. {_WAY_OUT}"
    )


def strength(
    row: Row,
    name: str,
    people: str = "",
) -> RowVerdict:
    """A whole number from -3 (the first is much better) over 0 (a tie) to 3; the margin is its
    size. `people` lists the `score` of each annotator, the same number.
    """
    value = -_point(row, name, range(-3, 4), "not a whole number from -3 to 3")
    own = sequence(row[people], people) if people and has(row, people) else []
    if not all(isinstance(person, dict) for person in own):
        raise DataError(
            f"not an annotation: {people} lists something other than objects with a score",
        )
    leans = [strength(person, "score").lean / 3 for person in own]
    votes = {f"annotator {number}": lean for number, lean in enumerate(leans, 1)}
    return RowVerdict(value, margin=value, votes=votes)


def judge_says(row: Row, name: str) -> RowVerdict:
    """AlpacaEval's 1 or 2 for the better output, 0 or 1.5 for a tie, between for a judge's
    probability of output 2.
    """
    value = fields.number(_given(row, name), name)
    if value != 0 and not 1 <= value <= 2:
        raise DataError(f"unreadable verdict: {name} {value:g} is neither 0 nor between 1 and 2")
    probability = 2.0 - (value or 1.5)
    lean = 2.0 * probability - 1.0
    votes = {str(row.get("annotator") or "judge"): lean}
    return RowVerdict(lean, votes=votes, probability=probability)


def half_a_scale(rows: Sequence[Row]) -> str:
    """A doubt about `preference` of 0 and 1 alone: 0 is a tie there, and elsewhere it is one of the
    answers.
    """
    if {0, 1} <= (numbers := cell_numbers(rows, "preference")) and max(numbers) <= 1:
        return (
            "column preference holds 0 and nothing above 1, where 1 and 2 are the two answers and "
            f"0 is a tie. {_WAY_OUT}"
        )
    return ""


def most_votes(row: Row, _: str) -> RowVerdict:
    """PandaLM's `annotator1` to `annotatorN` say 1 or 2 for the better response, 0 for a tie; nulls
    did not vote. More than half of the votes decide; without that it is a tie.
    """
    names = {
        int(match[1]): name
        for name in row
        if (match := _ANNOTATOR.fullmatch(name)) and has(row, name)
    }
    votes = {
        name: _LEANS[_point(row, name, [*_LEANS], "not 0, 1 or 2")]
        for _, name in sorted(names.items())
    }
    if not votes:
        raise DataError("no verdict: no annotator voted")
    cast = list(votes.values())
    lean = sum(cast)
    models = str(row.get("cmp_key") or "").split("_")
    return RowVerdict(
        lean,
        votes=votes,
        probability=0.5 + lean / (2 * len(cast)),
        tie=2 * max(cast.count(1.0), cast.count(-1.0)) <= len(cast),
        models=models if len(models) == 2 else (),
    )


def five_points(row: Row, name: str) -> RowVerdict:
    """open-instruct's five points from a-is-better to b-is-better; the margin counts points, 2, 1
    or 0.
    """
    point = str(_given(row, name)).strip().lower()
    side = side_of_word(point, Two(("completion_a", "completion_b"), "ab"), row)
    lean = _SCALE.get(point, side)
    if lean is None:
        raise DataError(f"unreadable verdict: {name} {point!r:.40} is not a point of the scale")
    votes = {str(row.get("evaluator") or "annotator"): lean}
    return RowVerdict(lean, margin=2.0 * lean if point in _SCALE else None, votes=votes)


def upvotes(
    row: Row,
    name: str,
    *scores: str,
) -> RowVerdict:
    """SHP's label; the margin is the difference of the scores."""
    verdict = by_number(row, name, "1", "0")
    if not all(has(row, score) for score in scores):
        return verdict
    margin = by_scores(row, *scores).lean
    if margin * verdict.lean < 0:
        raise DataError(
            f"contradictory scores: {name} {row[name]} prefers the response of the lower score",
        )
    return replace(verdict, margin=margin)


def by_scores(
    row: Row,
    one: str,
    other: str,
) -> RowVerdict:
    """A score for each answer: the higher is better, equal ones tie; the margin is the difference."""
    lean = fields.number(row.get(one), one) - fields.number(row.get(other), other)
    return RowVerdict(lean, margin=lean)


def worded(
    row: Row,
    name: str,
    *answers: str,
    endings: Sequence[str] = "ab",
) -> RowVerdict:
    """A word that names one of two answers."""
    lean, facts = side_of(row.get(name), name, Two(answers, endings), row)
    return RowVerdict(lean, facts=facts)


def read_summaries(row: Row) -> Comparison:
    """`choice` is the index, 0 or 1, of the better of two `summaries` of `info.post` or
    `info.article`.
    """
    verdict = by_number(row, "choice", "0", "1")
    both = sequence(row.get("summaries"), "summaries")
    if len(both) != 2 or not all(isinstance(item, dict) for item in both):
        raise DataError("not a pair: summaries needs two objects with a text")
    votes = {text(row, "worker"): verdict.lean} if has(row, "worker") else {}
    sides = [(assistant(text(item, "text")),) for item in both]
    models = [item.get("policy") for item in both]
    prompt = (user(_to_summarise(row.get("info"))),)
    return compared(prompt, sides, replace(verdict, votes=votes, models=models))


def _to_summarise(info: object) -> str:
    """The text to summarise, after the paper: a post with its forum and title, or an article."""
    if not isinstance(info, dict) or not has(info, "post", "article"):
        raise DataError("empty prompt: info has neither a post nor an article")
    parts = (
        head + text(info, name) for name, head in _HEADS.items() if optional(info, name).strip()
    )
    return "\n\n".join([*parts, "TL;DR:"])


def read_arena(row: Row) -> Comparison:
    """`winner` is model_a, model_b, tie, or tie (bothbad); of a conversation the turns up to `turn`
    were judged.
    """
    names = ("conversation_a", "conversation_b")
    both = [turns_at(row, name, "user") for name in names]
    verdict = worded(row, "winner", *names)
    judged = int(row["turn"]) if isinstance(dict.get(row, "turn"), int) else 0
    cut = [_up_to(turns, judged) for turns in both]
    later = [t.content for turns, own in zip(both, cut, strict=True) for t in turns[len(own) :]]
    verdict = replace(
        verdict,
        votes={text(row, "judge"): verdict.lean} if has(row, "judge") else {},
        models=(row.get("model_a"), row.get("model_b")),
        facts={**verdict.facts, **({"later_turns": later} if later else {})},
    )
    return compared(system_turn(row), cut, verdict)


def _up_to(turns: Conversation, count: int) -> Conversation:
    """The first `count` questions with their answers; all turns without a count."""
    questions = [place for place, turn in enumerate(turns) if turn.role == "user"]
    return turns[: questions[count]] if 0 < count < len(questions) else turns


def read_arena_lists(row: Row) -> Comparison:
    """`prompt`, `response_a` and `response_b` list the turns; one of `winner_model_a`,
    `winner_model_b`, `winner_tie` is 1.
    """
    questions = texts(row, "prompt")
    both: list[Conversation] = []
    for name in ("response_a", "response_b"):
        answers = texts(row, name)
        if len(questions) != len(answers):
            raise DataError(
                f"uneven lists: {len(questions)} turns in prompt but {len(answers)} in {name}",
            )
        pairs = zip(map(user, questions), map(assistant, answers), strict=True)
        both.append(tuple(turn for pair in pairs for turn in pair))
    won = [name for name in _WON if has(row, name) and boolean(row[name], name)]
    if len(won) != 1:
        raise DataError(
            f"unreadable verdict: {len(won)} of winner_model_a, winner_model_b and winner_tie are 1",
        )
    models = (row.get("model_a"), row.get("model_b"))
    return compared(
        system_turn(row),
        both,
        RowVerdict(_WON[won[0]], models=models),
    )


def read_two_answers(row: Row) -> Comparison:
    """The verdict is a word: the name of a side, A or B, its model, tie. Numbers are refused: they
    may count from 0 or 1.
    """
    two = _two(row)
    name, _ = fields.first(row, *VERDICTS)
    verdict = worded(row, name, *two.columns, endings=two.endings)
    return read_sides(row, two.columns, verdict)


def _two(row: Row) -> Two:
    if two := two_answers(row):
        return two
    raise DataError(
        "not a pair: no two columns of answers, for example response_a and response_b",
    )


def are_scored(row: Row) -> bool:
    """True for two answers with a score each."""
    two = two_answers(row)
    return two is not None and bool(score_columns(row, two))


def read_scored(row: Row) -> Comparison:
    """Two answers with a score each, by the names of their columns."""
    two = _two(row)
    if not (names := score_columns(row, two)):
        raise DataError(f"not a pair: no scores of {' and '.join(two.columns)}")
    return read_sides(row, two.columns, by_scores(row, *names))


def read_webgpt(row: Row) -> Comparison:
    """`question` (its `full_text`), `answer_0`, `answer_1`, `score_0`, `score_1`."""
    question = row.get("question")
    words = text(
        *(question, "full_text") if isinstance(question, dict) else (row, "question"),
    )
    sides = [turns_at(row, name, "assistant") for name in ("answer_0", "answer_1")]
    return compared(
        (user(words),),
        sides,
        by_scores(row, "score_0", "score_1"),
        beside=False,
    )


def read_webgpt_lists(row: Row) -> Comparison:
    """`text`, two transcripts of ## Human: and ## Assistant:, and `score` a number for each."""
    both = texts(row, "text")
    scores = [fields.number(value, "score") for value in sequence(row.get("score"), "score")]
    if len(both) != 2 or len(scores) != 2:
        raise DataError(f"not a pair: {len(both)} texts and {len(scores)} scores")
    marks = re.compile(r"## (?=(?:Human|Assistant):)")
    sides = [split_transcript(marks.sub("\n\n", words)) for words in both]
    lean = scores[0] - scores[1]
    return compared((), sides, RowVerdict(lean, margin=lean), beside=False)
