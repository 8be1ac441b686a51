"""Words of other libraries are answered with keys that are really there."""

import itertools

import pytest

from tether.assemble import Recipe
from tether.core.config import _models, build
from tether.core.errors import ConfigError
from tether.core.synonyms import KEYS, METHODS, SECTIONS

pytestmark = pytest.mark.audit
BASE = {"run": "r", "model": {"source": "tiny"}}


def complaint(*overrides):
    with pytest.raises(ConfigError) as raised:
        build(Recipe, BASE, overrides)
    return str(raised.value)


def paths(kind, depth=3):
    """Every dotted key of a config."""
    for name, field in kind.model_fields.items():
        yield (name,)
        for inner in _models(field.annotation) if depth else ():
            yield from ((name, *rest) for rest in paths(inner, depth - 1))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("ppo.beta", "ppo.kl.coefficient"),
        ("ppo.batch_size", "ppo.prompts_per_step"),
        ("grpo.num_generations", "grpo.samples_per_prompt"),
        ("grpo.max_completion_length", "grpo.max_new_tokens"),
        ("grpo.per_device_train_batch_size", "grpo.prompts_per_step"),
        ("grpo.gradient_accumulation_steps", "grpo.micro_batch_tokens"),
        ("grpo.epsilon", "grpo.clip_range"),
        ("grpo.num_train_epochs", "grpo.steps"),
        ("grpo.reward_funcs", "grpo.function.call"),
        ("sft.lr", "sft.optimizer.learning_rate"),
        ("sft.learning_rate", "optimizer.learning_rate"),
        ("sft.num_train_epochs", "sft.epochs"),
        ("sft.per_device_train_batch_size", "sft.batch_size"),
        ("sft.gradient_accumulation_steps", "sft.rows_per_micro_batch"),
        ("sft.lora.r", "sft.lora.rank"),
        ("direct.loss_type", "direct.loss"),
        ("direct.max_prompt_length", "direct.max_length"),
        ("direct.per_device_train_batch_size", "direct.prompts_per_update"),
        ("reward.dataset_name", "reward.data.path"),
        ("process.batch_size", "process.solutions_per_update"),
        ("kto.save_steps", "kto.checkpoint_every"),
        ("rounds.lr", "rounds.direct.optimizer.learning_rate"),
        ("ppo.bf16", "model.dtype"),
        ("model.model_name_or_path", "model.source"),
        ("output_dir", "run"),
    ],
)
def test_a_word_of_another_library_is_answered_with_the_key(key, meant):
    assert f"unknown key '{key}' (did you mean '{meant}'?)" in complaint(f"{key}=1")
    prefixes = {".".join(path) for path in paths(Recipe)}
    assert meant in prefixes or f"{key.split('.')[0]}.{meant}" in prefixes


@pytest.mark.parametrize("method", ["dpo", "ipo", "orpo", "simpo"])
def test_a_section_named_after_a_method_says_which_it_is(method):
    assert f"unknown key '{method}' ({method.upper()} is [direct] with loss = '{method}')" in complaint(f"{method}.beta=1")
    build(Recipe, BASE, [f"direct.loss={method}"])


def test_every_target_of_the_tables_is_a_key_and_no_word_of_theirs_is_one_everywhere():
    known = set(paths(Recipe))
    sections = {path[:depth] for path in known for depth in range(3)}
    for target in set(itertools.chain(*KEYS.values())):
        assert any((*section, *target.split(".")) in known for section in sections), target
    for word, (section, key, value) in METHODS.items():
        assert (word,) not in known
        build(Recipe, {**BASE, "reward": {}, section: {key: value}})
    assert all((right,) in known and (word,) not in known for word, right in SECTIONS.items())


def test_what_has_no_key_is_told_so_and_nothing_far_off_is_proposed():
    assert "metrics.jsonl" in complaint("ppo.report_to=wandb") and "did you mean" not in complaint("ppo.report_to=wandb")
    assert "tether quickstart" in complaint("pairs.num_prompts=3")
    assert "did you mean" not in complaint("grpo.use_vllm=true")
