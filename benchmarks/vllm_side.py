"""Sampling by vLLM: continuous batching, prefix caching within a call, all cores; the same token
ids, no stop token.
"""

from __future__ import annotations

from typing import Any

from contestant import serve, settings


def main() -> None:
    from vllm import LLM, SamplingParams

    task = settings()
    model = LLM(
        task["model"],
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=task["batch"],
        enable_prefix_caching=True,
        seed=1,
    )
    prompts: Any = [{"prompt_token_ids": row["ids"]} for row in task["rows"]][: task["batch"]]
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=task["tokens"],
        min_tokens=task["tokens"],
        ignore_eos=True,
    )
    model.generate(prompts[:1], SamplingParams(max_tokens=1), use_tqdm=False)

    def work() -> dict[str, Any]:
        model.reset_prefix_cache()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        return {"amount": sum(len(o.outputs[0].token_ids) for o in outputs)}

    serve(work)


if __name__ == "__main__":
    main()
