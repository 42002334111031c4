"""A model's sizes, from its config.json alone: the parameters, the numbers that attention caches per token, and the
parameters that a step reads. `quire plan` derives memory and speed from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

from quire.engine.architecture.kv_cache_spec import MatrixState, PagedColumnState, PagedState, SharedState, State
from quire.engine.checkpoint.adapted import class_not_served
from quire.engine.checkpoint.config_reader import (
    family_not_served,
    has_file,
    stored_dtype,
    text_config,
    why_not_served,
    wide_activations,
    with_errors_named_as_in_file,
)
from quire.engine.checkpoint.family_spec import read_encoder_spec, read_family_spec
from quire.engine.checkpoint.kv_plan import QUANTIZED_BITS
from quire.engine.checkpoint.sizes.decoder_sizes import DecoderSizes, count_decoder
from quire.engine.checkpoint.sizes.encoder_sizes import count_encoder
from quire.engine.checkpoint.sizes.guessed_sizes import (
    guess_decoder_sizes,
    optional_size,
    required_size,
    unknown_state_notes,
)
from quire.engine.errors import ModelError
from quire.engine.images.vision_config import count_vision_and_linear_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes(DecoderSizes):
    """Sizes of a model, in numbers too."""

    model_type: str
    max_position: int
    dtype: str
    """The checkpoint's type, as stored_dtype reads it."""
    wide_activations: bool
    """See engine/checkpoint/config_reader.py."""
    quantization: str | None
    """The method's name; None when the weights are not quantized."""
    bits: float
    """Bits per parameter of a quantized linear layer, its scales included; 0 when the weights are not quantized."""
    unserved: tuple[str, ...]
    """Why Quire does not serve such a model; empty where it does."""
    notes: tuple[str, ...]
    """What is not counted or only guessed, for people to read."""
    tower: int
    """Parameters of the tower and connector for images, which are not in `parameters`."""
    tower_linears: int
    """The part of them in its layers' linears: those alone are quantized."""

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
        return sum(each.paged_values_per_token for each in self.states if isinstance(each, PagedState))

    @property
    def column_numbers(self) -> int:
        """The same of columns, which are kept in the model's type."""
        return sum(each.paged_values_per_token for each in self.states if isinstance(each, PagedColumnState))

    def slot_bytes(self, drafts: int, width: int) -> int:
        """Bytes kept of each sequence beside pages, in all layers together, as PagedColumnState says it."""
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


@with_errors_named_as_in_file
def read_sizes(raw: Mapping[str, Any]) -> ModelSizes:
    """The sizes of a model, from the content of its config.json.

    Raises ModelError for a model that is not a decoder, and for a missing size, which it names.
    """
    text = _text_to_plan(raw)
    hidden = required_size(text, "hidden_size")
    tower, tower_linears = count_vision_and_linear_parameters(raw, hidden)
    unserved = why_not_served(raw)
    notes = _describe_uncounted(raw, text, tower)
    decoder = _count_family(raw, must_be_served=not unserved)
    if decoder is None:
        notes += unknown_state_notes(text)
        decoder = guess_decoder_sizes(raw, text)
    quantization, bits = _quantization(text)
    return ModelSizes(
        **{each.name: getattr(decoder, each.name) for each in fields(decoder)},
        model_type=str(text.get("model_type", "")),
        max_position=optional_size(text, "max_position_embeddings") or 2048,
        dtype=stored_dtype(text),
        wide_activations=wide_activations(text),
        quantization=quantization,
        bits=bits,
        unserved=tuple(unserved),
        notes=tuple(notes),
        tower=tower,
        tower_linears=tower_linears,
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


def _count_family(raw: Mapping[str, Any], *, must_be_served: bool) -> DecoderSizes | None:
    """The sizes of a model whose family a file of ours describes; None: none does. Raises ModelError."""
    try:
        if (encoder := read_encoder_spec(raw)) is not None:
            return count_encoder(encoder, caches=bool(raw.get("is_decoder")))
        spec = read_family_spec(raw)
    except ModelError:
        if has_file(raw) and must_be_served:
            raise
        return None
    return None if spec is None else count_decoder(spec)


def _describe_uncounted(raw: Mapping[str, Any], text: Mapping[str, Any], tower: int) -> list[str]:
    """What is to be known of a model that no file of ours serves, and of one of whose parts the text is one."""
    notes = []
    if not has_file(raw) and class_not_served(raw) is None:
        notes.append(
            "transformers' class computes it, on Quire's pages: slower, and without LoRA, ranks and CUDA graphs"
        )
    if tower:
        notes.append(f"its tower for images, {tower / 1e6:,.0f} M parameters, is counted where images are read")
    elif str(text.get("model_type", "")) != raw.get("model_type", ""):
        notes.append("only the text part is counted, no image or audio tower")
    return notes


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
