from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from quire.engine.architecture.kv_cache_spec import (
    AttentionSpec,
    KVCacheSpec,
    KVElementSizes,
    RecurrentStateSpec,
    SharedKVSpec,
)
from quire.engine.checkpoint.config_reader import (
    checkpoint_dtype,
    explain_unsupported_family,
    explain_unsupported_model,
    extract_text_config,
    has_quire_family,
    uses_float32_activations,
    with_file_names_in_errors,
)
from quire.engine.checkpoint.family_spec import read_decoder_spec, read_encoder_spec
from quire.engine.checkpoint.kv_cache_plan import QUANTIZED_BITS
from quire.engine.checkpoint.quantization import parse_quantization_config
from quire.engine.checkpoint.sizes.decoder_sizes import DecoderSizes, count_decoder_sizes, field_values
from quire.engine.checkpoint.sizes.encoder_sizes import count_encoder_sizes
from quire.engine.checkpoint.sizes.estimated_sizes import (
    estimate_decoder_sizes,
    read_optional_size,
    read_required_size,
    unknown_state_notes,
)
from quire.engine.checkpoint.transformers_classes import class_rejection_reason
from quire.engine.common.errors import ModelError
from quire.engine.families import find_encoder_family
from quire.engine.images.vision_config import count_vision_and_linear_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes(DecoderSizes):
    model_type: str
    max_position: int
    dtype: str
    uses_float32_activations: bool
    quantization: str | None
    bits_per_weight: float
    """Includes scales; 0 if unquantized."""
    unsupported_reasons: tuple[str, ...]
    notes: tuple[str, ...]
    tower_parameters: int
    """Parameters of the image tower and its connector, which `num_parameters` excludes."""
    tower_linear_parameters: int

    def tower_bytes(self, bytes_per_value: int, quantization: str | None) -> int:
        bits = 8 * bytes_per_value if quantization is None else QUANTIZED_BITS[quantization]
        return (self.tower_parameters - self.tower_linear_parameters) * bytes_per_value + round(
            self.tower_linear_parameters * bits / 8
        )

    def limit_to_sliding_window(self) -> ModelSizes:
        windows = [each.window for each in self.cache_specs if each.window]
        return replace(self, max_position=min([self.max_position, *windows]))

    @property
    def cache_specs(self) -> tuple[KVCacheSpec, ...]:
        return tuple(chain.from_iterable(self.layer_cache_specs))

    @property
    def num_caching_layers(self) -> int:
        return sum(not any(isinstance(each, SharedKVSpec) for each in layer) for layer in self.layer_cache_specs)

    @property
    def num_sliding_layers(self) -> int:
        return sum(each.window is not None for each in self.cache_specs)

    @property
    def kv_values_per_token(self) -> int:
        return sum(each.kv_elements for each in self.cache_specs if isinstance(each, AttentionSpec))

    def slot_bytes(self, num_draft_tokens: int, element_sizes: KVElementSizes) -> int:
        """Per sequence, without KV blocks."""
        return sum(each.slot_bytes(num_draft_tokens, element_sizes) for each in self.cache_specs)

    @property
    def needs_snapshots(self) -> bool:
        return any(isinstance(each, RecurrentStateSpec) for each in self.cache_specs)

    def weight_fraction_read(self, tokens: int) -> float:
        num_read, saved = self.parameters_read(tokens), 0.0
        if self.quantization == "mxfp4":
            saved = 1 - self.bits_per_weight / 16
        expert_parameters = self.expert_parameters_read(tokens)
        return (num_read - expert_parameters * saved) / (self.num_parameters - self.expert_parameters * saved)

    @property
    def weight_ratio(self) -> float:
        """Bytes of the weights, divided by two bytes per parameter."""
        if not self.bits_per_weight:
            return 1.0
        quantized_parameters = (
            self.expert_parameters if self.quantization == "mxfp4" else self.num_parameters - self.embedding_parameters
        )
        return (
            self.num_parameters - quantized_parameters + quantized_parameters * self.bits_per_weight / 16
        ) / self.num_parameters


@with_file_names_in_errors
def read_model_sizes(raw: Mapping[str, Any]) -> ModelSizes:
    """Raises ModelError naming a missing size, or if the model is not a decoder."""
    text_fields = _read_plannable_text_config(raw)
    hidden = read_required_size(text_fields, "hidden_size")
    tower, tower_linears = count_vision_and_linear_parameters(raw, hidden)
    unserved = explain_unsupported_model(raw)
    notes = _describe_uncounted(raw, text_fields, tower)
    decoder = _count_family_sizes(raw, must_be_served=not unserved)
    if decoder is None:
        notes += unknown_state_notes(text_fields)
        decoder = estimate_decoder_sizes(raw, text_fields)
    quantization, bits = _read_quantization(text_fields)
    return ModelSizes(
        **field_values(decoder),
        model_type=str(text_fields.get("model_type", "")),
        max_position=read_optional_size(text_fields, "max_position_embeddings") or 2048,
        dtype=checkpoint_dtype(text_fields),
        uses_float32_activations=uses_float32_activations(text_fields),
        quantization=quantization,
        bits_per_weight=bits,
        unsupported_reasons=tuple(unserved),
        notes=tuple(notes),
        tower_parameters=tower,
        tower_linear_parameters=tower_linears,
    )


def _read_plannable_text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    family = explain_unsupported_family(raw) if raw.get("model_type") else None
    if raw.get("is_encoder_decoder"):
        raise ModelError(f"model: {family or 'this is an encoder-decoder'}: only decoders can be planned here")
    text_fields = extract_text_config(raw)
    if family is not None and not read_optional_size(text_fields, "num_attention_heads"):
        raise ModelError(f"model: {family}, and its config.json gives no num_attention_heads to plan with")
    return text_fields


def _count_family_sizes(raw: Mapping[str, Any], *, must_be_served: bool) -> DecoderSizes | None:
    is_decoder = bool(raw.get("is_decoder"))
    is_encoder = find_encoder_family(extract_text_config(raw).get("model_type")) is not None and not is_decoder
    try:
        if (encoder := read_encoder_spec(raw)) is not None:
            return count_encoder_sizes(encoder, has_kv_cache=is_decoder)
        spec = read_decoder_spec(raw)
    except ModelError:
        if is_encoder or (has_quire_family(raw) and must_be_served):
            raise
        return None
    return None if spec is None else count_decoder_sizes(spec)


def _describe_uncounted(raw: Mapping[str, Any], text_fields: Mapping[str, Any], tower: int) -> list[str]:
    notes = []
    if not has_quire_family(raw) and class_rejection_reason(raw) is None:
        notes.append(
            "transformers' class computes it, with Quire's KV cache: slower, and without LoRA, ranks and CUDA graphs"
        )
    if tower:
        notes.append(f"its vision tower, {tower / 1e6:,.0f} M parameters, is counted where images are processed")
    elif str(text_fields.get("model_type", "")) != raw.get("model_type", ""):
        notes.append("only the text part is counted, no image or audio tower")
    return notes


def _read_quantization(text_fields: Mapping[str, Any]) -> tuple[str | None, float]:
    """Method and bits per weight, scales included."""
    settings = text_fields.get("quantization_config")
    if not isinstance(settings, Mapping):
        return None, 0.0
    method = str(settings.get("quant_method") or settings.get("fmt") or "unknown")
    if method == "mxfp4":
        return method, 4.25
    if method in ("compressed-tensors", "modelopt") and (bits := _mean_stored_bits(settings)) is not None:
        return (method, bits) if bits else (None, 0.0)  # without bits, only the KV cache is quantized
    if method in ("fp8", "fbgemm_fp8", "modelopt") or settings.get("load_in_8bit"):
        return method, 8.0
    if groups := settings.get("config_groups"):
        settings = next(iter(groups.values())).get("weights") or {}
        settings = {"bits": settings.get("num_bits"), "group_size": settings.get("group_size") or -1}
    bits = float(settings.get("bits") or settings.get("w_bit") or (4 if settings.get("load_in_4bit") else 8))
    group = int(settings.get("group_size") or settings.get("q_group_size") or 128)
    return method, bits + ((16 + bits) / group if group > 0 and bits < 8 else 0.0)


def _mean_stored_bits(settings: Mapping[str, Any]) -> float | None:
    try:
        return parse_quantization_config(settings).mean_stored_bits  # type: ignore[arg-type]
    except ModelError:
        return None
