"""A data set of a user's own class: whatever it does, the trainer's rows are what it returned, or one
sentence about what it did.
"""

import os
import random
import time
from collections.abc import Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM

from tether.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, SFTTrainer
from tether.classic.datasets import GuardedRows, guarded
from tether.core.errors import DataError


class Rows:
    """Six rows, made by `deed`, which gets the number of a row, or None for the length."""

    def __init__(self, deed=lambda place: None):
        self.deed = deed

    def __len__(self):
        return 6 if self.deed(None) is None else 0

    def __getitem__(self, place):
        if not 0 <= place < 6:
            raise IndexError
        self.deed(place)
        return {"text": f"red {place}", "input_ids": [1, 2, place + 3]}


class Streamed(Rows):
    """The same by `__iter__` alone, which never ends where no row is refused."""

    def __iter__(self):
        for place in range(6):
            yield self[place]


def failing(error, at):
    def deed(place):
        if place == at:
            raise error

    return deed


def hanging(place):
    if place == 4:
        time.sleep(60)


def ways(rows):
    """All ways in which trainers read rows."""
    return [*rows], rows.__getitems__([0, 4, 2]), len(rows)


@pytest.mark.parametrize("kind", [Rows, Streamed])
@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (failing(ValueError("no"), 4), "raised ValueError: no"),
        (failing(SystemExit(0), 4), "raised SystemExit: 0"),
        (lambda place: os._exit(0) if place == 4 else None, r"raised SystemExit: os._exit\(0\)"),
        (hanging, "gave no answer within 0.3 s, it was in hanging"),
        (failing(RecursionError("deep"), 4), "raised RecursionError"),
    ],
)
def test_a_data_set_that_fails_is_named(kind, deed, words):
    rows = GuardedRows(kind(deed), "train_dataset", time_limit=0.3)
    method = "__iter__" if kind is Streamed else "__getitem__"
    named = rf"^the train_dataset {kind.__name__}.{method} \(test_datasets.py\) {words}"
    with pytest.raises(DataError, match=named):
        list(rows)
    named = rf"^the train_dataset {kind.__name__}.__getitem__ \(test_datasets.py\) {words}"
    with pytest.raises(DataError, match=named):
        rows.__getitems__([0, 4])


def test_a_length_that_cannot_be_read_is_named():
    rows = GuardedRows(Rows(failing(ValueError("no"), None)), "dataset")
    with pytest.raises(DataError, match=r"^the dataset Rows.__len__ .* raised ValueError: no"):
        len(rows)


def test_a_key_stops_a_data_set():
    with pytest.raises(KeyboardInterrupt):
        list(GuardedRows(Rows(failing(KeyboardInterrupt(), 4)), "dataset"))


@pytest.mark.parametrize("kind", [Rows, Streamed])
def test_a_data_set_leaves_the_process_as_it_was(kind):
    def deed(place):
        if place is not None:
            random.seed(7)
            torch.manual_seed(7)
            torch.set_default_dtype(torch.float64)
            os.chdir("/")

    random.seed(1)
    torch.manual_seed(1)
    place = os.getcwd()
    plain = [*kind()], [kind()[n] for n in (0, 4, 2)], 6
    expected = random.random(), torch.rand(2)
    random.seed(1)
    torch.manual_seed(1)
    assert ways(GuardedRows(kind(deed), "train_dataset")) == plain
    assert random.random() == expected[0] and torch.equal(torch.rand(2), expected[1])
    assert torch.get_default_dtype() == torch.float32 and os.getcwd() == place


class Late(Mapping):
    """A row whose columns are made when they are asked for."""

    def __getitem__(self, name):
        raise ValueError("late")

    def __iter__(self):
        return iter(["text"])

    def __len__(self):
        return 1


def test_columns_are_read_behind_the_guard_too():
    with pytest.raises(DataError, match=r"the train_dataset list.__iter__ raised ValueError: late"):
        list(guarded([Late()], "train_dataset"))
    plain = [{"text": "red"}]
    assert guarded(plain, "train_dataset") is plain


def test_trainers_read_their_data_sets_behind_the_guard(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    bad = Rows(failing(SystemExit(0), 4))
    with pytest.raises(DataError, match=r"the train_dataset Rows.* raised SystemExit"):
        SFTTrainer(model, train_dataset=bad)
    with pytest.raises(DataError, match=r"the eval_dataset Rows.* raised SystemExit"):
        SFTTrainer(model, train_dataset=[{"text": "red"}], eval_dataset=bad)
    assert len(SFTTrainer(model, train_dataset=Rows()).train_rows) == 6


def test_the_batches_of_ppo_are_read_behind_the_guard(folder):
    from transformers import AutoTokenizer

    def batches(rows):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        config = PPOConfig(batch_size=2, mini_batch_size=2)
        return [*PPOTrainer(config, model, tokenizer=tokenizer, dataset=rows).dataloader]

    numbers = sorted(int(ids[2]) for batch in batches(Rows()) for ids in batch["input_ids"])
    assert numbers == [3, 4, 5, 6, 7, 8]
    with pytest.raises(DataError, match=r"the dataset Rows.__getitem__ .* raised SystemExit: 0"):
        batches(Rows(failing(SystemExit(0), 4)))
    with pytest.raises(DataError, match=r"the dataset Rows.__len__ .* raised SystemExit: 0"):
        batches(Rows(failing(SystemExit(0), None)))
