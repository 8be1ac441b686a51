"""`python -m benchmarks.references` writes docs/guides/coming_from.md with it: names of settings in
other libraries beside tether's, from the synonyms that tether itself reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from tether.settings.recipe import recipe_type
from tether.settings.reference import keys_of
from tether.settings.stages import STAGES
from tether.settings.synonyms import COMMANDS, KEYS, METHODS, NOTES, SECTIONS

LIBRARIES = {
    "TRL": """adam_beta1 adam_beta2 adam_epsilon attn_implementation beta bf16 bnb_4bit_quant_type
        cliprange cliprange_value dataset_name dataset_text_field epsilon epsilon_high eval_dataset
        eval_steps eval_strategy fp16 fsdp fsdp_config deepspeed gradient_accumulation_steps
        gradient_checkpointing hub_model_id hub_strategy kl_coef kl_estimator learning_rate
        load_in_4bit load_in_8bit logging_dir logging_steps lora_alpha lora_dropout lora_r
        lora_target_modules loss_type lr_scheduler_type mask_truncated_completions max_completion_length
        max_grad_norm max_length max_prompt_length max_steps missing_eos_penalty model_name_or_path
        num_generations num_iterations num_mini_batches num_ppo_epochs num_train_epochs optim
        output_dir peft_config per_device_train_batch_size precompute_ref_log_probs
        push_to_hub quantization_config reference_free remove_unused_columns report_to
        response_length reward_funcs reward_model reward_model_path rloo_k rpo_alpha run_name
        save_steps save_strategy save_total_limit scale_rewards torch_dtype dtype total_episodes
        train_dataset use_dora use_peft use_rslora use_vllm vf_coef vllm_gpu_memory_utilization
        vllm_mode warmup_ratio warmup_steps weight_decay whiten_rewards test_size r target_modules
        init_kl_coef cpo_alpha simpo_gamma""",
    "verl": """actor_learning_rate adv_estimator clip_ratio clip_ratio_high custom_reward_function
        default_local_dir enable_gradient_checkpointing entropy_coeff eps_clip experiment_name
        gpu_memory_utilization grad_clip group_size kl_ctrl kl_loss_coef kl_loss_type kl_penalty lr
        lr_warmup_steps lr_warmup_steps_ratio max_response_length max_prompt_length n nnodes
        n_gpus_per_node norm_adv_by_std_in_grpo normalize_advantages optimizer_type
        ppo_epochs ppo_micro_batch_size
        ppo_micro_batch_size_per_gpu ppo_mini_batch_size project_name prompt_key
        reward_fn reward_func reward_function rollout_batch_size save_freq
        tensor_model_parallel_size test_freq total_epochs total_training_steps train_batch_size
        train_files train_file val_files weight_decay""",
    "OpenRLHF": """actor_learning_rate adam_eps betas chosen_key dataset_path ent_coef entropy_coef
        eps_clip flash_attention flash_attn generate_max_len init_kl_coef lora_rank
        max_samples max_seq_len max_tokens micro_train_batch_size n_samples_per_prompt nll_loss_coef
        num_gpus num_processes num_return_sequences overlong_filter pref_beta pretrain prompt_key
        rejected_key rollout_batch_size save_path train_batch_size use_gradient_checkpointing
        value_clip wandb_project""",
    "Axolotl, LLaMA-Factory": """adapter base_model batch_size cutoff_len dataset datasets
        evaluation_strategy finetuning_type flash_attention gamma_beta_ratio gradient_clipping
        gradient_accumulation_steps learning_rate lora_alpha lora_dropout lora_r lora_rank
        lora_target lora_target_modules lr_scheduler max_seq_length max_train_samples
        micro_batch_size model_name num_epochs peft precision pref_beta
        quantization quantization_bit rl sample_packing save_dir sequence_len val_set_size""",
}
"""Words of `settings/synonyms.toml` by the libraries whose users write them."""
HEAD = """# Coming from TRL, verl, OpenRLHF or Axolotl

*Written by `python -m benchmarks.references` from the synonyms that tether reads.*

If a recipe or a call uses a name of another library, tether stops and prints its own name. `tether explain WORD` translates
one name. The tables below have the same translations. A name is listed even if several libraries share it.
Keys of a section are listed without the section: `kl.coefficient` in `[ppo]` is `ppo.kl.coefficient` on the command line.

Three habits differ:

- A method is a section of a recipe, not a trainer class. `[ppo]` after `[reward]` uses the reward model of that run.
- A batch counts prompts (`prompts_per_step`) or rows. tether cuts micro-batches by tokens, so results do not depend on the cut.
- A run is a folder. The same command continues it. Resuming needs nothing else.

Rows need no conversion: [every format](../reference/data.md) of these libraries is recognised by its columns.
Reward functions in TRL's form, `f(completions, **columns)`, work unchanged.
"""


def page() -> str:
    """docs/guides/coming_from.md."""
    parts = [HEAD, "## Methods\n", _table("name", "here", _methods())]
    for library, words in LIBRARIES.items():
        rows = [(f"`{word}`", _meaning(word)) for word in sorted(words.split())]
        parts += [f"## {library}\n", _table("name there", "here", rows)]
    return "\n".join([*parts, "## Commands\n", _table("name there", "here", _commands())])


def _methods() -> Iterator[tuple[str, str]]:
    for name, (section, key, value) in METHODS.items():
        yield f"`{name}`", f'`[{section}]` with `{key} = "{value}"`'
    for name, section in SECTIONS.items():
        yield f"`{name}`", f"`[{section}]`"


def _commands() -> list[tuple[str, str]]:
    return [(f"`{name}`", f"`tether {command}`") for name, command in COMMANDS.items()]


def _meaning(word: str) -> str:
    if word not in KEYS:
        return NOTES[word]
    return " or ".join(f"`{key}`" for key in KEYS[word] if key in _every_key())


def _every_key() -> set[str]:
    """Keys of recipes, with and without their sections."""
    full = [".".join(key.path) for key in keys_of(recipe_type())]
    inner = {key.partition(".")[2] for key in full if key.partition(".")[0] in STAGES}
    return {*full, *inner, *STAGES}


def _table(left: str, right: str, rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|", *(f"| {one} | {two} |" for one, two in rows)]
    return "\n".join(lines) + "\n"
