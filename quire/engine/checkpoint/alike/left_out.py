"""What a config.json means by the fields that it leaves out, where it is not what it means of a Llama. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.alike import latents, selective_scans, state_spaces

_GPT2_LEFT_OUT = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_QWEN_MOE = {"head_dim": 256, "partial_rotary_factor": 0.25, "norm_topk_prob": True}
LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    **latents.LEFT_OUT,
    **selective_scans.LEFT_OUT,
    **state_spaces.LEFT_OUT,
    **{kind: {"type_vocab_size": 2} for kind in ("camembert", "roberta", "xlm-roberta")},
    "apertus": {
        "rms_norm_eps": 1e-5,
        "hidden_act": "xielu",
        "rope_theta": 12_000_000.0,
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
    "ernie4_5": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 500_000.0},
    "ernie4_5_moe": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "moe_norm_min": 1e-12,
    },
    "exaone4": {"rms_norm_eps": 1e-5},
    "exaone_moe": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    "flex_olmo": {"rope_theta": 500_000.0},
    "falcon": {**_GPT2_LEFT_OUT, "hidden_act": "gelu", "multi_query": True, "parallel_attn": True},
    "gemma": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma2": {"tie_word_embeddings": True, "head_dim": 256},
    "gemma3_text": {
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "gemma4_text": {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
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
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    "gptj": {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "rotary_dim": 64},
    "granite_swa": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "gte": {"rope_theta": 160_000.0},
    "helium": {"rms_norm_eps": 1e-8, "head_dim": 128, "rope_theta": 100_000.0},
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
    "lfm3": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
        },
        "head_dim": 128,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "max_position_embeddings": 128_000,
        "num_key_value_heads": 4,
    },
    "llama4_text": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
    },
    "mellum": {"head_dim": 128, "norm_topk_prob": True, "sliding_window": 1024},
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
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "mpt": {**_GPT2_LEFT_OUT, "hidden_act": "gelu", "expansion_ratio": 4},
    "nomic_bert": {"type_vocab_size": 2},
    "nemotron": {"rms_norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    "olmoe": {"rms_norm_eps": 1e-5},
    "opt": {**_GPT2_LEFT_OUT, "hidden_act": "relu", "enable_bias": True},
    "phi": {"rms_norm_eps": 1e-5, "hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_experts_per_tok": 2},
    **{kind: {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0} for kind in ("qwen2_5_vl_text", "qwen2_vl_text")},
    "qwen3_5_moe_text": {**_QWEN_MOE, "intermediate_size": 512},  # of no layer
    "qwen3_5_text": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_next": _QWEN_MOE,
    "qwen3_vl_moe_text": {"tie_word_embeddings": True, "rope_theta": 500_000.0},
    "qwen3_vl_text": {"tie_word_embeddings": True, "rope_theta": 500_000.0},
    "seed_oss": {"attention_bias": True, "head_dim": 128},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "solar_open": {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "intermediate_size": 512,  # of no layer
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "rope_theta": 1_000_000.0,
    },
    "stablelm": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    "starcoder2": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
    },
}
"""By model_type: what a config.json means that leaves a field out, where it is not what it means of a Llama."""
POSITIONS: Mapping[str, int] = {
    "siglip_text_model": 64,
    "clip_text_model": 77,
    **dict.fromkeys(
        (
            "bert",
            "camembert",
            "distilbert",
            "mpnet",
            "roberta",
            "xlm-roberta",
        ),
        512,
    ),
    "gpt_bigcode": 1_024,
    **dict.fromkeys(
        (
            "arcee",
            "deepseek_v3",
            "flex_olmo",
            "helium",
            "nemotron",
            "olmoe",
            "phi3",
            "stablelm",
            "starcoder2",
        ),
        4_096,
    ),
    **dict.fromkeys(
        (
            "cohere",
            "cohere2",
            "gemma",
            "gemma2",
            "granite_swa",
            "gte",
            "modernbert",
        ),
        8_192,
    ),
    **dict.fromkeys(
        (
            "minicpm3",
            "qwen2",
            "qwen2_5_vl_text",
            "qwen2_moe",
            "qwen2_vl_text",
            "qwen3",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_moe",
            "qwen3_next",
            "smollm3",
        ),
        32_768,
    ),
    "apertus": 65_536,
    **dict.fromkeys(
        (
            "lfm2",
            "lfm2_moe",
            "qwen3_vl_moe_text",
            "qwen3_vl_text",
        ),
        128_000,
    ),
    **dict.fromkeys(
        (
            "ernie4_5",
            "ernie4_5_moe",
            "glm",
            "glm4",
            "glm4_moe",
            "gpt_oss",
            "llama4_text",
            "mellum",
            "mistral",
            "mixtral",
            "phimoe",
            "solar_open",
            "youtu",
        ),
        131_072,
    ),
    "minimax_m2": 196_608,
    "glm4_moe_lite": 202_752,
    "seed_oss": 524_288,
}
"""The same of max_position_embeddings."""
KEY_HEADS: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "ernie4_5",
            "glm",
            "glm4",
            "qwen3_5_moe_text",
            "qwen3_next",
            "starcoder2",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "ernie4_5_moe",
            "gemma2",
            "granite_swa",
            "mellum",
            "qwen3_5_text",
            "qwen3_moe",
            "smollm3",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "glm4_moe",
            "gpt_oss",
            "lfm2",
            "lfm2_moe",
            "minimax_m2",
            "ministral3",
            "mistral",
            "mixtral",
            "phimoe",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
            "seed_oss",
            "solar_open",
        ),
        8,
    ),
}
"""The same of num_key_value_heads; null means as many as there are query heads."""
QUERY_RANKS: Mapping[str, int] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "youtu"), 1536),
    **dict.fromkeys(("glm4_moe_lite", "minicpm3"), 768),
}
"""The same of q_lora_rank; null means that queries are projected at once."""


def left_out(kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a config.json of this model_type leaves out, with what it means by that."""
    missing = {name: value for name, value in LEFT_OUT.get(kind, {}).items() if found.get(name) is None}
    if found.get("rope_scaling"):
        missing.pop("rope_parameters", None)
    if kind in POSITIONS and found.get("max_position_embeddings") is None:
        missing["max_position_embeddings"] = POSITIONS[kind]
    for name, values in (("num_key_value_heads", KEY_HEADS), ("q_lora_rank", QUERY_RANKS)):
        if kind in values and name not in found:
            missing[name] = values[kind]
    return missing
