"""The names of a GGUF file's tensors, and what they are called in a checkpoint of the same family."""

from __future__ import annotations

import re

from quire.engine.gguf import delta_nets, state_spaces

_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INSIDE = {
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
_INSIDE_WITH_OUTPUT_NORMS = _INSIDE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_QWEN3_MOE = _INSIDE | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_SHARED = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_WITH_SHARED = _OF_QWEN3_MOE | _SHARED
_OF_DEEPSEEK = _WITH_SHARED | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_OF_QWEN2_MOE = {
    **_OF_QWEN3_MOE,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{name: own.replace("shared_experts", "shared_expert") for name, own in _SHARED.items()},
}
_OF_HUNYUAN = {
    **_OF_QWEN3_MOE,
    "ffn_gate_inp": "mlp.gate.wg",
    **{name: own.replace("shared_experts", "shared_mlp") for name, own in _SHARED.items()},
}
_OF_GPT_OSS = _OF_QWEN3_MOE | {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
_OF_MIXTRAL = _INSIDE | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_OF_GRANITE = {
    **_OF_QWEN3_MOE,
    **{name: own.replace("mlp.", "block_sparse_moe.") for name, own in _OF_QWEN3_MOE.items() if "exps" in name},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{name: own.replace("mlp.shared_experts", "shared_mlp") for name, own in _SHARED.items()},
}
_OF_LFM2 = _INSIDE | {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
_OF_LFM2_MOE = _OF_LFM2 | {
    name: own.replace("block_sparse_moe", "feed_forward") for name, own in _OF_MIXTRAL.items() if name not in _INSIDE
}
_OF_SPACES = _INSIDE | state_spaces.INSIDE
_OF_JAMBA = {
    **_OF_SPACES,
    **{name: own.replace("block_sparse_moe", "feed_forward") for name, own in _OF_GRANITE.items() if "exps" in name},
    "ffn_gate_inp": "feed_forward.router",
}
_OF_NEMOTRON_H = _OF_SPACES | {
    name: own.replace("mlp.", "mixer.") for name, own in _WITH_SHARED.items() if name not in _INSIDE
}
_OF_NEMOTRON_H |= {"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"}
_OF_GRANITE_HYBRID = {
    **_OF_GRANITE,
    **state_spaces.INSIDE,
    **{f"ffn_{name}": f"shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_CORRECTIONS = {
    "ernie4_5_moe": "mlp.moe_statics.e_score_correction_bias",
    "lfm2_moe": "feed_forward.expert_bias",
    "minimax_m2": "block_sparse_moe.e_score_correction_bias",
    "nemotron_h": "mixer.gate.e_score_correction_bias",
}
"""What corrects the choice of experts, where it is not DeepSeek-V3's name."""
_OF_SEED_OSS = _INSIDE | {"post_attention_norm": "post_attention_layernorm"}
_BY_FAMILY = {
    "deepseek_v2": _OF_DEEPSEEK,
    "deepseek_v3": _OF_DEEPSEEK,
    "dots1": _WITH_SHARED,
    "ernie4_5_moe": _WITH_SHARED,
    "exaone4": _INSIDE_WITH_OUTPUT_NORMS,
    "falcon_h1": _OF_SPACES,
    "falcon_mamba": _OF_SPACES,
    "gemma2": _INSIDE_WITH_OUTPUT_NORMS,
    "gemma3_text": _INSIDE_WITH_OUTPUT_NORMS,
    "glm4": _INSIDE_WITH_OUTPUT_NORMS | {"ffn_up": "mlp.gate_up_proj"},
    "glm4_moe": _WITH_SHARED | {"post_attention_norm": "post_attention_layernorm"},
    "gpt_oss": _OF_GPT_OSS,
    "granitemoe": _OF_GRANITE,
    "granitemoehybrid": _OF_GRANITE_HYBRID,
    "hunyuan_v1_moe": _OF_HUNYUAN,
    "jamba": _OF_JAMBA,
    "lfm2": _OF_LFM2,
    "lfm2_moe": _OF_LFM2_MOE,
    "mamba": _OF_SPACES,
    "mamba2": _OF_SPACES,
    "minimax_m2": _OF_MIXTRAL,
    "mixtral": _OF_MIXTRAL,
    "nemotron_h": _OF_NEMOTRON_H,
    "olmo2": _INSIDE_WITH_OUTPUT_NORMS,
    "olmoe": _OF_QWEN3_MOE,
    "phimoe": _OF_MIXTRAL,
    "qwen2_moe": _OF_QWEN2_MOE,
    "qwen3_5_moe_text": _OF_QWEN2_MOE | delta_nets.INSIDE,
    "qwen3_5_text": _INSIDE | delta_nets.INSIDE,
    "qwen3_next": _OF_QWEN2_MOE | delta_nets.INSIDE,
    "phi3": _INSIDE | {"ffn_up": "mlp.gate_up_proj"},
    "qwen3_moe": _OF_QWEN3_MOE,
    "seed_oss": _OF_SEED_OSS,
    "youtu": _OF_DEEPSEEK,
}
"""By config.json's model_type; * stands for an expert's number."""
_DRAFTING = {f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm")} | {
    "nextn.shared_head_norm": "shared_head.norm"
}
"""Of a layer that guesses tokens, in all families."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def checkpoint_name(name: str, model_type: str, count: int) -> str | list[str] | None:
    """The name of the same tensor in a safetensors checkpoint: blk.0.attn_q.weight is
    model.layers.0.self_attn.q_proj.weight. What all experts of a layer have in one tensor, `count` of them along its
    first axis, has a name for each expert. None for a tensor that holds no weights; a name that is not known stays."""
    stem, _, kind = name.rpartition(".")
    whole = state_spaces.bare(model_type) or delta_nets.BARE
    if (bare := _LAYER.fullmatch(name)) is not None and bare[2] in whole:
        return f"model.layers.{bare[1]}.{whole[bare[2]]}"
    if stem in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        return None
    if stem == "token_embd_norm" and model_type.startswith("lfm2"):  # named wrongly there: it is behind all layers
        return f"model.norm.{kind}"
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    layer = _LAYER.fullmatch(stem)
    if layer is not None and layer[2] == "attn_sinks":
        return f"model.layers.{layer[1]}.self_attn.sinks"
    if layer is not None and layer[2] == "exp_probs_b":
        return f"model.layers.{layer[1]}.{_CORRECTIONS.get(model_type, 'mlp.gate.e_score_correction_bias')}"
    inside = _DRAFTING | _BY_FAMILY.get(model_type, _INSIDE)
    if layer is None or layer[2] not in inside:
        return name
    known = f"model.layers.{layer[1]}.{inside[layer[2]]}.{kind}"
    return [known.replace("*", str(expert)) for expert in range(count)] if "*" in known else known
