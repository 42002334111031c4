"""The names of a GGUF file's tensors, and what they are called in a checkpoint of the same family."""

from __future__ import annotations

import re

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


def checkpoint_name(name: str, model_type: str) -> str | None:
    """The name of the same tensor in a safetensors checkpoint: blk.0.attn_q.weight is
    model.layers.0.self_attn.q_proj.weight. None for a tensor that holds no weights; a name that is not known stays."""
    stem, _, kind = name.rpartition(".")
    if stem == "rope_freqs":
        return None
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    inside = _INSIDE_WITH_OUTPUT_NORMS if model_type in ("gemma2", "gemma3_text") else _INSIDE
    layer = _LAYER.fullmatch(stem)
    if layer is None or layer[2] not in inside:
        return name
    return f"model.layers.{layer[1]}.{inside[layer[2]]}.{kind}"
