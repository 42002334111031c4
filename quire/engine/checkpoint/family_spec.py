from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.draft_heads import EagleSpec
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
from quire.engine.families.base.base_spec import base_decoder_spec
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
    """False for encoders that transformers' class turns into decoders."""
    return config.transformers_config is None and find_encoder_family(config.model_type) is not None


def build_encoder_spec(config: ModelConfig) -> EncoderSpec:
    """Raises ModelError."""
    family = find_encoder_family(config.model_type)
    assert family is not None, f"{config.model_type} is not an encoder"
    return family.build_spec(config)


def read_encoder_spec(raw: Mapping[str, Any]) -> EncoderSpec | None:
    """Return None if no encoder family describes the model. Raises ModelError."""
    text_fields = extract_text_config(raw)
    if find_encoder_family(text_fields.get("model_type")) is None:
        return None
    content = text_fields if find_encoder_family(raw.get("model_type")) is None else raw
    return build_encoder_spec(parse_family_config(content, "config.json"))


def read_decoder_spec(raw: Mapping[str, Any]) -> DecoderSpec | None:
    """Return None if no decoder family describes the model. Raises ModelError."""
    text_fields = extract_text_config(raw)
    if find_decoder_family(text_fields.get("model_type")) is None or (
        not has_quire_family(raw) and text_fields.get("kv_lora_rank")
    ):
        return None  # transformers' class caches expanded keys and values, not latents
    content = raw if find_decoder_family(raw.get("model_type")) is not None else text_fields
    return build_decoder_spec(parse_family_config(content, "config.json"))


def build_eagle_spec(
    model: ModelConfig, num_target_layers: int, tensor_names: Collection[str] = (), *, is_eagle3: bool
) -> EagleSpec:
    """`num_target_layers` counts the served decoder's layers. Raises ModelError."""
    if (activation := model.raw.get("hidden_act")) not in (None, "silu"):
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a head")
    eagle3_fields: dict[str, Any] = {}
    if is_eagle3:
        eagle3_fields = {
            "aux_layers": _aux_layers(model.raw.get("eagle_config") or {}, num_target_layers),
            "norm_before_residual": bool(model.raw.get("norm_before_residual")),
            "draft_vocab_size": model.raw.get("draft_vocab_size") or model.vocab_size,
            "has_token_map": "d2t" in tensor_names,
        }
    base = base_decoder_spec(model).replace_sublayer_fields(
        AttentionLayerSpec, qkv_bias="layers.0.self_attn.q_proj.bias" in tensor_names
    )
    read = 2 * model.hidden_size if is_eagle3 else model.hidden_size
    (first, *_), *others = (
        base.replace_sublayer_fields(AttentionLayerSpec, input_norm=False, input_size=read).layers,
        *base.layers[1:],
    )
    return EagleSpec((first, *others), base.hidden_size, base.norm, "fc.bias" in tensor_names, **eagle3_fields)


def _aux_layers(eagle_config: Any, layers: int) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    if eagle_config.get("use_aux_hidden_state") is False:
        raise ModelError("model: config.json: eagle_config: use_aux_hidden_state: false is not supported")
    ids = tuple(eagle_config.get(name) or (2, layers // 2, layers - 3))
    if list(ids) != sorted(set(ids)) or ids[-1] >= layers:
        raise ModelError(f"model: config.json: eagle_config: {name}: {list(ids)} are not layers of the served {layers}")
    return ids
