"""Computes a model's size from its config.json, for decoders of nearly every family, whether Quire serves it or not.

It counts the parameters, the numbers that attention caches per token, and the parameters that a step reads. `quire
plan` derives memory and speed from these. Layers follow Vaswani et al. (2017) with grouped queries (Ainslie et al.,
2023), gated MLPs (Shazeer, 2020), mixtures of experts (Fedus et al., 2021) and latent attention (DeepSeek-V2, 2024).
It does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from quire.engine.architecture.kv_cache_spec import (
    ColumnState,
    LayerStates,
    MatrixState,
    PagedState,
    SharedState,
    State,
)
from quire.engine.checkpoint.adapted import class_not_served
from quire.engine.checkpoint.alike.told import told_by_file
from quire.engine.checkpoint.families import (
    ALONE,
    ENCODERS,
    family_not_served,
    has_file,
    layer_parts,
    layer_windows,
    stored_dtype,
    why_not_served,
    wide_activations,
)
from quire.engine.checkpoint.files import text_config
from quire.engine.checkpoint.kv_plan import QUANTIZED_BITS
from quire.engine.checkpoint.parts import shared_blocks, unequal
from quire.engine.checkpoint.parts.parameters import (
    LEARNED,
    TIED,
    attention_numbers,
    end_numbers,
    given_size,
    head_size,
    kept_by,
    key_heads,
    mlp_numbers,
    norm_numbers,
    optional_size,
    state_formula,
)
from quire.engine.checkpoint.parts.states import in_layers, state_of
from quire.engine.errors import ModelError
from quire.engine.images.vision_config import count_vision_parameters


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model, counted in numbers (parameters or cached values), not in bytes."""

    model_type: str
    num_layers: int
    vocab_size: int
    max_position: int
    dtype: str
    wide_activations: bool
    """See engine/checkpoint/families.py."""
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
    layer_states: tuple[LayerStates, ...]
    """By layer, of those that have attention or keep something else; an encoder's keep nothing."""
    unserved: tuple[str, ...]
    """Why Quire does not serve such a model; empty where it does."""
    notes: tuple[str, ...]
    """What is not counted or only guessed, for people to read."""
    tower: int = 0
    """Parameters of the tower and connector for images, which are not in `parameters`."""
    tower_linears: int = 0
    """The part of them in its layers' linears: those alone are quantized."""
    state_formula: str = ""
    """How column_numbers comes about; "" where it is 0."""
    again: int = 0
    """Parameters that a step reads beyond the first time, where layers share some."""

    def tower_bytes(self, width: int, quantization: str | None) -> int:
        """The tower's, at so many bytes for a number and as its linears are quantized at load."""
        bits = 8 * width if quantization is None else QUANTIZED_BITS[quantization]
        return (self.tower - self.tower_linears) * width + round(self.tower_linears * bits / 8)

    def within_windows(self) -> ModelSizes:
        """The same for contexts that end where the narrowest sliding window does."""
        windows = [each.window for each in self.states if each.window]
        return replace(self, max_position=min([self.max_position, *windows]))

    @property
    def states(self) -> tuple[State, ...]:
        """Those of all layers."""
        return tuple(chain.from_iterable(self.layer_states))

    @property
    def layers_with_state(self) -> int:
        """Number of layers that do not read what others keep."""
        return sum(not any(isinstance(each, SharedState) for each in layer) for layer in self.layer_states)

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
        """Whether cached prefixes need those of a MatrixState."""
        return any(isinstance(each, MatrixState) for each in self.states)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with: not the embedding, and only the experts chosen for it."""
        return self.touched(1)

    def touched(self, tokens: int) -> int:
        """Parameters that a step of so many tokens reads, if every expert is chosen equally often."""
        lookups = self.embeddings - self.head_parameters
        layers = self.parameters - lookups + self.again
        return round(layers - self.expert_parameters + self._expert_parameters_read(tokens))

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
    sizes, text = _sizes_of_equal_layers(raw), text_config(raw)
    if sizes.model_type not in unequal.KINDS:
        return sizes
    hidden = given_size(text, "hidden_size")
    own = unequal.unequal_sizes(text, hidden)
    embeddings = sizes.embeddings + own.table
    return replace(
        sizes,
        parameters=embeddings + own.parameters + sizes.expert_parameters + end_numbers(text, hidden, 0, tied=True),
        embeddings=embeddings,
        kv_formula=own.formula,
        kv_heads=own.kv_heads,
        head_dim=own.head_dim,
        attention_width=own.attention_width,
        layer_states=own.states,
    )


def _text_to_plan(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the text. Raises ModelError where it says too little, or of no decoder."""
    family = family_not_served(raw) if raw.get("model_type") else None
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"model: {family or 'this is an encoder-decoder'}: only decoders have a plan here")
    text = text_config(raw)
    if family is not None and not optional_size(text, "num_attention_heads"):
        raise ModelError(f"model: {family}, and its config.json gives no num_attention_heads to plan with")
    return text


def _sizes_of_equal_layers(raw: Mapping[str, Any]) -> ModelSizes:
    """The same of a model all of whose layers that attend do so with as many heads of one size."""
    text = _text_to_plan(raw)
    kind, wanted = str(text.get("model_type", "")), ("hidden_size", "num_hidden_layers", "vocab_size")
    hidden, layers, vocab = (given_size(text, name) for name in wanted)
    notes = _notes(raw, kind, (tower := count_vision_parameters(raw, hidden))[0])
    windows, states = layer_windows(text, layers), state_of(text, hidden)
    attending, parts = len(windows), layer_parts(text, layers)
    notes += _of_states(text, layers - attending) if states is None else []
    attention, kv, formula, width = attention_numbers(text, hidden, latents=(latents := _keeps_latents(raw, text)))
    if attending < 1 and states is None:
        raise ModelError("model: no layer of it has keys and values to cache, so there is nothing to plan")
    dense, expert, router, shared, sparse = mlp_numbers(text, hidden, layers)
    experts, per_token = optional_size(text, "experts"), optional_size(text, "experts_per_token")
    tied = text.get("tie_word_embeddings", kind in TIED)
    positions = optional_size(text, "max_position_embeddings") or 2048
    table = vocab * hidden
    learned = (positions + 2 * (kind == "opt")) * hidden if kind in LEARNED else 0
    embeddings = table * (1 if tied else 2) + learned
    cached = 0 if kind in ENCODERS else kv
    keeping = sum(each.keeps for each in parts) if states is not None else layers - attending
    others = attention if states is None else kept_by(states, text, hidden)
    body = attending * attention + keeping * others + layers * norm_numbers(text, hidden)
    body += end_numbers(text, hidden, vocab, tied=bool(tied))
    blocks = shared_blocks.block_numbers(text, hidden) if kind in shared_blocks.KINDS else shared_blocks.NO_BLOCKS
    mlps = sum(each.mlp for each in parts) if kind in ALONE else layers - sparse
    mlps = mlps * dense + sparse * (experts * (expert + router) + shared)
    method, bits = _quantization(text)
    head = kv if latents else head_size(text, hidden)
    return ModelSizes(
        model_type=kind,
        num_layers=layers,
        vocab_size=vocab,
        max_position=positions,
        dtype=stored_dtype(text),
        wide_activations=wide_activations(text),
        quantization=method,
        bits=bits,
        parameters=embeddings + body + mlps + blocks.stored,
        embeddings=embeddings,
        experts=experts if sparse else 0,
        experts_per_token=per_token,
        expert_parameters=sparse * experts * expert,
        head_parameters=table,
        kv_formula=f"{formula} x {attending} layers",
        heads=given_size(text, "num_attention_heads"),
        kv_heads=1 if latents else key_heads(text),
        head_dim=head,
        attention_width=width * attending,
        layer_states=in_layers(text, states, [PagedState(cached, each, head) for each in windows], layers),
        unserved=tuple(why_not_served(raw)),
        notes=tuple(notes),
        tower=tower[0],
        tower_linears=tower[1],
        state_formula=state_formula(states, keeping),
        again=blocks.again,
    )


def _of_states(text: Mapping[str, Any], layers: int) -> list[str]:
    """What is to be known of so many layers whose states no file of ours knows."""
    found = [f"{layers} layers keep a state instead of keys; it is not counted"] if layers > 0 else []
    if any(key.startswith("mamba_") for key in text):
        found.append("state-space layers are not known here: their parameters are a guess")
    return found


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


def _keeps_latents(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether latents are cached (DeepSeek-V2, 2024). transformers' classes give keys and values made of them."""
    return bool(text.get("kv_lora_rank")) and (has_file(raw) or class_not_served(text) is not None)


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
