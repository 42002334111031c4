"""What a config.json says of a model's size, for decoders of nearly every family, served here or not. No torch.

Counts parameters, the numbers that attention caches per token, and the work per token; `quire plan` makes memory and
speed of them. Layers follow Vaswani et al. (2017) with grouped queries (Ainslie et al., 2023), gated MLPs (Shazeer,
2020), mixtures of experts (Fedus et al., 2021) and latent attention (DeepSeek-V2, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.checkpoint.files import text_config
from quire.engine.errors import ModelError

_OLDER = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "codegen", "opt", "falcon", "bloom", "mpt", "phi"}
_OLDER |= {"starcoder2", "nemotron", "arcee"}
"""Two matrices in the MLP instead of three, and norms with biases."""
_TIED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "starcoder2", "cohere", "cohere2"}
_TIED |= {"gemma", "gemma2", "gemma3", "gemma3_text"}
"""Where config.json does not say whether the head is the embedding."""
_BIASED = {"gpt2", "gpt_neox", "gpt_bigcode", "opt", "bloom", "phi", "starcoder2"}
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


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, in numbers, not bytes."""

    model_type: str
    num_layers: int
    vocab_size: int
    max_position: int
    dtype: str
    """The checkpoint's, "float32" where it does not say."""
    quantization: str | None
    bits: float
    """Per parameter of a linear, scales included, when quantized; 0: not quantized."""
    parameters: int
    embeddings: int
    """Of these, the embedding and the output head: never quantized. A tied head counts once."""
    experts: int
    experts_per_token: int
    expert_parameters: int
    """Of `parameters`, all experts of all layers, the shared ones left out."""
    head_parameters: int
    """Numbers read to make logits, tied or not."""
    kv_numbers: int
    """Cached per token, all layers together."""
    kv_formula: str
    kv_heads: int
    """Over how many devices the cache can be split; 1 with latent attention."""
    attention_width: int
    """Query heads times head size, summed over the layers that attend."""
    sliding: int
    """Layers with a sliding window; Quire keeps all their keys all the same."""
    notes: tuple[str, ...]

    @property
    def active_parameters(self) -> int:
        """Multiplied for every token: no embedding look-up, and only the experts that it meets."""
        return self.touched(1)

    def touched(self, tokens: int) -> int:
        """Parameters that a step of so many tokens reads, experts chosen evenly."""
        lookups = self.embeddings - self.head_parameters
        share = 1.0
        if self.experts:
            share = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return round(self.parameters - lookups - self.expert_parameters * (1 - share))

    @property
    def weight_ratio(self) -> float:
        """Bytes of the weights over those of the same without quantization to `bits`, at two bytes a parameter."""
        if not self.bits:
            return 1.0
        return (self.embeddings + (self.parameters - self.embeddings) * self.bits / 16) / self.parameters


def read_sizes(raw: Mapping[str, Any]) -> ModelSizes:
    """Of a config.json. Raises ModelError, naming what is missing, for what is no decoder."""
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
    """Of a layer: parameters, numbers cached per token, how these come about, query heads times head size."""
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
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    given = text.get("num_key_value_heads") or text.get("num_kv_heads")
    return int(given or _number(text, "num_attention_heads"))


def _mlp(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int, int]:
    """Parameters of a dense layer's MLP, of one expert, of the shared experts; layers that have experts."""
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
    beside = int(text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * width)
    if kind in ("llama4", "llama4_text"):
        beside = width
    every = int(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1)
    plain = set(text.get("mlp_only_layers") or ()) | set(range(int(text.get("first_k_dense_replace") or 0)))
    sparse = sum((layer + 1) % every == 0 and layer not in plain for layer in range(layers))
    return dense, 3 * hidden * width, 3 * hidden * beside, sparse


def _norms(text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a layer's norms: biases with the older families, four norms with the newer Gemmas."""
    kind = str(text.get("model_type"))
    if kind in _OLDER:
        return 4 * hidden
    return (4 if kind.startswith(("gemma2", "gemma3")) else 2) * hidden


def _layer_kinds(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Layers that attend, and those of them whose window slides."""
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
    """The method, and bits per parameter of a linear with its scales."""
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
    """0 where the model has none."""
    return next((int(text[key]) for key in _ALIASES[name] if isinstance(text.get(key), int)), 0)


def _number(text: Mapping[str, Any], name: str) -> int:
    value = _optional(text, name)
    if value < 1:
        raise ModelError(f"model: config.json lacks {name}, needed to know the size of a decoder")
    return value
