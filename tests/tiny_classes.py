"""Tiny random models of every causal language model of transformers, saved by transformers. Size fields are set small
under all their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny_models import VOCAB

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # its import takes a second

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_MOST = 45_000_000
"""Maximum number of parameters of a tested model."""

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 128),
    **dict.fromkeys(("dense_intermediate_size", "ffn_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    "encoder_layers": 1,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "kv_channels"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "zero_expert_num"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"index_head_dim": 16, "index_n_heads": 4, "index_topk": 64},
    **{"hidden_size_per_layer_input": 16, "laurel_rank": 8, "default_language": "en_XX"},
}
_LATENT = {"num_key_value_heads": 4}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
}
_TOWER |= {"embed_dim": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "output_dim": 32, "base_channels": 32}
_SLIDES = ["sliding_attention", "full_attention", "sliding_attention"]
_DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2}
_NEMOTRON_H = {
    "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES = {"sliding_attention": _ROPE, "full_attention": {**_ROPE, "rope_theta": 50000.0}}
_FIVE = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_hidden_layers": 5,
    "layer_types": _FIVE,
    "sliding_window": 24,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
"""Heads of two sizes, values that equal keys, and layers that reuse the keys and values of others."""

_INDEX_HEADS = {"index_n_heads": 18}
"""See INDEXER of tiny_models.py."""

_OTHERWISE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": _SLIDES, "sliding_window": 24, "rope_parameters": _ROPES},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v32": _INDEX_HEADS,
    "glm_moe_dsa": _INDEX_HEADS,
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": _FIVE,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "intermediate_size": [128] * 5,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA),
    "bamba": {**_SPACE, "attn_layer_indices": [1]},
    "falcon_h1": {**_SPACE, "mamba_d_ssm": 128, "key_multiplier": 0.7, "ssm_out_multiplier": 0.6},
    "granitemoehybrid": {**_SPACE, **_DELTA},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2},
    "nemotron_h": _NEMOTRON_H,
    "zamba2": {"n_mamba_heads": 8, "layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "longcat_flash": {"num_key_value_heads": 4, "num_layers": 2},
    "minicpm3": {"scale_emb": 1, "scale_depth": 1.4, "dim_model_base": 64},
    "zaya": {"num_experts_per_tok": 1},
}
"""By model_type: fields that have another meaning there, or depend on each other."""
_WITHOUT: dict[str, tuple[str, ...]] = {
    "falcon": ("head_dim",),
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    "gpt_neo": ("num_layers", "num_hidden_layers"),
    "gemma4_assistant": ("hidden_size_per_layer_input",),
    "gemma4_unified_assistant": ("hidden_size_per_layer_input",),
    "xlstm": ("v_head_dim",),
}
"""Fields that keep the class's defaults."""


def tiny_config(kind: str) -> Any:
    """A small config of a model_type. Raises what its class raises."""
    made_by = CONFIG_MAPPING[kind]
    small = _small(made_by, kind)
    for name in made_by.sub_configs:
        if (part := type(getattr(made_by(), name, None))) is type(None):
            continue
        if name == "text_config":
            small[name] = {"model_type": part.model_type, **_small(part, part.model_type)}
        elif "vision" in name or "audio" in name or name == "vq_config":
            small[name] = {own: value for own, value in _TOWER.items() if own in _fields(part())}
    config = made_by(**small)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    return config


def _small(made_by: Any, kind: str) -> dict[str, Any]:
    known = _fields(made_by())
    small = {name: value for name, value in _SMALL.items() if name in known and name not in _WITHOUT.get(kind, ())}
    small |= _LATENT if "kv_lora_rank" in small else {}
    return small | _OTHERWISE.get(kind, {})


def _fields(config: Any) -> set[str]:
    """Fields of a config with their aliases."""
    return {*config.to_dict(), *getattr(type(config), "attribute_map", {})}


def save_tiny_class(path: Path, kind: str) -> type[PreTrainedModel]:
    """Write a random model to `path`; return its class. Its weights are larger than usual, so that distributions are
    not flat. Raises ValueError for a model that is not small.
    """
    config = tiny_config(kind)
    made_by = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if made_by.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    asked = {"attn_implementation": "eager", "dtype": torch.float32}
    with torch.device("meta"):
        size = sum(each.numel() for each in made_by._from_config(config, **asked).parameters())
    if size > _MOST:
        raise ValueError(f"its small config has {size:,} parameters")
    torch.manual_seed(1234)
    model = made_by._from_config(config, **asked)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            embedding = any(part in name for part in ("embed", "wte", "wpe"))
            torch.nn.init.normal_(parameter, std=0.5 if embedding else 1.2 * parameter.shape[-1] ** -0.5)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    for module in model.modules():  # some classes zero it again when loaded
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0
    model.save_pretrained(path)
    return made_by
