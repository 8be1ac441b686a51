"""Wrong rows of every format: each goes to quarantine with its file, its line and a reason, and the
other rows are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.bad_input.rows import GOOD, KINDS, SEEDS, changed, refused, write

from tether.core.errors import DataError
from tether.core.types import Comparison
from tether.data.formats.rankings import MOST
from tether.data.formats.registry import FORMATS
from tether.data.sources import read

HUGE = 10**400
NAN, INFINITE = float("nan"), float("inf")
USER, REPLY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
HALF = '[{"role": "user", "content": "\\ud800"}]'
TREE = GOOD["open_assistant"]["prompt"]
REPLIES = TREE["replies"]

# format, what is changed in its good row, how the reason begins
SOFT = (
    "unreadable label: labels holds 0.3, a probability and no verdict. Put such numbers into a "
    "column of their own and "
    "name it by label_column"
)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("preference", {"chosen": "No."}, "equal responses: chosen and rejected are the same"),
    ("preference", {"chosen": ...}, "missing text: nothing in column chosen"),
    ("preference", {"rejected": NAN}, "missing text: nothing in column rejected"),
    ("preference", {"chosen": ""}, "empty response: chosen holds no text"),
    ("preference", {"chosen": " \n "}, "empty response: chosen holds no text"),
    ("preference", {"chosen": []}, "empty response: chosen has no turn after the prompt"),
    ("preference", {"chosen": [[]]}, "not a message: column chosen lists a list where a role and "
                                     "a content belong"),
    ("preference", {"chosen": {"role": 5, "content": "x"}}, "unknown role: 5 in column chosen"),
    ("preference", {"chosen": {**REPLY, "content": 5}}, "not a message: the content of a turn in "
                                                        "column chosen is a number"),
    ("preference", {"chosen": INFINITE}, "not a text: column chosen holds inf"),
    ("preference", {"prompt": ...}, "empty prompt: no turn before the response"),
    ("preference", {"prompt": {"text": "Why?"}}, "unknown role: None in column prompt"),
    ("preference", {"prompt": [USER, REPLY]}, "prompt ends on an assistant turn"),
    ("preference", {"prompt": [{"role": "system", "content": "s"}]}, "prompt without a question"),
    ("preference", {"prompt": "a\0b"}, "NUL character: a text holds a byte 0"),
    ("preference", {"a\0b": 1}, "NUL character: a text holds a byte 0"),
    ("preference", {"prompt": "\ud800"}, "not UTF-8: half a surrogate pair"),
    ("preference", {"metadata": {"deep": ["\udfff"]}}, "not UTF-8: half a surrogate pair"),
    ("preference", {"prompt": HALF}, "not UTF-8: half a surrogate pair, in the JSON text of "
                                     "column prompt"),
    ("preference", {"prompt": '[{"role": "user", "content": "\\u0000"}]'}, "NUL character: a text "
                                                                           "holds a byte 0"),
    ("preference", {"metadata": json.loads("[" * 120 + "]" * 120)}, "malformed JSON: lists or "
                                                                    "objects nested more than 100 deep"),
    ("preference", {"margin": "much"}, "not a number: column margin holds 'much'"),
    ("preference", {"margin": HUGE}, "not a number: column margin holds 1000"),
    ("preference", {"margin": INFINITE}, "not a number: column margin holds inf"),
    ("preference", {"margin": [1]}, "not a number: column margin holds [1]"),
    ("preference", {"margin": -1}, "contradictory margin: rejected is better than chosen by 1"),
    ("preference", {"margin": None, "score_chosen": 1, "score_rejected": 2}, "contradictory "
                                                                             "margin"),
    ("preference", {"margin": None, "score_chosen": "high", "score_rejected": 2}, "not a number: "
                                                                                  "column "
                                                                                  "score_chosen holds"),
    ("preference", {"probability": 1.5}, "impossible probability: 1.5"),
    ("preference", {"tie": "perhaps"}, "unreadable label: column tie holds 'perhaps'"),
    ("preference", {"annotations": 5}, "not a list: column annotations holds a number"),
    ("preference", {"annotations": "[1"}, "not a list: column annotations holds a text that only "
                                          "begins like one"),
    ("preference", {"annotations": ["ann"]}, "not an annotation: annotations need annotator and "
                                             "preference"),
    ("preference", {"annotations": [{"annotator": [], "preference": 1}]}, "not a text: column "
                                                                          "annotator holds a list"),
    ("preference", {"annotations": [{"annotator": "x", "preference": 7}]}, "impossible "
                                                                           "preference: 7 of an "
                                                                           "annotator"),
    ("preference", {"group": ["g"]}, "not a text: column group holds a list"),
    ("preference", {"system": {"text": "s"}}, "not a text: column system holds an object"),
    ("sharegpt_pairs", {"chosen": GOOD["sharegpt_pairs"]["rejected"]}, "equal responses"),
    ("sharegpt_pairs", {"conversations": [{"from": "human"}]}, "not a message: the content of a "
                                                               "turn in column conversations"),
    ("hh", {"chosen": GOOD["hh"]["rejected"]}, "equal responses"),
    ("hh", {"chosen": "Hello"}, "not a transcript: it does not begin with a Human or an Assistant turn"),
    ("hh", {"chosen": "\n\nHuman: Milk?\n\nAssistant: Yes."}, "no shared prompt: chosen and "
                                                              "rejected differ"),
    ("hh", {"chosen": 7}, "not a transcript"),
    ("ultrafeedback", {"completions": {"a": 1}}, "not a list: column completions holds an object"),
    ("ultrafeedback", {"completions": ["Oak", "Cat"]}, "not a response"),
    ("ultrafeedback", {"completions": []}, "too few responses: 0"),
    ("ultrafeedback", {"completions": [{"response": None, "overall_score": 1}]}, "not a text: "
                                                                                 "column completions.response holds nothing"),
    ("nectar", {"answers": [1, 2]}, "not a response: answers need answer and rank"),
    ("nectar", {"answers": [{"answer": "a", "rank": "best"}]}, "not a number: column rank holds "
                                                               "'best'"),
    ("ranking", {"scores": [1]}, "uneven lists: 2 responses but 1 scores"),
    ("ranking", {"scores": [1, NAN]}, "not a number: column scores holds nan"),
    ("ranking", {"responses": "1 2"}, "not a list: column responses holds a text"),
    ("ranking", {"responses": ["1", NAN]}, "not a text: column responses holds nan"),
    ("ranking", {"responses": ["x"] * (MOST + 1), "scores": [0] * (MOST + 1)}, "too many "
                                                                               "responses: "
                                                                               f"{MOST + 1}"),
    ("webgpt", {"score_0": None}, "not a number: column score_0 holds None"),
    ("webgpt", {"question": {"text": "Q"}}, "missing text: nothing in column full_text"),
    ("webgpt_lists", {"text": ["one"]}, "not a pair: 1 texts and 2 scores"),
    ("webgpt_lists", {"text": ["one", "two"]}, "not a transcript: it does not begin with a Human"),
    ("alpaca_eval", {"preference": None}, "no verdict: preference is null"),
    ("alpaca_eval", {"preference": 3}, "unreadable verdict: preference 3 is neither 0 nor between "
                                       "1 and 2"),
    ("alpaca_eval", {"output_1": "b"}, "equal responses"),
    ("alpaca_eval", {"instruction": ""}, "empty prompt"),
    ("llmbar", {"label": 3}, "unreadable verdict: label 3 is neither 1 nor 2"),
    ("llmbar", {"label": HUGE}, "not a number: column label holds 1000"),
    ("pandalm", {"annotator1": 9}, "unreadable verdict: annotator1 9 "),
    ("pandalm", {"annotator1": None, "annotator2": None, "annotator3": None}, "no verdict: no "
                                                                              "annotator voted"),
    ("helpsteer3", {"overall_preference": 4}, "unreadable verdict: overall_preference 4 is not a "
                                              "whole number from -3 to 3"),
    ("helpsteer3", {"individual_preference": [2]}, "not an annotation: individual_preference "
                                                   "lists something other"),
    ("helpsteer2_preference", {"preference_strength": 1.5}, "unreadable verdict: "
                                                            "preference_strength 1.5"),
    ("helpsteer2_preference", {"preference_strength": None}, "no verdict: preference_strength is null"),
    ("safe_rlhf", {"better_response_id": None}, "no verdict: better_response_id is null"),
    ("shp", {"score_A": 1}, "contradictory scores: labels 1 prefers the response of the lower score"),
    ("summarize_from_feedback", {"summaries": [{"text": "x"}]}, "not a pair: summaries needs two "
                                                                "objects with a text"),
    ("summarize_from_feedback", {"info": {"id": "x"}}, "empty prompt: info has neither a post nor "
                                                       "an article"),
    ("arena", {"winner": 1}, "ambiguous verdict: winner 1"),
    ("arena", {"winner": "model_c"}, "unreadable verdict: winner 'model_c' is none of"),
    ("arena", {"conversation_a": [USER]}, "no shared prompt"),
    ("arena_lists", {"winner_model_b": 1}, "unreadable verdict: 2 of winner_model_a, "
                                           "winner_model_b and winner_tie are 1"),
    ("arena_lists", {"response_a": "[null]"}, "not a text: column response_a holds nothing"),
    ("arena_lists", {"response_a": "[]"}, "uneven lists: 1 turns in prompt but 0 in response_a"),
    ("prometheus_preference", {"orig_preference": "C"}, "unreadable verdict: orig_preference 'C' "
                                                        "is none of"),
    ("two_answers", {"winner": 0}, "ambiguous verdict: winner 0 may count the answers from 0 or "
                                   "from 1"),
    ("two_answers", {"winner": None}, "missing text: nothing in column winner"),
    ("rejected_beside", {"rejected_response": "Pear."}, "equal responses"),
    ("rejected_beside", {"messages": [USER]}, "empty prompt"),
    ("preference_names", {"preferred_output": []}, "empty response: chosen has no turn after the "
                                                   "prompt"),
    ("stack_exchange", {"answers": [{"text": "one", "pm_score": 1}]}, "too few responses: 1"),
    ("rated_conversations", {"conv_A_rating": "high"}, "not a number: column conv_A_rating holds "
                                                       "'high'"),
    ("gemini_preference", {"completions": [1]}, "not a response: completions need completion "
                                                "and score"),
    ("gemini_preference", {"contents": []}, "empty prompt"),
    ("nova_preference", {"messages": []}, "not a comparison: the last message lists no candidates"),
    ("nova_preference", {"messages": [USER, {"role": "assistant", "candidates": [{}]}]},
     "unreadable label: column preferenceLabel holds None"),
    ("helpsteer", {"response": " "}, "empty response"),
    ("preference", {"chosen": 0, "rejected": 1, "responses": ["a", "b"]}, "ambiguous verdict: "
                                                                          "chosen and rejected "
                                                                          "may be places"),
    ("ranked_objects", {"candidates": ["one", "two"]}, "not a ranking: no list of objects with a "
                                                       "text and a score each"),
    ("ranked_objects", {"candidates": [{"text": "x", "score": 1}, {"text": "y", "score": "z"}]}, "not a number: column score"),
    ("scored_answers", {"score_b": None}, "not a pair: no scores of response_a and response_b"),
    ("scored_answers", {"score_b": "low"}, "not a number: column score_b holds 'low'"),
    ("open_instruct", {"preference": "a-wins"}, "unreadable verdict: preference 'a-wins' is not a "
                                                "point of the scale"),
    ("open_instruct", {"completion_a": ...}, "missing text: nothing in column completion_a"),
    ("open_assistant", {"prompt": "Q"}, "not a tree: column prompt holds no message"),
    ("open_assistant", {"prompt": {**TREE, "replies": 5}}, "not a list: column replies holds a "
                                                           "number"),
    ("open_assistant", {"prompt": {**TREE, "replies": []}}, "no ranked siblings: the tree holds "
                                                            "no comparison"),
    ("open_assistant", {"prompt": {**TREE, "replies": [REPLIES[0] | {"rank": n} for n in range(9000)]}},
     "too many responses: 9000, and a ranking has 2 to 512"),
    ("open_assistant", {"prompt": {**TREE, "role": "king"}}, "unknown role: 'king'"),
    ("open_assistant", {"prompt": {**TREE, "text": None}}, "not a text: column text holds nothing"),
    ("open_assistant", {"prompt": {**TREE, "replies": [{**r, "rank": "x"} for r in REPLIES]}}, "not a number: column rank"),
    ("kto_messages", {"messages": 5}, "empty prompt"),
    ("kto_messages", {"label": "maybe"}, "unreadable label: column label holds 'maybe', neither "
                                         "true nor false"),
    ("kto", {"label": None}, "unreadable label: nothing in column label"),
    ("kto", {"completion": None}, "missing text: nothing in column response or completion"),
    ("kto", {"completion": {"role": "user", "content": "A"}}, "response ends on a user turn"),
    ("prmbench", {"error_steps": [9]}, "error step out of range: error_steps 9 of a solution of 2 steps"),
    ("prmbench", {"error_steps": 2}, "not a list: column error_steps holds a number"),
    ("prmbench", {"modified_process": []}, "error step out of range"),
    ("steps", {"steps": [], "labels": []}, "no steps: the solution is empty"),
    ("steps", {"labels": [True]}, "uneven lists: 2 steps but 1 labels"),
    ("steps", {"labels": [1, -1]}, "unreadable label: labels holds -1, a rating and no verdict"),
    ("steps", {"labels": [1, 0.3]}, SOFT),
    ("steps", {"steps": ["one", {}]}, "not a text: column steps holds an object"),
    ("truthful_qa", {"true": "yes"}, "not a number: column true holds 'yes'"),
    ("truthful_qa", {"answer": ""}, "empty response"),
    ("mt_bench", {"turns": []}, "empty prompt: turns is an empty list"),
    ("mt_bench", {"turns": "one"}, "not a list: column turns holds a text"),
    ("mt_bench", {"turns": [None]}, "not a text: column turns holds nothing"),
    ("human_eval", {"prompt": " "}, "empty prompt"),
    ("model_written_evals", {"question": None}, "empty prompt"),
    ("sycophancy", {"prompt": [{}]}, "unknown role: None in column prompt"),
    ("self_instruct", {"instances": []}, "empty response: the task has no instances"),
    ("self_instruct", {"instances": 3}, "not a list: column instances holds a number"),
    ("self_instruct", {"instances": ["x"]}, "not an instance: instances need input and output"),
    ("alpaca_eval_instructions", {"output": " "}, "empty response"),
    ("dolly", {"response": [1]}, "not a message: column response lists a number"),
    ("dolly", {"context": {"a": 1}}, "not a text: column context holds an object"),
    ("alpaca", {"instruction": None}, "empty prompt: "),
    ("alpaca", {"history": [["a"]]}, "unreadable history: each entry needs a question and an "
                                     "answer"),
    ("alpaca", {"history": 5}, "not a list: column history holds a number"),
    ("messages", {"messages": [USER]}, "no assistant turn: the conversation demonstrates nothing"),
    ("messages", {"messages": [REPLY]}, "empty prompt: the conversation is a single assistant turn"),
    ("messages", {"messages": [USER, 5]}, "not a message: column messages lists a number"),
    ("messages", {"messages": [{**USER, "content": [{"type": "image"}]}, REPLY]}, "not a text: a "
                                                                                  "turn in column "
                                                                                  "messages"),
    ("messages", {"messages": None}, "missing text: nothing in column messages"),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": ""}]}, "empty response"),
    ("prompt_response", {"response": None}, "missing text: nothing in column response"),
    ("prompt_response", {"prompt": ""}, "empty prompt"),
    ("gsm8k", {"answer": "####"}, "no final answer: nothing after ####"),
    ("gsm8k_solutions", {"small": {"solution": "1", "is_correct": "x"}}, "unreadable label: "
                                                                         "column small.is_correct "
                                                                         "holds 'x'"),
    ("math", {"solution": "no box"}, r"no final answer: no \boxed in the solution"),
    ("math", {"solution": r"\boxed{1"}, r"no final answer: the braces of \boxed{ do not close"),
    ("question_answer", {"answer": " "}, "no final answer: no \\boxed in the solution"),
    ("prompts", {"prompt": ...}, "empty prompt"),
    ("prompts", {"prompt": 5.5, "system": [1]}, "not a text: a turn in column system has a part"),
    ("prm800k", {"label": {"steps": []}}, "no steps: the solution is empty"),
    ("prm800k", {"label": {"steps": [5]}}, "not a step: label.steps need completions"),
    ("math_shepherd", {"label": "Sums?"}, "uneven marks: label is not the text of input"),
    ("answered_steps", {"conversations": [USER, {"role": "assistant", "content": "+"}]}, "no "
                                                                                         "first step"),
    ("process_bench", {"label": 0.5}, "error step out of range: label 0.5"),
    ("rated_steps", {"steps": [5]}, "not a step: column steps holds a number"),
    ("rated_steps", {"steps": [{"text": "x", "rating": 0.5}]}, "unreadable rating: 0.5"),
    ("function_calls", {"answers": [{"name": 5}]}, "unreadable tool call: in column answers"),
    ("function_calls", {"answers": []}, "not a message"),
    ("openenv", {"sequences": [{"role": "agent", "node_ids": ["b"]}]}, "unreadable capture: a path has no 'b'"),
    ("openenv_trace", {"turns": [{"loss_mask": [1]}]}, "unreadable trace: a turn has no 'prompt_token_ids'"),
    ("calls", {"response": {"choices": []}}, "unreadable call"),
    ("squad", {"answers": {"text": []}}, "no answer: answers.text is an empty list"),
    ("answered_messages", {"ground_truth": " "}, "no final answer: column ground_truth is empty"),
    ("inputs_targets", {"targets": ""}, "empty response"),
    ("dialogue", {"conversation": [USER]}, "no assistant turn"),
    ("verl", {"reward_model": {"ground_truth": {}}}, "not a text: column "
                                                     "reward_model.ground_truth holds an object"),
    ("choices", {"answer": 9}, "no right option: answer is 9, and 2 options count from 0"),
    ("worked_solutions", {"solution": ""}, "empty response"),
    ("svamp", {"Answer": [1, 2]}, "not a text: column Answer holds a list"),
    ("text", {"text": "Pears."}, "plain text: column text has no marks of turns"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "change", "reason"),
    CASES,
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_wrong_row_goes_to_quarantine(
    tmp_path: Path,
    layout: str,
    change: dict[str, Any],
    reason: str,
) -> None:
    good = GOOD[layout]
    path = write(tmp_path / "rows.jsonl", good, changed(good, change), good)
    count, found = refused(path, KINDS[layout], format=layout)
    one, _ = refused(write(tmp_path / "one.jsonl", good), KINDS[layout], format=layout)
    assert {(file, line) for file, line, _ in found} == {(str(path), 2)}
    assert found[0][2].startswith(reason)
    assert count >= 2 * one  # of a row with many parts, those that are right are used
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: .* Mend or remove the row"):
        list(read(path, KINDS[layout], format=layout, strict=True))


def test_every_format_has_a_good_row_and_a_wrong_one(tmp_path: Path) -> None:
    names = {layout.name for layout in FORMATS}
    assert (
        names
        == {seed["format"] for seed in SEEDS} - {"label-studio", "argilla", "answers"}
        == {case[0] for case in CASES}
    )
    for seed in SEEDS:
        if seed["format"] in names:
            assert (
                refused(write(tmp_path / "rows.jsonl", seed["row"]), KINDS[seed["format"]])[1] == []
            )


def test_two_rows_of_one_id_are_two_records(tmp_path: Path) -> None:
    rows = [
        {"id": name, "prompt": f"p{n}", "chosen": "a", "rejected": "b"}
        for n, name in enumerate(["x", "x", 7, "7", ""])
    ]
    assert [pair.id for pair in read(write(tmp_path / "r.jsonl", *rows), Comparison)] == [
        "x",
        "x@r:2",
        "7",
        "7@r:4",
        "r:5",
    ]
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "r.jsonl", rows[0], rows[4])
    ids = [pair.id for pair in read(tmp_path, Comparison)]
    assert len(set(ids)) == len(ids) == 7


def test_rows_of_several_formats_in_one_file(tmp_path: Path) -> None:
    """The commonest format is the file's; what is of another goes to quarantine."""
    path = write(tmp_path / "rows.jsonl", GOOD["preference"], GOOD["messages"], GOOD["preference"])
    assert refused(path, Comparison) == (
        2,
        [(str(path), 2, "missing text: nothing in column chosen")],
    )
