"""`python -m benchmarks.gpu`: rollouts, updates and a PPO step on one GPU, on random weights of real shapes; prints a table.

Rates are set beside what the GPU's data sheet promises: bandwidth for decoding, bfloat16 products for the update. `--smoke` runs
the same on a few thousand weights, on any machine, to see that the script works.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.core.types import Prompt, Sampling, user
from tether.cpu.attention import pick_attention
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.learner.config import OptimizerConfig
from tether.learner.local import LocalLearner
from tether.models.config import LoraConfig
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter, pick_device
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.rollout.local import LocalEngine
from tether.run.plan import SHAPES
from tether.stages.policy_config import PolicyConfig
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.sft import SFT, SFTConfig
from tether.stages.supervised import make_step

PRODUCTS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "L40S": 0.86e12}
TINY = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 4096}
LORA = LoraConfig(rank=16, alpha=32, targets="all-linear")
DEVICE = pick_device("auto")


def model_of(shape: str, small: bool) -> Any:
    sizes: dict[str, Any] = TINY if small else SHAPES[shape]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=8192)).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    model.set_attn_implementation(pick_attention("auto", DEVICE, model))
    return model


def encoder_of() -> ChatEncoder:
    return ChatEncoder(tiny_tokenizer(), (4,), None, None)  # a token like any other: random weights hardly ever draw it


def timed(work: Callable[[], Any], tries: int = 3) -> float:
    times = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def peak() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else float("nan")


def limits() -> tuple[float, float]:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "H200"
    known = next((key for key in PRODUCTS if key in name), "H200")
    return PRODUCTS[known], BANDWIDTH[known]


def say(what: str, figure: str, limit: str) -> None:
    print(f"| {what} | {figure} | {limit} | {peak():.1f} |", flush=True)


def rollouts(small: bool) -> None:
    model = model_of("qwen2.5-1.5b", small)
    weights = sum(p.numel() for p in model.parameters()) * 2
    for rows in (4,) if small else (64, 256, 1024):
        engine = LocalEngine(Role(model), encoder_of(), max_rows=rows)
        prompts = [Prompt((user(f"number {n}"),), str(n)) for n in range(rows)]
        tokens = 4 if small else 128
        seconds = timed(lambda: engine.generate(prompts, Sampling(max_new_tokens=tokens), seed=1), 2)  # noqa: B023
        steps = tokens * weights / limits()[1]
        say(
            f"rollout, 1.5B, {rows} rows of {tokens}",
            f"{rows * tokens / seconds:,.0f} tokens/s",
            f"{steps / seconds:.0%} of bandwidth",
        )


def update(small: bool) -> None:
    model = add_adapter(model_of("qwen2.5-1.5b", small), "policy", LORA)
    rows, length = (2, 32) if small else (16, 1024)
    role = Role(model, "policy")
    counted = (False,) * (length // 2) + (True,) * (length - length // 2)
    draw = torch.Generator().manual_seed(0)
    sequences = [Encoded(tuple(torch.randint(5, 4000, (length,), generator=draw).tolist()), counted) for _ in range(rows)]
    batch = make_batch(sequences, 0).to(DEVICE)
    learner = LocalLearner(role.parameters(), OptimizerConfig(learning_rate=1e-5), 100)

    def work() -> None:
        learner.backward(-role.logprobs(batch)[0].mean())
        learner.step()

    seconds = timed(work)
    config = model.get_base_model().config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.get_base_model().get_decoder().parameters()) - head
    flops = 4 * (body * rows * length + head * rows * (length // 2))
    say(
        f"update, 1.5B, LoRA, {rows} x {length}",
        f"{rows * length / seconds:,.0f} tokens/s",
        f"{flops / seconds / limits()[0]:.0%} of products",
    )


def fine_tuning(model: Any, width: int, response: int) -> Callable[[], Any]:
    policy = Role(model, "policy")
    stage = SFT(SFTConfig(row_tokens=width, rows_per_micro_batch=2), policy, encoder_of())
    learner = LocalLearner(policy.parameters(), OptimizerConfig(learning_rate=1e-5), 100)
    counted = (False,) * (width - response) + (True,) * response
    rows = [Encoded(tuple(n % 200 + 5 for n in range(width)), counted) for _ in range(8)]
    return lambda: make_step(stage, learner, rows)


def four_roles(model: Any, width: int, response: int) -> Callable[[], Any]:
    encoder, dim = encoder_of(), model.get_base_model().config.hidden_size
    model = add_adapter(model, "reward", LORA, seed=1)
    policy = Role(model, "policy")
    reward = LearnedReward(Role(model, "reward", ScalarHead(dim, zero=False).to(DEVICE)), encoder)
    config = PolicyConfig(
        prompts_per_step=16, samples_per_prompt=1, max_new_tokens=response, epochs=1, micro_batch_tokens=2 * width
    )
    value = Role(model, "policy", ScalarHead(dim).to(DEVICE))
    stage = PolicyGradient(config, policy, Role(model), value, reward, LocalEngine(policy, encoder, max_rows=16), encoder)
    prompts = [Prompt((user("word " * ((width - response) // 6) + str(n)),), str(n)) for n in range(16)]
    return lambda: stage.step(prompts, 0)


def trunk(small: bool) -> None:
    """PPO's four roles on one 7B trunk, beside one fine-tuning of the same trunk."""
    width, response = (96, 8) if small else (1024, 256)
    for name, stage in (("fine-tuning", fine_tuning), ("PPO, four roles,", four_roles)):
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        work = stage(add_adapter(model_of("llama-2-7b", small), "policy", LORA), width, response)
        say(f"{name} on one 7B trunk, LoRA", f"{timed(work, 1):.1f} s a step", "")
        del work
        gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few thousand weights, on a GPU or without: does it run?")
    small = parser.parse_args().smoke
    if not small and DEVICE.type != "cuda":
        parser.error("there is no GPU here. --smoke runs the same on a few thousand weights")
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "no GPU"
    print(f"{name}; torch {torch.__version__}\n\n| what | rate | of the data sheet's limit | peak GB |\n|---|---|---|---|")
    rollouts(small)
    update(small)
    trunk(small)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
