"""What TRL, Axolotl, LLaMA-Factory, verl and OpenRLHF call a key, a section or a command, and what it is called here."""

from __future__ import annotations

METHODS = {
    **{name: ("direct", "loss", name) for name in ("dpo", "ipo", "orpo", "simpo")},
    **{name: ("grpo", "algorithm", name) for name in ("dr_grpo", "dapo", "gspo", "cispo")},
    "rloo": ("reinforce", "algorithm", "rloo"),
    "prm": ("process", "target", "process"),
    "orm": ("process", "target", "outcome"),
    "spin": ("rounds", "method", "spin"),
}
"""A method that is a value in a section of another name: the section, the key, the value."""
SECTIONS = {
    "rm": "reward", "reward_model": "reward", "raft": "best_of_n", "rejection_sampling": "best_of_n",
    "online_dpo": "online_direct",
}  # fmt: skip
"""Other names of a section."""
_KEYS = """
beta kl_coef init_kl_coef kl_loss_coef kl_ctrl pref_beta: kl.coefficient beta direct.beta
kl_penalty kl_estimator kl_loss_type: kl.estimator
batch_size per_device_train_batch_size train_batch_size micro_batch_size rollout_batch_size: batch_size prompts_per_update
    solutions_per_update prompts_per_step direct.prompts_per_update
gradient_accumulation_steps ppo_micro_batch_size micro_train_batch_size: micro_batch_tokens rows_per_micro_batch
    direct.micro_batch_tokens
num_train_epochs num_epochs total_epochs max_steps total_training_steps total_episodes: steps epochs direct.epochs
num_ppo_epochs ppo_epochs num_iterations: epochs
num_mini_batches ppo_mini_batch_size: minibatches
lr actor_learning_rate: optimizer.learning_rate direct.optimizer.learning_rate
lr_scheduler lr_scheduler_type: optimizer.schedule direct.optimizer.schedule
warmup_ratio warmup_steps: optimizer.warmup_fraction direct.optimizer.warmup_fraction
gradient_clipping grad_clip: optimizer.max_grad_norm direct.optimizer.max_grad_norm
max_completion_length max_response_length response_length generate_max_len max_tokens: max_new_tokens
max_seq_length max_seq_len sequence_len cutoff_len max_prompt_length: max_length direct.max_length
num_generations num_return_sequences n n_samples_per_prompt group_size rloo_k: samples_per_prompt
cliprange clip_ratio eps_clip epsilon: clip_range
clip_ratio_high epsilon_high: clip_range_high
cliprange_value value_clip: value_clip_range
vf_coef: value_coefficient
entropy_coef entropy_coeff ent_coef: entropy_coefficient
whiten_rewards normalize_advantages: whiten_advantages
scale_rewards norm_adv_by_std_in_grpo: scale_advantages
missing_eos_penalty: missing_stop_penalty
loss_type: loss algorithm direct.loss
simpo_gamma gamma_beta_ratio: margin direct.margin
cpo_alpha rpo_alpha nll_loss_coef: likelihood_weight direct.likelihood_weight
precompute_ref_log_probs: reference_logprobs direct.reference_logprobs
lora_r lora_rank r: lora.rank rank
lora_alpha: lora.alpha
lora_dropout: lora.dropout
lora_target lora_target_modules target_modules: lora.targets targets
adapter peft peft_config use_peft finetuning_type: lora
reward_fn reward_func reward_funcs reward_function: function.call
reward_model reward_model_path: classifier.source reward_source
dataset datasets dataset_name dataset_path train_dataset train_file train_files: data.path
max_samples max_train_samples: data.limit
eval_dataset val_files: evaluate.data heldout_fraction
val_set_size test_size: heldout_fraction evaluate.prompts
eval_steps eval_strategy evaluation_strategy test_freq: evaluate_every evaluate.every
save_steps save_strategy save_freq: checkpoint_every
save_total_limit: keep_checkpoints
base_model model_name model_name_or_path pretrain: model.source
torch_dtype dtype bf16 fp16 precision: model.dtype
attn_implementation flash_attn flash_attention: model.attention
gradient_checkpointing use_gradient_checkpointing: model.recompute
output_dir save_dir save_path default_local_dir: run
"""
KEYS = {
    name: tuple(targets.split())
    for names, _, targets in (line.partition(":") for line in _KEYS.strip().replace("\n    ", " ").splitlines())
    for name in names.split()
}
"""Other names of a key: what it may be here, from its section or from the recipe's root, the first that is there."""
NOTES = {
    "pairs": "`tether quickstart` and `tether loop` collect pairs; those that you have are the data of [reward] or [direct]",
    **dict.fromkeys(
        ("report_to", "logging_steps", "wandb_project", "run_name", "project_name"),
        "there is nothing to set: every step goes to metrics.jsonl in the run, and report.html draws it",
    ),
}  # fmt: skip
"""What has no key of its own."""
COMMANDS = {
    "train": "run", "finetune": "sft", "rm": "reward", "eval": "reward-bench", "merge": "export", "ui": "prefs serve",
    "annotate": "prefs serve", "raft": "best-of-n", "online-dpo": "online-direct",
}  # fmt: skip
"""Other names of a command."""
