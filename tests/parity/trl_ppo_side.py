"""Two epochs of TRL 1.12's PPO on one batch; every tensor of its loop is kept. Run by test_ppo.py
with TRL's own interpreter.

Reads a folder of models (policy, reference, scorer, critic), its settings and prompts; writes
tensors and gradients beside them.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

ROLLOUT = (
    "query_responses",
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "rewards",
    "advantages",
    "returns",
)
UPDATE = (
    "new_logprobs",
    "vpred",
    "mb_advantage",
    "mb_return",
    "mb_values",
    "mb_logprobs",
    "loss",
    "pg_loss",
    "vf_loss",
)


def main():
    folder = Path(sys.argv[1])
    task = json.loads((folder / "task.json").read_text())
    kept = {}

    def watch():
        """Called by TRL's loop between its parts; looks at its variables."""
        variables = sys._getframe(1).f_locals
        if "returns" in variables and "rollout/returns" not in kept:
            kept.update({f"rollout/{name}": variables[name].detach().float() for name in ROLLOUT})
            kept.update(
                {
                    f"rollout/{name}": variables[name]
                    for name in ("padding_mask", "padding_mask_p1")
                },
            )

    ppo_trainer.empty_cache = watch
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / n, dtype=torch.float32)
        for n in ("policy", "reference")
    )
    scorer, critic = (
        AutoModelForSequenceClassification.from_pretrained(
            folder / n,
            num_labels=1,
            dtype=torch.float32,
        )
        for n in ("scorer", "critic")
    )
    kept["critic/head"] = critic.score.weight.detach().clone()
    count = len(task["prompts"])
    rows = Dataset.from_list([{"input_ids": ids} for ids in task["prompts"]])
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        total_episodes=count,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        num_sample_generations=0,
        per_device_train_batch_size=count,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        temperature=1.0,
        dataloader_pin_memory=False,
        max_grad_norm=None,
        **task["settings"],
    )
    trainer = PPOTrainer(
        config,
        tokenizer,
        policy,
        reference,
        scorer,
        rows,
        critic,
        eval_dataset=rows,
    )
    backward, epoch = trainer.accelerator.backward, 0

    def watched(loss):
        nonlocal epoch
        variables = sys._getframe(1).f_locals
        for name in ("new_logprobs", "vpred"):
            variables[name].retain_grad()
        backward(loss)
        kept.update({f"{epoch}/{name}": variables[name].detach().clone() for name in UPDATE})
        kept.update(
            {
                f"{epoch}/{name}.grad": variables[name].grad.clone()
                for name in ("new_logprobs", "vpred")
            },
        )
        if epoch == 0:
            kept.update(
                {
                    f"grad/{n}": p.grad.clone()
                    for n, p in trainer.model.named_parameters()
                    if p.grad is not None
                },
            )
        epoch += 1

    trainer.accelerator.backward = watched
    trainer.train()
    save_file(
        {name: tensor.contiguous() for name, tensor in kept.items()},
        folder / "kept.safetensors",
    )


if __name__ == "__main__":
    main()
