from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.checkpoint.config_reader import (
    extract_text_config,
    has_quire_family,
    parse_family_config,
    use_file_names_in_errors,
)
from quire.engine.common.errors import ModelError
from quire.engine.families import decoder_model_types, find_decoder_family, find_encoder_family
from quire.engine.families.base.activations import hidden_activation
from quire.engine.families.base.model_config import ModelConfig


def build_decoder_spec(config: ModelConfig) -> DecoderSpec:
    """Raises ModelError."""
    with use_file_names_in_errors(config.file_field_names):
        if (family := find_decoder_family(config.model_type)) is None:
            known = ", ".join(decoder_model_types())
            raise ModelError(f"model: model_type {config.model_type!r} is not supported; supported: {known}")
        spec = family.decoder_spec(config)
        _check_activation(config, spec)
        return spec


def _check_activation(config: ModelConfig, spec: DecoderSpec) -> None:
    """Raise ModelError for another function than the family's."""
    experts = {"silu" if each.gated else "relu2" for each in spec.sublayers_of_kind(MoELayerSpec)}
    shared_activations = {each.activation.kind for each in spec.sublayers_of_kind(SharedTransformerSpec)}
    activations = (
        {each.activation for each in spec.sublayers_of_kind(MLPSpec)} or experts or shared_activations or {"silu"}
    )
    activation = hidden_activation(config)
    # Old Gemma files name gelu, but use its tanh form.
    if activation not in {*activations, None} and (activation, activations) != ("gelu", {"gelu_tanh"}):
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a {config.model_type!r}")


def is_encoder(config: ModelConfig) -> bool:
    """transformers' class makes decoders of some encoders."""
    return config.transformers_config is None and find_encoder_family(config.model_type) is not None


def build_encoder_spec(config: ModelConfig) -> EncoderSpec:
    """Raises ModelError for unsupported models."""
    family = find_encoder_family(config.model_type)
    assert family is not None, f"{config.model_type} is no encoder"
    return family.build_spec(config)


def read_encoder_spec(raw: Mapping[str, Any]) -> EncoderSpec | None:
    """None for other models. Raises ModelError."""
    text_fields = extract_text_config(raw)
    if find_encoder_family(text_fields.get("model_type")) is None:
        return None
    content = text_fields if find_encoder_family(raw.get("model_type")) is None else raw
    return build_encoder_spec(parse_family_config(content, "config.json"))


def read_decoder_spec(raw: Mapping[str, Any]) -> DecoderSpec | None:
    """Return None without a family; the text part alone may have one. Raises ModelError for unsupported models."""
    text_fields = extract_text_config(raw)
    if find_decoder_family(text_fields.get("model_type")) is None or (
        not has_quire_family(raw) and text_fields.get("kv_lora_rank")
    ):
        return None  # transformers' classes cache expanded keys and values
    content = raw if find_decoder_family(raw.get("model_type")) is not None else text_fields
    return build_decoder_spec(parse_family_config(content, "config.json"))
