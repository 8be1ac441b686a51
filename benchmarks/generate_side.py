"""Sampling by transformers.generate: the same model, prompts padded on the left, temperature 1, no
stop token.
"""

from __future__ import annotations

from typing import Any

import torch
from contestant import serve, settings
from transformers import AutoModelForCausalLM

TASK = settings()


def main() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(TASK["model"], dtype=torch.bfloat16).eval()
    prompts = [row["ids"] for row in TASK["rows"]][: TASK["batch"]]
    width = max(map(len, prompts))
    ids, mask = (
        torch.zeros(len(prompts), width, dtype=torch.long),
        torch.zeros(len(prompts), width, dtype=torch.long),
    )
    for number, prompt in enumerate(prompts):
        ids[number, width - len(prompt) :], mask[number, width - len(prompt) :] = (
            torch.tensor(prompt),
            1,
        )
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}

    @torch.no_grad()
    def work() -> dict[str, Any]:
        tokens = TASK["tokens"]
        model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            **options,
        )
        return {"amount": len(prompts) * tokens}

    with torch.no_grad():
        model.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=1, **options)
    serve(work)


main()
