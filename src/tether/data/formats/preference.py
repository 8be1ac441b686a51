"""Preference pairs as most trainers take them: `prompt`, `chosen`, `rejected`, each a text or a list of messages.

https://huggingface.co/docs/trl/dataset_formats#preference, and with whole conversations and scores
https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized; with ShareGPT turns (`conversations`)
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Annotation, Comparison, Conversation
from tether.data.formats.fields import (
    as_text,
    boolean,
    comparison,
    fold,
    leftover,
    missing,
    number,
    optional,
    sequence,
    system_turn,
    turns,
)
from tether.data.formats.format import Format, Row, having
from tether.data.formats.hh import awaits_assistant, shared_prompt, split_prompt

PROMPTS = ("prompt", "question", "instruction", "conversations")
_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"))
_USED = {
    "id",
    "system",
    "chosen",
    "rejected",
    "margin",
    "tie",
    "probability",
    "annotations",
    "group",
    *PROMPTS,
    *(name for pair in _SCORES for name in pair),
}


def read_pair(row: Row) -> Iterator[Comparison]:
    """`margin`, or the difference of the two scores, is kept; equal scores give no direction and so a tie.

    Optional columns: system, tie, probability, group, annotations (each `annotator`, `preference`).
    """
    prompt, chosen, rejected = _conversations(row)
    margin, equal = _margin(row)
    tie = equal if missing(row.get("tie")) else boolean(row["tie"], "tie")
    probability = None if missing(row.get("probability")) else number(row["probability"], "probability")
    if probability is not None and not 0.0 <= probability <= 1.0:
        raise DataError(f"impossible probability: {probability}")
    votes = [] if missing(row.get("annotations")) else sequence(row["annotations"], "annotations")
    yield comparison(
        prompt,
        chosen,
        rejected,
        tie=tie,
        margin=margin,
        probability=probability,
        annotations=[_annotation(item) for item in votes],
        group=optional(row, "group"),
        metadata=leftover(row, _USED),
    )


def prompt_turns(row: Row, *names: str) -> Conversation:
    """The prompt of a row, whether a text, messages or a transcript that waits for the assistant."""
    name = next((name for name in names if not missing(row.get(name))), None)
    if name is None:
        return ()
    value = row[name]
    return system_turn(row) + (split_prompt(value) if awaits_assistant(value) else turns(value, "user", name))


def _conversations(row: Row) -> tuple[Conversation, Conversation, Conversation]:
    for side in ("chosen", "rejected"):
        if missing(row.get(side)):
            raise DataError(f"missing text: nothing in column {side}")
    chosen, rejected = (turns(row[side], "assistant", side) for side in ("chosen", "rejected"))
    prompt = prompt_turns(row, *PROMPTS)
    if not chosen or not rejected or chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    if chosen == rejected:
        raise DataError("equal responses: chosen and rejected are the same")
    length = shared_prompt(chosen, rejected)
    if not length:
        raise DataError("no shared prompt: chosen and rejected differ from the first turn on")
    shared = chosen[:length]
    if prompt and fold(prompt[-1].content) not in {fold(turn.content) for turn in shared}:
        raise DataError("prompt differs: its text is not a turn of the conversations in chosen and rejected")
    if prompt and prompt[0].role == "system" and shared[0].role != "system":
        shared = (prompt[0], *shared)
    return shared, chosen[length:], rejected[length:]


def _margin(row: Row) -> tuple[float | None, bool]:
    """The margin in the source's units, and whether equal scores make it a tie."""
    margin, equal = None, False
    for better, worse in _SCORES:
        if not missing(row.get(better)) and not missing(row.get(worse)):
            margin = number(row[better], better) - number(row[worse], worse)
            equal = margin == 0
            break
    if not missing(row.get("margin")):
        margin, equal = number(row["margin"], "margin"), False
    if margin is not None and margin < 0:
        raise DataError(f"contradictory margin: rejected is better than chosen by {-margin:g}")
    return margin, equal


def _annotation(item: Any) -> Annotation:
    if not isinstance(item, dict) or not {"annotator", "preference"} <= item.keys():
        raise DataError("not an annotation: annotations need annotator and preference")
    lean = number(item["preference"], "preference")
    if not -1.0 <= lean <= 1.0:
        raise DataError(f"impossible preference: {lean:g} of an annotator, not between -1 and 1")
    return Annotation(as_text(item["annotator"], "annotator"), lean)


FORMATS = (
    Format("sharegpt_pairs", having("conversations", "chosen", "rejected"), {Comparison: read_pair}),
    Format("preference", having("chosen", "rejected"), {Comparison: read_pair}),
)
