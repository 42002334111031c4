"""Reads config.json without torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from quire.engine.checkpoint.quantization import explain_unsupported_quantization
from quire.engine.checkpoint.transformers_classes import class_rejection_reason
from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import convert_parsed_json
from quire.engine.families import (
    decoder_model_types,
    find_any_family,
    find_decoder_family,
    find_encoder_family,
    find_multimodal_family,
)
from quire.engine.families.base.family import DecoderFamily
from quire.engine.families.base.mla_fields import fill_mla_head_dims
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.rope_fields import read_max_position, read_rope_parameters, unsupported_rope_types
from quire.engine.families.base.schema.config_schema import TEXT_CONFIG_KEYS, FamilyConfigFields
from quire.engine.families.base.weight_names import WeightNames

_T = TypeVar("_T")


def normalize_config_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields under Llama's names, with the family's defaults."""
    family, fields = find_any_family(raw.get("model_type")), dict(raw)
    if family is not None:
        for alias, name in family.field_names.items():
            if fields.get(alias) is not None:
                fields[name] = fields[alias]
        if fields.get("sliding_window_pattern") == 0:
            fields["sliding_window_pattern"] = None
        defaults = {name: value for name, value in family.defaults.items() if fields.get(name) is None}
        if fields.get("rope_scaling"):
            defaults.pop("rope_parameters", None)
        fields |= defaults | {name: value for name, value in family.missing_defaults.items() if name not in fields}
        if family.fill_derived_fields is not None:
            family.fill_derived_fields(fields)
    if fields.get("kv_lora_rank"):
        fill_mla_head_dims(fields)
    return fields


def extract_text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields in the text model's own object, such as text_config, override outer ones, except an encoder's
    outer_fields.
    """
    text_fields = next((raw[name] for name in TEXT_CONFIG_KEYS if raw.get(name)), None)
    multimodal_family, defaults = find_multimodal_family(raw.get("model_type")), dict[str, Any]()
    fields = {
        **raw,
        "model_type": raw.get("model_type") if multimodal_family is None else multimodal_family.text_model_type,
    }
    encoder = find_encoder_family(fields["model_type"])
    fields |= text_fields if isinstance(text_fields, Mapping) else {}
    if encoder is not None:
        fields |= {name: raw.get(name) for name in encoder.outer_fields}
    if text_fields and multimodal_family is not None and (family := find_any_family(fields["model_type"])) is not None:
        defaults = dict(family.multimodal_text_defaults)
    return normalize_config_fields({**defaults, **fields})


def parse_text_config(raw: dict[str, Any], file: str) -> dict[str, Any]:
    """Raises ModelError if text_config or an alias is not an object."""
    for key in TEXT_CONFIG_KEYS:
        if not isinstance(raw.get(key) or {}, dict):
            raise ModelError(f"model: {file}: {key}: expected object")
    return extract_text_config(raw)


def has_quire_family(raw: Mapping[str, Any]) -> bool:
    """False for encoders whose config.json sets is_decoder: transformers' class computes them."""
    model_type, text_fields = raw.get("model_type"), raw.get("text_config")
    if find_encoder_family(model_type) is not None:
        return not raw.get("is_decoder")
    if find_decoder_family(model_type) is not None:
        return True
    text_model_type = text_fields.get("model_type") if isinstance(text_fields, Mapping) else None
    return find_multimodal_family(model_type) is not None and (
        not text_model_type or find_any_family(text_model_type) is not None
    )


def explain_unsupported_family(raw: Mapping[str, Any]) -> str | None:
    if has_quire_family(raw) or (reason := class_rejection_reason(raw)) is None:
        return None
    model_type, text_fields = str(raw.get("model_type") or ""), raw.get("text_config")
    text_model_type = str(text_fields.get("model_type") or "") if isinstance(text_fields, Mapping) else ""
    description = (
        f"{model_type} models, whose text part is {text_model_type}"
        if text_model_type
        else f"{model_type or 'such'} models"
    )
    return f"Quire does not serve {description}: transformers' class: {reason}"


def explain_unsupported_model(raw: Mapping[str, Any]) -> list[str]:
    """The caller must have checked the fields' types."""
    family_reason, text_fields = explain_unsupported_family(raw), extract_text_config(raw)
    problems = [] if family_reason is None else [family_reason]
    is_encoder = find_encoder_family(raw.get("model_type")) is not None and not raw.get("is_decoder")
    quantization = text_fields.get("quantization_config") or {}
    if (reason := explain_unsupported_quantization(quantization, is_encoder=is_encoder)) is not None:
        problems.append(reason)
    if not has_quire_family(raw):
        return problems
    family = find_decoder_family(text_fields.get("model_type"))
    has_longrope = family is not None and family.has_longrope
    unsupported = unsupported_rope_types(text_fields, has_longrope=has_longrope)
    return problems + [f"Quire does not compute the rope_type {each} yet" for each in unsupported]


def uses_transformers_backend(content: Mapping[str, Any], impl: str) -> bool:
    """Raises ModelError if `impl` requires a missing family."""
    if has_quire_family(content) and impl != "transformers":
        return False
    if impl == "quire" and content.get("model_type"):
        known = ", ".join(decoder_model_types())
        raise ModelError(f"model_impl: Quire has no implementation of a {content['model_type']}; it has {known}")
    return bool(content.get("model_type"))


def find_weight_names(model_type: str, *, gguf: bool = False) -> WeightNames:
    family = find_decoder_family(model_type)
    names = WeightNames() if family is None else family.weight_names
    return names.gguf_weight_names() if gguf else names


def uses_float32_activations(text_fields: Mapping[str, Any]) -> bool:
    """True for GGUF files with nearly all matrices quantized. With float32 activations and a bfloat16 KV cache, CPUs
    then need as little memory as with bfloat16.
    """
    return (text_fields.get("quantization_config") or {}).get("activations") == "float32"


def checkpoint_dtype(text_fields: Mapping[str, Any]) -> str:
    """Without a named dtype, quantized checkpoints are bfloat16, as gpt-oss is, and others float32."""
    return str(
        text_fields.get("dtype")
        or text_fields.get("torch_dtype")
        or ("bfloat16" if text_fields.get("quantization_config") else "float32")
    )


def parse_family_config(content: Mapping[str, Any], label: str) -> ModelConfig:
    """`label` names the file in errors. Raises ModelError naming a wrong field."""
    names, family = file_field_names(content), find_decoder_family(content.get("model_type"))
    with use_file_names_in_errors(names):
        raw = convert_parsed_json(normalize_config_fields(content), FamilyConfigFields, label)
        heads = _read_required_integer(raw, "num_attention_heads")
        hidden = _read_required_integer(raw, "hidden_size")
        vocab_size = _read_required_integer(raw, "vocab_size")
        rope = read_rope_parameters(
            raw,
            has_partial_rotary=family is not None and family.has_partial_rotary,
            has_longrope=family is not None and family.has_longrope,
        )
        config = ModelConfig(
            model_type=raw.get("model_type") or "",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_read_required_integer(raw, "intermediate_size"),
            num_layers=_read_required_integer(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads
            if raw.get("num_key_value_heads") is None
            else _read_required_integer(raw, "num_key_value_heads"),
            head_dim=raw.get("head_dim") or hidden // heads,
            max_position=read_max_position(raw, rope),
            norm_eps=1e-6 if (eps := raw.get("rms_norm_eps")) is None else eps,
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
            dtype=checkpoint_dtype(raw),
            rope=rope,
            raw=raw,
            file_field_names=names,
        )
        _check_config_consistency(config)
        return config


def _check_config_consistency(config: ModelConfig) -> None:
    def config_error(text: str) -> ModelError:
        return ModelError(f"model: config.json: {text}")

    if config.num_heads % config.num_kv_heads:
        raise config_error(
            f"num_key_value_heads: {config.num_kv_heads} do not divide the {config.num_heads} query heads"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        source = "head_dim" if config.raw.get("head_dim") else "hidden_size / num_attention_heads"
        raise config_error(f"{source}: a head must have an even size, got {config.head_dim}")
    layer_types = config.raw.get("layer_types")
    for name, by_layer in (("layer_types", layer_types), ("no_rope_layers", config.raw.get("no_rope_layers"))):
        if by_layer and len(by_layer) != config.num_layers:
            raise config_error(f"{name}: {len(by_layer)} entries for {config.num_layers} layers")
    family = find_decoder_family(config.model_type)
    layer_type_names = DecoderFamily(model_types=()).layer_types if family is None else family.layer_types
    if unknown := sorted(set(layer_types or ()) - {*layer_type_names}):
        raise config_error(f"layer_types: {unknown[0]!r} is not supported")


def _read_required_integer(raw: FamilyConfigFields, key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int):
        family = f"config.json of a {raw.get('model_type')!r}"
        raise ModelError(f"model: {family} lacks {key}, needed to build a decoder")
    return value


def file_field_names(raw: Mapping[str, Any]) -> dict[str, str]:
    text_fields = raw.get("text_config")
    fields = {**raw, **text_fields} if isinstance(text_fields, Mapping) else raw
    family, names = find_any_family(fields.get("model_type")), dict[str, str]()
    for alias, name in ({} if family is None else family.field_names).items():
        if fields.get(alias) is not None or (name not in names and name not in fields):
            names[name] = alias
    return names


@contextmanager
def use_file_names_in_errors(file_names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        message = error.message
        for name, file_name in file_names.items():
            message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", file_name, message)
        if message == error.message:
            raise
        raise ModelError(message) from error


def with_file_names_in_errors(read: Callable[[Mapping[str, Any]], _T]) -> Callable[[Mapping[str, Any]], _T]:
    @wraps(read)
    def read_with_file_names(raw: Mapping[str, Any]) -> _T:
        with use_file_names_in_errors(file_field_names(raw)):
            return read(raw)

    return read_with_file_names
