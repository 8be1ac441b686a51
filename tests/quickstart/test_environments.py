"""Environments that come with tether: what each pays, and recipes that train in them."""

import json
import re
from pathlib import Path

import pytest

import tether
from tether.core.rundir import read_jsonl
from tether.core.types import Message, Prompt, user
from tether.rewards.environments import environments_of
from tether.settings.environment import EnvironmentConfig
from tether.settings.reading import packaged_recipes
from tether.settings.section import DataConfig

PLACE = "tether.quickstart.environments:"
TEMPLATE = """{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] -%}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor -%}
<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
GAMES = ["hangman", "walk"]
OFTEN = "!#$%&*+-/;=?@^`~QXZ0123456789"
"""Stop tokens with which a random model ends many of its replies; no demonstration has one."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rows(name):
    return list(read_jsonl(Path(DataConfig(path=f"tether:{name}").paths[0])))


def played(name, task, *replies, **settings):
    """The rewards of replies and what is said to them; a dict is a call."""
    config = {"call": PLACE + name, **settings} if ".py" not in name else {"call": name, **settings}
    pool = environments_of(EnvironmentConfig.model_validate(config))
    pool.begin({0: Prompt((user(task["prompt"]),), row=task)})
    turns = []
    for number, reply in enumerate(replies):
        function = {"id": str(number), "type": "function", "function": reply}
        called = isinstance(reply, dict)
        calls = (json.dumps(function),) if called else ()
        message = Message("assistant", "" if called else reply, tool_calls=calls)
        turns.append(pool.step({0: message})[0])
        assert not isinstance(turns[-1], str), turns[-1]
    pool.end()
    return turns


def call(function, **arguments):
    return {"name": function, "arguments": arguments}


def test_the_calculator_pays_the_right_product_in_the_last_reply():
    task = {"prompt": "What is 23 x 87?", "answer": "2001"}
    product, right = played("Calculator", task, call("multiply", a=23, b=87), "23 x 87 = 2,001.")
    assert [m.content for m in product.messages] == ["2001"]
    assert (product.reward, product.done, right.reward, right.done) == (0, False, 1, True)
    for wrong in ("20010", "2", "it is"):
        assert played("Calculator", task, wrong)[0].reward == 0


def test_a_price_for_each_call_is_a_class_as_the_recipe_writes_it(tmp_path):
    text = packaged_recipes()["calculator"].read_text()
    program = re.findall(r"^#     (.+)$", text, re.MULTILINE)
    (tmp_path / "priced.py").write_text("\n".join(program))
    task = {"prompt": "What is 2 x 3 x 4?", "answer": "24"}
    calls = call("multiply", a=2, b=3), call("multiply", a=6, b=4)
    turns = played(f"{tmp_path}/priced.py:Priced", task, *calls, "24")
    assert [turn.reward for turn in turns] == [-0.3, -0.3, 1]


def test_a_guess_pays_the_places_that_its_letter_fills():
    task = {"prompt": "_ _ _ _ _", "word": "apple"}
    turns = played("Hangman", task, "P", "p", "", "Exactly", "a", "l")
    assert [turn.reward for turn in turns] == [2 / 5, 0, 0, 1 / 5, 1 / 5, 1 / 5]
    assert [turn.messages[0].content for turn in turns[:4]] == [
        *["_ p p _ _"] * 3,
        "_ p p _ e",
    ]
    assert [turn.done for turn in turns] == [False] * 5 + [True]


def test_a_step_pays_its_part_of_the_way():
    task = {"prompt": "Go.", "word": "nnw"}
    turns = played("Walk", task, "North", "east", "west, of course", "n", "n")
    assert [turn.reward for turn in turns] == [1 / 3, 0, 1 / 3, 1 / 3, 0]
    assert turns[0].messages[0].content == "The door is 1 north, 0 south, 0 east and 1 west."
    assert [turn.done for turn in turns[:4]] == [False, False, False, True]


def test_python_runs_in_the_sandbox_of_code_rewards(tmp_path):
    programs = ["print(6 * 7)", "1 / 0", f"open({str(tmp_path / 'x')!r}, 'w')", "print('a' * 999)"]
    pool = environments_of(EnvironmentConfig(tools=(f"{PLACE}python",), time_limit=120))
    pool.begin({0: Prompt((user("?"),))})
    calls = [json.dumps({"id": "1", "function": call("python", program=p)}) for p in programs]
    turn = pool.step({0: Message("assistant", "", tool_calls=tuple(calls))})[0]
    assert not isinstance(turn, str), turn
    right, raised, written, long = (message.content for message in turn.messages)
    assert right == "gave 42\n"
    assert "ZeroDivisionError" in raised
    assert written.startswith("ended") and not (tmp_path / "x").exists()
    assert len(long) == 500


def test_rows_of_tasks_say_what_their_environments_play():
    for row in rows("products"):
        factors = [int(n) for n in re.findall(r"\d+", row["prompt"])]
        product = factors[0] * factors[1] * (factors[2] if len(factors) > 2 else 1)
        assert row["answer"] == str(product)
    for row in (*rows("hangman"), *rows("hangman_heldout")):
        assert {*row["word"]} <= {*LETTERS}
        assert (
            row["prompt"].count("_")
            == len(row["word"])
            == int(re.findall(r"\d+", row["prompt"])[0])
        )
        assert sum(turn.reward for turn in played("Hangman", row, *dict.fromkeys(row["word"]))) == (
            pytest.approx(1)
        )
    for row in (*rows("walk"), *rows("walk_heldout")):
        (turn,) = played("Walk", row, "here")
        assert row["prompt"].startswith(turn.messages[0].content)
    shown = {row["word"] for row in rows("hangman")}
    assert len({row["word"] for row in rows("hangman_heldout")} - shown) == 32
    for game in GAMES:
        asked = {row["prompt"] for row in rows(game)}
        assert {row["messages"][0]["content"] for row in rows(f"{game}_games")} <= asked
    asked = {row["messages"][0]["content"] for row in rows("calls")}
    assert len(asked & {row["prompt"] for row in rows("products")}) < 24


def test_demonstrations_call_the_tool_and_end_with_what_it_gave():
    for row in rows("calls"):
        question, *turns = row["messages"]
        replies = [turn for turn in turns if turn["role"] == "assistant"]
        steps = [
            reply["tool_calls"][0]["function"] if "tool_calls" in reply else reply["content"]
            for reply in replies
        ]
        task = {"prompt": question["content"], "answer": replies[-1]["content"].split()[-1]}
        answers = played("Calculator", task, *steps)
        tools = [turn["content"] for turn in turns if turn["role"] == "tool"]
        assert [a.messages[0].content for a in answers[:-1]] == tools
        assert answers[-1].reward == 1


SMALL = [
    "run=run",
    "grpo.steps=2",
    "grpo.prompts_per_step=2",
    "grpo.samples_per_prompt=4",
    "grpo.max_new_tokens=8",
]
SHOWN = ["sft.data.limit=8", "sft.epochs=1"]
EVALUATE = "{ prompts = 2, every = 2, temperatures = [] }"
OWN = ["grpo.data.path=problems.jsonl", f"grpo.evaluate={EVALUATE}"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("calculator", SHOWN), *((game, SHOWN) for game in GAMES), ("gsm8k-python", OWN)],
)
def test_a_recipe_trains_a_tiny_model_in_its_environment(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    problems = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    stops = ["<|end|>", *(OFTEN if name in GAMES else "")]
    tiny = "source = 'tiny', dtype = 'float32', chat_template = 'template.jinja'"
    model = f"model={{ {tiny}, stop_tokens = {json.dumps(stops)} }}"
    run = tether.run(name, model, *SMALL, *words, progress=False)
    steps = list(read_jsonl(run.path / "grpo" / "metrics.jsonl"))
    assert len(steps) == 2
    assert all(row["reward/failed"] == 0 for row in steps)
    if name in GAMES:
        samples = list(read_jsonl(run.path / "grpo" / "samples.jsonl"))
        assert any("[user]" in row["response"] for row in samples)
