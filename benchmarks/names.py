"""`python -m benchmarks.references` writes docs/guides/coming_from.md with it: names of settings in
other libraries beside tether's, from the synonyms that tether itself reads.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tether.settings.recipe import recipe_type
from tether.settings.reference import keys_of
from tether.settings.stages import STAGES
from tether.settings.synonyms import COMMANDS, KEYS, METHODS, NOTES, SECTIONS, TRAINERS


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
        """adam_beta1 adam_beta2 adam_epsilon attn_implementation beta bf16 bnb_4bit_quant_type
        center_rewards_coefficient cpo_alpha dataset_name dataset_text_field datasets deepspeed delta dtype entropy_coef epsilon
        epsilon_high eval_dataset eval_steps eval_strategy fp16 fsdp fsdp_config
        gradient_accumulation_steps gradient_checkpointing hub_model_id hub_strategy
        importance_sampling_level learning_rate
        load_in_4bit load_in_8bit logging_steps lora_alpha lora_dropout lora_r lora_target_modules
        loss_type lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm
        max_length max_prompt_length max_steps min_p missing_eos_penalty model_name_or_path
        normalize_advantages num_generations num_iterations num_train_epochs optim output_dir
        peft_config per_device_train_batch_size precompute_ref_log_probs push_to_hub
        quantization_config r ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns
        repetition_penalty report_to reward_funcs reward_model_path reward_weights
        run_name save_steps save_strategy save_total_limit scale_rewards simpo_gamma
        sync_ref_model target_modules top_k train_dataset use_bias_correction_kl use_dora use_peft use_rslora use_vllm
        vllm_gpu_memory_utilization vllm_importance_sampling_cap vllm_importance_sampling_clip_max
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_mode warmup_steps weight_decay""",
        "0.8 or 0.14",
        """cliprange cliprange_value init_kl_coef kl_coef max_seq_length num_mini_batches
        num_ppo_epochs reference_free response_length reward_model rloo_k rpo_alpha torch_dtype
        total_episodes vf_coef whiten_rewards""",
    ),
    "verl": Library(
        "verl 0.9.1",
        """actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_high
        actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.actor.grad_clip
        actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
        actor_rollout_ref.actor.optim.betas actor_rollout_ref.actor.optim.clip_grad
        actor_rollout_ref.actor.optim.lr actor_rollout_ref.actor.optim.lr_scheduler_type
        actor_rollout_ref.actor.optim.lr_warmup_steps
        actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
        actor_rollout_ref.actor.optim.weight_decay actor_rollout_ref.actor.ppo_epochs
        actor_rollout_ref.actor.ppo_micro_batch_size
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        actor_rollout_ref.actor.ppo_mini_batch_size
        actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.lora_alpha
        actor_rollout_ref.model.lora_rank actor_rollout_ref.model.target_modules
        actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.n
        actor_rollout_ref.rollout.tensor_model_parallel_size algorithm.adv_estimator
        algorithm.kl_ctrl.kl_coef algorithm.kl_penalty algorithm.norm_adv_by_std_in_grpo
        critic.cliprange_value data.max_prompt_length data.max_response_length data.prompt_key
        data.train_batch_size data.train_files data.val_files reward.custom_reward_function
        trainer.default_local_dir trainer.experiment_name trainer.n_gpus_per_node trainer.nnodes
        trainer.project_name trainer.save_freq trainer.test_freq trainer.total_epochs
        trainer.total_training_steps""",
    ),
    "OpenRLHF": Library(
        "OpenRLHF 0.11.2",
        """actor.entropy_coef actor.eps_clip actor.gradient_checkpointing_enable actor.adam.lr
        actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.lr_scheduler
        actor.lr_warmup_ratio actor.max_norm actor.model_name_or_path actor.policy_loss_type
        actor.num_nodes actor.num_gpus_per_node algo.kl.init_coef ckpt.max_num ckpt.output_dir
        ckpt.save_steps critic.value_clip data.chosen_key data.dataset data.max_len
        data.max_samples data.prompt_dataset data.prompt_key data.rejected_key
        ds.attn_implementation ds.load_in_4bit ds.lora.target_modules ds.packing_samples
        eval.dataset logger.logging_steps logger.wandb.run_name model.beta model.loss_type
        model.nll_loss_coef rollout.batch_size rollout.n_samples_per_prompt train.batch_size
        train.max_epochs train.num_episodes vllm.gpu_memory_utilization vllm.num_engines
        vllm.tensor_parallel_size""",
        "0.6 to 0.9",
        """actor_learning_rate adam_betas advantage_estimator entropy_loss_coef flash_attn
        generate_max_len gradient_checkpointing init_kl_coef kl_estimator learning_rate
        lora_alpha lora_rank lr_warmup_ratio max_epochs max_len micro_train_batch_size
        num_episodes packing_samples pretrain prompt_data prompt_max_len rollout_batch_size
        save_path train_batch_size wandb_project""",
    ),
    "Axolotl": Library(
        "Axolotl 0.19.0",
        """adapter adam_beta1 adam_beta2 adam_epsilon base_model batch_size bf16 cpo_alpha datasets
        deepspeed eval_steps eval_strategy evaluation_strategy flash_attention fp16 fsdp
        fsdp_config gradient_accumulation_steps gradient_checkpointing learning_rate load_in_4bit
        load_in_8bit logging_steps lora_alpha lora_dropout lora_r lora_target_modules lr_scheduler
        max_grad_norm max_steps micro_batch_size num_epochs output_dir peft_use_dora
        peft_use_rslora rl rpo_alpha sample_packing save_steps save_strategy save_total_limit
        sequence_len simpo_gamma trl.beta trl.max_completion_length trl.num_generations
        trl.reward_funcs trl.use_vllm val_set_size wandb_project warmup_ratio warmup_steps
        weight_decay""",
    ),
    "LLaMA-Factory": Library(
        "LLaMA-Factory 0.9.5",
        """cutoff_len dataset eval_dataset finetuning_type flash_attn lora_alpha lora_dropout
        lora_rank lora_target max_samples model_name_or_path pref_beta quantization_bit reward_model
        simpo_gamma stage use_dora use_rslora val_size""",
    ),
}
"""Words of `settings/synonyms.toml` by the libraries that have them. `python -m benchmarks.names
FOLDER` looks for the names of `now` in wheels of these releases.
"""
HEAD = """# Coming from TRL, verl, OpenRLHF or Axolotl

*Written by `python -m benchmarks.references` from the synonyms that tether reads.*

If a recipe or a call uses a name of another library, tether stops and prints its own name. `tether explain WORD` translates
one name. The tables below have the same translations. Each was read in the release that is named above it.
If a name has several keys here, the first one that your section has counts.
Keys of a section are listed without the section: `kl.coefficient` in `[ppo]` is `ppo.kl.coefficient` on the command line.

Four habits differ:

- A method is a section of a recipe, not a trainer class. `[ppo]` after `[reward]` uses the reward model of that run.
- A batch counts prompts (`prompts_per_step`, `prompts_per_update`) or rows (`batch_size`). TRL's batch is
  `per_device_train_batch_size` × `gradient_accumulation_steps` × devices.
  tether cuts micro-batches by tokens, so results do not depend on the cut.
- `minibatches` is a number of parts. With 256 prompts a step, verl's `ppo_mini_batch_size = 64` is `minibatches = 4`.
- A run is a folder. The same command continues it. Resuming needs nothing else.

Rows need no conversion: [every format](../reference/data.md) of these libraries is recognised by its columns.
Reward functions in TRL's form, `f(completions, **columns)`, work unchanged, but for two arguments: tether does not create
`completion_ids` and `trainer_state`. A recipe passes texts; for conversations as lists of messages, as in TRL, set
`completions = "messages"` in its `function` ([reward functions](python.md)).
"""


def page() -> str:
    """docs/guides/coming_from.md."""
    parts = [HEAD, "## Methods\n", _table("name", "here", _methods())]
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
        parts.append(_table("name there", "here", rows))
        if name == "TRL":
            parts.append(_table("trainer", "here", list(_trainers())))
    rest = [(f"`{word}`", meaning(word)) for word in sorted(others())]
    parts += ["## Other words\n", "No release above has these. tether translates them, too.\n"]
    parts.append(_table("word", "here", rows=rest))
    return "\n".join([*parts, "## Commands\n", _table("name there", "here", _commands())])


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
        note = f"; {NOTES[name]}" if name in NOTES else ""
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
    return "; ".join(filter(None, (keys, NOTES.get(last))))


def _every_key() -> set[str]:
    """Keys of recipes, with and without their sections."""
    full = [".".join(key.path) for key in keys_of(recipe_type())]
    inner = {key.partition(".")[2] for key in full if key.partition(".")[0] in STAGES}
    return {*full, *inner, *STAGES}


def _table(left: str, right: str, rows: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> str:
    lines = [f"| {left} | {right} |", "|---|---|", *(f"| {one} | {two} |" for one, two in rows)]
    return "\n".join(lines) + "\n"


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
