"""Your prompts, your reward, GRPO: then the report, an exported model, and a talk with it."""

import sys

import tether


def brief(prompts, responses):
    """Twelve words are best."""
    return [-abs(len(response.split()) - 12) / 12 for response in responses]


model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
questions = [
    f"How do I {what}?"
    for what in ("boil an egg", "fix a flat tyre", "thank a neighbour", "sleep", "learn chess")
]
run = tether.grpo(
    model,
    questions,
    brief,
    steps=20,
    prompts_per_step=4,
    max_new_tokens=48,
    run="runs/brief",
)
print(
    f"reward {run.summary['proxy_first']:.2f} to {run.summary['proxy_last']:.2f}; the page: "
    f"{run.report()}",
)
print(run.policy.generate("How do I make tea?"))
print("exported to", run.export("brief-model"))
run.policy.chat()
