"""The names of a GGUF file's tensors, and what they are called in a checkpoint of the same family."""

from __future__ import annotations

import re

from quire.engine.gguf import delta_net_config, mamba_config

_MODEL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSORS_WITH_POST_NORMS = _LAYER_TENSORS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN3_MOE_TENSORS = _LAYER_TENSORS | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED_EXPERT_TENSORS = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_MOE_WITH_SHARED_TENSORS = _QWEN3_MOE_TENSORS | _SHARED_EXPERT_TENSORS
_DEEPSEEK_TENSORS = _MOE_WITH_SHARED_TENSORS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_QWEN2_MOE_TENSORS = {
    **_QWEN3_MOE_TENSORS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{name: own.replace("shared_experts", "shared_expert") for name, own in _SHARED_EXPERT_TENSORS.items()},
}
_HUNYUAN_TENSORS = {
    **_QWEN3_MOE_TENSORS,
    "ffn_gate_inp": "mlp.gate.wg",
    **{name: own.replace("shared_experts", "shared_mlp") for name, own in _SHARED_EXPERT_TENSORS.items()},
}
_GPT_OSS_TENSORS = _QWEN3_MOE_TENSORS | {
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
}
_MIXTRAL_TENSORS = _LAYER_TENSORS | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_GRANITE_MOE_TENSORS = {
    **_QWEN3_MOE_TENSORS,
    **{name: own.replace("mlp.", "block_sparse_moe.") for name, own in _QWEN3_MOE_TENSORS.items() if "exps" in name},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{name: own.replace("mlp.shared_experts", "shared_mlp") for name, own in _SHARED_EXPERT_TENSORS.items()},
}
_LFM2_TENSORS = _LAYER_TENSORS | {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
_LFM2_MOE_TENSORS = _LFM2_TENSORS | {
    name: own.replace("block_sparse_moe", "feed_forward")
    for name, own in _MIXTRAL_TENSORS.items()
    if name not in _LAYER_TENSORS
}
_MAMBA_TENSORS = _LAYER_TENSORS | mamba_config.LAYER_TENSORS
_JAMBA_TENSORS = {
    **_MAMBA_TENSORS,
    **{
        name: own.replace("block_sparse_moe", "feed_forward")
        for name, own in _GRANITE_MOE_TENSORS.items()
        if "exps" in name
    },
    "ffn_gate_inp": "feed_forward.router",
}
_NEMOTRON_H_TENSORS = _MAMBA_TENSORS | {
    name: own.replace("mlp.", "mixer.") for name, own in _MOE_WITH_SHARED_TENSORS.items() if name not in _LAYER_TENSORS
}
_NEMOTRON_H_TENSORS |= {"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"}
_GRANITE_HYBRID_TENSORS = {
    **_GRANITE_MOE_TENSORS,
    **mamba_config.LAYER_TENSORS,
    **{f"ffn_{name}": f"shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_ROUTER_BIAS_TENSORS = {
    "ernie4_5_moe": "mlp.moe_statics.e_score_correction_bias",
    "lfm2_moe": "feed_forward.expert_bias",
    "minimax_m2": "block_sparse_moe.e_score_correction_bias",
    "nemotron_h": "mixer.gate.e_score_correction_bias",
}
"""What corrects the choice of experts, where it is not DeepSeek-V3's name."""
_SEED_OSS_TENSORS = _LAYER_TENSORS | {"post_attention_norm": "post_attention_layernorm"}
_TENSORS_BY_MODEL_TYPE = {
    "deepseek_v2": _DEEPSEEK_TENSORS,
    "deepseek_v3": _DEEPSEEK_TENSORS,
    "dots1": _MOE_WITH_SHARED_TENSORS,
    "ernie4_5_moe": _MOE_WITH_SHARED_TENSORS,
    "exaone4": _LAYER_TENSORS_WITH_POST_NORMS,
    "falcon_h1": _MAMBA_TENSORS,
    "falcon_mamba": _MAMBA_TENSORS,
    "gemma2": _LAYER_TENSORS_WITH_POST_NORMS,
    "gemma3_text": _LAYER_TENSORS_WITH_POST_NORMS,
    "glm4": _LAYER_TENSORS_WITH_POST_NORMS | {"ffn_up": "mlp.gate_up_proj"},
    "glm4_moe": _MOE_WITH_SHARED_TENSORS | {"post_attention_norm": "post_attention_layernorm"},
    "gpt_oss": _GPT_OSS_TENSORS,
    "granitemoe": _GRANITE_MOE_TENSORS,
    "granitemoehybrid": _GRANITE_HYBRID_TENSORS,
    "hunyuan_v1_moe": _HUNYUAN_TENSORS,
    "jamba": _JAMBA_TENSORS,
    "lfm2": _LFM2_TENSORS,
    "lfm2_moe": _LFM2_MOE_TENSORS,
    "mamba": _MAMBA_TENSORS,
    "mamba2": _MAMBA_TENSORS,
    "minimax_m2": _MIXTRAL_TENSORS,
    "mixtral": _MIXTRAL_TENSORS,
    "nemotron_h": _NEMOTRON_H_TENSORS,
    "olmo2": _LAYER_TENSORS_WITH_POST_NORMS,
    "olmoe": _QWEN3_MOE_TENSORS,
    "phimoe": _MIXTRAL_TENSORS,
    "qwen2_moe": _QWEN2_MOE_TENSORS,
    "qwen3_5_moe_text": _QWEN2_MOE_TENSORS | delta_net_config.LAYER_TENSORS,
    "qwen3_5_text": _LAYER_TENSORS | delta_net_config.LAYER_TENSORS,
    "qwen3_next": _QWEN2_MOE_TENSORS | delta_net_config.LAYER_TENSORS,
    "phi3": _LAYER_TENSORS | {"ffn_up": "mlp.gate_up_proj"},
    "qwen3_moe": _QWEN3_MOE_TENSORS,
    "seed_oss": _SEED_OSS_TENSORS,
    "youtu": _DEEPSEEK_TENSORS,
}
"""By config.json's model_type; * stands for an expert's number."""
_MTP_TENSORS = {f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm")} | {
    "nextn.shared_head_norm": "shared_head.norm"
}
"""Of a layer that guesses tokens, in all families."""
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(.+)")


def checkpoint_names(name: str, model_type: str, num_experts: int) -> str | list[str] | None:
    """The name of the same tensor in a safetensors checkpoint: blk.0.attn_q.weight is
    model.layers.0.self_attn.q_proj.weight. What all experts of a layer have in one tensor, `num_experts` of them along
    its first axis, has a name for each expert. None for a tensor that holds no weights; a name that is not known
    stays."""
    stem, _, suffix = name.rpartition(".")
    unsuffixed = mamba_config.unsuffixed_tensor_name_map(model_type) or delta_net_config.UNSUFFIXED_LAYER_TENSORS
    if (unsuffixed_match := _LAYER_PATTERN.fullmatch(name)) is not None and unsuffixed_match[2] in unsuffixed:
        return f"model.layers.{unsuffixed_match[1]}.{unsuffixed[unsuffixed_match[2]]}"
    if stem in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        return None
    if stem == "token_embd_norm" and model_type.startswith("lfm2"):  # named wrongly there: it is behind all layers
        return f"model.norm.{suffix}"
    if stem in _MODEL_TENSORS:
        return f"{_MODEL_TENSORS[stem]}.{suffix}"
    layer = _LAYER_PATTERN.fullmatch(stem)
    if layer is not None and layer[2] == "attn_sinks":
        return f"model.layers.{layer[1]}.self_attn.sinks"
    if layer is not None and layer[2] == "exp_probs_b":
        return f"model.layers.{layer[1]}.{_ROUTER_BIAS_TENSORS.get(model_type, 'mlp.gate.e_score_correction_bias')}"
    layer_tensors = _MTP_TENSORS | _TENSORS_BY_MODEL_TYPE.get(model_type, _LAYER_TENSORS)
    if layer is None or layer[2] not in layer_tensors:
        return name
    known = f"model.layers.{layer[1]}.{layer_tensors[layer[2]]}.{suffix}"
    return [known.replace("*", str(expert)) for expert in range(num_experts)] if "*" in known else known
