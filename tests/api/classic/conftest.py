"""One tiny model on disk, loaded by name as the textbooks do."""

import pytest
import torch

from tether.models.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """What a training writes by default lies in the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sft-checkpoint")
    tiny_model(0).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def reward_folder(folder, tokenizer, tmp_path_factory):
    """A classifier of one label with random weights, saved as transformers saves it."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("reward-model")
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
