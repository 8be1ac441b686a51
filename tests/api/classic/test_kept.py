"""What `tether.classic` has saved is on the disk, and a later saving leaves nothing half."""

import random

import pytest
import torch
from tests.disks import Disks, disks

from tether.classic import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
)


def ppo(folder, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    return PPOTrainer(PPOConfig(batch_size=4), model, None, tokenizer).save_pretrained, model


def with_head(folder, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    return model.save_pretrained, model


def sft(folder, tokenizer):
    config = SFTConfig(output_dir="trained", report_to="none")
    trainer = SFTTrainer(folder, config, train_dataset=[{"text": "one two"}])
    return trainer.save_model, trainer.model


@pytest.mark.parametrize("make", [ppo, with_head, sft])
def test_a_saved_model_is_on_the_disk_and_the_next_replaces_whole_files(
    folder,
    tokenizer,
    tmp_path,
    make,
):
    root = tmp_path / "disk"
    target = root / "out" / "model"
    save, model = make(folder, tokenizer)
    versions = []
    root.mkdir()
    with Disks(root).noting() as seen:
        for _ in range(2):
            save(target)
            seen.note("saved")
            versions.append({f"out/model/{p.name}": p.read_bytes() for p in target.iterdir()})
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
    assert {"model.safetensors", "config.json"} <= {name[10:] for name in versions[0]}
    assert versions[0] != versions[1]
    promised = 0
    for moment in seen.moments:
        promised += moment.change == "saved"
        for _, disk in disks(seen, moment, random.Random(0)):
            files = {n: text for n, text in disk.items() if n[-1] != "/" and "/." not in n}
            assert all(text in (versions[0][n], versions[1][n]) for n, text in files.items())
            if moment.change == "saved":
                assert files == versions[promised - 1]
            if promised:
                assert files.keys() == versions[0].keys()
