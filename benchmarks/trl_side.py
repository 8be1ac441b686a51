"""TRL's side: its trainers on the same token ids, with the settings that make it fastest here
without changing what it does.

Beside its defaults: adapters in the weights' bfloat16 (peft's default is float32, several times
slower on a CPU), no autocast (the model is bfloat16 throughout), no gradient checkpointing, no
shuffling, nothing reported.
"""

from __future__ import annotations

import tempfile
from itertools import cycle, islice
from typing import Any

import torch
from contestant import Gate, serve, settings
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

TASK = settings()
TOKENIZER = AutoTokenizer.from_pretrained(TASK["model"])
COMMON: dict[str, Any] = {
    "output_dir": tempfile.mkdtemp(),
    "max_steps": 10**5,
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "dataloader_pin_memory": False,
    "per_device_train_batch_size": TASK["micro_batch"],
    "gradient_accumulation_steps": TASK["batch"] // TASK["micro_batch"],
}


def adapted(model: Any, task: str = "CAUSAL_LM", **options: Any) -> Any:
    config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj"],
        task_type=task,
        **options,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def policy() -> Any:
    options = {"attn_implementation": TASK["attention"]} if "attention" in TASK else {}
    return adapted(
        AutoModelForCausalLM.from_pretrained(TASK["model"], dtype=torch.bfloat16, **options),
    )


class Rounds(TrainerCallback):
    """A round is so many optimizer steps; between rounds the trainer waits."""

    def __init__(self, amount: Any, **facts: Any) -> None:
        self.amount, self.facts, self.gate = amount, facts, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.gate = Gate(TASK["updates"], self.amount, **self.facts)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        # The log comes after the step's end, so that a round's last loss is missing from it.
        if self.gate and logs and "loss" in logs:
            self.gate.losses.append(float(logs["loss"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.gate is not None
        self.gate.updated()


def trainable(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def per_round(amount: Any) -> Any:
    """The amount of work of round n, of rows that are gone through in order."""
    size = TASK["updates"] * TASK["batch"]
    return lambda number: sum(
        map(amount, islice(cycle(TASK["rows"]), number * size, (number + 1) * size)),
    )


def sequential(trainer_class: Any) -> Any:
    class InOrder(trainer_class):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def sft() -> None:
    from trl import SFTConfig, SFTTrainer

    data = [
        {"input_ids": r["ids"], "labels": [-100] * r["prompt"] + r["ids"][r["prompt"] :]}
        for r in TASK["rows"]
    ]
    model = policy()
    rounds = Rounds(per_round(lambda row: len(row["ids"])), trainable=trainable(model))
    sequential(SFTTrainer)(
        model,
        SFTConfig(**COMMON),
        train_dataset=Dataset.from_list(data),
        processing_class=TOKENIZER,
        callbacks=[rounds],
    ).train()


def reward() -> None:
    from trl import RewardConfig, RewardTrainer

    data = [
        {f"{side}_ids": r["prompt"] + r[side] for side in ("chosen", "rejected")}
        for r in TASK["rows"]
    ]
    model = AutoModelForSequenceClassification.from_pretrained(
        TASK["model"],
        num_labels=1,
        dtype=torch.bfloat16,
    )
    model.config.pad_token_id = TOKENIZER.pad_token_id
    model = adapted(model, "SEQ_CLS", modules_to_save=["score"])
    rounds = Rounds(per_round(lambda _: 1), trainable=trainable(model))
    sequential(RewardTrainer)(
        model,
        RewardConfig(**COMMON),
        train_dataset=Dataset.from_list(data),
        processing_class=TOKENIZER,
        callbacks=[rounds],
    ).train()


def dpo() -> None:
    from trl import DPOConfig, DPOTrainer

    # Its trainer has no way in for finished ids: it gets plain texts, which tokenize to the same
    # ids.
    data = [
        {
            "prompt": TOKENIZER.decode(r["prompt"]),
            **{s: TOKENIZER.decode(r[s][:-1]) for s in ("chosen", "rejected")},
        }
        for r in TASK["rows"]
    ]
    model = policy()
    rounds = Rounds(per_round(lambda _: 1), trainable=trainable(model))
    sequential(DPOTrainer)(
        model,
        args=DPOConfig(**COMMON),
        train_dataset=Dataset.from_list(data),
        processing_class=TOKENIZER,
        callbacks=[rounds],
    ).train()


def logprobs() -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    model = policy()
    chosen = TASK["rows"][: TASK["batch"]]
    micro = [
        chosen[i : i + TASK["micro_batch"]] for i in range(0, len(chosen), TASK["micro_batch"])
    ]
    batches = []
    for rows in micro:
        width = max(len(r["ids"]) for r in rows)
        ids, mask, counts = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(3))
        for n, row in enumerate(rows):
            size = len(row["ids"])
            ids[n, :size], mask[n, :size], counts[n, row["prompt"] : size] = (
                torch.tensor(row["ids"]),
                1,
                1,
            )
        batches.append((ids, mask, counts[:, 1:].bool()))
    total = sum(int(counts.sum()) for _, _, counts in batches)

    def work() -> dict[str, Any]:
        for _ in range(TASK["updates"]):
            loss = 0.0
            for ids, mask, counts in batches:
                logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
                values = selective_log_softmax(logits, ids[:, 1:])[counts]
                entropy = entropy_from_logits(logits)[counts]
                (-(values.sum() + entropy.sum()) / total).backward()
                loss += float(-values.detach().sum()) / total
            model.zero_grad()
        return {"amount": TASK["updates"] * sum(len(r["ids"]) for r in chosen), "losses": [loss]}

    serve(work)


def grpo() -> None:
    from trl import GRPOConfig, GRPOTrainer

    def even(completion_ids: Any, **_: Any) -> list[float | None]:
        return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

    data = [{"prompt": [{"role": "user", "content": row["text"]}]} for row in TASK["rows"]]
    model = policy()
    config = GRPOConfig(
        **COMMON,
        num_generations=TASK["group"],
        max_completion_length=TASK["tokens"],
        temperature=1.0,
        generation_kwargs={"min_new_tokens": TASK["tokens"]},
    )
    rounds = Rounds(lambda _: TASK["updates"] * TASK["batch"], trainable=trainable(model))
    GRPOTrainer(
        model,
        even,
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=TOKENIZER,
        callbacks=[rounds],
    ).train()


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[TASK["task"]]()
