"""The manual's page of settings in other libraries beside tether's, from the synonyms that tether
itself reads.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tools.dev.tables import markdown

from tether.settings.recipe import recipe_type
from tether.settings.reference import keys_of
from tether.settings.stages import STAGES
from tether.settings.synonyms import COMMANDS, KEYS, METHODS, NOTES, SECTIONS, TRAINERS, advice


class Library(NamedTuple):
    """A library's names of settings, as its releases have them.

    `now`: of the release in `read`, with the place where a name has one; `before`: of releases in
    `earlier`, gone since.
    """

    read: str
    now: str
    earlier: str = ""
    before: str = ""

    def names(self) -> list[str]:
        return [*self.now.split(), *self.before.split()]


LIBRARIES = {
    "TRL": Library(
        "TRL 1.16.0, with transformers 5.23 and peft 0.21",
        """accelerator_config activation_checkpointing activation_checkpointing_kwargs
        activation_offloading adam_beta1 adam_beta2 adam_epsilon alora_invocation_tokens
        alpha alpha_pattern arrow_config assistant_only_loss attn_implementation
        auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16
        bf16_full_eval bias bnb_4bit_compute_dtype bnb_4bit_quant_storage
        bnb_4bit_quant_type bnb_4bit_use_double_quant cache_implementation callbacks
        cast_lm_head_to_fp32 center_rewards_coefficient chat_template_kwargs
        chat_template_path completion_only_loss compute_loss_func compute_metrics
        corda_config cpo_alpha data_collator data_seed dataloader_drop_last
        dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
        dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
        dataset_config dataset_kwargs dataset_name dataset_num_proc dataset_streaming
        dataset_test_split dataset_text_field dataset_train_split datasets ddp_backend
        ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph
        ddp_timeout debug deepspeed delta disable_dropout disable_tqdm discopop_tau do_eval
        do_predict do_train ds3_gather_for_generation dtype enable_jit_checkpoint
        ensure_weight_tying entropy_coef entropy_coef_delta entropy_coef_max
        entropy_coef_min entropy_target environment_factory eos_token epsilon epsilon_high
        eva_config eval_accumulation_steps eval_dataset eval_delay eval_do_concat_batches
        eval_on_start eval_packing eval_steps eval_strategy eval_use_gather_object
        exclude_modules f_alpha_divergence_coef f_divergence_type fan_in_fan_out
        formatting_func fp16 fp16_full_eval fsdp fsdp_config full_determinism
        generate_during_eval generation_batch_size generation_kwargs
        gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
        greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision
        hub_strategy hub_token ignore_bias_buffers ignore_data_skip
        importance_sampling_level include_for_metrics include_num_input_tokens_seen
        inference_mode init_lora_weights is_encoder_decoder kasa_config label_names
        label_smoothing_factor layer_replication layers_pattern layers_to_transform
        ld_alpha learning_rate length_column_name liger_kernel_config llm_int8_skip_modules
        llm_int8_threshold load_best_model_at_end load_in_4bit load_in_8bit local_rank
        loftq_config log_completions log_completions_hub_repo log_level log_level_replica
        log_multimodal log_on_each_node log_unique_prompts logging_first_step
        logging_nan_inf_filter logging_steps logging_strategy lora_alpha lora_bias
        lora_dropout lora_ga_config lora_modules_to_save lora_r lora_target_modules
        lora_target_parameters lora_task_type loss_type loss_weights lr_scheduler_kwargs
        lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm
        max_length max_prompt_length max_steps max_tool_calling_iterations megatron_config
        megatron_core metric_for_best_model min_p missing_eos_penalty model_init
        model_init_kwargs model_name_or_path model_revision modules_to_save
        monteclora_config multi_objective_aggregation neftune_noise_alpha
        lmbda teacher_model_name_or_path
        normalize_advantages num_completions_to_print num_generations num_generations_eval
        num_iterations num_train_epochs off_policy_mask_threshold optim optim_args
        optim_target_modules optimizer_cls_and_kwargs optimizers output_dir
        packing_strategy pad_to_multiple_of pad_token padding_free padding_value
        parallelism_config peft_config per_device_eval_batch_size
        per_device_train_batch_size precompute_ref_batch_size precompute_ref_log_probs
        prediction_loss_only preprocess_logits_for_metrics processing_class project
        push_to_hub qalora_group_size quantization_config r rank_pattern ref_model
        ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns repetition_penalty
        report_to restore_callback_states_from_checkpoint resume_from_checkpoint revision
        reward_clip_range reward_funcs reward_model_path reward_processing_classes
        reward_weights rollout_func router_aux_loss_coef run_name runtime_config
        sapo_temperature_neg sapo_temperature_pos save_on_each_node save_only_model
        save_steps save_strategy save_total_limit scale_rewards shuffle_dataset simpo_gamma
        skip_memory_metrics steps_per_generation streaming sync_ref_model target_modules
        target_parameters task_type test_split_size tf32 tools top_entropy_quantile top_k
        top_p torch_compile torch_compile_backend torch_compile_mode
        torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
        train_dataset train_sampling_strategy trainable_token_indices
        transformers_continuous_batching_config truncation_mode trust_remote_code
        use_adaptive_entropy use_bdlora use_bias_correction_kl use_bnb_nested_quant
        use_cache use_cpu use_dora use_liger_kernel use_peft use_qalora use_rslora
        use_transformers_continuous_batching use_transformers_paged use_vllm use_weighting
        velora_config vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos
        vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
        vllm_importance_sampling_cap vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
        vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_structured_outputs_regex vllm_tensor_parallel_size warmup_steps weight_decay""",
        "0.8 to 0.24",
        """accelerator_kwargs adap_kl_ctrl backward_batch_size base_model_attribute_name
        batch_size chars_per_token cliprange cliprange_value compare_steps
        dataset_batch_size early_stopping exp_name force_use_ref_model forward_batch_size
        global_backward_batch_size global_batch_size gpu_memory_utilization horizon
        init_kl_coef is_peft_model judge kl_coef kl_estimator kl_penalty label_pad_token_id
        local_batch_size local_mini_batch_size local_rollout_forward_batch_size log_with
        max_seq_length mini_batch_size mixture_coef model_adapter_name model_name
        normalize_reward num_mini_batches num_of_sequences num_ppo_epochs
        num_sample_generations num_total_batches optimize_cuda_cache optimize_device_cache
        ppo_epochs project_kwargs push_to_hub_if_best_kwargs query_dataset ratio_threshold
        ref_adapter_name ref_model_init_kwargs reference_free response_length reward_model
        rloo_k rpo_alpha sft_model_path step_separator stop_token stop_token_id target
        task_name token_level_kl tokenizer torch_dtype total_episodes tracker_kwargs
        tracker_project_name train_on_last_step_only use_liger use_liger_loss
        use_logits_to_keep use_score_norm use_score_scaling value_model vf_coef
        vllm_guided_decoding_regex wandb_log_unique_prompts whiten_rewards world_size""",
    ),
    "verl": Library(
        "verl 0.9.1",
        """actor_rollout_ref actor_rollout_ref.actor.clip_ratio
        actor_rollout_ref.actor.clip_ratio_c actor_rollout_ref.actor.clip_ratio_high
        actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.data_loader_seed
        actor_rollout_ref.actor.entropy_coeff
        actor_rollout_ref.actor.fsdp_config.optimizer_offload
        actor_rollout_ref.actor.fsdp_config.param_offload
        actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
        actor_rollout_ref.actor.fsdp_config.use_torch_compile
        actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.kl_loss_coef
        actor_rollout_ref.actor.kl_loss_type actor_rollout_ref.actor.loss_agg_mode
        actor_rollout_ref.actor.loss_scale_factor actor_rollout_ref.actor.optim.betas
        actor_rollout_ref.actor.optim.clip_grad actor_rollout_ref.actor.optim.lr
        actor_rollout_ref.actor.optim.lr_scheduler_type
        actor_rollout_ref.actor.optim.lr_warmup_steps
        actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
        actor_rollout_ref.actor.optim.min_lr_ratio
        actor_rollout_ref.actor.optim.warmup_style
        actor_rollout_ref.actor.optim.weight_decay
        actor_rollout_ref.actor.policy_loss.clip_cov_lb
        actor_rollout_ref.actor.policy_loss.clip_cov_ratio
        actor_rollout_ref.actor.policy_loss.clip_cov_ub
        actor_rollout_ref.actor.policy_loss.dro_beta
        actor_rollout_ref.actor.policy_loss.kl_cov_ratio
        actor_rollout_ref.actor.policy_loss.loss_mode
        actor_rollout_ref.actor.policy_loss.ppo_kl_coef actor_rollout_ref.actor.ppo_epochs
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        actor_rollout_ref.actor.ppo_micro_batch_size
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.tau_neg
        actor_rollout_ref.actor.tau_pos actor_rollout_ref.actor.use_dynamic_bsz
        actor_rollout_ref.actor.use_fused_kernels actor_rollout_ref.actor.use_kl_loss
        actor_rollout_ref.actor.use_remove_padding
        actor_rollout_ref.model.custom_chat_template
        actor_rollout_ref.model.enable_activation_offload
        actor_rollout_ref.model.enable_gradient_checkpointing
        actor_rollout_ref.model.exclude_modules actor_rollout_ref.model.lora.adapter_path
        actor_rollout_ref.model.lora.alpha actor_rollout_ref.model.lora_adapter_path
        actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.lora_rank
        actor_rollout_ref.model.target_modules actor_rollout_ref.model.use_liger
        actor_rollout_ref.rollout.agent.agent_loop_config_path
        actor_rollout_ref.rollout.do_sample
        actor_rollout_ref.rollout.enable_chunked_prefill
        actor_rollout_ref.rollout.enable_prefix_caching
        actor_rollout_ref.rollout.enforce_eager actor_rollout_ref.rollout.free_cache_engine
        actor_rollout_ref.rollout.gpu_memory_utilization
        actor_rollout_ref.rollout.ignore_eos actor_rollout_ref.rollout.load_format
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
        actor_rollout_ref.rollout.log_prob_micro_batch_size
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        actor_rollout_ref.rollout.max_model_len
        actor_rollout_ref.rollout.max_num_batched_tokens
        actor_rollout_ref.rollout.max_num_seqs
        actor_rollout_ref.rollout.multi_turn.function_tool_path
        actor_rollout_ref.rollout.multi_turn.max_assistant_turns
        actor_rollout_ref.rollout.multi_turn.max_user_turns
        actor_rollout_ref.rollout.multi_turn.tool_config_path actor_rollout_ref.rollout.n
        actor_rollout_ref.rollout.tensor_model_parallel_size
        actor_rollout_ref.rollout.top_k actor_rollout_ref.rollout.top_p
        algorithm.adv_estimator algorithm.filter_groups.max_num_gen_batches
        algorithm.kl_ctrl.horizon algorithm.kl_ctrl.kl_coef algorithm.kl_penalty
        algorithm.norm_adv_by_std_in_grpo algorithm.rollout_correction.bypass_mode
        algorithm.rollout_correction.rollout_is
        algorithm.rollout_correction.rollout_is_batch_normalize
        algorithm.rollout_correction.rollout_is_threshold
        algorithm.rollout_correction.rollout_rs
        algorithm.rollout_correction.rollout_rs_threshold algorithm.use_kl_in_reward
        critic.cliprange_value critic.forward_max_token_len_per_gpu
        critic.forward_micro_batch_size critic.forward_micro_batch_size_per_gpu
        data.apply_chat_template_kwargs data.dataloader_num_workers
        data.filter_overlong_prompts data.gen_batch_size data.max_length
        data.max_prompt_length data.max_response_length data.max_token_len_per_gpu
        data.messages_key data.micro_batch_size_per_gpu data.prompt_key data.reward_fn_key
        data.train_batch_size data.train_files data.train_max_samples data.truncation
        data.trust_remote_code data.val_files data.val_max_samples
        reward.custom_reward_function trainer.balance_batch trainer.critic_warmup
        trainer.default_local_dir trainer.experiment_name trainer.log_val_generations
        trainer.logger trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep
        trainer.max_critic_ckpt_to_keep trainer.n_gpus_per_node trainer.nnodes
        trainer.project_name trainer.resume_from_path trainer.resume_mode trainer.save_freq
        trainer.test_freq trainer.total_epochs trainer.total_training_steps
        trainer.val_before_train trainer.val_only""",
    ),
    "OpenRLHF": Library(
        "OpenRLHF 0.11.2",
        """actor.adam.betas actor.adam.eps actor.adam.lr actor.adam.weight_decay
        actor.aux_loss_coef actor.entropy_coef actor.eps_clip actor.eps_clip_low_high
        actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant
        actor.loss_agg_mode actor.lr_scheduler actor.lr_warmup_ratio actor.max_norm
        actor.min_lr_ratio actor.model_name_or_path actor.num_gpus_per_node actor.num_nodes
        actor.policy_loss_type algo.advantage.is_correction_gating
        algo.advantage.is_correction_level algo.advantage.is_correction_mode
        algo.advantage.is_correction_threshold algo.advantage.lambd
        algo.advantage.no_std_norm algo.dynamic_filtering_enable
        algo.dynamic_filtering_range algo.kl.horizon algo.kl.init_coef
        algo.kl.unbiased_gradient algo.kl.use_loss ckpt.best_metric_key ckpt.load_enable
        ckpt.max_num ckpt.output_dir ckpt.save_steps critic.freezing_steps
        critic.value_clip data.apply_chat_template data.chosen_key
        data.dataloader_num_workers data.dataset data.dataset_probs data.dataset_split
        data.input_key data.input_template data.label_key data.max_len data.max_samples
        data.output_key data.prompt_dataset data.prompt_key data.prompt_probs
        data.prompt_split data.rejected_key data.tokenizer_chat_template ds.adam_offload
        ds.attn_implementation ds.enable_sleep ds.load_in_4bit ds.lora.target_modules
        ds.packing_samples ds.ring_attn_size ds.use_liger_kernel ds.zero_stage eval.dataset
        logger.logging_steps logger.tensorboard_dir logger.wandb.project
        logger.wandb.run_name model.beta model.ipo_enable model.loss_type
        model.margin_loss_enable model.nll_loss_coef reward.normalize_enable
        reward.overlong_buffer_len reward.overlong_penalty_factor reward.remote_url
        reward.stop_properly_penalty_coef rollout.batch_size rollout.max_tokens_per_gpu
        rollout.micro_batch_size rollout.n_samples_per_prompt rollout.top_p
        train.agent_func_path train.async_enable train.async_queue_size train.batch_size
        train.colocate_all train.dynamic_batch_enable train.ema_beta train.enable_ema
        train.max_epochs train.num_episodes train.partial_rollout_enable
        vllm.enable_prefix_caching vllm.enforce_eager vllm.gpu_memory_utilization
        vllm.num_engines vllm.sync_backend vllm.tensor_parallel_size""",
        "0.6 to 0.9",
        """actor_learning_rate adam_betas advantage_estimator entropy_loss_coef flash_attn
        generate_max_len gradient_checkpointing init_kl_coef kl_estimator learning_rate
        lora_alpha lora_rank lr_warmup_ratio max_epochs max_len micro_train_batch_size
        num_episodes packing_samples pretrain prompt_data prompt_max_len rollout_batch_size
        save_path train_batch_size wandb_project""",
    ),
    "Axolotl": Library(
        "Axolotl 0.19.0",
        """accelerator_config activation_checkpointing activation_offloading adam_beta1
        adam_beta2 adam_epsilon adapter attn_implementation auto_find_batch_size
        auto_resume_from_checkpoints base_model batch_size bf16 center_rewards_coefficient
        chat_template_jinja chat_template_kwargs chunked_cross_entropy comet_project_name
        context_parallel_size cosine_min_lr_ratio cpo_alpha dataloader_drop_last
        dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
        dataset_num_proc datasets ddp_broadcast_buffers ddp_bucket_cap_mb
        ddp_find_unused_parameters ddp_timeout deepspeed do_bench_eval dp_shard_size
        dpo_beta dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_padding_free
        dpo_use_weighting early_stopping_patience eos_token eot_tokens eval_batch_size
        eval_sample_packing eval_steps eval_strategy evals_per_epoch evaluation_strategy
        excess_length_strategy field_chosen field_messages field_prompt field_rejected
        field_system flash_attention fp16 fsdp fsdp_config fsdp_version
        gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
        greater_is_better group_by_length hub_model_id hub_revision hub_strategy
        kto_desirable_weight kto_undesirable_weight learning_rate load_best_model_at_end
        load_in_4bit load_in_8bit loftq_config logging_steps lora_alpha lora_dropout
        lora_model_dir lora_modules_to_save lora_r lora_target_linear lora_target_modules
        lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio lr lr_scheduler
        lr_scheduler_kwargs max_grad_norm max_prompt_len max_steps
        message_property_mappings metric_for_best_model micro_batch_size
        mlflow_experiment_name mlflow_run_name mlflow_tracking_uri neftune_noise_alpha
        num_epochs optim_args optim_target_modules orpo_alpha output_dir pad_to_multiple_of
        pad_to_sequence_len pad_token peft_init_lora_weights peft_layers_to_transform
        peft_use_dora peft_use_rslora precompute_ref_log_probs relora remove_unused_columns
        resume_from_checkpoint reward_model ring_attn_func rl rl_beta roles_to_train
        rpo_alpha sample_packing sample_packing_bin_size sample_packing_group_size
        save_only_model save_steps save_strategy save_total_limit saves_per_epoch
        sequence_len sequence_parallel_degree shuffle_merged_datasets simpo_gamma
        special_tokens step_separator streaming test_datasets tf32 top_p torch_compile
        torch_compile_backend torch_compile_mode torch_empty_cache_steps
        trackio_project_name trackio_run_name trackio_space_id train_on_eos train_on_eot
        train_on_inputs train_on_last_step_only trl.beta trl.entropy_coef
        trl.entropy_coef_delta trl.entropy_coef_max trl.entropy_coef_min trl.entropy_target
        trl.epsilon trl.epsilon_high trl.generation_batch_size trl.generation_kwargs
        trl.importance_sampling_level trl.log_completions trl.log_multimodal trl.loss_type
        trl.mask_truncated_completions trl.max_completion_length trl.min_p
        trl.multi_objective_aggregation trl.num_completions_to_print trl.num_generations
        trl.num_iterations trl.off_policy_mask_threshold trl.ref_model_mixup_alpha
        trl.ref_model_sync_steps trl.repetition_penalty trl.reward_funcs trl.reward_weights
        trl.rollout_func trl.scale_rewards trl.sync_ref_model trl.top_k
        trl.use_adaptive_entropy trl.use_bias_correction_kl trl.use_liger_loss trl.use_vllm
        trl.vllm_enable_sleep_mode trl.vllm_guided_decoding_regex
        trl.vllm_importance_sampling_cap trl.vllm_importance_sampling_clip_max
        trl.vllm_importance_sampling_clip_min trl.vllm_importance_sampling_correction
        trl.vllm_importance_sampling_mode trl.vllm_mode trl.vllm_server_host
        trl.vllm_server_port trl.vllm_server_timeout trust_remote_code use_comet use_mlflow
        use_tensorboard use_trackio use_wandb val_set_size vllm.dtype
        vllm.enable_prefix_caching vllm.enforce_eager vllm.max_model_len wandb_entity
        wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch
        warmup_ratio warmup_steps weight_decay""",
    ),
    "LLaMA-Factory": Library(
        "LLaMA-Factory 0.9.5",
        """cutoff_len dataset eval_dataset finetuning_type flash_attn lora_alpha lora_dropout
        lora_rank lora_target max_samples model_name_or_path pref_beta quantization_bit reward_model
        simpo_gamma stage use_dora use_rslora val_size""",
    ),
}
"""Words of `settings/synonyms.toml` by the libraries that have them. `python -m tools.dev.names
FOLDER` looks for the names of `now` in wheels of these releases.
"""
COLUMNS = ("name there", "here")
HEAD = """# Names of other libraries

`tether explain WORD` translates one of these names. [Coming from other libraries](../guides/coming_from.md)
names the habits and defaults that differ.

The names of each library were read in the release above its table. If a name has several keys here, the first one that
your section has counts. Keys of a section are listed without it: `kl.coefficient` is `ppo.kl.coefficient` in `[ppo]`.
"""


def page() -> str:
    """Every name by library."""
    parts = [HEAD, "## Methods\n", markdown(("name", "here"), _methods())]
    for name, library in LIBRARIES.items():
        title = (
            "TRL: names of TRL 1.x and of the 0.x that had PPOTrainer" if name == "TRL" else name
        )
        parts += [f"## {title}\n", f"Read in {library.read}.{_earlier(library)}\n"]
        gone = library.before.split()
        rows = [
            (f"`{word}`" + (" †" if word in gone else ""), meaning(word))
            for word in sorted(library.names())
        ]
        parts.append(markdown(COLUMNS, rows))
        if name == "TRL":
            parts.append(markdown(("trainer", "here"), _trainers()))
    rows = [(f"`{word}`", meaning(word)) for word in sorted(others())]
    parts += ["## Other words\n", "No release above has these. tether translates them, too.\n"]
    parts.append(markdown(("word", "here"), rows))
    return "\n".join([*parts, "## Commands\n", markdown(COLUMNS, _commands())])


def _earlier(library: Library) -> str:
    return f" A name with † is one of {library.earlier}, and gone since." if library.before else ""


def others() -> set[str]:
    """Synonyms that no library in the tables has."""
    listed = {word(name) for library in LIBRARIES.values() for name in library.names()}
    return {*KEYS, *NOTES} - {*listed, *METHODS}


def word(name: str) -> str:
    """The last part of a name: the part that is translated."""
    return name.rpartition(".")[2]


def absent(library: Library, wheels: Iterable[Path]) -> list[str]:
    """Names of `now` that no wheel's Python or YAML files have as a field, key, argument or
    option.
    """
    texts = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            files = [n for n in archive.namelist() if n.endswith((".py", ".yaml"))]
            texts += [archive.read(name).decode("utf-8", "replace") for name in files]
    text = "\n".join(texts)

    def is_there(name: str) -> bool:
        # a prefix may be put before an option by a loop
        option = re.escape(name.partition(".")[2] or name)
        field = rf"^[ \t]*{word(name)} *[:=,]"
        return bool(re.search(rf'"--[\w{{}}]*\.?{option}"|{field}', text, re.M))

    return [name for name in library.now.split() if not is_there(name)]


def _methods() -> Iterator[tuple[str, str]]:
    for name, (section, key, value) in METHODS.items():
        note = "; ".join(["", advice(NOTES, name)]) if name in NOTES else ""
        yield f"`{name}`", f'`[{section}]` with `{key} = "{value}"`{note}'
    for name, section in SECTIONS.items():
        yield f"`{name}`", f"`[{section}]`"


def _trainers() -> Iterator[tuple[str, str]]:
    for name, section in TRAINERS.items():
        short = name.removesuffix("trainer")
        names = {"reward": "Reward", "onlinedpo": "OnlineDPO"}
        yield f"`{names.get(short, short.upper())}Trainer`", section


def _commands() -> list[tuple[str, str]]:
    return [(f"`{name}`", f"`tether {command}`") for name, command in COMMANDS.items()]


def meaning(name: str) -> str:
    """tether's keys for a name, or the advice for one without a key."""
    last = word(name)
    keys = " or ".join(f"`{key}`" for key in KEYS.get(last, ()) if key in _every_key())
    return "; ".join(filter(None, (keys, advice(NOTES, last))))


@cache
def _every_key() -> set[str]:
    """Keys of recipes, with and without their sections."""
    full = [".".join(key.path) for key in keys_of(recipe_type())]
    inner = {key.partition(".")[2] for key in full if key.partition(".")[0] in STAGES}
    return {*full, *inner, *STAGES}


def main() -> None:
    """Print the names that the wheels in a folder do not have, library by library."""
    folder = Path(sys.argv[1])
    site = {"TRL": ("trl", "transformers", "peft"), "LLaMA-Factory": ("llamafactory",)}
    for name, library in LIBRARIES.items():
        names = site.get(name, (name.lower(),))
        wheels = [wheel for one in names for wheel in folder.glob(f"{one}-*.whl")]
        print(f"{name}: {absent(library, wheels) if wheels else 'no wheel'}")


if __name__ == "__main__":
    main()
