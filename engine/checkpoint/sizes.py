"""Computes a model's size from its config.json, for decoders of nearly every family, whether Quire serves it or not.

It counts the parameters, the numbers that attention caches per token, and the parameters that a step reads. `quire
plan` derives memory and speed from these. Layers follow Vaswani et al. (2017) with grouped queries (Ainslie et al.,
2023), gated MLPs (Shazeer, 2020), mixtures of experts (Fedus et al., 2021) and latent attention (DeepSeek-V2, 2024).
It does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.checkpoint.files import text_config
from quire.engine.errors import ModelError

_OLDER = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "falcon", "bloom", "mpt", "phi"}
_OLDER |= {"starcoder2", "nemotron", "arcee"}
"""Families whose MLP has two matrices instead of three, and whose norms have biases."""
_TIED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "starcoder2", "cohere", "cohere2"}
_TIED |= {"gemma", "gemma2", "gemma3", "gemma3_text"}
"""Families whose output head is the embedding unless config.json says otherwise."""
_BIASED = {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "phi", "starcoder2"}
"""Families whose linear layers have biases."""
_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_topk"),
}
"""Which keys of config.json give a size; families name it differently."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, counted in numbers (parameters or cached values), not in bytes."""

    model_type: str
    num_layers: int
    vocab_size: int
    max_position: int
    dtype: str
    """The checkpoint's type; "float32" if config.json names none."""
    quantization: str | None
    """The method's name; None when the weights are not quantized."""
    bits: float
    """Bits per parameter of a quantized linear layer, its scales included; 0 when the weights are not quantized."""
    parameters: int
    embeddings: int
    """The part of `parameters` in the embedding and the output head, which are never quantized. A tied head, which
    shares the embedding's weights, is counted once."""
    experts: int
    """Routed experts per layer; 0 when no layer has experts."""
    experts_per_token: int
    expert_parameters: int
    """The part of `parameters` in the routed experts of all layers, without the shared experts."""
    head_parameters: int
    """Parameters of the output head, tied or not."""
    kv_numbers: int
    """Numbers cached per token in all layers together."""
    kv_formula: str
    """How kv_numbers comes about, for people to read."""
    kv_heads: int
    """The largest number of devices that the KV cache can be split over; 1 with latent attention."""
    attention_width: int
    """Query heads times head size, summed over the layers that have attention."""
    sliding: int
    """Number of layers with a sliding window. Quire nevertheless caches all of their keys and values."""
    notes: tuple[str, ...]
    """What is not counted or only guessed, for people to read."""

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: not the embedding, and only the experts chosen for it."""
        return self.touched(1)

    def touched(self, tokens: int) -> int:
        """Parameters that a step of so many tokens reads, if every expert is chosen equally often."""
        lookups = self.embeddings - self.head_parameters
        share = 1.0
        if self.experts:
            share = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return round(self.parameters - lookups - self.expert_parameters * (1 - share))

    @property
    def weight_ratio(self) -> float:
        """Bytes of the quantized weights divided by their bytes at two bytes per parameter."""
        if not self.bits:
            return 1.0
        return (self.embeddings + (self.parameters - self.embeddings) * self.bits / 16) / self.parameters


def read_sizes(raw: Mapping[str, Any]) -> ModelSizes:
    """Compute the sizes from the content of a config.json.

    Raises ModelError for a model that is not a decoder, and for a missing size, which it names.
    """
    if raw.get("is_encoder_decoder"):
        raise ModelError("model: an encoder-decoder has no plan here, only decoders do")
    text = text_config(raw)
    kind = str(text.get("model_type", ""))
    hidden, layers = _number(text, "hidden_size"), _number(text, "num_hidden_layers")
    vocab = _number(text, "vocab_size")
    whole = kind == raw.get("model_type", "")
    notes = [] if whole else ["only the text part is counted, no image or audio tower"]
    attending, sliding = _layer_kinds(text, layers)
    if attending < layers:
        notes.append(f"{layers - attending} of {layers} layers keep a state instead of keys; it is not counted")
    if any(key.startswith("mamba_") for key in text):
        notes.append("state-space layers are not known here: their parameters are a guess")
    attention, kv, formula, width = _attention(text, hidden)
    dense, expert, shared, sparse_layers = _mlp(text, hidden, layers)
    experts, per_token = _optional(text, "experts"), _optional(text, "experts_per_token")
    tied = text.get("tie_word_embeddings", kind in _TIED)
    positions = _optional(text, "max_position_embeddings") or 2048
    table = vocab * hidden
    learned = (positions + 2 * (kind == "opt")) * hidden if kind in ("gpt2", "opt", "gpt_bigcode", "gpt_neo") else 0
    embeddings = table * (1 if tied else 2) + learned
    body = layers * (attention + _norms(text, hidden)) + hidden
    mlps = (layers - sparse_layers) * dense + sparse_layers * (experts * expert + shared + experts * hidden)
    method, bits = _quantization(text)
    return ModelSizes(
        model_type=kind,
        num_layers=layers,
        vocab_size=vocab,
        max_position=positions,
        dtype=str(text.get("dtype") or text.get("torch_dtype") or "float32"),
        quantization=method,
        bits=bits,
        parameters=embeddings + body + mlps,
        embeddings=embeddings,
        experts=experts if sparse_layers else 0,
        experts_per_token=per_token,
        expert_parameters=sparse_layers * experts * expert,
        head_parameters=table,
        kv_numbers=kv * attending,
        kv_formula=f"{formula} x {attending} layers",
        kv_heads=1 if text.get("kv_lora_rank") else _kv_heads(text),
        attention_width=width * attending,
        sliding=sliding,
        notes=tuple(notes),
    )


def _attention(text: Mapping[str, Any], hidden: int) -> tuple[int, int, str, int]:
    """One layer's attention.

    Returns its parameters, the numbers it caches per token, a formula for these, and query heads times head size.
    """
    heads = _number(text, "num_attention_heads")
    if latent := text.get("kv_lora_rank"):
        rope, nope, value = (int(text[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        low = text.get("q_lora_rank")
        query = heads * (rope + nope)
        parameters = hidden * low + low + low * query if low else hidden * query
        parameters += hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden
        return parameters, latent + rope, f"({latent} latent + {rope} rope)", heads * (rope + nope + value) // 2
    shared = _kv_heads(text)
    size = int(text.get("head_dim") or text.get("kv_channels") or hidden // heads)
    parameters = 2 * hidden * heads * size + 2 * hidden * shared * size
    kind = text.get("model_type")
    if text.get("attention_bias") or text.get("use_bias") or kind in _BIASED:
        parameters += heads * size + 2 * shared * size + hidden
    elif kind in ("qwen2", "qwen2_moe"):
        parameters += heads * size + 2 * shared * size
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        parameters += 2 * size
    return parameters, 2 * shared * size, f"2 x {shared} heads x {size}", heads * size


def _kv_heads(text: Mapping[str, Any]) -> int:
    """Key and value heads per layer: 1 for multi-query models, as many as query heads if config.json names none."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    given = text.get("num_key_value_heads") or text.get("num_kv_heads")
    return int(given or _number(text, "num_attention_heads"))


def _mlp(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int, int]:
    """Returns the parameters of a dense layer's MLP, of one expert and of a layer's shared experts, and the number of
    layers that have experts."""
    kind = text.get("model_type")
    matrices = 2 if kind in _OLDER else 3
    inner = _optional(text, "intermediate_size") or int(text.get("expansion_ratio", 4) * hidden)
    biased = text.get("mlp_bias") or text.get("use_bias") or kind in _BIASED
    dense = matrices * hidden * int(text.get("intermediate_size_mlp") or inner)
    dense += ((matrices - 1) * inner + hidden) if biased else 0
    experts = _optional(text, "experts")
    if experts < 2:
        return dense, 0, 0, 0
    width = int(text.get("moe_intermediate_size") or inner)
    shared_width = int(text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * width)
    if kind in ("llama4", "llama4_text"):
        shared_width = width
    every = int(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1)
    dense_layers = set(text.get("mlp_only_layers") or ()) | set(range(int(text.get("first_k_dense_replace") or 0)))
    sparse = sum((layer + 1) % every == 0 and layer not in dense_layers for layer in range(layers))
    return dense, 3 * hidden * width, 3 * hidden * shared_width, sparse


def _norms(text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of one layer's norms. The older families have biases too; Gemma 2 and 3 have four norms."""
    kind = str(text.get("model_type"))
    if kind in _OLDER:
        return 4 * hidden
    return (4 if kind.startswith(("gemma2", "gemma3")) else 2) * hidden


def _layer_kinds(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Returns the number of layers that have attention, and the number of those with a sliding window."""
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        attend = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
        return len(attend), sum("sliding" in kind for kind in attend)
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    kind = text.get("model_type")
    full = int(text.get("max_window_layers") or 0) if kind == "qwen2" else 0
    if every := text.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(str(kind)):
        full = layers // int(every)
    return layers, max(layers - full, 0) if window else 0


def _quantization(text: Mapping[str, Any]) -> tuple[str | None, float]:
    """Returns the method's name and the bits per parameter of a linear layer with its scales; (None, 0) if none."""
    settings = text.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None, 0.0
    method = str(settings.get("quant_method") or settings.get("fmt") or "unknown")
    if method == "mxfp4":
        return method, 4.25
    if method in ("fp8", "fbgemm_fp8", "modelopt") or settings.get("load_in_8bit"):
        return method, 8.0
    bits = int(settings.get("bits") or settings.get("w_bit") or (4 if settings.get("load_in_4bit") else 8))
    group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
    return method, bits + ((16 + bits) / group if group > 0 and bits < 8 else 0.0)


def _optional(text: Mapping[str, Any], name: str) -> int:
    """The size that _ALIASES lists as `name`; 0 if config.json does not give it."""
    return next((int(text[key]) for key in _ALIASES[name] if isinstance(text.get(key), int)), 0)


def _number(text: Mapping[str, Any], name: str) -> int:
    """The size that _ALIASES lists as `name`. Raises ModelError if config.json does not give it."""
    value = _optional(text, name)
    if value < 1:
        raise ModelError(f"model: config.json lacks {name}, needed to know the size of a decoder")
    return value
