from __future__ import annotations

import re

from quire.engine.families.base.gguf.gguf_format import GGUFFormat

_MODEL_MODULES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_WITHOUT_WEIGHTS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_MTP_MODULES = {f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm")} | {
    "nextn.shared_head_norm": "shared_head.norm"
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(.+)")


def checkpoint_names(name: str, gguf: GGUFFormat, num_experts: int) -> str | list[str] | None:
    """Maps blk.0.attn_q.weight to model.layers.0.self_attn.q_proj.weight, and a tensor of all experts to a name per
    expert. None for tensors without weights. Unknown names stay unchanged.
    """
    stem, _, suffix = name.rpartition(".")
    if stem in _WITHOUT_WEIGHTS:
        return None
    if (module := gguf.model_modules.get(stem) or _MODEL_MODULES.get(stem)) is not None:
        return f"{module}.{suffix}"
    tensor, layer = _LAYER_PATTERN.fullmatch(name), _LAYER_PATTERN.fullmatch(stem)
    if tensor is not None and (own := gguf.layer_tensors.get(tensor[2]) or _LAYER_TENSORS.get(tensor[2])) is not None:
        return f"model.layers.{tensor[1]}.{own}"
    if layer is None or (own := _MTP_MODULES.get(layer[2]) or gguf.layer_modules.get(layer[2])) is None:
        return name
    known = f"model.layers.{layer[1]}.{own}.{suffix}"
    return [known.replace("*", str(expert)) for expert in range(num_experts)] if "*" in known else known
