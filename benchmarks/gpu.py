"""`python -m benchmarks.gpu`: the first run on a card, in ten minutes at most, as one page of
Markdown.

Rollouts, an update, fine-tuning and PPO on random weights of real shapes: their rates beside the
card's limits, their peak of memory beside the planner's; and the lines at which the host waits for
the card. Limits are those of the data sheet; a card without one is measured. A part that the
planner takes for too large is left out with a sentence. `--smoke` runs the same on a few thousand
weights, on any machine, to see that the script works. `--part` runs one part. `--first` is the first
half hour on a card (`benchmarks.first_card`).
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tether.core.types import Prompt, Sampling, user
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.models.cpu.attention import pick_attention
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter, pick_device
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.rollout.local import LocalEngine
from tether.runner.planning.devices import DECODING_EFFICIENCY, EFFICIENCY, Device, machine_for
from tether.runner.planning.plan import SHAPES, plan
from tether.runner.planning.speeds import RowSizes
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.policy import PolicyConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.supervised import SFTConfig
from tether.stages.learner.local import LocalLearner
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.sft import SFT
from tether.stages.supervised import make_step

TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 4096,
}
LORA = LoraConfig(rank=16, alpha=32, targets="all-linear")
DEVICE = pick_device("auto")
TEMPLATE = 3
"""Tokens that the tiny model's template puts around a message."""
GREETING = TEMPLATE + len("number 1024")


def model_of(shape: str, small: bool) -> Any:
    sizes: dict[str, Any] = TINY if small else SHAPES[shape]
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = (
            LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=8192))
            .eval()
            .requires_grad_(False)
        )
    torch.set_default_dtype(torch.float32)
    model.set_attn_implementation(pick_attention("auto", DEVICE, model))
    return model


def encoder_of() -> ChatEncoder:
    # a token like any other: random weights hardly ever draw it
    return ChatEncoder(tiny_tokenizer(), (4,), None, None)


def timed(work: Callable[[], Any], tries: int = 3) -> float:
    times = []
    # without what the making of the model took
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(tries + 1):
        start = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def peak() -> float:
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else float("nan")


def limits(card: Device) -> tuple[float, float]:
    """Operations and bytes a second that the card's maker promises; of a card that was measured,
    those that it reaches.
    """
    return (
        (card.products / EFFICIENCY, card.bandwidth / DECODING_EFFICIENCY)
        if card.gpu
        else (1e12, 1e11)
    )


def row(what: str, figure: str, limit: str, planned: float) -> None:
    print(f"| {what} | {figure} | {limit} | {planned:.1f} | {peak():.1f} |", flush=True)


def planned(
    card: Device,
    shape: str,
    small: bool,
    rows: RowSizes,
    parts: Sequence[str] = (),
    **stage: Any,
) -> float | None:
    """GB of tensors that the planner counts for a recipe of one stage; None, after a sentence,
    where the card has less.

    Args:
        parts: what is measured of its rollout; none: the most of all phases is compared.
    """
    (name,) = stage
    sections = {"reward": {"lora": LORA.model_dump()}, **stage}
    made = plan(
        build(Recipe, {"run": "unused", "model": {"source": "tiny"}, **sections}),
        card,
        shape=None if small else shape,
        sizes={name: rows},
        stages=[name],
    )
    if made.fits or DEVICE.type != "cuda":
        phases = made.stages[0].phases
        held = [
            {**phase.bytes, "process": 0}
            for phase in phases
            if not parts or phase.name == "rollout"
        ]
        return max(sum(one[part] for part in parts or one) for one in held) / 1e9
    needed, there = made.peak / 1e9, card.memory / 1e9
    print(
        f"| {shape}, {next(iter(stage))} | left out: {needed:.0f} GB are needed, the card has "
        f"{there:.0f} | | | |",
    )
    return None


def begin() -> None:
    """Give back what the last part took, and count the peak of memory anew; to be called when no
    name holds its model.
    """
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rollouts(card: Device, small: bool) -> None:
    for rows in (4,) if small else (64, 256, 1024):
        tokens = 4 if small else 128
        grpo = {
            "prompts_per_step": rows,
            "samples_per_prompt": 2,
            "max_new_tokens": tokens,
            "engine_rows": rows,
            "reward_source": "random",
        }
        begin()
        grpo |= {"micro_batch_tokens": 512}
        parts = "trunk", "cache", "prefill and draw"
        parts = parts if card.gpu else ("trunk", "engine", "cache", "logits")
        expected = planned(card, "qwen2.5-1.5b", small, RowSizes(prompt=GREETING), parts, grpo=grpo)
        if expected is None:
            continue
        model = model_of("qwen2.5-1.5b", small)
        weights = sum(p.numel() for p in model.parameters()) * 2
        engine = LocalEngine(Role(model), encoder_of(), max_rows=rows)
        prompts = [Prompt((user(f"number {n:4}"),), str(n)) for n in range(rows)]
        seconds = timed(
            partial(engine.generate, prompts, Sampling(max_new_tokens=tokens), seed=1),
            2,
        )
        steps = tokens * weights / limits(card)[1]
        rate = f"{rows * tokens / seconds:,.0f} tokens/s"
        row(
            f"rollout, 1.5B, {rows} rows of {tokens}",
            rate,
            f"{steps / seconds:.0%} of bandwidth",
            expected,
        )
        del model, engine


def update(card: Device, small: bool) -> None:
    rows, length = (2, 32) if small else (16, 1024)
    sft = {
        "row_tokens": length,
        "rows_per_micro_batch": rows,
        "max_length": length,
        "lora": LORA.model_dump(),
        "heldout_fraction": 0.0,
    }
    halves = RowSizes(prompt=length // 2, answer=length - length // 2)
    expected = planned(card, "qwen2.5-1.5b", small, halves, sft=sft)
    if expected is None:
        return
    begin()
    model = add_adapter(model_of("qwen2.5-1.5b", small), "policy", LORA)
    role = Role(model, "policy")
    counted = (False,) * (length // 2) + (True,) * (length - length // 2)
    draw = torch.Generator().manual_seed(0)
    sequences = [
        Encoded(tuple(torch.randint(5, 4000, (length,), generator=draw).tolist()), counted)
        for _ in range(rows)
    ]
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
    share = flops / seconds / limits(card)[0]
    row(
        f"update, 1.5B, LoRA, {rows} x {length}",
        f"{rows * length / seconds:,.0f} tokens/s",
        f"{share:.0%} of products",
        expected,
    )


def fine_tuning(model: Any, width: int, response: int) -> Callable[[], Any]:
    policy = Role(model, "policy")
    stage = SFT(SFTConfig(row_tokens=width, rows_per_micro_batch=2), policy, encoder_of())
    learner = LocalLearner(policy.parameters(), OptimizerConfig(learning_rate=1e-5), 100)
    counted = (False,) * (width - response) + (True,) * response
    rows = [Encoded(tuple(n % 200 + 5 for n in range(width)), counted) for _ in range(8)]
    return lambda: make_step(stage, learner, rows)


def question(width: int, response: int, number: int) -> str:
    return f"{'word ' * ((width - response) // 6)}{number:2}"


def four_roles(model: Any, width: int, response: int) -> Callable[[], Any]:
    encoder, dim = encoder_of(), model.get_base_model().config.hidden_size
    model = add_adapter(model, "reward", LORA, seed=1)
    policy = Role(model, "policy")
    reward = LearnedReward(Role(model, "reward", ScalarHead(dim, zero=False).to(DEVICE)), encoder)
    config = PolicyConfig(
        prompts_per_step=16,
        samples_per_prompt=1,
        max_new_tokens=response,
        epochs=1,
        micro_batch_tokens=2 * width,
    )
    value = Role(model, "policy", ScalarHead(dim).to(DEVICE))
    stage = PolicyGradient(
        config=config,
        policy=policy,
        reference=Role(model),
        value=value,
        reward=reward,
        engine=LocalEngine(policy, encoder, max_rows=16),
        encoder=encoder,
    )
    prompts = [Prompt((user(question(width, response, n)),), str(n)) for n in range(16)]
    return lambda: stage.step(prompts, 0)


def trunk(card: Device, small: bool) -> None:
    """PPO's four roles on one trunk of 7B, beside one fine-tuning of the same trunk; on a small
    card of 1.5B.
    """
    width, response = (96, 8) if small else (1024, 256)
    lora = LORA.model_dump()
    sft = {"row_tokens": width, "rows_per_micro_batch": 2, "max_length": width, "lora": lora}
    sft |= {"batch_size": 8, "heldout_fraction": 0.0}
    ppo = {
        "prompts_per_step": 16,
        "samples_per_prompt": 1,
        "max_new_tokens": response,
        "epochs": 1,
        "micro_batch_tokens": 2 * width,
        "lora": lora,
    }
    parts = {
        "fine-tuning": ("sft", sft, width - response, fine_tuning),
        "PPO, four roles,": ("ppo", ppo, TEMPLATE + len(question(width, response, 0)), four_roles),
    }
    for name, (stage, section, prompt, made) in parts.items():
        for shape in ("llama-2-7b", "qwen2.5-1.5b"):
            expected = planned(
                card,
                shape,
                small,
                RowSizes(prompt=prompt, answer=response),
                (),
                **{stage: section},
            )
            if expected is None:
                continue
            begin()
            work = made(add_adapter(model_of(shape, small), "policy", LORA), width, response)
            row(
                f"{name} on one trunk, {shape}, LoRA",
                f"{timed(work, 1):.1f} s a step",
                "",
                expected,
            )
            del work
            break


def waits(card: Device, small: bool) -> None:
    """Lines at which the host waits for the card while a step samples, scores and learns, by CUDA's
    own report.
    """
    begin()
    work = four_roles(add_adapter(model_of("qwen2.5-1.5b", True), "policy", LORA), 96, 8)
    work()
    with warnings.catch_warnings(record=True) as reports:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{report.filename.split('/tether/')[-1]}:{report.lineno}" for report in reports
    )
    print(
        "\nWaits of the host in one step of PPO with 16 prompts and 8 new tokens: "
        f"{sum(lines.values())}.\n",
    )
    print("| line | waits |\n|---|---|")
    for line, count in lines.most_common(20):
        print(f"| {line} | {count} |")


PARTS = {"rollouts": rollouts, "update": update, "trunk": trunk, "waits": waits}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("a few thousand weights, on a GPU or without: does it run?"),
    )
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument(
        "--first",
        action="store_true",
        help="checks of a first half hour, by their value",
    )
    options = parser.parse_args()
    if options.first:
        from benchmarks.first_card import run_checks

        return run_checks()
    small = options.smoke
    if not small and DEVICE.type != "cuda":
        parser.error("there is no GPU here. --smoke runs the same on a few thousand weights")
    card = machine_for("auto")
    print(f"{card.name}; torch {torch.__version__}\n")
    print("| part | rate | of the card's limit | planned GB | peak GB |\n|---|---|---|---|---|")
    for name, part in PARTS.items():
        if options.part in (None, name) and (part is not waits or DEVICE.type == "cuda"):
            part(card, small)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
