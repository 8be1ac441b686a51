"""Published layouts of demonstrations, prompts, problems and step labels: rows written by hand, and
what they must become.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import DataError
from tether.core.types import Demonstration, Message, Problem, Prompt, StepLabels, assistant, user
from tether.data.formats.rendered import turns_of_text
from tether.data.inspection import inspect_data
from tether.data.sources import Quarantine, read

U, A = (
    (lambda words: {"role": "user", "content": words}),
    (lambda words: {"role": "assistant", "content": words}),
)
QA = (user("q"), assistant("a"))
QARB = (*QA, user("r"), assistant("b"))
S = Message("system", "s")


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def one(tmp_path: Path, row: Any, kind: type) -> Any:
    [record] = read(write(tmp_path, row), kind, strict=True)
    return record


def refusal(tmp_path: Path, row: Any, kind: type) -> str:
    with pytest.raises(DataError) as error:
        list(read(write(tmp_path, row), kind))
    return str(error.value)


CALL = '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'
DEMONSTRATIONS: dict[str, tuple[Any, Any]] = {
    "WildChat": (
        {
            "conversation_hash": "h",
            "model": "m",
            "conversation": [{**U("q"), "toxic": False}, {**A("a"), "toxic": False}],
        },
        QA,
    ),
    "LMSYS-chat-1M": (
        {"conversation_id": "c", "conversation": [U("q"), A("a")], "redacted": False},
        QA,
    ),
    "Capybara": (
        {
            "source": "x",
            "conversation": [{"input": "q", "output": "a"}, {"input": "r", "output": "b"}],
        },
        QARB,
    ),
    "firefly": (
        {
            "conversation_id": 1,
            "conversation": [{"human": "q", "assistant": "a"}, {"human": "r", "assistant": "b"}],
        },
        QARB,
    ),
    "LIMA": ({"conversations": ["q", "a", "r", "b"], "source": "x"}, QARB),
    "LIMA as text": ({"conversations": '["q", "a"]'}, QA),
    "UltraChat": ({"id": "0", "data": ["q", "a", "r", "b"]}, QARB),
    "UltraChat 200k": ({"prompt": "q", "prompt_id": "i", "messages": [U("q"), A("a")]}, QA),
    "no_robots": (
        {"prompt": "q", "prompt_id": "i", "messages": [U("q"), A("a")], "category": "c"},
        QA,
    ),
    "Tulu 3": ({"id": "i", "messages": [U("q"), A("a")], "source": "x"}, QA),
    "smoltalk": (
        {"messages": [{"role": "system", "content": "s"}, U("q"), A("a")], "source": "x"},
        (S, *QA),
    ),
    "OpenHermes 2.5": (
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "system_prompt": None,
        },
        QA,
    ),
    "SlimOrca": (
        {
            "conversations": [
                {"from": "system", "value": "s", "weight": None},
                {"from": "human", "value": "q", "weight": 0},
                {"from": "gpt", "value": "a", "weight": 1},
            ],
        },
        (S, *QA),
    ),
    "OpenThoughts": (
        {
            "system": "s",
            "conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "a"}],
        },
        (S, *QA),
    ),
    "ToolACE": (
        {
            "system": "s",
            "conversations": [
                {"from": "user", "value": "q"},
                {"from": "assistant", "value": "[f(x=1)]"},
                {"from": "tool", "value": "t"},
                {"from": "assistant", "value": "a"},
            ],
        },
        (S, user("q"), assistant("[f(x=1)]"), Message("tool", "t"), assistant("a")),
    ),
    "LLaMA-Factory tools": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "t"},
                {"from": "gpt", "value": "a"},
            ],
        },
        (user("q"), Message("assistant", "", (CALL,)), Message("tool", "t"), assistant("a")),
    ),
    "Gemini": (
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "s"}]},
            "contents": [
                {"role": "user", "parts": [{"text": "q"}]},
                {"role": "model", "parts": [{"text": "a"}]},
            ],
        },
        (S, *QA),
    ),
    "Bedrock": (
        {
            "system": [{"text": "s"}],
            "messages": [
                {"role": "user", "content": [{"text": "q"}]},
                {"role": "assistant", "content": [{"text": "a"}]},
            ],
        },
        (S, *QA),
    ),
    "Anthropic": (
        {
            "system": "s",
            "messages": [U("q"), {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
        },
        (S, *QA),
    ),
    "Cohere": (
        {
            "messages": [
                {"role": "System", "content": "s"},
                {"role": "User", "content": "q"},
                {"role": "Chatbot", "content": "a"},
            ],
        },
        (S, *QA),
    ),
    "Mistral": (
        {"messages": [U("q"), {**A("a"), "weight": 0, "prefix": False}, U("r"), A("b")]},
        (user("q"), Message("assistant", "a", train=False), user("r"), assistant("b")),
    ),
    "LangChain": (
        {"messages": [{"role": "human", "content": "q"}, {"role": "ai", "content": "a"}]},
        QA,
    ),
    "gpt-oss": (
        {"messages": [U("q"), {**A("w"), "channel": "analysis"}, {**A("a"), "channel": "final"}]},
        (user("q"), Message("assistant", "a", reasoning="w")),
    ),
    "gpt-oss with a call": (
        {
            "messages": [
                U("q"),
                {**A("w"), "channel": "analysis"},
                {**A('{"x": 1}'), "channel": "commentary", "recipient": "functions.f"},
                {"role": "tool", "name": "f", "content": "t"},
                {**A("a"), "channel": "final"},
            ],
        },
        (
            user("q"),
            Message("assistant", "", (CALL,), reasoning="w"),
            Message("tool", "t", name="f"),
            assistant("a"),
        ),
    ),
    "user, assistant": ({"user": "q", "assistant": "a"}, QA),
    "thought twice": (
        {"messages": [U("q"), {**A("<think>w</think>a"), "reasoning_content": "w"}]},
        (user("q"), assistant("<think>w</think>a")),
    ),
    "Baize": ({"topic": "t", "input": "[|Human|] q\n[|AI|] a"}, QA),
    "Dolly": (
        {"instruction": "q", "context": "c", "response": "a", "category": "x"},
        (user("q\n\nc"), assistant("a")),
    ),
    "Alpaca-GPT4": (
        {
            "instruction": "q",
            "input": "",
            "output": "a",
            "text": ("Below is. ### Instruction: q ### Response: a"),
        },
        QA,
    ),
    "OpenOrca": ({"id": "i", "system_prompt": "s", "question": "q", "response": "a"}, (S, *QA)),
    "MetaMath": ({"query": "q", "response": "a", "type": "GSM", "original_question": "o"}, QA),
    "Orca-Math": ({"question": "q", "answer": "a"}, QA),
    "NuminaMath": (
        {"source": "x", "problem": "p", "solution": "z", "messages": [U("q"), A("a")]},
        QA,
    ),
    "OpenMathInstruct-2": ({"problem": "q", "generated_solution": "a", "expected_answer": "5"}, QA),
    "Magicoder-OSS": ({"lang": "c", "problem": "q", "solution": "a"}, QA),
    "Magpie": (
        {
            "instruction": "q",
            "response": "a",
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
        },
        QA,
    ),
    "Aya": ({"inputs": "q", "targets": "a", "language": "x"}, QA),
    "P3": (
        {
            "inputs": [3, 1],
            "inputs_pretokenized": "q",
            "targets": [4, 1],
            "targets_pretokenized": "a",
        },
        QA,
    ),
    "Super-NaturalInstructions": (
        {"definition": "d", "inputs": "q", "targets": "a"},
        (user("d\n\nq"), assistant("a")),
    ),
    "Firefly 1.1": ({"kind": "k", "input": "q", "target": "a"}, QA),
    "CAMEL": ({"role_1": "x", "topic": "t", "message_1": "q", "message_2": "a"}, QA),
    "input, output": ({"input": "q", "output": "a"}, QA),
    "ms-swift": (
        {"system": "s", "query": "r", "response": "b", "history": [["q", "a"]]},
        (S, *QARB),
    ),
    "SQuAD": (
        {
            "title": "t",
            "context": "c",
            "question": "q",
            "answers": {"text": ["a", "a"], "answer_start": [0, 0]},
        },
        (user("q\n\nc"), assistant("a")),
    ),
    "xLAM": (
        {
            "query": "q",
            "answers": '[{"name": "f", "arguments": {"x": 1}}]',
            "tools": ('[{"name": "f", "parameters": {}}]'),
        },
        (
            Message(
                "user",
                "q",
                tools=('[{"type": "function", "function": {"name": "f", "parameters": {}}}]'),
            ),
            Message("assistant", "", (CALL,)),
        ),
    ),
    "Glaive": (
        {
            "system": "SYSTEM: s",
            "chat": (
                "USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\nFUNCTION RESPONSE: "
                "t\n\n\nASSISTANT: b <|endoftext|>\n"
            ),
        },
        (S, *QA, Message("tool", "t"), assistant("b")),
    ),
    "Guanaco": ({"text": "### Human: q### Assistant: a### Human: r### Assistant: b"}, QARB),
    "ChatML": (
        {
            "text": "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
        },
        (S, *QA),
    ),
    "thought beside the response": (
        {"prompt": "q", "reasoning": "w", "response": "a"},
        (user("q"), Message("assistant", "a", reasoning="w")),
    ),
    "DialogSum's kind": ({"dialog": ["q", "a"]}, QA),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstrations(tmp_path: Path, name: str) -> None:
    row, messages = DEMONSTRATIONS[name]
    assert one(tmp_path, row, Demonstration).messages == messages


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_their_prompts(tmp_path: Path, name: str) -> None:
    row, messages = DEMONSTRATIONS[name]
    assert one(tmp_path, row, Prompt).messages == messages[:-1]


@pytest.mark.parametrize(
    ("words", "turns"),
    [
        (
            "Below is one.\n\n### Instruction:\nq\n\n### Input:\nx\n\n### Response:\na",
            (Message("system", "Below is one."), user("q\n\nx"), assistant("a")),
        ),
        (
            "<s>[INST] <<SYS>>\ns\n<</SYS>>\n\nq [/INST] a </s><s>[INST] r [/INST] b </s>",
            (S, *QARB),
        ),
        ("<s>[INST] q [/INST] a</s> [INST] r [/INST]", (*QA, user("r"))),
        (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\na<|eot_id|>",
            QA,
        ),
        ("<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n", QA),
        ("<|system|>\ns</s>\n<|user|>\nq</s>\n<|assistant|>\na</s>", (S, *QA)),
        ("<|prompter|>q<|endoftext|><|assistant|>a<|endoftext|>", QA),
        (
            "A chat. USER: q ASSISTANT: a</s>USER: r ASSISTANT: b</s>",
            (Message("system", "A chat."), *QARB),
        ),
        ("Human: q\nAssistant: a", QA),
        ("\n\nHuman: q\n\nAssistant: a\n\nHuman: r\n\nAssistant:", (*QA, user("r"))),
        (
            "<|im_start|>user\nSay:\n### Response: x<|im_end|>\n<|im_start|>assistant\na<|im_end|>",
            (user("Say:\n### Response: x"), assistant("a")),
        ),
        ("The user: a story of an Assistant: none.", ()),
        ("# Title\n### Answer: 5", ()),
        ("", ()),
    ],
)
def test_turns_of_rendered_texts(words: str, turns: Any) -> None:
    assert turns_of_text(words) == turns


PROBLEMS: dict[str, tuple[Any, str, str, str]] = {
    "verl": (
        {
            "data_source": "gsm8k",
            "prompt": [U("q")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"index": 0},
        },
        "q",
        "5",
        "",
    ),
    "verl in CSV": (
        {
            "prompt": json.dumps([U("q")]),
            "reward_model": ('{"style": "rule", "ground_truth": "5"}'),
        },
        "q",
        "5",
        "",
    ),
    "OlympiadBench": (
        {"question": "q", "solution": ["w"], "final_answer": ["5"], "context": None},
        "q",
        "5",
        "w",
    ),
    "tests of a program": (
        {"prompt": "q", "answer": '[{"input": "1"}]'},
        "q",
        '[{"input": "1"}]',
        "",
    ),
    "DAPO": (
        {
            "data_source": "math_dapo",
            "prompt": [U("q")],
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
        },
        "q",
        "34",
        "",
    ),
    "Skywork-OR1": (
        {
            "prompt": [U("q")],
            "reward_model": {"ground_truth": '["\\\\frac{1}{2}"]', "style": "rule"},
        },
        "q",
        "\\frac{1}{2}",
        "",
    ),
    "RLVR": ({"messages": [U("q")], "ground_truth": "5", "dataset": "gsm8k"}, "q", "5", ""),
    "OpenAI RFT": ({"messages": [U("q")], "reference_answer": 5}, "q", "5", ""),
    "OpenR1-Math": (
        {
            "problem": "q",
            "solution": "w",
            "answer": "5",
            "messages": [U("q"), A("a")],
            "correctness_math_verify": [True],
        },
        "q",
        "5",
        "w",
    ),
    "messages with a reply": ({"messages": [U("q"), A("a")], "answer": "5"}, "q", "5", ""),
    "Big-Math": (
        {"problem": "q", "answer": "5", "source": "x", "llama8b_solve_rate": 0.2},
        "q",
        "5",
        "",
    ),
    "DeepScaleR": ({"problem": "q", "answer": "5", "solution": ""}, "q", "5", ""),
    "NuminaMath-CoT": (
        {"problem": "q", "solution": "w \\boxed{5}", "messages": [U("q"), A("a")]},
        "q",
        "5",
        "w \\boxed{5}",
    ),
    "AIME": ({"id": 60, "problem": "q", "answer": 33}, "q", "33", ""),
    "OpenMathReasoning": (
        {"problem": "q", "expected_answer": "5", "generated_solution": "w"},
        "q",
        "5",
        "w",
    ),
    "boxed answer": (
        {"question": "q", "answer": "So it is \\boxed{5}."},
        "q",
        "5",
        "So it is \\boxed{5}.",
    ),
    "GSM8K": ({"question": "q", "answer": "w\n#### 1,000"}, "q", "1000", "w\n#### 1,000"),
    "SVAMP": (
        {
            "ID": "c",
            "Body": "Tom has 3.",
            "Question": "How many?",
            "Equation": "3",
            "Answer": "3.0",
            "Type": "x",
        },
        "Tom has 3. How many?",
        "3",
        "",
    ),
    "SQuAD": (
        {"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}},
        "q\n\nc",
        "a",
        "",
    ),
    "MMLU": (
        {"question": "q", "subject": "s", "choices": ["w", "x", "y", "z"], "answer": 2},
        "q\nA. w\nB. x\nC. y\nD. z",
        "C",
        "",
    ),
    "MMLU-Pro": (
        {
            "question": "q",
            "options": ["w", "x"],
            "answer": "B",
            "answer_index": 1,
            "cot_content": "",
        },
        "q\nA. w\nB. x",
        "B",
        "",
    ),
    "ARC": (
        {"question": "q", "choices": {"text": ["w", "x"], "label": ["A", "B"]}, "answerKey": "B"},
        "q\nA. w\nB. x",
        "B",
        "",
    ),
    "ARC with numbers": (
        {"question": "q", "choices": {"text": ["w", "x"], "label": ["1", "2"]}, "answerKey": "1"},
        "q\n1. w\n2. x",
        "1",
        "",
    ),
    "AQuA": (
        {"question": "q", "options": ["A)21", "B)22"], "rationale": "w", "correct": "B"},
        "q\nA. 21\nB. 22",
        "B",
        "w",
    ),
    "MedMCQA": (
        {"question": "q", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 1, "exp": "e"},
        "q\nA. w\nB. x\nC. y\nD. z",
        "B",
        "e",
    ),
    "MedQA": (
        {"question": "q", "options": {"A": "w", "B": "x"}, "answer": "x", "answer_idx": "B"},
        "q\nA. w\nB. x",
        "B",
        "",
    ),
    "RACE": (
        {"article": "t", "question": "q", "options": ["w", "x"], "answer": "A"},
        "q\n\nt\nA. w\nB. x",
        "A",
        "",
    ),
    "BoolQ": ({"question": "q", "passage": "t", "answer": True}, "q\n\nt", "True", ""),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(tmp_path: Path, name: str) -> None:
    row, question, answer, solution = PROBLEMS[name]
    problem = one(tmp_path, row, Problem)
    assert (problem.prompt, problem.answer, problem.solution) == (
        (user(question),),
        answer,
        solution,
    )


PRM800K = {
    "labeler": "l",
    "question": {"problem": "q", "ground_truth_answer": "3"},
    "label": {
        "finish_reason": "found_error",
        "steps": [
            {
                "completions": [{"text": "w", "rating": -1}, {"text": "x", "rating": 1}],
                "human_completion": None,
                "chosen_completion": 1,
            },
            {"completions": [{"text": "y", "rating": 0}], "chosen_completion": 0},
            {"completions": [], "human_completion": {"text": "h"}, "chosen_completion": None},
            {
                "completions": [{"text": "z", "rating": -1}],
                "human_completion": None,
                "chosen_completion": None,
            },
        ],
    },
}
SHEPHERD = "q? Step 1: 1 + 1 = 2. ки\nStep 2: It is 3. The answer is: 3 ки"
STEPS: dict[str, tuple[Any, tuple[str, ...], tuple[bool | None, ...]]] = {
    "PRM800K, question as a text": (
        {**PRM800K, "question": "q?"},
        ("x", "y", "h", "z"),
        (True, None, True, False),
    ),
    "PRM800K, label as a text": (
        {**PRM800K, "question": "q?", "label": json.dumps(PRM800K["label"])},
        ("x", "y", "h", "z"),
        (True, None, True, False),
    ),
    "PRM800K": (PRM800K, ("x", "y", "h", "z"), (True, None, True, False)),
    "TRL": (
        {"prompt": "q?", "completions": ["x", "y"], "labels": [True, False]},
        ("x", "y"),
        (True, False),
    ),
    "rated steps": (
        {
            "problem": "q?",
            "steps": [
                {"text": "x", "rating": 1},
                {"text": "y", "rating": -1},
                {"text": "z", "rating": None},
            ],
        },
        ("x", "y", "z"),
        (True, False, None),
    ),
    "judged steps": (
        {
            "problem": "q?",
            "steps": [{"step": "x", "is_correct": True}, {"step": "y", "is_correct": False}],
        },
        ("x", "y"),
        (True, False),
    ),
    "Math-Shepherd": (
        {
            "input": SHEPHERD,
            "label": SHEPHERD.replace("ки", "+", 1).replace("ки", "-"),
            "task": "GSM8K",
        },
        ("Step 1: 1 + 1 = 2.", "Step 2: It is 3. The answer is: 3"),
        (True, False),
    ),
    "ProcessBench": (
        {
            "id": "i",
            "generator": "g",
            "problem": "q?",
            "steps": ["x", "y", "z"],
            "final_answer_correct": False,
            "label": 1,
        },
        ("x", "y", "z"),
        (True, False, None),
    ),
    "ProcessBench, all right": (
        {"problem": "q?", "steps": ["x", "y"], "label": -1},
        ("x", "y"),
        (True, True),
    ),
    "steps as turns": (
        {"conversations": [U("q? Step 1: x"), A("+"), U("Step 2: y"), A("-")]},
        ("Step 1: x", "Step 2: y"),
        (True, False),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(tmp_path: Path, name: str) -> None:
    row, steps, labels = STEPS[name]
    solution = one(tmp_path, row, StepLabels)
    assert (solution.steps, solution.labels) == (steps, labels)
    assert solution.prompt == (user("q" if name == "PRM800K" else "q?"),)


def test_ratings_are_kept_as_numbers(tmp_path: Path) -> None:
    assert one(tmp_path, PRM800K, StepLabels).metadata["ratings"] == [1, 0, 1, -1]


@pytest.mark.parametrize(
    ("row", "kind", "reason"),
    [
        (
            {"text": "Once upon a time."},
            Demonstration,
            "plain text: column text has no marks of turns.*data.columns",
        ),
        (
            {"segments": [{"label": True, "text": "a"}]},
            Demonstration,
            "segments are pieces of a rendered text.*Write the conversation as messages",
        ),
        (
            {"conversations": [U("q Step 1: x"), A("+")]},
            Demonstration,
            "verdicts in place of replies",
        ),
        ({"messages": [U("q"), {**A("a"), "weight": 0}]}, Demonstration, "no turn to learn"),
        (
            {"context": "c", "question": "q", "answers": {"text": [], "answer_start": []}},
            Problem,
            "no answer: answers.text is an empty list",
        ),
        (
            {"messages": [U("q")], "ground_truth": '{"func_name": "validate_lowercase"}'},
            Problem,
            "a constraint in place of an answer",
        ),
        (
            {"problem": "q", "answer": "proof"},
            Problem,
            "no final answer: column answer says 'proof'",
        ),
        (
            {"question": "q", "answer": "word " * 80},
            Problem,
            "no final answer: column answer holds 80 words",
        ),
        (
            {"question": "q", "answers": {"text": ["a", "b"], "score": [1, 2]}},
            Demonstration,
            "looks like prompts",
        ),
        (
            {"image": "x.jpg", "conversations": ["<image> q", "a"]},
            Demonstration,
            "not a text: column image",
        ),
        (
            {"question": "q", "choices": ["a", "b"], "answer": 5},
            Problem,
            "no right option: answer is 5",
        ),
        (
            {"question": "q", "choices": ["a", "b"], "answer": "It is a, since"},
            Problem,
            "no right option",
        ),
        (
            {"question": "q", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": -1},
            Problem,
            "no right option: cop is -1",
        ),
        (
            {"input": SHEPHERD, "label": SHEPHERD.replace("ки", "+").replace("1 + 1", "1 + 2")},
            StepLabels,
            "uneven marks",
        ),
        (
            {"problem": "q", "steps": ["x"], "label": 3},
            StepLabels,
            "error step out of range: label 3",
        ),
        (
            {"problem": "q", "steps": [{"text": "x", "rating": 7}]},
            StepLabels,
            "unreadable rating: 7",
        ),
        (
            {**PRM800K, "label": {**PRM800K["label"], "finish_reason": "bad_problem"}},
            StepLabels,
            "bad problem",
        ),
        (
            {"goal": "g", "sol1": "a", "sol2": "b", "label": 0},
            Problem,
            "no known format has the columns goal, sol1, sol2, label",
        ),
        ({"ctx": "c", "endings": ["a"], "label": "0"}, Problem, "no known format"),
        (
            {"question": "q", "correct_answer": "a", "distractor1": "b"},
            Problem,
            "looks like prompts",
        ),
    ],
)
def test_layouts_that_are_refused(tmp_path: Path, row: Any, kind: type, reason: str) -> None:
    assert re.search(reason, refusal(tmp_path, row, kind))


MARKED = [
    ({"prompt": "q", "response": "a", "is_correct": False}, True),
    ({"instruction": "q", "input": "", "output": "a", "label": "false"}, True),
    ({"instruction": "q", "input": "", "output": "a", "kto_tag": False}, True),
    ({"messages": [U("q"), A("a")], "accepted": False}, True),
    ({"problem": "q", "generated_solution": "a", "expected_answer": "5", "is_correct": 0}, True),
    ({"prompt": "q", "response": "a", "is_safe": False}, True),
    ({"prompt": "q", "response": "a", "is_correct": True}, False),
    ({"prompt": "q", "response": "a", "score": 1, "rating": 0.2}, False),
    ({"prompt": "q", "response": "a", "correct": "Bern"}, False),
]


@pytest.mark.parametrize(("row", "is_bad"), MARKED)
def test_replies_that_are_marked_as_bad_are_no_demonstrations(
    tmp_path: Path,
    row: Any,
    is_bad: bool,
) -> None:
    good, quarantine = (
        {name: value for name, value in row.items() if not isinstance(value, bool)},
        Quarantine(),
    )
    for name in ("is_correct", "label"):
        if name in row:
            good.pop(name, None)
    records = list(
        read(write(tmp_path, good, row), Demonstration, quarantine=quarantine, strict=True),
    )
    assert [len(records), quarantine.count] == ([1, 1] if is_bad else [2, 0])
    named = {"score", "rating", "correct"} & row.keys()
    assert named <= set(quarantine.unused) and (not is_bad or not named)


def tree_row(
    message: str,
    parent: str | None,
    words: str,
    rank: int | None = None,
    tree: str = "t",
) -> dict[str, Any]:
    role = "prompter" if parent is None or parent.startswith("a") else "assistant"
    return {
        "message_id": message,
        "parent_id": parent,
        "text": words,
        "role": role,
        "rank": rank,
        "message_tree_id": tree,
        "lang": "en",
    }


def test_trees_of_flat_rows(tmp_path: Path) -> None:
    """OASST of the hub: the best path of each tree, whatever the order of its rows; a message
    without its parent is refused.
    """
    rows = [
        tree_row("q", None, "Hi"),
        tree_row("a2", "q", "Hm", 1),
        tree_row("a1", "q", "Hello", 0),
        tree_row("b1", "r", "Fine", tree="u"),
        tree_row("r", None, "Well?", tree="u"),
        tree_row("b9", "gone", "Lost", tree="v"),
        tree_row("c", "a1", "late"),
    ]
    quarantine = Quarantine()
    records = list(read(write(tmp_path, *rows), Demonstration, quarantine=quarantine))
    assert [record.messages for record in records] == [
        (user("Hi"), assistant("Hello")),
        (user("Well?"), assistant("Fine")),
    ]
    assert [record.id for record in records] == ["t", "u"]
    assert dict(quarantine.reasons) == {"orphan": 2} and quarantine.unused["prompt.lang"] == 2
    assert [record.messages for record in read(write(tmp_path, *rows[:5]), Prompt)] == [
        (user("Hi"),),
        (user("Well?"),),
    ]


def test_several_kinds_of_one_row_are_told_by_what_is_wanted(tmp_path: Path) -> None:
    row = {"problem": "p", "solution": "w \\boxed{5}", "answer": "5", "messages": [U("q"), A("a")]}
    assert one(tmp_path, row, Demonstration).messages == QA
    assert one(tmp_path, row, Problem).answer == "5"
    assert inspect_data(write(tmp_path, row)).quarantine.unused.keys() == {
        "problem",
        "solution",
        "answer",
    }
    assert (
        inspect_data(write(tmp_path, {"messages": [U("q")], "ground_truth": "5"})).kind is Problem
    )
