"""What config.json of each family means by the fields that it leaves out. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.left_out import latents

_GPT2_LEFT_OUT = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    **latents.LEFT_OUT,
    "apertus": {
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "arcee": {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    "bloom": {**_GPT2_LEFT_OUT, "hidden_act": "gelu_new"},
    "cohere": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500_000.0},
    "cohere2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "logit_scale": 0.0625},
    "ernie4_5": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "head_dim": 128},
    "ernie4_5_moe": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "moe_norm_min": 1e-12,
    },
    "exaone4": {"rms_norm_eps": 1e-5},
    "falcon": {**_GPT2_LEFT_OUT, "hidden_act": "gelu", "multi_query": True, "parallel_attn": True},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "glm": {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4": {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "gpt2": {**_GPT2_LEFT_OUT, "hidden_act": "gelu_new", "max_position_embeddings": 1024},
    "gpt_bigcode": {**_GPT2_LEFT_OUT, "hidden_act": "gelu_pytorch_tanh", "multi_query": True},
    "gpt_neox": {"rms_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True, "partial_rotary_factor": 0.25},
    "gptj": {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "rotary_dim": 64},
    "granite_swa": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "helium": {"rms_norm_eps": 1e-8, "head_dim": 128},
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
    "hunyuan_v1_moe": {"rms_norm_eps": 1e-5},
    "lfm2": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "conv_L_cache": 3},
    "lfm2_moe": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "first_k_dense_replace": 2,
    },
    "minimax_m2": {"rope_theta": 5_000_000.0, "head_dim": 128},
    "ministral3": {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mpt": {**_GPT2_LEFT_OUT, "hidden_act": "gelu", "expansion_ratio": 4},
    "nemotron": {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "olmoe": {"rms_norm_eps": 1e-5},
    "opt": {**_GPT2_LEFT_OUT, "hidden_act": "relu", "enable_bias": True},
    "phi": {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "seed_oss": {"attention_bias": True, "head_dim": 128},
    "stablelm": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    "starcoder2": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
    },
}
"""By model_type: what a config.json means that leaves a field out, where it is not what it means of a Llama."""
