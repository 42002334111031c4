"""Tiny random models of every family, saved by transformers, as a reference for Quire."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.made_once import made_once

VOCAB = 320

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}
GROUPED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
FIVE = {"num_local_experts": 5, "num_experts_per_tok": 2}
LLAMA4 = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "intermediate_size_mlp": 128,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 24,
    "no_rope_layer_interval": 3,
    "floor_scale": 16,
    "attn_scale": 0.3,
}
ERNIE_MOE = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 48}
EXPERTS = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_expand": 2}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 4, "expand": 2}
ZAMBA2 = {
    "n_mamba_heads": 8,
    "mamba_ngroups": 4,
    "mamba_d_state": 12,
    "chunk_size": 32,
    "num_key_value_heads": 4,
    "adapter_rank": 8,
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "tie_word_embeddings": True,
}
NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 10,
    "n_groups": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
GRANITE_HYBRID = {
    **SPACE,
    "mamba_n_groups": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
FALCON_H1 = {
    **SPACE,
    "mamba_n_groups": 4,
    "mamba_d_ssm": 128,
    "num_hidden_layers": 2,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 1.3,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.2, 0.8, 1.4, 0.9],
    "mlp_multipliers": [1.3, 0.6],
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.5,
}
JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5, "mamba_d_state": 10, "mamba_expand": 4}

GEMMA = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "query_pre_attn_scalar": 50,
}

GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 6.0,
    "tie_word_embeddings": True,
    "sliding_window": 24,
}
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
}
TOWER = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 32, "patch_size": 16},
}

SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = {"sliding_window": 24, "layer_types": SLIDES}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "factor": 4.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 512,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
QUERY_SCALES = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
QUERY_SCALES |= {"original_max_position_embeddings": 32, "truncate": True}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}
LFM2 = {
    "full_attn_idxs": [1],
    "block_multiple_of": 32,
    "tie_word_embeddings": True,
}
DELTA: dict[str, Any] = {
    "full_attention_interval": 2,
    "head_dim": 32,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
HEADS = {"num_key_value_heads": None, "intermediate_size": None}
"""Used for families without such fields."""
GPT2 = {**HEADS, "n_inner": 96, "tie_word_embeddings": True}
SHORT_YARN = {name: value for name, value in YARN.items() if name != "truncate"}
NEWER_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 160}

LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
}
INDEXER = {"index_n_heads": 18, "index_head_dim": 24, "index_topk": 20}
"""With fewer heads, keys have equal scores: 0, if no product is positive."""
KIMI_LINEAR = {
    **LATENTS,
    "num_hidden_layers": 4,
    "q_lora_rank": None,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": SHORT_YARN,
}
MSCALE = SHORT_YARN | {"mscale": 0.707, "mscale_all_dim": 0.9}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-biased": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
    },
    "llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "head_dim": 32},
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 24},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {**EXPERTS, "model_type": "qwen3_moe", "mlp_only_layers": [1]},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "sliding_window": 24,
        "swiglu_limit": 1.5,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "rope_parameters": YARN,
    },
    "qwen2-moe": {
        **EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
    },
    "qwen2-moe-window": {
        **EXPERTS,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
    "flex_olmo": {"model_type": "flex_olmo", "num_experts": 5, "num_experts_per_tok": 2},
    "glm4_moe": {"model_type": "glm4_moe", **GROUPED, "attention_bias": True, "use_qk_norm": True, "head_dim": 32},
    "glm4_moe-plain": {"model_type": "glm4_moe", **GROUPED, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "dots1": {
        "model_type": "dots1",
        **GROUPED,
        "norm_topk_prob": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **ERNIE_MOE,
        "moe_layer_end_index": 1,
        "moe_layer_start_index": 0,
        "moe_num_shared_experts": 1,
    },
    "ernie4_5_moe-alone": {"model_type": "ernie4_5_moe", **ERNIE_MOE, "moe_num_shared_experts": 0},
    "granitemoe": {"model_type": "granitemoe", **GRANITE, **FIVE},
    "granitemoeshared": {"model_type": "granitemoeshared", **GRANITE, **FIVE, "shared_intermediate_size": 96},
    "granitemoe_swa": {
        "model_type": "granitemoe_swa",
        **GRANITE,
        **FIVE,
        "shared_intermediate_size": 96,
        "sliding_window": 24,
        "layer_types": SLIDES,
        "layer_rope_theta": [10000.0, 0, 500.0],
    },
    "hunyuan_v1_moe": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 32,
        "num_experts": 5,
        "moe_topk": 2,
        "rope_parameters": ALPHA,
    },
    "llama4": {"model_type": "llama4_text", **LLAMA4, "interleave_moe_layer_step": 2},
    "llama4-plain": {
        "model_type": "llama4_text",
        **LLAMA4,
        "num_experts_per_tok": 1,
        "moe_layers": [0, 2],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0},
    },
    "exaone_moe": {**GROUPED, **WINDOWED, "model_type": "exaone_moe", "num_experts": 12, "num_shared_experts": 2},
    "mellum": {
        **EXPERTS,
        **WINDOWED,
        "model_type": "mellum",
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": TWO_ROPES,
    },
    "solar_open": {**GROUPED, "model_type": "solar_open", "head_dim": 32, "first_k_dense_replace": 0},
    "minimax_m2": {"model_type": "minimax_m2", "head_dim": 32, **FIVE, "rotary_dim": 16},
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 5,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.3,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "gemma": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "gemma-biased": {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True, "attention_bias": True},
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 6.0,
    },
    "vaultgemma": {
        **GEMMA,
        "model_type": "vaultgemma",
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 6.0,
    },
    "cwm": {"model_type": "cwm", "sliding_window": 24, "num_hidden_layers": 5},
    "gemma3": {**GEMMA, "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3-linear-rope": {
        **GEMMA,
        "model_type": "gemma3_text",
        "sliding_window_pattern": 2,
        "rope_parameters": GEMMA3_ROPES,
    },
    "gemma3-with-images": {
        "model_type": "gemma3",
        "text_config": SHAPE | GEMMA | {"sliding_window_pattern": 3, "rope_parameters": GEMMA3_ROPES},
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
        "tie_word_embeddings": True,
    },
    "gemma4": {**GEMMA4, "model_type": "gemma4_text"},
    "gemma4-small": {
        **GEMMA4,
        "model_type": "gemma4_text",
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4-moe": {
        **GEMMA4,
        "model_type": "gemma4_text",
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "phi3": {"model_type": "phi3", "sliding_window": 24},
    "phi3-longrope": {"model_type": "phi3", "rope_parameters": LONGROPE},
    "ministral3": {"model_type": "ministral3", "head_dim": 32, "rope_parameters": QUERY_SCALES},
    "granite": {**GRANITE, "model_type": "granite", "tie_word_embeddings": True},
    "granite_swa": {
        **GRANITE,
        "model_type": "granite_swa",
        "sliding_window": 24,
        "layer_types": SLIDES,
        "layer_rope_theta": [10000.0, 0, 500.0],
    },
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        **WINDOWED,
        "rope_parameters": TWO_ROPES,
    },
    "lfm2": {"model_type": "lfm2", **LFM2},
    "lfm2-biased": {
        "model_type": "lfm2",
        **LFM2,
        "tie_word_embeddings": False,
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [0],
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA},
    "qwen3_5-grouped": {
        "model_type": "qwen3_5_text",
        **DELTA,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "head_dim": 16,
    },
    "qwen3_5-moe": {**EXPERTS, **DELTA, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 32},
    "qwen3-next": {
        **EXPERTS,
        **DELTA,
        "model_type": "qwen3_next",
        "linear_num_value_heads": 8,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "lfm3": {
        "model_type": "lfm3",
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv", "sliding_attention"],
        "num_hidden_layers": 5,
        "head_dim": 32,
        "sliding_window": 20,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "lfm3-ungated": {"model_type": "lfm3", "num_hidden_layers": 6, "head_dim": 16, "use_attention_gate": False},
    "mamba2": {"model_type": "mamba2", **MAMBA2},
    "mamba2-tied": {
        "model_type": "mamba2",
        **MAMBA2,
        "n_groups": 1,
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
    },
    "bamba": {"model_type": "bamba", **SPACE, "attn_layer_indices": [1]},
    "granite-hybrid": {"model_type": "granitemoehybrid", **GRANITE_HYBRID, **FIVE},
    "granite-hybrid-dense": {
        "model_type": "granitemoehybrid",
        **GRANITE_HYBRID,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
    },
    "falcon_h1": {"model_type": "falcon_h1", **FALCON_H1},
    "falcon_h1-normed": {"model_type": "falcon_h1", **FALCON_H1, "mamba_rms_norm": True, "projectors_bias": False},
    "falcon_h1-normed-behind": {
        "model_type": "falcon_h1",
        **FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "nemotron_h": {"model_type": "nemotron_h", **NEMOTRON_H},
    "nemotron_h-experts": {
        "model_type": "nemotron_h",
        **NEMOTRON_H,
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
    },
    "nemotron_h-latent": {
        "model_type": "nemotron_h",
        **NEMOTRON_H,
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"],
        "moe_latent_size": 40,
        "mlp_bias": True,
    },
    "zamba2": {"model_type": "zamba2", **ZAMBA2, "num_key_value_heads": 2, "attention_head_dim": 24},
    "zamba2-blocks": {
        "model_type": "zamba2",
        **ZAMBA2,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "add_bias_linear": True,
    },
    "mamba": {"model_type": "mamba", "state_size": 12, "intermediate_size": 256},
    "mamba-tied": {
        "model_type": "mamba",
        "intermediate_size": 96,
        "conv_kernel": 3,
        "time_step_rank": 6,
        "use_bias": True,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
    },
    "falcon_mamba": {"model_type": "falcon_mamba", "intermediate_size": 192, "mixer_rms_eps": 1e-3},
    "jamba": {"model_type": "jamba", **JAMBA},
    "jamba-dense": {"model_type": "jamba", **JAMBA, "num_experts": 1, "mamba_proj_bias": True},
    "deepseek_v2": {
        **LATENTS,
        **GROUPED,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "rope_parameters": MSCALE,
    },
    "deepseek_v2-lite": {
        **LATENTS,
        **GROUPED,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "attention_bias": True,
    },
    "deepseek_v2-dense": {**LATENTS, "model_type": "deepseek_v2", "q_lora_rank": None, "first_k_dense_replace": 3},
    "deepseek_v3": {**LATENTS, **GROUPED, "model_type": "deepseek_v3", "rope_parameters": MSCALE},
    "deepseek_v32": {**LATENTS, **GROUPED, **INDEXER, "model_type": "deepseek_v32", "rope_parameters": MSCALE},
    "glm_moe_dsa": {**LATENTS, **GROUPED, **INDEXER, "model_type": "glm_moe_dsa", "attention_bias": True},
    "glm4_moe_lite": {**LATENTS, **GROUPED, "model_type": "glm4_moe_lite", "norm_topk_prob": True},
    "kimi_linear": {**KIMI_LINEAR, "model_type": "kimi_linear"},
    "youtu": {
        **LATENTS,
        "model_type": "youtu",
        "kv_lora_rank": 30,
        "rope_interleave": False,
        "attention_bias": True,
        "pad_token_id": None,  # transformers zeroes its embedding on load
    },
    "minicpm3": {**LATENTS, "model_type": "minicpm3", "dim_model_base": 32, "tie_word_embeddings": True},
    "glm": {"model_type": "glm", "head_dim": 32},
    "glm4": {"model_type": "glm4", "head_dim": 32, "attention_bias": False},
    "exaone4": {"model_type": "exaone4", "sliding_window": 24, "layer_types": SLIDES},
    "exaone4-full": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32},
    "hunyuan_v1_dense": {"model_type": "hunyuan_v1_dense", "head_dim": 32, "rope_parameters": ALPHA},
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 32, "use_bias": True},
    "arcee": {"model_type": "arcee"},
    "helium": {"model_type": "helium", "head_dim": 16},
    "apertus": {"model_type": "apertus", "rope_parameters": LLAMA3_ROPE},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5, "tie_word_embeddings": True},
    "cohere-norms": {"model_type": "cohere", "logit_scale": 0.5, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": 24,
        "layer_types": SLIDES,
        "logit_scale": 0.5,
        "tie_word_embeddings": True,
    },
    "nemotron": {"model_type": "nemotron", "attention_bias": True, "mlp_bias": True},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 24},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
    "stablelm-parallel": {"model_type": "stablelm", "use_parallel_residual": True},
    "gpt_neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "gpt_neox-serial": {
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "use_parallel_residual": False,
        "attention_bias": False,
    },
    "gptj": {"model_type": "gptj", **HEADS, "n_inner": 96, "rotary_dim": 8},
    "phi": {"model_type": "phi"},
    "gpt2": {"model_type": "gpt2", **GPT2, "scale_attn_by_inverse_layer_idx": True},
    "opt": {"model_type": "opt", **HEADS, "ffn_dim": 96, "tie_word_embeddings": True},
    "falcon": {"model_type": "falcon", **HEADS, "bias": True, "tie_word_embeddings": True},
    "falcon-newer": {"model_type": "falcon", **HEADS, **NEWER_FALCON},
    "falcon-alibi": {
        "model_type": "falcon",
        **HEADS,
        "alibi": True,
        "parallel_attn": False,
        "multi_query": False,
    },
    "gpt_bigcode": {"model_type": "gpt_bigcode", **GPT2},
    "gpt_bigcode-heads": {"model_type": "gpt_bigcode", **GPT2, "multi_query": False},
    "bloom": {"model_type": "bloom", **HEADS, "tie_word_embeddings": True},
    "mpt": {"model_type": "mpt", **HEADS, "tie_word_embeddings": True},
}


def save_tiny_model(path: Path, family: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    """Write a random model of the family to `path`. Its weights are larger than usual, so that distributions are not
    flat.
    """
    return made_once(
        path, partial(_save, family=family, dtype=dtype, **overrides), family, FAMILIES[family], dtype, overrides
    )


def _save(path: Path, family: str, dtype: torch.dtype, **overrides: Any) -> None:
    torch.manual_seed(1234)
    options = SHAPE | FAMILIES[family] | overrides
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "_norm" not in name:
            bias = name.endswith("bias")  # stacked for all experts of a layer
            inputs = parameter.shape[1]
            spread, embedded = (0.5, 0.25) if family.startswith("zamba2") else (1.5, 0.5)  # five fused linears
            torch.nn.init.normal_(
                parameter, std=embedded if "embed" in name else 0.2 if bias else spread * inputs**-0.5
            )
        elif parameter.ndim == 3:  # experts; those of gpt-oss and Llama 4 are transposed
            inputs = parameter.shape[1 if family.startswith(("gpt_oss", "llama4")) else 2]
            torch.nn.init.normal_(parameter, std=1.5 * inputs**-0.5)
        else:
            # norms that multiply by 1 + weight
            by_1 = family.startswith(("gemma", "qwen3_5", "qwen3-next")) or family == "nemotron"
            by_1 = by_1 and not family.startswith("gemma4")
            centred = by_1 and "linear_attn" not in name
            mean = 0.0 if name.endswith("bias") or centred else -2.0 if name.endswith("A_log") else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():  # corrects the choice of experts
            torch.nn.init.normal_(buffer, std=0.2)
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, mean=1.0, std=0.2)
    model.to(dtype).save_pretrained(path)
