"""The time of classic trainings: a line before, the measured rest, and a budget that ends them."""

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tether.classic import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from tether.core.errors import ConfigError

TEXTS = [{"text": f"number {n} is a number"} for n in range(8)]
PAIRS = [{"chosen": f"{n} is good.", "rejected": f"{n}, bad."} for n in range(8)]


def supervised(folder, name, **settings):
    if name == "sft":
        model = AutoModelForCausalLM.from_pretrained(folder)
        return SFTTrainer(model, SFTConfig(**settings), train_dataset=TEXTS)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    return RewardTrainer(model, RewardConfig(**settings), train_dataset=PAIRS)


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_the_work_stands_before_it_and_its_time_after_two_updates(
    folder,
    reward_folder,
    name,
    capsys,
):
    where = folder if name == "sft" else reward_folder
    trainer = supervised(where, name, per_device_train_batch_size=2, num_train_epochs=2)
    assert trainer.train().global_step == 8
    first, second = capsys.readouterr().out.splitlines()
    work = f"{name}: 8 rows × 2 passes in 8 updates; "
    assert first == f"{work}the first steps show the time that it takes."
    assert second.startswith(f"{name}: about ") and second.endswith(" for the other 6 steps.")


@pytest.mark.parametrize("name", ["sft", "reward"])
def test_a_budget_ends_a_training_and_its_learning_rate(folder, reward_folder, name, capsys):
    where, epochs, began = folder if name == "sft" else reward_folder, 50_000, time.monotonic()
    trainer = supervised(where, name, budget=0.15, num_train_epochs=epochs, output_dir="out")
    done = trainer.train().global_step
    assert time.monotonic() - began < 40 and 2 < done < epochs
    printed = capsys.readouterr().out
    assert f"{name}: the budget ends it after 0.15 min, at a whole step.\n" in printed
    assert f"{name}: the budget ended it after {done:,} steps.\n" in printed
    with open("out/runs/001/metrics.jsonl") as file:
        rates = [json.loads(line)["learning_rate"] for line in file]
    assert len(rates) == done and rates[-1] < 0.9 * rates[0]
    with open("out/runs/001/summary.json") as file:
        assert json.load(file)["budget"]["ended_at"] == done


class Hours:
    """A clock on which every look at it takes nothing, and every step an hour."""

    now = 0.0

    def __call__(self):
        return self.now


def looped(folder, tokenizer, **settings):
    config = PPOConfig(batch_size=2, mini_batch_size=2, ppo_epochs=1, **settings)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    rows = [{"input_ids": torch.tensor([70 + n, 71, 72])} for n in range(12)]
    return PPOTrainer(config, model, tokenizer=tokenizer, dataset=rows)


def test_a_loop_of_ones_own_ends_where_the_next_step_would_not_fit(folder, tokenizer, capsys):
    """By hand: 4.5 hours; steps end after 1, 2, 3 and 4, and a fifth would end after 5."""
    trainer, clock = looped(folder, tokenizer, budget=4.5 * 60), Hours()
    limit = trainer.clock.limit
    limit.clock, limit.began, seen = clock, 0.0, 0
    for _ in range(3):
        for _batch in trainer.dataloader:
            clock.now, seen = clock.now + 3600, seen + 1
    assert seen == 4 and limit.spent == 4 * 3600
    assert capsys.readouterr().out.splitlines() == [
        "ppo: 6 batches of 2 queries in a pass; the first steps show the time that it takes.",
        "ppo: the budget ends it after 270 min, at a whole step.",
        "ppo: about 4.0 h for the other 4 steps.",
        "ppo: the budget ended it after 4 steps.",
        "ppo: the budget ended it after 4 steps.",
        "ppo: the budget ended it after 4 steps.",
    ]


def test_without_a_budget_a_loop_has_every_batch(folder, tokenizer):
    trainer = looped(folder, tokenizer)
    assert [len(list(trainer.dataloader)) for _ in range(2)] == [6, 6]


def test_a_budget_is_a_number_above_0():
    for kind in (PPOConfig, SFTConfig, RewardConfig):
        assert kind(budget={"minutes": 2}).budget.minutes == kind(budget=2).budget.minutes == 2
        with pytest.raises(ConfigError, match=r"budget.*greater than 0"):
            kind(budget=0)
