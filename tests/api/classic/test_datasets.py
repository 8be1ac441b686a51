"""A data set of a user's own class gives the rows of the classic trainers."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tether.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, SFTTrainer


class Rows:
    """Six rows by number."""

    def __len__(self):
        return 6

    def __getitem__(self, place):
        if not 0 <= place < 6:
            raise IndexError
        return {"text": f"red {place}", "input_ids": [1, 2, place + 3]}


class Streamed(Rows):
    """The same by `__iter__`."""

    def __iter__(self):
        for place in range(6):
            yield self[place]


@pytest.mark.parametrize("kind", [Rows, Streamed])
def test_trainers_take_all_rows(kind, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = SFTTrainer(model, train_dataset=kind(), eval_dataset=kind())
    assert len(trainer.train_rows) == len(trainer.eval_rows) == 6


def test_the_batches_of_ppo_hold_all_rows(folder):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = PPOConfig(batch_size=2, mini_batch_size=2)
    loader = PPOTrainer(config, model, tokenizer=tokenizer, dataset=Rows()).dataloader
    numbers = sorted(int(ids[2]) for batch in loader for ids in batch["input_ids"])
    assert numbers == [3, 4, 5, 6, 7, 8]
