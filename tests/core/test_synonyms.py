"""Words of other libraries are answered with keys that are really there."""

import functools
import itertools
import re

import pytest

from tether.core.errors import ConfigError
from tether.settings.messages import models_of
from tether.settings.reading import build, load_recipe
from tether.settings.recipe import Recipe
from tether.settings.stages import STAGES
from tether.settings.synonyms import KEYS, METHODS, NOTES, SECTIONS, TRAINERS, VALUES

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
        for inner in models_of(field.annotation) if depth else ():
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
        ("sft.learning_rate", "sft.optimizer.learning_rate"),
        ("sft.num_train_epochs", "sft.epochs"),
        ("sft.per_device_train_batch_size", "sft.batch_size"),
        ("sft.gradient_accumulation_steps", "sft.rows_per_micro_batch"),
        ("sft.lora.r", "sft.lora.rank"),
        ("direct.loss_type", "direct.loss"),
        ("direct.max_prompt_length", "direct.max_length"),
        ("direct.per_device_train_batch_size", "direct.prompts_per_update"),
        ("reward.dataset_name", "reward.data.path"),
        ("reward.center_rewards_coefficient", "reward.centering"),
        ("grpo.max_steps", "grpo.steps"),
        ("ppo.num_ppo_epochs", "ppo.epochs"),
        ("grpo.importance_sampling_level", "grpo.surrogate"),
        ("grpo.reward_weights", "grpo.function.weights"),
        ("grpo.delta", "grpo.dual_clip"),
        ("grpo.vllm_importance_sampling_correction", "grpo.importance"),
        ("process.batch_size", "process.solutions_per_update"),
        ("kto.save_steps", "kto.checkpoint_every"),
        ("rounds.lr", "rounds.direct.optimizer.learning_rate"),
        ("ppo.bf16", "model.dtype"),
        ("model.model_name_or_path", "model.source"),
        ("output_dir", "run"),
        ("lora_r", "lora.rank"),
        ("direct.cliprange", "ppo.clip_range"),
        ("sft.num_generations", "ppo.samples_per_prompt"),
        ("ppo.clip_ratio_c", "ppo.dual_clip"),
        ("ppo.lambd", "ppo.lam"),
        ("grpo.overlong_buffer_len", "grpo.overlong_buffer"),
        ("grpo.ppo_max_token_len_per_gpu", "grpo.micro_batch_tokens"),
        ("sft.cosine_min_lr_ratio", "sft.optimizer.final_fraction"),
        ("direct.dpo_beta", "direct.beta"),
        ("kto.kto_desirable_weight", "kto.desirable_weight"),
        ("grpo.dynamic_filtering_enable", "grpo.filter_groups"),
    ],
)
def test_a_word_of_another_library_is_answered_with_the_key(key, meant):
    assert f"unknown key '{key}' (did you mean '{meant}'?" in complaint(f"{key}=1")
    prefixes = {".".join(path) for path in paths(Recipe)}
    assert meant in prefixes or f"{key.split('.')[0]}.{meant}" in prefixes


@pytest.mark.parametrize("method", ["dpo", "ipo", "orpo", "simpo"])
def test_a_section_named_after_a_method_says_which_it_is(method):
    meant = ("DPO is [direct] with loss = 'dpo': write [direct] and in it loss = \"dpo\"").replace(
        "DPO",
        method.upper(),
    )
    meant = f"{meant.replace('dpo', method)}; {method}.beta is direct.beta"
    assert f"unknown key '{method}' ({meant})" in complaint(f"{method}.beta=1")
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


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("ppo.total_episodes", "steps = total_episodes / (prompts_per_step × samples_per_prompt)"),
        ("sft.max_steps", "offline methods count epochs"),
        ("sft.assistant_only_loss", "only assistant turns count"),
        ("sft.per_device_train_batch_size", "batch_size = per_device_train_batch_size"),
        ("grpo.per_device_train_batch_size", "devices / num_generations"),
        ("kto.loss_type", "apo_zero_unpaired is left out"),
        ("grpo.loss_type", "luspo, sapo and vespo are left out"),
        ("direct.ref_model", "the model that training starts from"),
        ("grpo.vllm_server_host", "addresses = ["),
        ("grpo.num_train_epochs", "steps = epochs × prompts / prompts_per_step"),
        ("ppo.whiten_rewards", "does not whiten rewards of tokens"),
        ("grpo.mask_truncated_completions", 'truncated = "mask"'),
        ("direct.loss_type", "ipo is 'ipo' with average = true"),
        ("ppo.kl_penalty", "kl.place = 'loss'"),
        ("grpo.ppo_mini_batch_size", "a number of parts"),
        ("grpo.loss_agg_mode", "seq-mean-token-mean is 'sequence'"),
        ("actor_rollout_ref.model.path", "model.path is model.source"),
        ("grpo.beta", "kl.estimator = 'k3'"),
        ("grpo.use_kl_loss", "true is kl.place = 'loss'"),
        ("grpo.eps_clip_low_high", "clip_range_high the upper"),
        ("sft.train_on_inputs", "only assistant turns count"),
        ("sft.data.type", "recognised by their columns"),
        ("grpo.tools", "environment = { tools = "),
        ("sft.tools", "rows with tool calls are read by [sft]"),
        ("distill.environment_factory", "environment = { call = "),
        ("grpo.max_tool_calling_iterations", "environment.turns"),
        ("distill.max_steps", "a step samples answers to prompts_per_step prompts"),
        ("distill.beta", "GKD's beta is jsd_beta"),
        ("rounds.max_steps", "rounds counts the rounds"),
    ],
)
def test_a_value_that_is_counted_otherwise_here_comes_with_advice(key, advice):
    assert advice in complaint(f"{key}=1")


@pytest.mark.parametrize(
    ("key", "absent"),
    [
        ("sft.num_train_epochs", "where answers are sampled"),
        ("kto.loss_type", "dr_grpo"),
        ("sft.eos_token", "row_tokens"),
        ("reward.disable_dropout", "head_dropout"),
        ("ppo.target", "process.target"),
        ("direct.loss_type", "vespo"),
    ],
)
def test_a_section_has_no_advice_of_another(key, absent):
    assert absent not in complaint(f"{key}=1")


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("direct.loss", "sigmoid", "dpo"),
        ("grpo.normalize", "bnpo", "token"),
        ("grpo.normalize", "grpo", "sequence"),
        ("sft.optimizer.schedule", "constant_with_warmup", "constant"),
        ("sft.optimizer.kind", "adamw_torch_fused", "adamw"),
        ("sft.optimizer.kind", "paged_adamw_8bit", "adamw8bit"),
        ("model.dtype", "bf16", "bfloat16"),
        ("model.attention", "flash_attention_2", "sdpa"),
        ("direct.reference_logprobs", "true", "precomputed"),
        ("grpo.importance", "token_mask", "mask"),
        ("grpo.scale_advantages", "none", "false"),
        ("grpo.surrogate", "gspo", "sequence"),
        ("grpo.normalize", "token-mean", "token"),
        ("grpo.normalize", "seq-mean-token-sum-norm", "constant"),
        ("ppo.algorithm", "group_norm", "grpo"),
        ("reinforce.algorithm", "reinforce_plus_plus_baseline", r"reinforce\+\+_baseline"),
    ],
)
def test_a_value_of_another_library_is_answered_with_the_one_here(key, value, meant):
    message = complaint(f"{key}={value}")
    advice = message.partition("(got ")[2].partition("; ")[2]
    assert re.search(rf"(^|'| ){meant}('|$|\b)", advice), message


def test_a_value_that_is_refused_for_another_reason_has_no_advice():
    assert complaint("direct.loss=sigmoids").endswith("(got 'sigmoids')")


def test_a_number_in_place_of_a_table_is_answered_with_its_keys():
    assert "coefficient, place (got 0)" in complaint("grpo.kl=0")


def test_many_faults_stand_in_lines_of_their_own():
    faults = ["sft.lr=1", "sft.eval_steps=1", "sft.epoch=1", "sft.num_epochs=1"]
    few, many = complaint(*faults[:3]), complaint(*faults)
    assert "\n" not in few and "; unknown key" in few
    assert [line[:16] for line in many.splitlines()[1:]] == ["  unknown key 's"] * 4


def test_every_value_has_a_key_that_takes_it():
    """The keys before the colon are keys, and the values that are offered for them are valid."""
    known = {path[-1]: path for path in paths(Recipe)}
    for value, texts in VALUES.items():
        for key in texts:
            assert key in known, (value, key)


def test_values_that_the_advice_names_are_ones():
    build(Recipe, BASE, ["direct.loss=ipo", "direct.average=true"])
    for value in ("token", "sequence", "constant"):
        build(Recipe, BASE, ["ppo.steps=1", f"ppo.normalize={value}"])
    for value in ("truncate", "mask", "none"):
        build(Recipe, BASE, ["ppo.steps=1", f"ppo.importance={value}"])
    for trainer, text in TRAINERS.items():
        section, key, value = re.match(r'\[(\w+)\](?: with (\w+) = "(\w+)")?', text).groups()
        assert section in STAGES, trainer
        taught = ["distill.teacher=runs/one"] if section == "distill" else []
        build(Recipe, BASE, [*taught, *([f"{section}.{key}={value}"] if key else [])])


def test_a_word_without_a_key_gets_no_far_off_proposal():
    assert "metrics.jsonl" in complaint("ppo.report_to=wandb") and "did you mean" not in complaint(
        "ppo.report_to=wandb",
    )
    assert "did you mean 'prompts'?" in complaint("pairs.num_prompts=3")
    assert "did you mean" not in complaint("grpo.use_vllm=true")


WORDS = """
beta lr learning_rate batch_size per_device_train_batch_size gradient_accumulation_steps num_train_epochs report_to max_steps
num_generations max_completion_length max_prompt_length kl_coef init_kl_coef cliprange vf_coef logging_steps save_steps bf16
load_in_4bit lora_r lora_alpha micro_batch_size sequence_len val_set_size weight_decay adam_beta1 sample_packing reward_funcs
deepspeed use_vllm push_to_hub temperature rollout.n actor.optim.lr algorithm.kl_ctrl.kl_coef actor_rollout_ref.rollout.n
data.train_batch_size trainer.total_epochs
"""


@pytest.mark.parametrize("word", WORDS.split())
def test_a_word_at_the_top_of_a_recipe_is_answered_with_keys_that_are_there(word):
    message = complaint(f"{word}=1", "sft.epochs=1", "ppo.steps=1", "reward.epochs=1")
    notes = [text for one in NOTES.values() for text in one.values() if text in message]
    without = functools.reduce(lambda text, note: text.replace(note, ""), notes, message)
    answers = re.findall(r"'([\w.]+)'", without.partition("unknown key ")[2])[1:]
    assert answers or notes, message
    assert all(tuple(answer.split(".")) in set(paths(Recipe)) for answer in answers), message
    assert "known keys" not in message


def test_the_recipes_own_sections_are_named_first():
    assert "mean 'sft.optimizer.learning_rate' or 'ppo.optimizer.learning_rate'?" in complaint(
        "lr=1",
        "sft={}",
        "ppo={}",
    )
    assert "'rollout.n' is" not in complaint("rollout.n=4", "grpo={}")
    assert "rollout.n is 'grpo.samples_per_prompt'" in complaint("rollout.n=4", "grpo.steps=1")


def test_a_recipe_in_another_language_says_what_a_recipe_looks_like(tmp_path):
    (tmp_path / "mine.yml").write_text("sft:\n  epochs: 2\n")
    with pytest.raises(
        ConfigError,
        match=(
            r"mine.yml: recipes are written in "
            r"TOML(.|\n)*\[sft\](.|\n)*epochs = 2"
        ),
    ):
        load_recipe(tmp_path / "mine.yml", Recipe)
