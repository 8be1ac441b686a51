"""Every layout of the table for every kind of row: it is read rightly or refused, and never read as
something else.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.data.layouts import LAYOUTS, Layout, told

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Feedback,
    Problem,
    Prompt,
    StepLabels,
)
from tether.data.sources import Quarantine, read

KINDS = (Prompt, Demonstration, Comparison, Feedback, StepLabels, Problem)
RESPONSES = {"response", "completion", "output", "messages"}


def words(conversation: Conversation) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in conversation]


def wrong(record: Any, right: dict[str, Any]) -> str:
    """The first thing in which a record differs from the right reading; nothing if it is right."""
    prompt = told(right["prompt"], "user")
    good, bad = (
        told(right[name], "assistant") if name in right else None for name in ("good", "bad")
    )
    either = [told(side, "assistant") for side in right.get("sides", ())]
    match record:
        case Prompt():
            return "" if words(record.messages) == prompt else f"prompt {words(record.messages)}"
        case Demonstration():
            sides = [] if right.get("both_bad") else [side for side in (good, *either) if side]
            rightly = (
                [told(right["demonstration"], "user")]
                if "demonstration" in right
                else [prompt + side for side in sides]
            )
            return (
                ""
                if words(record.messages) in rightly
                else (f"demonstration {words(record.messages)}")
            )
        case Feedback():
            side = [good] if record.desirable else [bad, *(either if right.get("both_bad") else ())]
            fits = words(record.prompt) == prompt and words(record.response) in side
            return "" if fits else f"feedback {words(record.response)} {record.desirable}"
        case Problem():
            is_right = (words(record.prompt), record.answer) == (prompt, right.get("answer"))
            return "" if is_right else f"problem {words(record.prompt)} {record.answer}"
        case Comparison():
            return differs(record, right, prompt, [good, bad])
    return f"read as {type(record).__name__}"


def differs(pair: Comparison, right: dict[str, Any], prompt: Any, sides: Any) -> str:
    found, tie = [words(pair.chosen), words(pair.rejected)], right.get("tie", False)
    if "sides" in right:
        sides, found = sorted(told(side, "assistant") for side in right["sides"]), sorted(found)
    probability = right.get("probability", 0.5 if tie else 1.0)
    votes = [vote.preference for vote in pair.annotations]
    faults = {
        f"prompt {words(pair.prompt)}": words(pair.prompt) != prompt,
        f"sides {found}": found != sides,
        f"tie {pair.tie}, probability {pair.probability}": (pair.tie, pair.probability)
        != (tie, probability),
        f"margin {pair.margin}": "margin" in right and pair.margin != right["margin"],
        f"votes {votes}": "votes" in right and votes != pytest.approx(right["votes"]),
        "tools are lost": right.get("tools", "") not in pair.prompt[0].tools,
        "both_bad": bool(pair.metadata.get("both_bad")) != right.get("both_bad", False),
    }
    return next((name for name, is_so in faults.items() if is_so), "")


def outcome(tmp_path: Path, layout: Layout, kind: type) -> str:
    """read, refused, or what is wrong."""
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(layout.row)}\n{json.dumps(layout.row)}\n", encoding="utf-8")
    try:
        records = list(read(path, kind, quarantine=Quarantine()))
    except DataError as error:
        expected = layout.kind is not kind or (layout.read is None and layout.refused in str(error))
        return "refused" if expected else f"refused: {error}"
    if layout.read is not None:
        return next(
            (f"misread: {reason}" for record in records if (reason := wrong(record, layout.read))),
            "read",
        )
    # A refused verdict says nothing against the prompt, nor against a response as a demonstration.
    sound = kind is Prompt or (kind is Demonstration and RESPONSES & layout.row.keys())
    return "read" if sound else f"misread as {records[0]}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_is_read_rightly_or_refused(tmp_path: Path, layout: Layout) -> None:
    outcomes = {kind.__name__: outcome(tmp_path, layout, kind) for kind in KINDS}
    assert {
        name: found for name, found in outcomes.items() if found not in ("read", "refused")
    } == {}
    assert outcomes[layout.kind.__name__] == ("read" if layout.read else "refused")


def test_the_table_holds_many_layouts_and_few_are_refused() -> None:
    count = Counter(layout.read is not None for layout in LAYOUTS)
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) >= 125
    assert count[True] >= 105
