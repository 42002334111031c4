"""The parameters of the parts of layers, as config.json gives their sizes, for decoders of nearly every family. No
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.kv_cache_spec import PIECE, ColumnState, MatrixState
from quire.engine.checkpoint.families import (
    ALONE,
    ENCODERS,
    GATED,
    HEAD_GATED,
    PAIRED,
    SELECTIVE_SCANS,
    STATE_SPACES,
    WITHOUT_GATES,
    shared_experts,
    sparse_layers,
)
from quire.engine.checkpoint.fields import ALIASES
from quire.engine.checkpoint.parts import shared_blocks
from quire.engine.errors import ModelError

_BERTS = {"bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta"}
_READERS = {*_BERTS, *PAIRED}
_TWO_MATRICES = {*WITHOUT_GATES, "gpt_neo", "codegen", *_READERS}
"""Families whose MLP has two matrices instead of three."""
_NORM_BIASES = {
    "bloom",
    "codegen",
    "falcon",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "nemotron",
    "opt",
    "phi",
    "phimoe",
    "stablelm",
    "starcoder2",
    *_READERS,
}
"""Families whose norms have biases."""
_FOUR_NORMS, _ONE_NORM = (
    {"gemma2", "gemma3", "gemma3_text", "glm4", "lfm3"},
    {"cohere", "cohere2", "gptj", "phi", *ALONE},
)
"""Families whose layers have another number of norms than two."""
TIED = {"gpt_neo", *ENCODERS}
"""Families, of those without a row in engine/checkpoint/alike/left_out.py, whose output head is the embedding unless
config.json says otherwise."""
_BIASED = {"gpt2", "gpt_bigcode", "bloom", "phi", *_READERS}
"""Families whose linear layers have biases."""
_BIASED_MLP, _BIASED_HEAD = {*_BIASED, "gpt_neox", "gptj"}, {"gptj", "phi"}
"""Families whose MLPs have biases, and those whose output heads have them where they are not tied."""
_NO_OUT_BIAS = {
    "glm",
    "glm4",
    "glm4_moe",
    "helium",
    "qwen2",
    "qwen2_5_vl_text",
    "qwen2_moe",
    "qwen2_vl_text",
    "seed_oss",
    "stablelm",
}
"""Families where queries, keys and values may have biases, and what follows attention has none of these."""
_HEAD_NORMS = {
    "apertus",
    "exaone4",
    "gemma3_text",
    "hunyuan_v1_dense",
    "lfm2",
    "qwen3",
    "qwen3_moe",
    *GATED,
    "dots1",
    "exaone_moe",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "lfm3",
    "mellum",
    "qwen3_vl_moe_text",
    "qwen3_vl_text",
}
"""Families with a norm of each query and key head."""
_WHOLE_NORMS = {"flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe"}
"""Families with a norm of all query heads together, and of all key heads."""
_CORRECTED = {
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "kimi_k2",
    "lfm2_moe",
    "minimax_m2",
    "exaone_moe",
    "nemotron_h",
    "solar_open",
}
"""Families whose choice of experts a number of each expert corrects."""
_GATED_SHARED = {"qwen2_moe", "qwen3_5_moe_text", "qwen3_next"}
"""Families whose shared experts have a gate."""
LEARNED = {"gpt2", "opt", "gpt_bigcode", "gpt_neo", *_READERS}
"""Families with a table of positions."""


def attention_numbers(text: Mapping[str, Any], hidden: int, *, latents: bool) -> tuple[int, int, str, int]:
    """One layer's attention.

    Returns its parameters, the numbers it caches per token, a formula for these, and query heads times head size.
    """
    heads = given_size(text, "num_attention_heads")
    if latent := text.get("kv_lora_rank"):
        rope, nope, value = (_given(text, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        low = text.get("q_lora_rank")
        query = heads * (rope + nope)
        parameters = hidden * low + low + low * query if low else hidden * query
        parameters += hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden
        parameters += int(low or 0) + latent + rope + hidden if text.get("attention_bias") else 0
        width = heads * (rope + nope + value) // 2
        if not latents:
            widest = max(rope + nope, value)
            return parameters, 2 * heads * widest, f"2 x {heads} heads x {widest} (latents are expanded)", width
        return parameters, latent + rope, f"({latent} latent + {rope} rope)", width
    shared = key_heads(text)
    size = head_size(text, hidden)
    if size < 1:
        raise ModelError(f"model: config.json: hidden_size: {hidden} cannot be split into {heads} heads")
    kind = text.get("model_type")
    if kind in shared_blocks.KINDS:  # whose parameters are no layer's: block_numbers
        return 0, 2 * shared * size, f"2 x {shared} heads x {size}", heads * size
    parameters = (2 + (kind in GATED)) * hidden * heads * size + 2 * hidden * shared * size
    parameters += hidden * heads if kind in HEAD_GATED and text.get("use_attention_gate") is not False else 0
    asked = any(text.get(name) for name in ("attention_bias", "use_bias", "use_qkv_bias", "enable_bias"))
    if asked or kind in _BIASED or kind in ("qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text"):
        parameters += heads * size + 2 * shared * size + (0 if kind in _NO_OUT_BIAS else hidden)
    parameters += hidden if text.get("attention_out_bias") else 0
    parameters += heads if kind in ("gpt_oss", "granite_swa", "granitemoe_swa") else 0  # their sinks
    if kind in _HEAD_NORMS or (kind == "glm4_moe" and text.get("use_qk_norm")):
        parameters += 2 * size
    elif kind in _WHOLE_NORMS or (kind not in ("glm4_moe", "llama4_text") and text.get("use_qk_norm")):
        parameters += (heads + shared) * size
    return parameters, 2 * shared * size, f"2 x {shared} heads x {size}", heads * size


def head_size(text: Mapping[str, Any], hidden: int) -> int:
    return int(text.get("head_dim") or text.get("kv_channels") or hidden // given_size(text, "num_attention_heads"))


def key_heads(text: Mapping[str, Any]) -> int:
    """Key and value heads per layer: 1 for multi-query models, as many as query heads if config.json names none."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    given = text.get("num_key_value_heads") or text.get("num_kv_heads")
    return given if isinstance(given, int) else given_size(text, "num_attention_heads")


def mlp_numbers(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int, int, int]:
    """Returns the parameters of a dense layer's MLP, of one expert, of the router for one expert, and of a layer's
    shared experts, and the number of layers that have experts."""
    kind = text.get("model_type")
    matrices = 2 if kind in _TWO_MATRICES else 3
    inner = optional_size(text, "intermediate_size") or int(text.get("expansion_ratio", 4) * hidden)
    biased = any(text.get(name) for name in ("mlp_bias", "use_bias", "enable_bias")) or kind in _BIASED_MLP
    dense = matrices * hidden * int(text.get("intermediate_size_mlp") or inner)
    dense += ((matrices - 1) * inner + hidden) if biased else 0
    dense += 2 if kind == "apertus" else 0  # what xIELU has learned
    dense = 3 * hidden * shared_experts(text)[1] if kind == "granitemoehybrid" else dense
    experts = optional_size(text, "experts")
    if experts < 2:
        return dense, 0, 0, 0, 0
    width = text.get("moe_intermediate_size")
    width = width if isinstance(width, int) else inner
    shared_width = shared_experts(text)[1]
    matrices = 2 if kind == "nemotron_h" else 3
    shared = matrices * hidden * shared_width + (hidden if kind in _GATED_SHARED and shared_width else 0)
    shared += (matrices - 1) * shared_width + hidden if biased and shared_width else 0
    read = text.get("moe_latent_size")  # what experts read, where it is not as wide as the layer
    shared += 2 * hidden * read + (hidden + read if biased else 0) if isinstance(read, int) else 0
    read = read if isinstance(read, int) else hidden
    biases = 2 * width + hidden if kind == "gpt_oss" else 0
    router = hidden + (kind == "gpt_oss" or kind in _CORRECTED)
    return dense, matrices * read * width + biases, router, shared, sum(sparse_layers(text, layers))


def norm_numbers(text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of one layer's norms."""
    kind, count = str(text.get("model_type")), 2
    if kind in _FOUR_NORMS:
        count = 4
    elif kind in _ONE_NORM or (text.get("use_parallel_residual") and kind == "stablelm"):
        count = 1
    elif kind == "falcon":
        newer = bool(text.get("new_decoder_architecture"))
        parallel, given = newer or text.get("parallel_attn"), text.get("num_ln_in_parallel_attn")
        count = int(given if isinstance(given, int) else 1 + newer) if parallel else 2
    return count * hidden * (2 if kind in _NORM_BIASES else 1)


def end_numbers(text: Mapping[str, Any], hidden: int, vocab: int, *, tied: bool) -> int:
    """Parameters beside the layers, the embedding and the head: norms, and biases of the head."""
    kind = str(text.get("model_type"))
    norm = hidden * (2 if kind in _NORM_BIASES - _BERTS else 1)
    biased = kind in _BIASED_HEAD or text.get("lm_head_bias")
    return norm * (2 if kind == "bloom" else 1) + (vocab if biased and not tied else 0)


def _given(text: Mapping[str, Any], key: str) -> int:
    """A size that config.json must give by this key. Raises ModelError."""
    if text.get(key) is None:
        raise ModelError(f"model: config.json lacks {key}, needed to know the size of latent attention")
    return int(text[key])


def optional_size(text: Mapping[str, Any], name: str) -> int:
    """The size that ALIASES lists as `name`; 0 if config.json does not give it."""
    return next((int(text[key]) for key in ALIASES[name] if isinstance(text.get(key), int)), 0)


def given_size(text: Mapping[str, Any], name: str) -> int:
    """The size that ALIASES lists as `name`. Raises ModelError if config.json does not give it."""
    value = optional_size(text, name)
    if value < 1:
        raise ModelError(f"model: config.json lacks {name}, needed to know the size of a decoder")
    return value


def kept_by(state: ColumnState | MatrixState, text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of the part of a layer that keeps this."""
    if isinstance(state, ColumnState):
        return _short_conv(text, hidden)
    values, heads = state.heads * state.value, state.heads
    if text.get("model_type") in SELECTIVE_SCANS:
        return _selective_scan(state, text, hidden)
    if text.get("model_type") in STATE_SPACES:
        return _state_space(state, text, hidden)
    linears = hidden * (state.channels + 2 * values + 2 * heads)
    return linears + (state.columns + 1) * state.channels + 2 * heads + state.value


def _selective_scan(state: MatrixState, text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a selective scan, its convolution and its linears."""
    channels = state.channels
    biased = bool(text.get("mamba_proj_bias"))
    given = text.get("mamba_dt_rank")
    rank, both = given if isinstance(given, int) else -(-hidden // 16), 2 * state.key
    found = 3 * hidden * channels + biased * (2 * channels + hidden) + channels * (2 * rank + both + state.key + 2)
    found += (state.columns + 1 + (text.get("mamba_conv_bias") is not False)) * channels
    return found + (rank + both if text.get("model_type") == "jamba" else 0)


def _state_space(state: MatrixState, text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a state space, its convolution and its two linears."""
    kind, values = str(text.get("model_type")), state.heads * state.value
    reads, biased = values + state.channels + state.heads, bool(text.get("mamba_proj_bias"))
    found = hidden * (reads + values) + biased * reads + 3 * state.heads
    found += bool(text.get("projectors_bias") if kind == "falcon_h1" else biased) * hidden
    found += (state.columns + 1 + (text.get("mamba_conv_bias") is not False)) * state.channels
    return found + (values if kind != "falcon_h1" or text.get("mamba_rms_norm") else 0)


def state_formula(state: ColumnState | MatrixState | None, layers: int) -> str:
    """Of what pages keep; "": nothing."""
    if not isinstance(state, ColumnState):
        return ""
    return f"{state.columns} columns x {state.channels} / {PIECE} x {layers} layers"


def _short_conv(text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a convolution and its two linears."""
    biases = 5 * hidden if text.get("conv_bias") else 0
    return 4 * hidden * hidden + int(text.get("conv_L_cache") or 3) * hidden + biases
