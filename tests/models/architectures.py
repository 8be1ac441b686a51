"""Small random models of the architectures that transformers has, built from their
configurations.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tether.models.tiny import tiny_tokenizer

COMMON = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 8,
    "d_model": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 256,
    "max_seq_len": 256,
    "ffn_dim": 64,
    "state_size": 8,
    "time_step_rank": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
"""Given to every configuration that has a setting of this name."""
LATENT = {
    "head_dim": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MAMBA = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
}
HYBRID = {"num_hidden_layers": 4}
SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
"""Positions of time, height and width, in a half of a head's numbers."""
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), SECTIONS),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "paddleocr_vl_text"), SECTIONS),
    "deepseek_v4": {
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 1,
    },
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "bart": {
        "is_decoder": True,
        "decoder_layers": 2,
        "decoder_ffn_dim": 64,
        "decoder_attention_heads": 4,
        "encoder_layers": 2,
    },
    "bloom": {"hidden_size": 32},
    "codegen": {"rotary_dim": 4, "n_ctx": 256},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    **dict.fromkeys(("axk1", "axk2", "deepseek_v32", "glm_moe_dsa"), LATENT),
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {"n_shared_experts": 1, "layer_types": ["full_attention"] * 2},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "falcon_h1": MAMBA,
    "gemma2": {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 261,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [64] * 4,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": 261,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
    },
    "glm4_moe_lite": LATENT,
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    "mimo_v2_flash": {"layer_types": ["sliding_attention", "full_attention"]},
    "minicpm3": LATENT,
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "nemotron_h": {
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "opt": {"hidden_size": 32, "word_embed_proj_dim": 32},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3_5_text": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "rwkv": {"context_length": 256, "attention_hidden_size": 32, "num_layers": 2},
    "xglm": {"attention_heads": 4, "num_layers": 2, "d_model": 32},
    "youtu": LATENT,
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "num_mem_blocks": 1,
    },
}
"""What an architecture needs beside, or in place of, `COMMON`."""
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "encoder_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "encoder_attention_heads": 4,
    "num_heads": 4,
    "head_dim": 8,
    "encoder_ffn_dim": 64,
    "embed_dim": 32,
    "d_model": 32,
    "output_dim": 32,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "patch_size": 14,
    "image_size": 28,
}
"""Given to the configuration of a tower of images or sounds."""
TEXTS = ("text_config", "thinker_config", "llm_config", "language_config", "decoder_config")
VARIANTS = {
    "falcon-rw": (
        "falcon",
        {"alibi": True, "multi_query": False, "new_decoder_architecture": False},
    ),
    "opt-350m": ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
}
"""Shapes of an architecture that a well-known model has, and its first does not."""


def settings_of(made: Any) -> set[str]:
    """Names of the settings that a class of configurations takes."""
    fields = getattr(made, "__dataclass_fields__", ())
    return {*inspect.signature(made.__init__).parameters, *fields}


def small_multimodal(kind: str, seed: int = 0) -> Any:
    """A model that takes images or sounds beside text, as transformers loads what is published."""
    made = CONFIG_MAPPING[kind]
    usual, known, parts = made(), settings_of(made), dict[str, Any]()
    for name, part in ((name, getattr(usual, name, None)) for name in made.sub_configs):
        if part is None:
            continue
        values = {**COMMON, **OWN.get(part.model_type, {})} if name in TEXTS else TOWER
        values = {key: value for key, value in values.items() if key in settings_of(type(part))}
        parts[name] = {"model_type": part.model_type, **values}
    if not any(name in parts for name in TEXTS):
        values = {**COMMON, **OWN.get(kind, {})}
        parts |= {key: value for key, value in values.items() if key in known}
    tokens = {key for key in known if key.endswith(("_token_id", "_token_index"))}
    tokens -= {"bos_token_id", "eos_token_id", "pad_token_id"}
    config = made(**dict.fromkeys(tokens, 200), **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def small_config(name: str, **settings: Any) -> Any:
    """A configuration of the architecture or variant `name`."""
    kind, more = VARIANTS.get(name, (name, OWN.get(name, {})))
    made = CONFIG_MAPPING[kind]
    known = settings_of(made)
    common = {key: value for key, value in {**COMMON, **settings}.items() if key in known}
    if made.__dataclass_fields__["bos_token_id"].type in ("int", int):
        common["bos_token_id"] = 1
    return made(**{**common, **more})


def small_model(name: str, seed: int = 0, **settings: Any) -> Any:
    """A model of it with weights so large that what a token sees matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            small_config(name, **settings),
            dtype=torch.float32,
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def small_folder(name: str, folder: Path, **settings: Any) -> Path:
    """Such a model saved with the byte tokenizer."""
    small_model(name, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
