"""The published loops, in their own calls, on a tiny model: only imports and names of models and
data differ.
"""

import importlib.machinery
import json
import math
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, pipeline

from tether.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from tether.core.errors import DataError
from tether.watch.tracking import follow as tracking

PROMPTS = ["one", "two two", "three?", "a longer one", "five", "six?", "77", "ate"]
PROBE = torch.tensor([[72, 73, 74, 75, 76]])


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def assert_finite(stats):
    for name, value in stats.items():
        assert np.isfinite(value).all(), name


@pytest.fixture(autouse=True)
def no_wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)


def test_loop_over_dataset_iter_with_a_pipeline_as_reward(
    folder,
    tokenizer,
    reward_folder,
    tmp_path,
):
    policy_model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    ref_model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    reward_pipe = pipeline("text-classification", model=reward_folder, device_map="auto")
    with pytest.warns(UserWarning, match="target_kl .*early stopping"):
        ppo_config = PPOConfig(
            output_dir=str(tmp_path / "ppo"),
            learning_rate=1e-3,
            batch_size=4,
            mini_batch_size=2,
            ppo_epochs=4,
            kl_penalty="kl",
            init_kl_coef=0.2,
            target_kl=6.0,
            gamma=1.0,
            lam=0.95,
            cliprange=0.2,
            log_with="wandb",
        )
    ppo_trainer = PPOTrainer(
        config=ppo_config,
        model=policy_model,
        ref_model=ref_model,
        tokenizer=tokenizer,
    )
    with pytest.warns(
        UserWarning,
        match="wandb is not .*runs/001",
    ):
        assert ppo_trainer.run.path == tmp_path / "ppo/runs/001"
    before = weights(policy_model), weights(ref_model)
    kl = []
    prompts_dataset = Dataset.from_dict({"chosen": PROMPTS})
    for _epoch, batch in enumerate(prompts_dataset.iter(batch_size=4)):
        query_tensors = [
            tokenizer.encode(p, return_tensors="pt").squeeze() for p in batch["chosen"]
        ]
        with pytest.warns(UserWarning, match="another distribution than the policy"):
            response_tensors = ppo_trainer.generate(
                query_tensors,
                max_new_tokens=6,
                temperature=0.7,
                top_p=0.9,
            )
        texts = [tokenizer.decode(r) for r in response_tensors]
        rewards = [torch.tensor(reward_pipe(t)[0]["score"]) for t in texts]
        with pytest.warns(UserWarning, match="the queries are taken off"):
            stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(stats, batch, rewards, columns_to_log=["chosen"])
        kl.append(stats["objective/kl"])
        assert_finite(stats)
        assert stats["tokens/responses_len_mean"] <= 6
    assert abs(kl[0]) < 1e-4 < abs(kl[1])
    assert not torch.equal(weights(policy_model), before[0]) and torch.equal(
        weights(ref_model),
        before[1],
    )
    run = tmp_path / "ppo" / "runs" / "001"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (
        [row["step"] for row in rows] == [1, 2]
        and rows[1]["objective/kl"] == kl[1]
        and "env/reward_mean" in rows[0]
    )
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [row["chosen"] for row in samples] == PROMPTS and all(
        0 < row["proxy"] < 1 for row in samples
    )


def test_positional_loop_with_batched_queries_and_scores_that_carry_gradient(
    folder,
    tokenizer,
    reward_folder,
):
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    ref = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    rm = AutoModelForSequenceClassification.from_pretrained(reward_folder)
    config = PPOConfig(
        learning_rate=1e-3,
        batch_size=4,
        mini_batch_size=2,
        ppo_epochs=4,
        init_kl_coef=0.05,
        cliprange=0.2,
    )
    trainer = PPOTrainer(config, policy, ref, tokenizer)
    before = weights(policy)
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    for batch in dataset.iter(batch_size=config.batch_size):
        query_tensors = [tokenizer(p, return_tensors="pt").input_ids for p in batch["prompt"]]
        response_tensors = trainer.generate(query_tensors, max_new_tokens=5)
        texts = [tokenizer.decode(r[0]) for r in response_tensors]
        assert all(
            text.startswith(prompt) and len(text) > len(prompt)
            for text, prompt in zip(texts, batch["prompt"], strict=True)
        )
        rewards = [rm(**tokenizer(t, return_tensors="pt")).logits[0] for t in texts]
        with pytest.warns(UserWarning, match="the queries are taken off"):
            stats = trainer.step(query_tensors, response_tensors, rewards)
        # as the fragment prints it
        with pytest.raises(TypeError, match="unsupported format string"):
            f"reward={sum(rewards) / len(rewards):+.2f}"
        mean = float(sum(rewards).detach() / len(rewards))
        assert f"{mean:+.2f} {stats['objective/kl']:.3f}" and stats[
            "ppo/mean_scores"
        ] == pytest.approx(mean, rel=1e-5)
    assert not torch.equal(weights(policy), before)
    assert all(p.grad is None for p in trainer.ref_model.parameters())


def test_loop_without_a_reference_over_the_dataloader(folder, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    ppo_config = PPOConfig(batch_size=4, learning_rate=1.4e-3, ppo_epochs=4)
    dataset = Dataset.from_list([{"query": p, "input_ids": tokenizer.encode(p)} for p in PROMPTS])
    trainer = PPOTrainer(config=ppo_config, model=model, tokenizer=tokenizer, dataset=dataset)
    seen = []
    for batch in trainer.dataloader:
        queries, responses = (
            batch["input_ids"],
            trainer.generate(batch["input_ids"], max_new_tokens=4, return_prompt=False),
        )
        rewards = [torch.tensor(float(r[0] % 2)) for r in responses]
        assert_finite(trainer.step(queries, responses, rewards))
        seen += batch["query"]
    assert sorted(seen) == sorted(PROMPTS) and seen != PROMPTS
    probe = trainer.ref_model(PROBE)[0]
    assert torch.equal(probe, AutoModelForCausalLMWithValueHead.from_pretrained(folder)(PROBE)[0])
    bare = PPOTrainer(config=ppo_config, model=model, tokenizer=tokenizer)
    with pytest.raises(DataError, match="least batch_size = 4"):
        next(iter(bare.dataloader))


@pytest.fixture
def wandb(monkeypatch):
    """A package in wandb's place; `down` is what its `log` raises, if anything."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.started, module.logged, module.down = [], [], None

    class Run:
        id, finish = "1", lambda self: None

        def log(self, numbers, step):
            if module.down:
                raise module.down
            module.logged.append((step, numbers))

    def init(**settings):
        module.started.append(settings)
        return Run()

    module.init, module.Settings, module.teardown = init, dict, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(tracking, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(tracking, "RETRY_AFTER", 0.01)
    return module


def finish_tracking():
    """As the end of the process does it."""
    for thread in [t for t in threading.enumerate() if isinstance(t, tracking.TrackerThread)]:
        thread.finish()


def test_a_tracker_that_is_installed_gets_the_numbers(folder, tokenizer, wandb):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    trainer = PPOTrainer(PPOConfig(batch_size=1, log_with="wandb"), model, tokenizer=tokenizer)
    trainer.log_stats({"objective/kl": 0.5, "of/every_token": np.zeros(2)}, {}, [1.0])
    finish_tracking()
    (started,) = wandb.started
    assert started["config"]["trainer"] == "PPOConfig" and started["config"]["batch_size"] == 1
    assert wandb.logged == [
        (0, {"objective/kl": 0.5, "env/reward_mean": 1.0, "env/reward_std": 0.0}),
    ]


def test_a_tracker_that_is_down_does_not_stop_training(folder, tokenizer, wandb, caplog):
    """It is told of once, asked again and again, and what it missed is sent when it is back."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    wandb.down = ConnectionError("no route to host")
    trainer = PPOTrainer(PPOConfig(batch_size=1, log_with="wandb"), model, tokenizer=tokenizer)
    for step in range(3):
        trainer.run.log({"x": float(step)}, step)
    while len(wandb.started) < 3:
        time.sleep(0.01)
    wandb.down = None
    trainer.run.log({"x": 3.0}, 3)
    finish_tracking()
    assert wandb.logged == [(step, {"x": float(step)}) for step in range(4)]
    assert [r.getMessage()[:57] for r in caplog.records] == [
        "wandb takes nothing (ConnectionError: no route to host). ",
    ]


def test_it_learns_to_write_a_byte(folder, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    config = PPOConfig(
        batch_size=16,
        mini_batch_size=4,
        learning_rate=5e-3,
        ppo_epochs=2,
        init_kl_coef=0.01,
    )
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    queries = [tokenizer(PROMPTS[i % 8], return_tensors="pt").input_ids[0] for i in range(16)]
    byte, means = tokenizer.encode("a")[0], []
    for _ in range(30):
        responses = trainer.generate(queries, batch_size=16, return_prompt=False, max_new_tokens=8)
        scores = [(r == byte).float().sum() for r in responses]
        stats = trainer.step(queries, responses, scores)
        means.append(stats["ppo/mean_scores"])
    assert sum(means[-3:]) / 3 > 4.0 > 0.5 > means[0]
    assert stats["objective/kl"] > 10.0 and math.isfinite(stats["ppo/val/var_explained"])
