"""Two outputs and the verdicts of one or several judges: AlpacaEval, LLMBar, PandaLM, open-instruct.

https://github.com/tatsu-lab/alpaca_eval, https://github.com/princeton-nlp/LLMBar (https://arxiv.org/abs/2310.07641),
https://github.com/WeOpenML/PandaLM (https://arxiv.org/abs/2306.05087), https://github.com/allenai/open-instruct

A row is a comparison. Where several rows judge one pair, possibly in both orders, they share prompt and so `group`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import Comparison, Message
from tether.data.formats.fields import judged, leftover, missing, number, optional, text
from tether.data.formats.format import Format, Row, having
from tether.data.formats.instruction import instruction_prompt

# The scale of open-instruct's human evaluation: how far the vote leans to a, and the margin in points of the scale.
_SCALE = {
    "a-is-better": (1.0, 2.0),
    "a-is-slightly-better": (0.5, 1.0),
    "tie": (0.0, 0.0),
    "b-is-slightly-better": (-0.5, 1.0),
    "b-is-better": (-1.0, 2.0),
}
_ANNOTATOR = re.compile(r"annotator_?(\d{1,9})")


def read_alpaca_eval(row: Row) -> Iterator[Comparison]:
    """`preference` is 1 or 2 for the better output, 0 or 1.5 for a tie, between for a judge's probability of output 2.

    A null preference (the judge failed) is no verdict and an error.
    """
    if missing(row.get("preference")):
        raise DataError("no verdict: preference is null")
    preference = number(row["preference"], "preference")
    if preference != 0 and not 1 <= preference <= 2:
        raise DataError(f"unreadable verdict: preference {preference:g} is neither 0 nor between 1 and 2")
    probability = 0.5 if preference == 0 else 2.0 - preference
    used = ("id", "instruction", "input", "output_1", "output_2", "generator_1", "generator_2", "annotator", "preference")
    yield judged(
        instruction_prompt(text(row, "instruction"), optional(row, "input")),
        (text(row, "output_1"), text(row, "output_2")),
        [(str(row.get("annotator") or "judge"), 2.0 * probability - 1.0)],
        probability=probability,
        models=(row.get("generator_1"), row.get("generator_2")),
        metadata=leftover(row, used),
    )


def read_llmbar(row: Row) -> Iterator[Comparison]:
    """`label` names the better output, 1 or 2; the data set has no ties and no names of annotators."""
    label = number(row.get("label"), "label")
    if label not in (1, 2):
        raise DataError(f"unreadable verdict: label {label:g} is neither 1 nor 2")
    sides = (text(row, "output_1"), text(row, "output_2"))
    metadata = leftover(row, ("id", "input", "output_1", "output_2", "label"))
    yield judged((Message("user", text(row, "input")),), sides, [("benchmark", 1.0 if label == 1 else -1.0)], metadata=metadata)


def read_pandalm(row: Row) -> Iterator[Comparison]:
    """`annotator1` to `annotatorN` say 1 or 2 for the better response, 0 for a tie; nulls did not vote."""
    names = sorted((name for name in row if _ANNOTATOR.fullmatch(name)), key=lambda name: int(_ANNOTATOR.sub(r"\1", name)))
    votes = []
    for name in names:
        if not missing(row[name]):
            verdict = number(row[name], name)
            if verdict not in (0, 1, 2):
                raise DataError(f"unreadable verdict: {name} says {verdict:g}, not 0, 1 or 2")
            votes.append((name, {0: 0.0, 1: 1.0, 2: -1.0}[int(verdict)]))
    if not votes:
        raise DataError("no verdict: no annotator voted")
    models = str(row.get("cmp_key") or "").split("_")
    yield judged(
        instruction_prompt(text(row, "instruction"), optional(row, "input")),
        (text(row, "response1"), text(row, "response2")),
        votes,
        models=(models[0], models[1]) if len(models) == 2 else None,
        metadata=leftover(row, ("id", "instruction", "input", "response1", "response2", "cmp_key", *names)),
    )


def read_open_instruct(row: Row) -> Iterator[Comparison]:
    """`preference` is one of five points from a-is-better to b-is-better; the margin counts points, 2, 1 or 0."""
    if missing(row.get("preference")):
        raise DataError("no verdict: preference is null")
    verdict = _SCALE.get(str(row["preference"]).strip().lower())
    if verdict is None:
        raise DataError(f"unreadable verdict: preference {row['preference']!r:.40} is not a point of the scale")
    used = ("prompt", "completion_a", "completion_b", "model_a", "model_b", "preference", "evaluator", "id")
    yield judged(
        (Message("user", text(row, "prompt")),),
        (text(row, "completion_a"), text(row, "completion_b")),
        [(str(row.get("evaluator") or "annotator"), verdict[0])],
        margin=verdict[1],
        models=(row.get("model_a"), row.get("model_b")),
        metadata=leftover(row, used),
    )


FORMATS = (
    Format("alpaca_eval", having("instruction", "output_1", "output_2", "preference"), {Comparison: read_alpaca_eval}),
    Format("llmbar", having("input", "output_1", "output_2", "label"), {Comparison: read_llmbar}),
    Format("pandalm", having("instruction", "response1", "response2", "annotator1|annotator_1"), {Comparison: read_pandalm}),
    Format("open_instruct", having("prompt", "completion_a", "completion_b", "preference"), {Comparison: read_open_instruct}),
)
