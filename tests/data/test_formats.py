"""Every published format, from rows written by hand, and from the real files against counts that
are made without tether.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import DataError
from tether.core.types import (
    Annotation,
    Comparison,
    Demonstration,
    Feedback,
    Message,
    Problem,
    Prompt,
    StepLabels,
    assistant,
    user,
)
from tether.data.formats.solved import boxed_answer, gsm8k_answer
from tether.data.formats.table import KINDS, TABLES
from tether.data.sources import Quarantine, detect_format, read

DATA = os.environ.get("TETHER_DATA")
needs_data = pytest.mark.skipif(
    not DATA,
    reason=("TETHER_DATA does not name a folder with the published files"),
)


def rows_of(tmp_path: Path, rows: list[Any], kind: type, **options: Any) -> list[Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return list(read(path, kind, strict=True, **options))


def reason_of(tmp_path: Path, row: Any, kind: type, good: Any) -> str:
    """Why `row` is refused in a file whose other row is good."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    quarantine = Quarantine()
    list(read(path, kind, quarantine=quarantine))
    assert [entry["line"] for entry in quarantine.examples] == [2]
    return quarantine.examples[0]["reason"]


def published(name: str) -> list[Any]:
    """The rows of a published file, parsed here and not by tether."""
    path = Path(DATA or "") / name
    raw = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    words = raw.decode("utf-8")
    return (
        json.loads(words)
        if words.startswith("[")
        else [json.loads(line) for line in words.split("\n") if line.strip()]
    )


def loaded(name: str, kind: type, **options: Any) -> tuple[list[Any], Quarantine]:
    quarantine = Quarantine()
    return list(read(Path(DATA or "") / name, kind, quarantine=quarantine, **options)), quarantine


# --- preference pairs
# ---------------------------------------------------------------------------------------------------


def test_plain_pair(tmp_path: Path) -> None:
    [pair] = rows_of(
        tmp_path,
        [{"prompt": "2+2?", "chosen": "4", "rejected": "5", "margin": 1.5, "source": "x"}],
        Comparison,
    )
    assert pair.prompt == (user("2+2?"),)
    assert (pair.chosen, pair.rejected) == ((assistant("4"),), (assistant("5"),))
    assert (pair.margin, pair.tie, pair.probability, pair.id) == (1.5, False, 1.0, "rows:1")
    assert pair.metadata == {"source": "x"}


def test_pair_of_messages_with_a_prompt_list(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "chosen": [{"role": "assistant", "content": "Hello"}],
        "rejected": {"role": "assistant", "content": "Go away"},
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert pair.prompt == (Message("system", "Be brief."), user("Hi"))
    assert pair.chosen == (assistant("Hello"),)
    assert pair.rejected == (assistant("Go away"),)


def whole(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": "user" if i % 2 == 0 else "assistant", "content": turn}
        for i, turn in enumerate(turns)
    ]


def test_whole_conversations_share_their_opening(tmp_path: Path) -> None:
    row = {
        "prompt": "And why?",
        "prompt_id": "p7",
        "chosen": whole("Sky?", "Blue.", "And why?", "Scattering."),
        "rejected": whole("Sky?", "Blue.", "And why?", "Paint."),
        "score_chosen": 8.5,
        "score_rejected": 5.0,
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert pair.prompt == (user("Sky?"), assistant("Blue."), user("And why?"))
    assert (pair.chosen, pair.rejected) == ((assistant("Scattering."),), (assistant("Paint."),))
    assert (pair.margin, pair.tie, pair.id) == (3.5, False, "p7")


def test_equal_scores_are_a_tie_and_a_contradiction_is_refused(tmp_path: Path) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b", "score_chosen": 3, "score_rejected": 3}
    [pair] = rows_of(tmp_path, [good], Comparison)
    assert (pair.tie, pair.margin, pair.probability) == (True, 0.0, 0.5)
    assert "contradictory margin" in reason_of(
        tmp_path,
        {**good, "score_rejected": 4},
        Comparison,
        good,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"chosen": "b"}, "equal responses"),
        ({"chosen": " "}, "empty response"),
        ({"rejected": None}, "missing text: nothing in column rejected"),
        ({"prompt": "\n"}, "empty prompt"),
        ({"prompt": None}, "empty prompt"),
        ({"chosen": {"a": 1}}, "unknown role"),
        ({"chosen": [3]}, "not a message"),
        (
            {"chosen": whole("Other question", "x"), "rejected": whole("Different", "y")},
            "no shared prompt",
        ),
        (
            {"chosen": whole("Other question", "x"), "rejected": whole("Other question", "y")},
            "prompt differs",
        ),
        ({"prompt": "x", "chosen": whole("x"), "rejected": whole("x", "y")}, "empty response"),
        ({"prompt": whole("a", "b")}, "prompt ends on an assistant turn"),
        ({"margin": "much"}, "not a number"),
        ({"probability": 1.2}, "impossible probability"),
    ],
)
def test_bad_pairs_are_refused_with_a_reason(
    tmp_path: Path,
    change: dict[str, Any],
    reason: str,
) -> None:
    good = {"prompt": "p", "chosen": "a", "rejected": "b"}
    assert reason_of(tmp_path, {**good, **change}, Comparison, good).startswith(reason)


def test_our_own_columns_come_back(tmp_path: Path) -> None:
    votes = [{"annotator": "ann", "preference": 1}, {"annotator": "bob", "preference": -0.5}]
    row = {
        "prompt": "p",
        "chosen": "a",
        "rejected": "b",
        "group": "g",
        "probability": 0.5,
        "tie": True,
        "annotations": votes,
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert (pair.group, pair.probability, pair.tie) == ("g", 0.5, True)
    assert pair.annotations == (Annotation("ann", 1.0), Annotation("bob", -0.5))


def test_numbers_and_booleans_are_texts_where_a_text_belongs(tmp_path: Path) -> None:
    [pair] = rows_of(tmp_path, [{"prompt": "2+2?", "chosen": 4, "rejected": True}], Comparison)
    assert (pair.chosen[0].content, pair.rejected[0].content) == ("4", "True")


def test_prompt_as_a_transcript(tmp_path: Path) -> None:
    row = {
        "prompt": ("\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Bye\n\nAssistant:"),
        "chosen": "Bye!",
        "rejected": "No.",
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert pair.prompt == (user("Hi"), assistant("Yes?"), user("Bye"))


def test_sharegpt_pair(tmp_path: Path) -> None:
    row = {
        "conversations": [{"from": "system", "value": ""}, {"from": "human", "value": "Hi"}],
        "chosen": {"from": "gpt", "value": "Hello"},
        "rejected": {"from": "gpt", "value": "What"},
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert (pair.prompt, pair.chosen, pair.rejected) == (
        (user("Hi"),),
        (assistant("Hello"),),
        (assistant("What"),),
    )


# --- hh
# -------------------------------------------------------------------------------------------------------------------

HH = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hey\n\nHuman: Well, Human: is a word\n\nAssistant: It is.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: Hey\n\nHuman: Well, Human: is a word\n\nAssistant: No.",
}


def test_hh_pair(tmp_path: Path) -> None:
    [pair] = rows_of(tmp_path, [HH], Comparison)
    assert pair.prompt == (user("Hi"), assistant("Hey"), user("Well, Human: is a word"))
    assert (pair.chosen, pair.rejected) == ((assistant("It is."),), (assistant("No."),))


def test_hh_pair_that_branches_early_keeps_all_turns(tmp_path: Path) -> None:
    row = {
        "chosen": "\n\nHuman: Hi\n\nAssistant: Hey\n\nHuman: One\n\nAssistant: Two",
        "rejected": "\n\nHuman: Hi\n\nAssistant: Go\n\nAssistant: Away",
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert pair.prompt == (user("Hi"),)
    assert pair.chosen == (assistant("Hey"), user("One"), assistant("Two"))
    assert pair.rejected == (assistant("Go"), assistant("Away"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": HH["chosen"]}, "equal responses"),
        (
            {"rejected": "\n\nHuman: Hi\n\nAssistant: Hey\n\nHuman: Well"},
            "response ends on a user turn",
        ),
        ({"chosen": "\n\nHuman: Hi\n\nAssistant:"}, "empty response"),
        ({"chosen": "\n\nHuman: Other\n\nAssistant: x"}, "no shared prompt"),
        ({"chosen": "Hello there"}, "not a transcript"),
    ],
)
def test_bad_hh_pairs(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    assert reason_of(tmp_path, {**HH, **change}, Comparison, HH).startswith(reason)


@needs_data
def test_published_hh_counts() -> None:
    """29 equal pairs by README; the other reasons are counted here by a regular expression over the
    raw text.
    """
    reasons: Counter[str] = Counter()
    usable = 0
    raw: Counter[str] = Counter()
    for path in sorted((Path(DATA or "") / "hh").glob("*.gz")):
        pairs, quarantine = loaded(f"hh/{path.name}", Comparison)
        usable += len(pairs)
        reasons += quarantine.reasons
        for row in published(f"hh/{path.name}"):
            last = [
                re.split(r"\n\n(?:Human|Assistant):", row[side])[-1].strip()
                for side in ("chosen", "rejected")
            ]
            ends_human = any(
                row[side].rfind("\n\nHuman:") > row[side].rfind("\n\nAssistant:") for side in row
            )
            if row["chosen"] == row["rejected"]:
                raw["equal responses"] += 1
            elif ends_human:
                raw["response ends on a user turn"] += 1
            elif not all(last):
                raw["empty response"] += 1
            else:
                raw["usable"] += 1
            if raw["usable"] and row["chosen"] != row["rejected"] and all(last) and not ends_human:
                assert pairs[raw["usable"] - usable + len(pairs) - 1].chosen[-1].content == last[0]
    assert reasons["equal responses"] == 29
    assert {**reasons, "usable": usable} == dict(raw)


# --- demonstrations
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placeholder",
    ["", "noinput", "N/A", "None", "<noinput>", "No input.", None],
)
def test_alpaca_without_an_input(tmp_path: Path, placeholder: str | None) -> None:
    [demo] = rows_of(
        tmp_path,
        [{"instruction": "Say hi.", "input": placeholder, "output": "Hi."}],
        Demonstration,
    )
    assert demo.messages == (user("Say hi."), assistant("Hi."))


def test_alpaca_with_an_input_and_dolly(tmp_path: Path) -> None:
    [demo] = rows_of(
        tmp_path,
        [{"instruction": "Add.", "input": "1, 2", "output": "3"}],
        Demonstration,
    )
    assert demo.messages == (user("Add.\n\n1, 2"), assistant("3"))
    row = {"instruction": "Add.", "context": "1, 2", "response": "3", "category": "closed_qa"}
    [demo] = rows_of(tmp_path, [row], Demonstration)
    assert demo.messages == (user("Add.\n\n1, 2"), assistant("3"))
    assert demo.metadata == {"category": "closed_qa"}


def test_alpaca_history_and_system(tmp_path: Path) -> None:
    row = {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]}
    [demo] = rows_of(tmp_path, [row], Demonstration)
    assert demo.messages == (
        Message("system", "s"),
        user("a"),
        assistant("b"),
        user("c"),
        assistant("d"),
    )


@pytest.mark.parametrize("column", ["response", "completion", "output"])
def test_prompt_response(tmp_path: Path, column: str) -> None:
    [demo] = rows_of(tmp_path, [{"prompt": "p", column: "r"}], Demonstration)
    assert demo.messages == (user("p"), assistant("r"))


def test_messages_and_sharegpt(tmp_path: Path) -> None:
    expected = (Message("system", "s"), user("a"), assistant("b"))
    parts = [{"type": "text", "text": "a"}]
    openai = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": "b"},
        ],
    }
    sharegpt = {
        "system": "s",
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    for row in (openai, sharegpt):
        [demo] = rows_of(tmp_path, [row], Demonstration)
        assert demo.messages == expected
        [prompt] = rows_of(tmp_path, [row], Prompt)
        assert prompt.messages == expected[:2]


def test_turns_after_the_last_answer_are_left_out_but_belong_to_the_prompt(tmp_path: Path) -> None:
    row = {"messages": whole("a", "b", "c")}
    [demo] = rows_of(tmp_path, [row], Demonstration)
    assert demo.messages == (user("a"), assistant("b"))
    [prompt] = rows_of(tmp_path, [row], Prompt)
    assert prompt.messages == (user("a"), assistant("b"), user("c"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (whole("a"), "no assistant turn"),
        (whole("a", " "), "empty response"),
        ([{"role": "king", "content": "a"}], "unknown role"),
        ([{"role": "assistant", "content": "a"}], "empty prompt"),
        ([{"role": "user", "content": [{"type": "image"}]}], "not a text"),
        ([{"role": "user", "content": None}], "not a message"),
        (7, "no assistant turn"),
    ],
)
def test_bad_conversations(tmp_path: Path, messages: Any, reason: str) -> None:
    assert reason_of(
        tmp_path,
        {"messages": messages},
        Demonstration,
        {"messages": whole("a", "b")},
    ).startswith(reason)


def test_self_instruct_gives_one_demonstration_an_instance(tmp_path: Path) -> None:
    row = {
        "id": "t1",
        "instruction": "Double.",
        "instances": [{"input": "1", "output": "2"}, {"input": "2", "output": "4"}],
    }
    one, two = rows_of(tmp_path, [row], Demonstration)
    assert (one.id, two.id) == ("t1:1", "t1:2")
    assert two.messages == (user("Double.\n\n2"), assistant("4"))


# --- feedback
# -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "desirable"),
    [(True, True), (0, False), ("true", True), ("0", False), (1.0, True), ("False", False)],
)
def test_kto_labels_of_all_types(tmp_path: Path, label: Any, desirable: bool) -> None:
    [plain] = rows_of(tmp_path, [{"prompt": "p", "completion": "c", "label": label}], Feedback)
    [spoken] = rows_of(tmp_path, [{"messages": whole("p", "c"), "label": label}], Feedback)
    for feedback in (plain, spoken):
        assert (feedback.prompt, feedback.response, feedback.desirable) == (
            (user("p"),),
            (assistant("c"),),
            desirable,
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": "maybe"}, "unreadable label"),
        ({"label": None}, "unreadable label"),
        ({"completion": ""}, "empty response"),
    ],
)
def test_bad_feedback(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    good = {"prompt": "p", "completion": "c", "label": True}
    assert reason_of(tmp_path, {**good, **change}, Feedback, good).startswith(reason)


# --- rankings and trees
# ---------------------------------------------------------------------------------------------------


def contents(pairs: list[Comparison]) -> list[tuple[str, str, bool]]:
    return [(pair.chosen[0].content, pair.rejected[0].content, pair.tie) for pair in pairs]


def test_ultrafeedback_all_pairs(tmp_path: Path) -> None:
    completions = [
        {"response": r, "overall_score": s, "model": f"m{r}"}
        for r, s in (("a", 3.0), ("b", 9.5), ("c", 3.0))
    ]
    row = {
        "source": "s",
        "instruction": "Q",
        "completions": [*completions, {"response": "d", "overall_score": None}],
    }
    pairs = rows_of(tmp_path, [row], Comparison)
    assert contents(pairs) == [("b", "a", False), ("a", "c", True), ("b", "c", False)]
    assert [pair.margin for pair in pairs] == [6.5, 0.0, 6.5]
    assert len({pair.group for pair in pairs}) == 1
    assert pairs[0].metadata == {"source": "s", "chosen_model": "mb", "rejected_model": "ma"}
    [demo] = rows_of(tmp_path, [row], Demonstration)
    assert demo.messages == (user("Q"), assistant("b"))
    assert [prompt.text for prompt in rows_of(tmp_path, [row], Prompt)] == ["Q"]
    with pytest.raises(DataError, match="looks like ultrafeedback preferences"):
        rows_of(tmp_path, [row], Feedback)


def test_nectar(tmp_path: Path) -> None:
    answers = [
        {"answer": "worst", "rank": 3.0, "model": "x"},
        {"answer": "best", "rank": 1.0},
        {"answer": "mid", "rank": 2.0},
    ]
    pairs = rows_of(
        tmp_path,
        [{"prompt": "\n\nHuman: Q\n\nAssistant: ", "answers": answers}],
        Comparison,
    )
    assert contents(pairs) == [
        ("best", "worst", False),
        ("mid", "worst", False),
        ("best", "mid", False),
    ]
    assert {pair.prompt for pair in pairs} == {(user("Q"),)}
    assert {pair.margin for pair in pairs} == {None}


def test_plain_rankings(tmp_path: Path) -> None:
    by_score = {"prompt": "Q", "responses": ["a", "b"], "scores": [1, 2]}
    by_rank = {"prompt": "Q", "responses": ["a", "b"], "ranks": [1, 2]}
    assert contents(rows_of(tmp_path, [by_score, by_rank], Comparison)) == [
        ("b", "a", False),
        ("a", "b", False),
    ]
    assert "uneven lists" in reason_of(tmp_path, {**by_score, "scores": [1]}, Comparison, by_score)


def test_a_bad_response_costs_only_its_own_pairs(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(
        json.dumps({"prompt": "Q", "responses": ["a", "", "c"], "scores": [1, 2, 3]}) + "\n",
    )
    quarantine = Quarantine()
    assert contents(list(read(path, Comparison, quarantine=quarantine))) == [("c", "a", False)]
    assert quarantine.reasons == {"empty response": 2}


def node(
    role: str,
    text: str,
    rank: int | None = None,
    *replies: Any,
    **more: Any,
) -> dict[str, Any]:
    return {"role": role, "text": text, "rank": rank, "replies": list(replies), **more}


def test_open_assistant_tree(tmp_path: Path) -> None:
    deep = [node("assistant", "d0", 0), node("assistant", "d1", 1)]
    tree = node(
        "prompter",
        "Q",
        None,
        node("assistant", "second", 1, node("prompter", "More", None, *deep)),
        node("assistant", "first", 0),
        node("assistant", "unranked", None),
        node("assistant", "gone", 2, deleted=True),
    )
    row = {"message_tree_id": "t", "tree_state": "ready", "prompt": tree}
    pairs = rows_of(tmp_path, [row], Comparison)
    assert contents(pairs) == [("first", "second", False), ("d0", "d1", False)]
    assert pairs[1].prompt == (user("Q"), assistant("second"), user("More"))
    assert [pair.id for pair in pairs] == ["t:1", "t:2"]
    assert pairs[0].group != pairs[1].group
    [demo] = rows_of(tmp_path, [row], Demonstration)
    assert demo.messages == (user("Q"), assistant("first"))
    assert [prompt.text for prompt in rows_of(tmp_path, [row], Prompt)] == ["Q"]


@needs_data
def test_published_trees() -> None:
    """Pairs of ranked siblings, counted here by walking the trees: k (k - 1) / 2 for each
    prompter's turn.
    """

    def ranked_pairs(message: dict[str, Any]) -> int:
        ranks = [reply["rank"] for reply in message["replies"] if reply.get("rank") is not None]
        own = len(ranks) * (len(ranks) - 1) // 2 if message["role"] == "prompter" else 0
        return own + sum(ranked_pairs(reply) for reply in message["replies"])

    expected = sum(
        ranked_pairs(row["prompt"]) for row in published("open-assistant/en-100-trees.jsonl.gz")
    )
    pairs, _ = loaded("open-assistant/en-100-trees.jsonl.gz", Comparison)
    assert len(pairs) == expected > 0
    demos, _ = loaded("open-assistant/en-100-trees.jsonl.gz", Demonstration)
    assert len(demos) == 100


# --- scores and judges
# ----------------------------------------------------------------------------------------------------


def test_webgpt_hub_layout(tmp_path: Path) -> None:
    row = {
        "question": {"full_text": "Q", "id": "q"},
        "answer_0": "a",
        "answer_1": "b",
        "score_0": -0.25,
        "score_1": 0.25,
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert (pair.prompt, *contents([pair])) == ((user("Q"),), ("b", "a", False))
    assert pair.margin == 0.5


def test_webgpt_lists(tmp_path: Path) -> None:
    row = {
        "text": ["## Human:\nQ\n\n\n\n## Assistant:\n a", "## Human:\nQ\n\n\n\n## Assistant:\nb"],
        "score": [1, 1],
    }
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert (pair.prompt, *contents([pair])) == ((user("Q"),), ("a", "b", True))
    assert (pair.margin, pair.probability) == (0.0, 0.5)


@needs_data
def test_published_webgpt() -> None:
    pairs, _ = loaded("webgpt/comparisons.jsonl.gz", Comparison)
    raw = published("webgpt/comparisons.jsonl.gz")
    assert Counter(pair.margin for pair in pairs) == Counter(
        abs(a - b) for a, b in (row["score"] for row in raw)
    )
    assert sum(pair.tie for pair in pairs) == 245
    for pair, row in zip(pairs, raw, strict=True):
        better = row["text"][row["score"].index(max(row["score"]))]
        assert better.strip().endswith(pair.chosen[0].content)


@pytest.mark.parametrize(
    ("preference", "chosen", "tie", "probability"),
    [
        (1, "a", False, 1.0),
        (2.0, "b", False, 1.0),
        (0, "a", True, 0.5),
        (1.5, "a", True, 0.5),
        (1.25, "a", False, 0.75),
        (1.75, "b", False, 0.75),
    ],
)
def test_alpaca_eval_preferences(
    tmp_path: Path,
    preference: float,
    chosen: str,
    tie: bool,
    probability: float,
) -> None:
    row = {
        "instruction": "Q",
        "output_1": "a",
        "generator_1": "A",
        "output_2": "b",
        "generator_2": "B",
        "annotator": "gpt4",
    }
    [pair] = rows_of(tmp_path, [{**row, "preference": preference}], Comparison)
    assert (pair.chosen[0].content, pair.tie, pair.probability) == (chosen, tie, probability)
    assert pair.annotations == (Annotation("gpt4", 2 * probability - 1),)
    assert pair.metadata["chosen_model"] == chosen.upper()
    assert pair.metadata["chosen_position"] == (2 if chosen == "b" else 1)


@pytest.mark.parametrize(
    ("preference", "reason"),
    [(None, "no verdict"), (3, "unreadable verdict"), ("first", "not a number")],
)
def test_alpaca_eval_without_a_verdict(tmp_path: Path, preference: Any, reason: str) -> None:
    good = {"instruction": "Q", "output_1": "a", "output_2": "b", "preference": 1}
    assert reason_of(tmp_path, {**good, "preference": preference}, Comparison, good).startswith(
        reason,
    )


@needs_data
def test_published_alpaca_eval() -> None:
    name = "alpaca_eval/gpt4-judged-pairs.jsonl.gz"
    pairs, quarantine = loaded(name, Comparison)
    raw = published(name)
    assert quarantine.reasons["no verdict"] == 6 == sum(row["preference"] is None for row in raw)
    assert (
        sum(pair.tie for pair in pairs) == sum(row["preference"] in (0, 1.5) for row in raw) == 70
    )
    second = sum(pair.metadata["chosen_position"] == 2 for pair in pairs)
    full = [row for row in raw if row["output_1"].strip() and row["output_2"].strip()]
    assert second == sum(row["preference"] == 2 for row in full)
    assert len(pairs) + quarantine.count == len(raw)


def test_llmbar(tmp_path: Path) -> None:
    rows = [{"input": "Q", "output_1": "a", "output_2": "b", "label": label} for label in (1, "2")]
    assert contents(rows_of(tmp_path, rows, Comparison)) == [("a", "b", False), ("b", "a", False)]


@pytest.mark.parametrize(
    ("votes", "chosen", "tie", "probability"),
    [
        ((2, 2, 2), "b", False, 1.0),
        ((1, 1, 0), "a", False, 5 / 6),
        ((0, 0, 1), "a", True, 2 / 3),
        ((0, 1, 2), "a", True, 0.5),
        ((2, 1, 2), "b", False, 2 / 3),
        ((0, 2, None), "b", True, 3 / 4),
    ],
)
def test_pandalm_majorities(
    tmp_path: Path,
    votes: tuple[int, ...],
    chosen: str,
    tie: bool,
    probability: float,
) -> None:
    row = {"instruction": "Q", "input": "i", "response1": "a", "response2": "b", "cmp_key": "m1_m2"}
    row |= {f"annotator{i}": vote for i, vote in enumerate(votes, 1)}
    [pair] = rows_of(tmp_path, [row], Comparison)
    assert (pair.chosen[0].content, pair.tie) == (chosen, tie)
    assert pair.probability == pytest.approx(probability)
    signs = {0: 0.0, 1: 1.0, 2: -1.0}
    sign = -1 if chosen == "b" else 1
    assert [a.preference for a in pair.annotations] == [
        sign * signs[v] for v in votes if v is not None
    ]
    assert pair.metadata["chosen_model"] == ("m2" if chosen == "b" else "m1")


@needs_data
def test_published_pandalm() -> None:
    pairs, quarantine = loaded("pandalm/testset-v1.jsonl.gz", Comparison)
    full = [
        r
        for r in published("pandalm/testset-v1.jsonl.gz")
        if str(r["response1"]).strip() and str(r["response2"]).strip()
    ]
    assert len(pairs) == len(full)
    assert set(quarantine.reasons) == {"empty response"}
    majority = [
        next((v for v, n in Counter(r[f"annotator{i}"] for i in (1, 2, 3)).items() if n > 1), 0)
        for r in full
    ]
    assert Counter(majority) == Counter(
        0 if pair.tie else pair.metadata["chosen_position"] for pair in pairs
    )


def test_open_instruct_scale_and_both_orders(tmp_path: Path) -> None:
    one = {
        "id": 1,
        "prompt": "Q",
        "completion_a": "x",
        "completion_b": "y",
        "model_a": "X",
        "model_b": "Y",
        "evaluator": "e1",
    }
    two = {
        **one,
        "id": 2,
        "completion_a": "y",
        "completion_b": "x",
        "model_a": "Y",
        "model_b": "X",
        "evaluator": "e2",
    }
    rows = [
        {**one, "preference": "a-is-slightly-better"},
        {**two, "preference": "a-is-better"},
        {**two, "preference": "tie"},
    ]
    slight, clear, tie = rows_of(tmp_path, rows, Comparison)
    assert contents([slight, clear, tie]) == [
        ("x", "y", False),
        ("y", "x", False),
        ("y", "x", True),
    ]
    assert [pair.margin for pair in (slight, clear, tie)] == [1.0, 2.0, 0.0]
    assert (slight.annotations, clear.annotations) == (
        (Annotation("e1", 0.5),),
        (Annotation("e2", 1.0),),
    )
    assert slight.group == clear.group == tie.group
    assert clear.metadata["chosen_model"] == "Y"


# --- steps, problems, prompts
# -----------------------------------------------------------------------------------------------


def test_prmbench(tmp_path: Path) -> None:
    row = {
        "idx": "p1",
        "classification": "circular",
        "question": "old",
        "modified_question": "new",
        "modified_process": ["s1", "s2", "s3"],
        "error_steps": [2, 3],
    }
    [labelled] = rows_of(tmp_path, [row], StepLabels)
    assert labelled.prompt == (user("new"),)
    assert (labelled.steps, labelled.labels) == (("s1", "s2", "s3"), (True, False, False))
    assert labelled.metadata == {"idx": "p1", "classification": "circular", "question": "old"}
    for wrong in (0, 4):
        assert "error step out of range" in reason_of(
            tmp_path,
            {**row, "error_steps": [wrong]},
            StepLabels,
            row,
        )


@needs_data
def test_published_prmbench() -> None:
    rows, quarantine = loaded("prmbench/step-errors.jsonl.gz", StepLabels)
    assert (len(rows), dict(quarantine.reasons)) == (2721 - 38, {"error step out of range": 38})
    inside = [
        r
        for r in published("prmbench/step-errors.jsonl.gz")
        if all(1 <= e <= len(r["modified_process"]) for e in r["error_steps"])
    ]
    assert sum(label is False for row in rows for label in row.labels) == sum(
        len(set(r["error_steps"])) for r in inside
    )


@pytest.mark.parametrize("column", ["steps", "completions"])
def test_plain_steps(tmp_path: Path, column: str) -> None:
    row = {"prompt": "Q", column: ["a", "b", "c"], "labels": [True, 0, None]}
    [labelled] = rows_of(tmp_path, [row], StepLabels)
    assert (labelled.steps, labelled.labels) == (("a", "b", "c"), (True, False, None))
    assert "uneven lists" in reason_of(tmp_path, {**row, "labels": [True]}, StepLabels, row)
    assert "unreadable label" in reason_of(tmp_path, {**row, "labels": [1, -1, 0]}, StepLabels, row)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("x\n#### 1,234,567", "1234567"), ("#### -5", "-5"), ("a #### 1 b\n#### 2.50", "2.50")],
)
def test_gsm8k_answers(solution: str, answer: str) -> None:
    assert gsm8k_answer(solution) == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{1}$ or rather $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\{1, {2}\}}", r"\{1, {2}\}"),
        (r"\boxed 5$", "5"),
        (r"\fbox{x^2}", "x^2"),
        (r"\boxed{ 7 } done", "7"),
    ],
)
def test_boxed_answers(solution: str, answer: str) -> None:
    assert boxed_answer(solution) == answer


@pytest.mark.parametrize("solution", ["no box", r"\boxed{1", r"\boxed{}", r"\boxedly{1}"])
def test_missing_boxes(solution: str) -> None:
    with pytest.raises(DataError, match="no final answer"):
        boxed_answer(solution)


def test_problems(tmp_path: Path) -> None:
    [gsm] = rows_of(tmp_path, [{"question": "Q", "answer": "Work.\n#### 1,000"}], Problem)
    assert (gsm.prompt, gsm.answer, gsm.solution) == ((user("Q"),), "1000", "Work.\n#### 1,000")
    [competition] = rows_of(
        tmp_path,
        [
            {
                "problem": "P",
                "solution": (
                    r"so "
                    r"\boxed{3}"
                ),
                "level": "Level 5",
            },
        ],
        Problem,
    )
    assert (competition.answer, competition.metadata) == ("3", {"level": "Level 5"})
    [plain] = rows_of(tmp_path, [{"question": "Q", "answer": 42}], Problem)
    assert (plain.answer, plain.solution) == ("42", "")


@needs_data
def test_published_problems() -> None:
    problems, quarantine = loaded("gsm8k/test.jsonl.gz", Problem)
    assert (len(problems), quarantine.count) == (1019, 0)
    raw = published("gsm8k/test.jsonl.gz")
    assert [float(p.answer) for p in problems] == [
        float(r["answer"].split("#### ")[1].replace(",", "")) for r in raw
    ]
    competition, quarantine = loaded("math/test.jsonl.gz", Problem)
    assert (len(competition), quarantine.count) == (4700, 0)
    assert all(
        p.answer.count("{") - p.answer.count(r"\{") == p.answer.count("}") - p.answer.count(r"\}")
        for p in competition
    )
    truths, _ = loaded("gsm8k/model-solutions.jsonl.gz", Problem)
    assert [truth.answer for truth in truths] == [problem.answer for problem in problems]


@needs_data
def test_published_model_solutions() -> None:
    feedback, _ = loaded("gsm8k/model-solutions.jsonl.gz", Feedback)
    raw = published("gsm8k/model-solutions.jsonl.gz")
    verdicts = Counter(v["is_correct"] for row in raw for v in row.values() if isinstance(v, dict))
    assert Counter(f.desirable for f in feedback) == verdicts
    assert len(feedback) == 4 * 1019
    assert len({f.id for f in feedback}) == len(feedback)


@pytest.mark.parametrize("column", ["prompt", "question", "instruction"])
def test_plain_prompts(tmp_path: Path, column: str) -> None:
    [prompt] = rows_of(tmp_path, [{column: "Q", "topic": "t"}], Prompt)
    assert (prompt.messages, prompt.metadata) == ((user("Q"),), {"topic": "t"})


def test_prompts_of_benchmarks(tmp_path: Path) -> None:
    [bench] = rows_of(
        tmp_path,
        [{"question_id": 81, "category": "w", "turns": ["one", "two"]}],
        Prompt,
    )
    assert (bench.text, bench.id, bench.metadata) == (
        "one",
        "81",
        {"category": "w", "later_turns": ("two",)},
    )
    [code] = rows_of(
        tmp_path,
        [{"task_id": "H/0", "prompt": "def f", "entry_point": "f", "test": "assert"}],
        Prompt,
    )
    assert (code.id, code.metadata) == ("H/0", {"entry_point": "f", "test": "assert"})
    [evil] = rows_of(tmp_path, [{"question": "Q", "answer_matching_behavior": " Yes"}], Prompt)
    assert evil.metadata == {"answer_matching_behavior": " Yes"}
    [bio] = rows_of(tmp_path, [{"prompt": "Q", "corrects": ["A"], "incorrects": ["B"]}], Prompt)
    assert bio.metadata == {"corrects": ["A"], "incorrects": ["B"]}


@needs_data
def test_published_truthful_answers() -> None:
    feedback, _ = loaded("instructgpt/truthful_qa_samples.csv", Feedback)
    with (Path(DATA or "") / "instructgpt/truthful_qa_samples.csv").open(
        newline="",
        encoding="utf-8",
    ) as stream:
        raw = list(csv.DictReader(stream))
    expected = [float(row["true"]) >= 0.5 and float(row["info"]) >= 0.5 for row in raw]
    assert [f.desirable for f in feedback] == expected
    assert feedback[0].metadata["true"] == float(raw[0]["true"])


# --- conversions
# ------------------------------------------------------------------------------------------------------------


def test_conversions(tmp_path: Path) -> None:
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    tie = {**pair, "tie": True}
    [demo] = rows_of(tmp_path, [pair], Demonstration)
    assert demo.messages == (user("p"), assistant("a"))
    assert [p.text for p in rows_of(tmp_path, [pair], Prompt)] == ["p"]
    good, bad = rows_of(tmp_path, [pair, tie], Feedback)
    assert [(f.response[0].content, f.desirable, f.id) for f in (good, bad)] == [
        ("a", True, "rows:1:1"),
        ("b", False, "rows:1:2"),
    ]
    rows = [{"prompt": "p", "completion": "a", "label": label} for label in (True, False)]
    assert len(rows_of(tmp_path, rows, Demonstration)) == 1
    [solved] = rows_of(tmp_path, [{"question": "Q", "answer": "W\n#### 1"}], Demonstration)
    assert solved.messages == (user("Q"), assistant("W\n#### 1"))
    [answered] = rows_of(tmp_path, [{"question": "Q", "answer": "1"}], Demonstration)
    assert answered.messages == (user("Q"), assistant("1"))


# --- every published file
# ---------------------------------------------------------------------------------------------------

# file (or prefix of files) -> format, kind, records or None where another test counts them
EXPECTED: dict[str, tuple[str, type, int | None]] = {
    "alpaca/": ("alpaca", Demonstration, None),
    "alpaca_eval/gpt4-judged-pairs": ("alpaca_eval", Comparison, 10465 - 6 - 2),
    "alpaca_eval/multi-judge-pairs": ("alpaca_eval", Comparison, None),
    "alpaca_eval/instructions-with-davinci003": ("alpaca_eval_instructions", Demonstration, None),
    "dolly/": ("alpaca", Demonstration, 2996),
    "gsm8k/model-solutions": ("gsm8k_solutions", Feedback, 4076),
    "gsm8k/test": ("gsm8k", Problem, 1019),
    "gsm8k/train": ("gsm8k", Problem, 7473),
    "hh/": ("hh", Comparison, None),
    "humaneval/": ("human_eval", Prompt, 164),
    "instructgpt/": ("truthful_qa", Feedback, 3600),
    "llamafactory/dpo_en_demo": ("sharegpt_pairs", Comparison, 300),
    "llamafactory/kto_en_demo": ("kto_messages", Feedback, 300),
    "llmbar/": ("llmbar", Comparison, None),
    "math/": ("math", Problem, 4700),
    "model-written-evals/": ("model_written_evals", Prompt, None),
    "mt_bench/mt-bench-questions": ("mt_bench", Prompt, 80),
    "mt_bench/vicuna-bench-questions": ("mt_bench", Prompt, 80),
    "open-assistant/": ("open_assistant", Comparison, None),
    "open-instruct/": ("open_instruct", Comparison, 1149),
    "pandalm/": ("pandalm", Comparison, None),
    "prmbench/": ("prmbench", StepLabels, 2683),
    "self-instruct/seed_tasks": ("self_instruct", Demonstration, 175),
    "self-instruct/user_oriented_instructions": ("self_instruct", Demonstration, 252),
    "sycophancy/": ("sycophancy", Prompt, 5100),
    "tinyshakespeare/": ("prompts", Prompt, 40000 - 7223),
    "webgpt/": ("webgpt_lists", Comparison, 901),
}
UNREADABLE = {"mt_bench/judge-prompts.jsonl", "mt_bench/mt-bench-reference-gpt4.jsonl"}
FILES = (
    sorted(
        str(p.relative_to(DATA)) for p in Path(DATA).rglob("*") if p.is_file() and p.suffix != ".md"
    )
    if DATA
    else []
)


@needs_data
@pytest.mark.parametrize("name", FILES or ["(TETHER_DATA is not set)"])
def test_every_published_file_loads(name: str) -> None:
    if name in UNREADABLE:
        with pytest.raises(DataError, match="no known format has the columns"):
            detect_format(Path(DATA or "") / name)
        return
    [(layout, kind, count)] = [
        value for prefix, value in EXPECTED.items() if name.startswith(prefix)
    ]
    detected = detect_format(Path(DATA or "") / name)
    assert (detected.name, detected.kind) == (layout, kind)
    records, quarantine = loaded(name, kind)
    assert all(type(record) is kind for record in records)
    assert count is None or len(records) == count
    assert len({record.id for record in records}) == len(records)
    assert quarantine.count <= 0.06 * (len(records) + quarantine.count)
    if kind is Comparison:
        groups = defaultdict(set)
        for pair in records:
            groups[pair.group].add(
                tuple(" ".join(turn.content.lower().split()) for turn in pair.prompt),
            )
        assert all(len(prompts) == 1 for prompts in groups.values())
    prompts = list(itertools.islice(read(Path(DATA or "") / name, Prompt), 5))
    assert all(prompt.messages[-1].role == "user" for prompt in prompts)


def test_the_table_of_formats_has_no_unknown_key() -> None:
    """A key that nothing reads would be left out in silence."""
    known = {"columns", "answers", "verdict", "coding", "prompt", "models", "ranking"}
    known |= {"holds", "doubts", "refuses", *(kind.__name__ for kind in KINDS)}
    strange = {name: row.keys() - known for name, row in TABLES["formats"].items()}
    assert not any(strange.values()), strange
