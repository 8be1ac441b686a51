"""Two outputs and the verdicts of one or several judges: AlpacaEval, LLMBar, PandaLM, open-instruct.

https://github.com/tatsu-lab/alpaca_eval, https://github.com/princeton-nlp/LLMBar (https://arxiv.org/abs/2310.07641),
https://github.com/WeOpenML/PandaLM (https://arxiv.org/abs/2306.05087), https://github.com/allenai/open-instruct

A row is a comparison. Where several rows judge one pair, possibly in both orders, they share prompt and so `group`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import Comparison, user
from tether.data.formats.conversations import instruction_prompt
from tether.data.formats.fields import judged, missing, number, optional, text
from tether.data.formats.format import Row

# The scale of open-instruct's human evaluation: how far the vote leans to a, and the margin in points of the scale.
_SCALE = {
    "a-is-better": (1.0, 2.0),
    "a-is-slightly-better": (0.5, 1.0),
    "tie": (0.0, 0.0),
    "b-is-slightly-better": (-0.5, 1.0),
    "b-is-better": (-1.0, 2.0),
}
_ANNOTATOR = re.compile(r"annotator_?(\d{1,9})")
_LEANS = {0.0: 0.0, 1.0: 1.0, 2.0: -1.0}


def _preference(row: Row) -> object:
    """The verdict; a judge that failed left null, which is none."""
    if missing(row.get("preference")):
        raise DataError("no verdict: preference is null")
    return row["preference"]


def read_alpaca_eval(row: Row) -> Iterator[Comparison]:
    """`preference` is 1 or 2 for the better output, 0 or 1.5 for a tie, between for a judge's probability of output 2."""
    preference = number(_preference(row), "preference")
    if preference != 0 and not 1 <= preference <= 2:
        raise DataError(f"unreadable verdict: preference {preference:g} is neither 0 nor between 1 and 2")
    probability = 0.5 if preference == 0 else 2.0 - preference
    yield judged(
        instruction_prompt(text(row, "instruction"), optional(row, "input")),
        (text(row, "output_1"), text(row, "output_2")),
        {str(row.get("annotator") or "judge"): 2.0 * probability - 1.0},
        probability=probability,
        models=(row.get("generator_1"), row.get("generator_2")),
    )


def read_llmbar(row: Row) -> Iterator[Comparison]:
    """`label` names the better output, 1 or 2; the data set has no ties and no names of annotators."""
    label = number(row.get("label"), "label")
    if label not in (1, 2):
        raise DataError(f"unreadable verdict: label {label:g} is neither 1 nor 2")
    sides = (text(row, "output_1"), text(row, "output_2"))
    yield judged((user(text(row, "input")),), sides, {"benchmark": _LEANS[label]})


def read_pandalm(row: Row) -> Iterator[Comparison]:
    """`annotator1` to `annotatorN` say 1 or 2 for the better response, 0 for a tie; nulls did not vote."""
    names = sorted((name for name in row if _ANNOTATOR.fullmatch(name)), key=lambda name: int(_ANNOTATOR.sub(r"\1", name)))
    verdicts = {name: number(row[name], name) for name in names if not missing(row[name])}
    for name, verdict in verdicts.items():
        if verdict not in _LEANS:
            raise DataError(f"unreadable verdict: {name} says {verdict:g}, not 0, 1 or 2")
    if not verdicts:
        raise DataError("no verdict: no annotator voted")
    models = str(row.get("cmp_key") or "").split("_")
    yield judged(
        instruction_prompt(text(row, "instruction"), optional(row, "input")),
        (text(row, "response1"), text(row, "response2")),
        {name: _LEANS[verdict] for name, verdict in verdicts.items()},
        models=models if len(models) == 2 else (),
    )


def read_open_instruct(row: Row) -> Iterator[Comparison]:
    """`preference` is one of five points from a-is-better to b-is-better; the margin counts points, 2, 1 or 0."""
    point = str(_preference(row)).strip().lower()
    if point not in _SCALE:
        raise DataError(f"unreadable verdict: preference {row['preference']!r:.40} is not a point of the scale")
    lean, margin = _SCALE[point]
    yield judged(
        (user(text(row, "prompt")),),
        (text(row, "completion_a"), text(row, "completion_b")),
        {str(row.get("evaluator") or "annotator"): lean},
        margin=margin,
        models=(row.get("model_a"), row.get("model_b")),
    )
