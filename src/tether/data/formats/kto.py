"""Single responses with a verdict, as KTO takes them: `messages` + `label`, or `prompt`, `completion`, `label`.

https://huggingface.co/docs/trl/dataset_formats#unpaired-preference,
https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md (paper: https://arxiv.org/abs/2402.01306)
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.core.errors import DataError
from tether.core.types import Feedback
from tether.data.formats.conversation import conversation
from tether.data.formats.fields import boolean, feedback, leftover, missing, turns
from tether.data.formats.format import Format, Row, having
from tether.data.formats.preference import prompt_turns

_LABELS = ("label", "kto_tag")
_USED = (*_LABELS, "id", "system", "messages", "conversations", "prompt", "question", "completion", "response")


def read_feedback(row: Row) -> Iterator[Feedback]:
    """The last assistant turn is the response that `label` judges."""
    name = next((name for name in _LABELS if not missing(row.get(name))), None)
    if name is None:
        raise DataError("unreadable label: nothing in column label")
    desirable = boolean(row[name], name)
    if missing(row.get("messages")) and missing(row.get("conversations")):
        prompt = prompt_turns(row, "prompt", "question")
        column = "completion" if missing(row.get("response")) else "response"
        if missing(row.get(column)):
            raise DataError(f"missing text: nothing in column {column}")
        response = turns(row[column], "assistant", column)
    else:
        messages = conversation(row)
        prompt, response = messages[:-1], messages[-1:]
    yield feedback(prompt, response, desirable, leftover(row, _USED))


FORMATS = (
    Format("kto_messages", having("messages|conversations", "label|kto_tag"), {Feedback: read_feedback}),
    Format("kto", having("prompt|question", "completion|response", "label"), {Feedback: read_feedback}),
)
