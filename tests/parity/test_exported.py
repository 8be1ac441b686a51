"""An exported reward model as the reward of TRL's GRPO trainer, which tokenizes text by itself:
tether's scores.
"""

from __future__ import annotations

import pytest
import torch
import trl

from tether.cli.tools.export import export_model
from tether.core.types import assistant, user
from tether.data.batches import make_batch
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, load_scorer, save_trained
from tether.settings.model import LoraConfig, ModelConfig

TALKS = [("one", "two"), ("a longer question", "x"), ("why?", "because\n\nof that")]


@torch.no_grad()
@pytest.mark.parametrize("tail", ["", "\n"])
def test_trl_scores_completions_as_tether_does(tmp_path, tail):
    """The base pads with its EOS, and with a tail its template writes something after the token
    that ends a turn.
    """
    from datasets import Dataset

    tiny_model(2).save_pretrained(tmp_path / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.chat_template = (
        tokenizer.eos_token,
        TEMPLATE.replace("<|end|>{% end", f"<|end|>{tail}{{% end"),
    )
    tokenizer.save_pretrained(tmp_path / "base")
    loaded = open_model(
        ModelConfig(source=str(tmp_path / "base"), dtype="float32", system_prompt="Be brief."),
    )
    role = Role(
        add_adapter(loaded.model, "reward", LoraConfig(rank=4), seed=1),
        "reward",
        ScalarHead(64, zero=False),
    )
    torch.manual_seed(3)
    for parameter in role.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    save_trained(role, loaded, tmp_path / "reward", kind="reward")
    constant = export_model(str(tmp_path / "reward"), tmp_path / "exported")["constant"]
    (scorer,), own = load_scorer(tmp_path / "reward")
    encoded = [encoder_of(own).conversation((user(p), assistant(r)), "last") for p, r in TALKS]
    expected = torch.cat([scorer.scores(make_batch([one], 0)) for one in encoded])

    prompts = [[{"role": "user", "content": p}] for p, _ in TALKS]
    completions = [[{"role": "assistant", "content": r}] for _, r in TALKS]
    how = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}
    config = trl.GRPOConfig(
        str(tmp_path / "out"),
        per_device_train_batch_size=2,
        num_generations=2,
        **how,
    )
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    reward = str(tmp_path / "exported")
    trainer = trl.GRPOTrainer(
        model=str(tmp_path / "base"),
        reward_funcs=reward,
        args=config,
        train_dataset=rows,
    )
    given = trainer._calculate_rewards(
        [{"prompt": prompt} for prompt in prompts],
        prompts,
        completions,
        [[0]] * 3,
    )[:, 0]
    torch.testing.assert_close(given + constant, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.01
