"""PPO as TRL last had it (1.12): policy and critic as two models under LoRA, a reward model, the
reference with adapters off.

Beside its defaults: everything in bfloat16 without autocast, adapters too. The critic trains all of
its weights, as by default, or an adapter (value = "adapter").
"""

from __future__ import annotations

import tempfile
from itertools import cycle, islice
from typing import Any

import torch
from contestant import Gate, settings
from datasets import Dataset
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

TASK = settings()


class Rounds(TrainerCallback):
    def __init__(self, **facts: Any) -> None:
        self.facts, self.gate = facts, None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.gate = Gate(TASK["updates"], lambda _: TASK["updates"] * TASK["batch"], **self.facts)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.gate is not None
        self.gate.updated()


def main() -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TASK["model"], padding_side="left")
    lora: dict[str, Any] = {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
    }
    policy = AutoModelForCausalLM.from_pretrained(TASK["model"], dtype=torch.bfloat16)
    policy = get_peft_model(
        policy,
        LoraConfig(**lora, task_type="CAUSAL_LM"),
        autocast_adapter_dtype=False,
    )
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(
            TASK["model"],
            num_labels=1,
            dtype=torch.bfloat16,
        )
        for _ in range(2)
    )
    if TASK["value"] == "adapter":
        value.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(**lora), value, "default")
        value.to(torch.bfloat16)
        value.score.requires_grad_(True)
    # More prompts than will be needed: its loader goes through them once for each epoch it was told
    # of.
    data = [{"input_ids": row["ids"]} for row in islice(cycle(TASK["rows"]), 20 * TASK["batch"])]
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        total_episodes=10**5,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
        per_device_train_batch_size=TASK["micro_batch"],
        gradient_accumulation_steps=TASK["batch"] // TASK["micro_batch"],
        num_ppo_epochs=4,
        num_mini_batches=1,
        response_length=TASK["tokens"],
        temperature=1.0,
        dataloader_pin_memory=False,
    )
    trainable = sum(
        p.numel() for model in (policy, value) for p in model.parameters() if p.requires_grad
    )
    PPOTrainer(
        config,
        tokenizer,
        policy,
        None,
        reward,
        Dataset.from_list(data),
        value,
        eval_dataset=Dataset.from_list(data[: TASK["batch"]]),
        callbacks=[Rounds(trainable=trainable)],
    ).train()


if __name__ == "__main__":
    main()
