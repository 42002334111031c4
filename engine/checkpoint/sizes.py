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

from quire.engine.checkpoint.adapted import class_not_served
from quire.engine.checkpoint.alike.told import told_by_file
from quire.engine.checkpoint.families import (
    ENCODERS,
    GATED,
    WITHOUT_GATES,
    family_not_served,
    has_file,
    layer_windows,
    shared_experts,
    sparse_layers,
    stored_dtype,
    why_not_served,
)
from quire.engine.checkpoint.fields import ALIASES
from quire.engine.checkpoint.files import text_config
from quire.engine.checkpoint.page_groups import PIECE, ColumnState, DeltaState, PagedState, State, in_layers, state_of
from quire.engine.errors import ModelError
from quire.engine.images.config import tower_numbers

_BERTS = {"bert", "camembert", "distilbert", "mpnet", "roberta", "xlm-roberta"}
_TWO_MATRICES = {*WITHOUT_GATES, "gpt_neo", "codegen", *_BERTS}
"""Families whose MLP has two matrices instead of three."""
_NORM_BIASES = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "nemotron", "opt"}
_NORM_BIASES |= {"phi", "phimoe", "stablelm", "starcoder2", *_BERTS}
"""Families whose norms have biases."""
_FOUR_NORMS, _ONE_NORM = {"gemma2", "gemma3", "gemma3_text", "glm4"}, {"cohere", "cohere2", "gptj", "phi"}
"""Families whose layers have another number of norms than two."""
_TIED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "falcon", "bloom", "mpt", "starcoder2", "cohere", "cohere2"}
_TIED |= {"gemma", "gemma2", "gemma3", "gemma3_text", "lfm2", "lfm2_moe", "minicpm3", "youtu", *ENCODERS}
"""Families whose output head is the embedding unless config.json says otherwise."""
_BIASED = {"gpt2", "gpt_bigcode", "bloom", "phi", *_BERTS}
"""Families whose linear layers have biases."""
_BIASED_MLP, _BIASED_HEAD = {*_BIASED, "gpt_neox", "gptj"}, {"gptj", "phi"}
"""The same of MLPs and of heads that are not tied."""
_NO_OUT_BIAS = {"glm", "glm4", "glm4_moe", "helium", "qwen2", "qwen2_moe", "seed_oss", "stablelm"}
_NO_OUT_BIAS |= {"qwen2_5_vl_text", "qwen2_vl_text"}
"""Families where queries, keys and values may have biases, and what follows attention has none of these."""
_HEAD_NORMS = {"apertus", "exaone4", "gemma3_text", "hunyuan_v1_dense", "lfm2", "qwen3", "qwen3_moe", *GATED}
_HEAD_NORMS |= {"dots1", "exaone_moe", "hunyuan_v1_moe", "lfm2_moe", "mellum", "qwen3_vl_moe_text", "qwen3_vl_text"}
"""Families with norms of query and key heads,"""
_WHOLE_NORMS = {"flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe"}
"""and of all of them together."""
_CORRECTED = {"deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "kimi_k2", "lfm2_moe", "minimax_m2"}
_CORRECTED |= {"exaone_moe", "solar_open"}
"""Families whose choice of experts a number of each expert corrects."""
_GATED_SHARED = {"qwen2_moe", "qwen3_5_moe_text", "qwen3_next"}
"""Families whose shared experts have a gate."""
_LEARNED = {"gpt2", "opt", "gpt_bigcode", "gpt_neo", *_BERTS}
"""Families with a table of positions."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, counted in numbers (parameters or cached values), not in bytes."""

    model_type: str
    num_layers: int
    vocab_size: int
    max_position: int
    dtype: str
    """The checkpoint's type, as stored_dtype reads it."""
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
    kv_formula: str
    """How kv_numbers comes about, for people to read."""
    heads: int
    """Query heads of a layer, which the devices that share the model divide among them."""
    kv_heads: int
    """The largest number of devices that the KV cache can be split over; 1 with latent attention."""
    head_dim: int
    """Numbers of a cached key per head; the whole of what latent attention caches."""
    attention_width: int
    """Query heads times head size, summed over the layers that have attention."""
    states: tuple[State, ...]
    """Of the layers that have attention, or keep columns; an encoder's keep nothing."""
    unserved: tuple[str, ...]
    """Why Quire does not serve such a model; empty where it does."""
    notes: tuple[str, ...]
    """What is not counted or only guessed, for people to read."""
    tower: int = 0
    """Parameters of the tower and connector for images, which are not in `parameters` and not quantized."""
    state_formula: str = ""
    """How column_numbers comes about; "" where it is 0."""

    @property
    def sliding(self) -> int:
        """Number of layers with a sliding window."""
        return sum(each.window is not None for each in self.states)

    @property
    def kv_numbers(self) -> int:
        """Of keys and values, cached per token in all layers together."""
        return sum(each.numbers for each in self.states if isinstance(each, PagedState))

    @property
    def column_numbers(self) -> int:
        """The same of columns, which are kept in the model's type."""
        return sum(each.numbers for each in self.states if isinstance(each, ColumnState))

    def slot_bytes(self, drafts: int, width: int) -> int:
        """Bytes kept of each sequence beside pages, in all layers together, as ColumnState says it."""
        return sum(each.slot_bytes(drafts, width) for each in self.states if not isinstance(each, PagedState))

    @property
    def needs_snapshots(self) -> bool:
        """Whether cached prefixes need those of a DeltaState."""
        return any(isinstance(each, DeltaState) for each in self.states)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: not the embedding, and only the experts chosen for it."""
        return self.touched(1)

    def touched(self, tokens: int) -> int:
        """Parameters that a step of so many tokens reads, if every expert is chosen equally often."""
        lookups = self.embeddings - self.head_parameters
        return round(self.parameters - lookups - self.expert_parameters + self._expert_parameters_read(tokens))

    def share_read(self, tokens: int) -> float:
        """The part of the weights' bytes that such a step reads."""
        touched, saved = self.touched(tokens), 0.0
        if self.quantization == "mxfp4":
            saved = 1 - self.bits / 16
        few = self._expert_parameters_read(tokens)
        return (touched - few * saved) / (self.parameters - self.expert_parameters * saved)

    def _expert_parameters_read(self, tokens: int) -> float:
        share = 1 - (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        return self.expert_parameters * share

    @property
    def weight_ratio(self) -> float:
        """Bytes of the quantized weights divided by their bytes at two bytes per parameter."""
        if not self.bits:
            return 1.0
        few = self.expert_parameters if self.quantization == "mxfp4" else self.parameters - self.embeddings
        return (self.parameters - few + few * self.bits / 16) / self.parameters


@told_by_file
def read_sizes(raw: Mapping[str, Any]) -> ModelSizes:
    """Compute the sizes from the content of a config.json.

    Raises ModelError for a model that is not a decoder, and for a missing size, which it names.
    """
    family = family_not_served(raw) if raw.get("model_type") else None
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"model: {family or 'this is an encoder-decoder'}: only decoders have a plan here")
    text = text_config(raw)
    if family is not None and not _optional(text, "num_attention_heads"):
        raise ModelError(f"model: {family}, and its config.json gives no num_attention_heads to plan with")
    kind, wanted = str(text.get("model_type", "")), ("hidden_size", "num_hidden_layers", "vocab_size")
    hidden, layers, vocab = (_number(text, name) for name in wanted)
    notes = _notes(raw, kind, tower := tower_numbers(raw, hidden))
    windows = layer_windows(text, layers)
    attending, states = len(windows), state_of(text, hidden)
    if states is None and attending < layers:
        notes.append(f"{layers - attending} of {layers} layers keep a state instead of keys; it is not counted")
    if any(key.startswith("mamba_") for key in text):
        notes.append("state-space layers are not known here: their parameters are a guess")
    attention, kv, formula, width = _attention(text, hidden, latents=(latents := _keeps_latents(raw, text)))
    if attending < 1:
        raise ModelError("model: no layer of it has keys and values to cache, so there is nothing to plan")
    dense, expert, router, shared, sparse = _mlp(text, hidden, layers)
    experts, per_token = _optional(text, "experts"), _optional(text, "experts_per_token")
    tied = text.get("tie_word_embeddings", kind in _TIED)
    positions = _optional(text, "max_position_embeddings") or 2048
    table = vocab * hidden
    learned = (positions + 2 * (kind == "opt")) * hidden if kind in _LEARNED else 0
    embeddings = table * (1 if tied else 2) + learned
    others = attention if states is None else _kept_by(states, text, hidden)
    body = attending * attention + (layers - attending) * others + layers * _norms(text, hidden)
    body += _ends(text, hidden, vocab, tied=bool(tied))
    mlps = (layers - sparse) * dense + sparse * (experts * (expert + router) + shared)
    method, bits = _quantization(text)
    return ModelSizes(
        model_type=kind,
        num_layers=layers,
        vocab_size=vocab,
        max_position=positions,
        dtype=stored_dtype(text),
        quantization=method,
        bits=bits,
        parameters=embeddings + body + mlps,
        embeddings=embeddings,
        experts=experts if sparse else 0,
        experts_per_token=per_token,
        expert_parameters=sparse * experts * expert,
        head_parameters=table,
        kv_formula=f"{formula} x {attending} layers",
        heads=_number(text, "num_attention_heads"),
        kv_heads=1 if latents else _kv_heads(text),
        head_dim=kv if latents else _head_dim(text, hidden),
        attention_width=width * attending,
        states=in_layers(text, states, [PagedState(0 if kind in ENCODERS else kv, window) for window in windows]),
        unserved=tuple(why_not_served(raw)),
        notes=tuple(notes),
        tower=tower,
        state_formula=_state_formula(states, layers - attending),
    )


def _kept_by(state: ColumnState | DeltaState, text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of the part of a layer that keeps this."""
    if isinstance(state, ColumnState):
        return _short_conv(text, hidden)
    values, heads = state.heads * state.value, state.heads
    linears = hidden * (state.channels + 2 * values + 2 * heads)
    return linears + (state.columns + 1) * state.channels + 2 * heads + state.value


def _state_formula(state: ColumnState | DeltaState | None, layers: int) -> str:
    """Of what pages keep; "": nothing."""
    if not isinstance(state, ColumnState):
        return ""
    return f"{state.columns} columns x {state.channels} / {PIECE} x {layers} layers"


def _short_conv(text: Mapping[str, Any], hidden: int) -> int:
    """Parameters of a convolution and its two linears."""
    biases = 5 * hidden if text.get("conv_bias") else 0
    return 4 * hidden * hidden + int(text.get("conv_L_cache") or 3) * hidden + biases


def _notes(raw: Mapping[str, Any], kind: str, tower: int) -> list[str]:
    """What is to be known of a model that no file of ours serves, and of one of whose parts the text is one."""
    found = []
    if not has_file(raw) and class_not_served(raw) is None:
        found = ["transformers' class computes it, on Quire's pages: slower, and without LoRA, ranks and CUDA graphs"]
    if tower:
        found.append(f"its tower for images, {tower / 1e6:,.0f} M parameters, is counted where images are read")
    elif kind != raw.get("model_type", ""):
        found.append("only the text part is counted, no image or audio tower")
    return found


def _attention(text: Mapping[str, Any], hidden: int, *, latents: bool) -> tuple[int, int, str, int]:
    """One layer's attention.

    Returns its parameters, the numbers it caches per token, a formula for these, and query heads times head size.
    """
    heads = _number(text, "num_attention_heads")
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
    shared = _kv_heads(text)
    size = _head_dim(text, hidden)
    if size < 1:
        raise ModelError(f"model: config.json: hidden_size: {hidden} cannot be split into {heads} heads")
    kind = text.get("model_type")
    parameters = (2 + (kind in GATED)) * hidden * heads * size + 2 * hidden * shared * size
    asked = any(text.get(name) for name in ("attention_bias", "use_bias", "use_qkv_bias", "enable_bias"))
    if asked or kind in _BIASED or kind in ("qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text"):
        parameters += heads * size + 2 * shared * size + (0 if kind in _NO_OUT_BIAS else hidden)
    parameters += hidden if text.get("attention_out_bias") else 0
    parameters += heads if kind in ("gpt_oss", "granite_swa", "granitemoe_swa") else 0  # their sinks
    if kind in _HEAD_NORMS or (kind == "glm4_moe" and text.get("use_qk_norm")):
        parameters += 2 * size
    elif kind in _WHOLE_NORMS or (kind != "glm4_moe" and text.get("use_qk_norm")):
        parameters += (heads + shared) * size
    return parameters, 2 * shared * size, f"2 x {shared} heads x {size}", heads * size


def _keeps_latents(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether latents are cached (DeepSeek-V2, 2024). transformers' classes give keys and values made of them."""
    return bool(text.get("kv_lora_rank")) and (has_file(raw) or class_not_served(text) is not None)


def _head_dim(text: Mapping[str, Any], hidden: int) -> int:
    return int(text.get("head_dim") or text.get("kv_channels") or hidden // _number(text, "num_attention_heads"))


def _kv_heads(text: Mapping[str, Any]) -> int:
    """Key and value heads per layer: 1 for multi-query models, as many as query heads if config.json names none."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    given = text.get("num_key_value_heads") or text.get("num_kv_heads")
    return given if isinstance(given, int) else _number(text, "num_attention_heads")


def _mlp(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int, int, int]:
    """Returns the parameters of a dense layer's MLP, of one expert, of the router for one expert, and of a layer's
    shared experts, and the number of layers that have experts."""
    kind = text.get("model_type")
    matrices = 2 if kind in _TWO_MATRICES else 3
    inner = _optional(text, "intermediate_size") or int(text.get("expansion_ratio", 4) * hidden)
    biased = any(text.get(name) for name in ("mlp_bias", "use_bias", "enable_bias")) or kind in _BIASED_MLP
    dense = matrices * hidden * int(text.get("intermediate_size_mlp") or inner)
    dense += ((matrices - 1) * inner + hidden) if biased else 0
    dense += 2 if kind == "apertus" else 0  # what xIELU has learned
    experts = _optional(text, "experts")
    if experts < 2:
        return dense, 0, 0, 0, 0
    width = text.get("moe_intermediate_size")
    width = width if isinstance(width, int) else inner
    shared_width = width if kind in ("llama4", "llama4_text") else shared_experts(text)[1]
    shared = 3 * hidden * shared_width + (hidden if kind in _GATED_SHARED and shared_width else 0)
    shared += 2 * shared_width + hidden if biased and shared_width else 0
    biases = 2 * width + hidden if kind == "gpt_oss" else 0
    router = hidden + (kind == "gpt_oss" or kind in _CORRECTED)
    return dense, 3 * hidden * width + biases, router, shared, sum(sparse_layers(text, layers))


def _norms(text: Mapping[str, Any], hidden: int) -> int:
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


def _ends(text: Mapping[str, Any], hidden: int, vocab: int, *, tied: bool) -> int:
    """Parameters beside the layers, the embedding and the head: norms, and biases of the head."""
    kind = str(text.get("model_type"))
    norm = hidden * (2 if kind in _NORM_BIASES - _BERTS else 1)
    biased = kind in _BIASED_HEAD or text.get("lm_head_bias")
    return norm * (2 if kind == "bloom" else 1) + (vocab if biased and not tied else 0)


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
    if groups := settings.get("config_groups"):
        settings = next(iter(groups.values())).get("weights") or {}
        settings = {"bits": settings.get("num_bits"), "group_size": settings.get("group_size") or -1}
    elif settings.get("kv_cache_scheme"):  # only keys and values are quantized
        return None, 0.0
    bits = float(settings.get("bits") or settings.get("w_bit") or (4 if settings.get("load_in_4bit") else 8))
    group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
    return method, bits + ((16 + bits) / group if group > 0 and bits < 8 else 0.0)


def _given(text: Mapping[str, Any], key: str) -> int:
    """A size that config.json must give by this key. Raises ModelError."""
    if text.get(key) is None:
        raise ModelError(f"model: config.json lacks {key}, needed to know the size of latent attention")
    return int(text[key])


def _optional(text: Mapping[str, Any], name: str) -> int:
    """The size that ALIASES lists as `name`; 0 if config.json does not give it."""
    return next((int(text[key]) for key in ALIASES[name] if isinstance(text.get(key), int)), 0)


def _number(text: Mapping[str, Any], name: str) -> int:
    """The size that ALIASES lists as `name`. Raises ModelError if config.json does not give it."""
    value = _optional(text, name)
    if value < 1:
        raise ModelError(f"model: config.json lacks {name}, needed to know the size of a decoder")
    return value
