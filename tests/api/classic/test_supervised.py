"""SFTTrainer and RewardTrainer in their classic calls: what is learned, from which tokens, and what
is on disk afterwards.
"""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
    pipeline,
)

from tether.classic import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from tether.core.errors import ConfigError, DataError, ModelError

WORDS = ("red", "blue", "green", "grey")
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"say {w}"},
            {"role": "assistant", "content": f"{w} {w}!"},
        ],
    }
    for w in WORDS * 2
]
PAIRS = [
    {
        "chosen": f"\n\nHuman: Do you like {w}?\n\nAssistant: Yes!! {n}!",
        "rejected": f"\n\nHuman: Do you like {w}?\n\nAssistant: no. {n}...",
    }
    for n in range(4)
    for w in WORDS
]


def test_smallest_recipe_with_training_arguments(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    args = TrainingArguments(
        output_dir=str(tmp_path / "sft"),
        per_device_train_batch_size=4,
        num_train_epochs=4,
        learning_rate=2e-3,
        bf16=True,
        use_cpu=True,  # transformers refuses bf16 without a GPU otherwise
    )
    result = SFTTrainer(model=model, train_dataset=Dataset.from_list(CHATS), args=args).train()
    assert result.global_step == 8 and result.metrics["train_loss"] == result.training_loss < 5.0
    assert (
        model.dtype == torch.bfloat16
        and len((tmp_path / "sft/runs/001/metrics.jsonl").read_text().splitlines()) == 8
    )


def test_chat_texts_with_every_setting_of_the_fragment(folder, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dataset = Dataset.from_list(CHATS)

    def format_chat(example):
        return {"text": tokenizer.apply_chat_template(example["messages"], tokenize=False)}

    dataset = dataset.map(format_chat)
    sft_config = SFTConfig(
        output_dir=str(tmp_path / "sft"),
        max_seq_length=64,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        num_train_epochs=4,
        warmup_ratio=0.1,
        logging_steps=4,
        bf16=False,
    )
    settings = {
        "model": model,
        "args": sft_config,
        "train_dataset": dataset,
        "tokenizer": tokenizer,
    }
    trainer = SFTTrainer(**settings, eval_dataset=dataset)
    before = trainer.evaluate()["eval_loss"]
    result = trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < 0.7 * before and after < result.training_loss < before
    assert capsys.readouterr().out.count("'learning_rate'") == 2
    trainer.save_model(tmp_path / "final")
    saved, texts = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "final"),
        AutoTokenizer.from_pretrained(tmp_path / "final"),
    )
    total = count = 0.0
    for row in dataset:  # every token but the first counts: transformers' own loss over the text
        ids = texts(row["text"], return_tensors="pt").input_ids
        with torch.no_grad():
            total += float(saved(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert total / count == pytest.approx(after, rel=1e-4)
    SFTTrainer(**settings).train()
    assert [p.name for p in sorted((tmp_path / "sft/runs").iterdir())] == ["001", "002"]


@pytest.mark.parametrize("packing", [False, True])
def test_of_conversations_the_assistants_tokens_count(folder, tokenizer, tmp_path, packing):
    rows = [*CHATS[:3], {"prompt": "say pink", "completion": "pink!"}]
    trainer = SFTTrainer(
        folder,
        SFTConfig(output_dir=str(tmp_path), packing=packing),
        train_dataset=rows,
        eval_dataset=rows,
    )
    total = count = 0.0
    for prompt, answer in [*((f"say {w}", f"{w} {w}!") for w in WORDS[:3]), ("say pink", "pink!")]:
        start = tokenizer(f"<|user|>{prompt}<|end|><|assistant|>").input_ids
        end = tokenizer(f"{answer}<|end|>").input_ids
        with torch.no_grad():
            table = trainer.model(torch.tensor([start + end])).logits[0].log_softmax(-1)
        total -= sum(float(table[len(start) + n - 1, token]) for n, token in enumerate(end))
        count += len(end)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def test_an_adapter_alone_is_trained_and_saved(folder, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    config = SFTConfig(output_dir=str(tmp_path), learning_rate=1e-2, num_train_epochs=1)
    trainer = SFTTrainer(folder, config, train_dataset=CHATS, eval_dataset=CHATS, peft_config=lora)
    before, base = (
        trainer.evaluate()["eval_loss"],
        trainer.model.get_base_model().model.embed_tokens.weight.detach().clone(),
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert torch.equal(trainer.model.get_base_model().model.embed_tokens.weight, base)
    trainer.save_model()
    assert (tmp_path / "adapter_config.json").is_file() and (tmp_path / "tokenizer.json").is_file()


def test_an_adapter_that_the_model_came_with_is_trained(folder, tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
    config = SFTConfig(
        output_dir=str(tmp_path),
        learning_rate=1e-2,
        num_train_epochs=1,
        warmup_steps=2,
        report_to="none",
    )
    trainer = SFTTrainer(model, config, train_dataset=CHATS, eval_dataset=CHATS)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


def test_long_texts_are_cut_and_empty_ones_left_out(folder, tmp_path):
    config = SFTConfig(output_dir=str(tmp_path), max_seq_length=8)
    with pytest.warns(UserWarning, match="1 rows are left out: {'nothing to learn"):
        trainer = SFTTrainer(folder, config, train_dataset=[{"text": "x" * 50}, {"text": "x"}])
    assert [len(row) for row in trainer.train_rows] == [8]
    with pytest.warns(UserWarning, match="no known format has the columns label"):
        trainer = SFTTrainer(folder, config, train_dataset=[{"label": 1}])
    with pytest.raises(DataError, match="no row that can be used"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp16": True}, "unknown key 'fp16'"),
        ({"max_steps": 10}, "unknown key 'max_steps'"),
        ({"eval_strategy": "epoch"}, "unknown key 'eval_strategy'"),
        ({"max_seq_len": 10}, "did you mean 'max_seq_length'"),
        ({"adam_beta1": 0.8}, "unknown key 'adam_beta1'"),
        ({"run_name": "mine"}, "unknown key 'run_name'"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SFTConfig(**settings)


def test_training_arguments_without_counterpart_are_named(folder, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), neftune_noise_alpha=5.0)
    with pytest.raises(ConfigError, match="SFTConfig: unknown key 'neftune_noise_alpha'"):
        SFTTrainer(folder, args, train_dataset=CHATS)


def test_reward_model_from_raw_conversations(folder, tokenizer, tmp_path):
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    pref_dataset = Dataset.from_list(PAIRS)
    reward_config = RewardConfig(
        output_dir=str(tmp_path / "reward"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        num_train_epochs=4,
        max_length=128,
        logging_steps=100,
        bf16=False,
        remove_unused_columns=False,
    )
    heldout = [
        {side: text.replace("Do you", "Would they") for side, text in row.items()} for row in PAIRS
    ]
    settings = {"args": reward_config, "train_dataset": pref_dataset, "tokenizer": tokenizer}
    reward_trainer = RewardTrainer(model=reward_model, eval_dataset=heldout, **settings)
    result = reward_trainer.train()
    assert result.training_loss < 0.5 and reward_trainer.evaluate()["eval_accuracy"] > 0.9
    reward_trainer.save_model(tmp_path / "final")
    texts = [row[side] for row in PAIRS[:2] for side in ("chosen", "rejected")]
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    encoded = [tokenizer(text, return_tensors="pt") for text in texts]
    with torch.no_grad():
        logits = [float(loaded(**row).logits) for row in encoded]
        padded = loaded(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
    reward_pipe = pipeline("text-classification", model=str(tmp_path / "final"))
    scores = [row["score"] for row in reward_pipe(texts)]
    assert scores == pytest.approx(logits, abs=1e-4) and padded.tolist() == pytest.approx(
        logits,
        abs=1e-4,
    )
    assert logits[0] > logits[1] and logits[2] > logits[3]
    ours = [s for row in reward_trainer.stage.scores(reward_trainer.train_rows[:2]) for s in row]
    assert ours == pytest.approx(logits, abs=1e-4)  # trained on what is scored, to the token


def test_a_reward_model_in_bfloat16_is_saved_as_one(folder, tokenizer, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    config = RewardConfig(output_dir=str(tmp_path), num_train_epochs=1, bf16=True, use_cpu=True)
    trainer = RewardTrainer(model, config, train_dataset=PAIRS[:4], tokenizer=tokenizer)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
    with torch.no_grad():
        logits = [
            float(loaded(**tokenizer(PAIRS[0][side], return_tensors="pt")).logits)
            for side in ("chosen", "rejected")
        ]
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert trainer.stage.scores(trainer.train_rows[:1])[0] == pytest.approx(logits, abs=0.05)


def test_the_reward_loss_is_the_pairwise_one(folder, tokenizer, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    rows = [{**row, "margin": 0.5} for row in PAIRS[:4]]
    config = RewardConfig(
        output_dir=str(tmp_path),
        center_rewards_coefficient=0.01,
        num_train_epochs=1,
    )
    trainer = RewardTrainer(model, config, train_dataset=rows, tokenizer=tokenizer)
    loss = 0.0
    with torch.no_grad():
        for row in rows:
            chosen, rejected = (
                model(**tokenizer(row[side], return_tensors="pt")).logits[0, 0]
                for side in ("chosen", "rejected")
            )
            loss += (
                float(
                    torch.log1p(torch.exp(-(chosen - rejected - 0.5)))
                    + 0.01 * (chosen + rejected) ** 2,
                )
                / 4
            )
    assert trainer.train().training_loss == pytest.approx(loss, rel=1e-4)


def test_token_ids_are_the_same_pairs_as_their_texts(folder, tokenizer, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    ids = []
    for row in PAIRS[:3]:
        sides = {
            side: tokenizer(row[side], padding="max_length", max_length=80)
            for side in ("chosen", "rejected")
        }
        ids.append(
            {
                f"{key}_{side}": found[key]
                for side, found in sides.items()
                for key in ("input_ids", "attention_mask")
            },
        )
    config = RewardConfig(output_dir=str(tmp_path))
    of_texts, of_ids = (
        RewardTrainer(model, config, train_dataset=rows, tokenizer=tokenizer)
        for rows in (PAIRS[:3], ids)
    )
    assert of_texts.train_rows == of_ids.train_rows
    # The prompt that both sides share is computed once: only "Yes!! 0!" and "no. 0..." count.
    assert [side.num_trained for side in of_texts.train_rows[0].sequences] == [8, 8]
    longest = max(len(tokenizer(text).input_ids) for text in PAIRS[0].values())
    with pytest.warns(UserWarning, match="2 rows are left out"):
        short = RewardTrainer(
            model,
            RewardConfig(max_length=longest),
            train_dataset=PAIRS[:3],
            tokenizer=tokenizer,
        )
    assert len(short.train_rows) == 1
    model.config.max_position_embeddings = longest
    with pytest.warns(UserWarning, match=f"longer than the model's context of {longest} tokens"):
        RewardTrainer(model, config, train_dataset=PAIRS[:3], tokenizer=tokenizer)


def test_a_reward_model_needs_one_score(folder, tokenizer):
    wrong = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    with pytest.raises(ModelError, match="num_labels=1"):
        RewardTrainer(wrong, train_dataset=PAIRS, tokenizer=tokenizer)
