"""Reads the content of a config.json: of which family it is, its fields by the names of Llama's, and a ModelConfig of
them. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from quire.engine.checkpoint.adapted import class_not_served
from quire.engine.checkpoint.quantization import why_not
from quire.engine.errors import ModelError
from quire.engine.families import (
    decoder_model_types,
    find_any_family,
    find_encoder_family,
    find_family,
    find_multimodal_family,
)
from quire.engine.families.base.family import Family
from quire.engine.families.base.mla_fields import complete_mla
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.ropes import positions_of, rope_of, unserved_rope_type
from quire.engine.families.base.schema.config_schema import ServedFields
from quire.engine.families.base.weight_names import WeightNames
from quire.engine.folder_reader import convert_parsed_json

_T = TypeVar("_T")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def normalize_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, or of its text part, by Llama's names, with what it leaves out."""
    family, fields = find_any_family(raw.get("model_type")), dict(raw)
    if family is not None:
        for other, name in family.field_names.items():
            if fields.get(other) is not None:
                fields[name] = fields[other]
        defaults = {name: value for name, value in family.defaults.items() if fields.get(name) is None}
        if fields.get("rope_scaling"):  # which says how positions are rotated, in older files
            defaults.pop("rope_parameters", None)
        fields |= defaults | {name: value for name, value in family.missing_defaults.items() if name not in fields}
        if family.complete is not None:
            family.complete(fields)
    if fields.get("kv_lora_rank"):
        complete_mla(fields)
    return fields


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model's text decoder.

    If a model also takes images or audio, it is an object inside config.json. The keys of that object then override
    the outer keys of the same name.
    """
    part = next((raw[name] for name in _TEXT_PARTS if raw.get(name)), None)
    outer, defaults = find_multimodal_family(raw.get("model_type")), dict[str, Any]()
    fields = {**raw, "model_type": raw.get("model_type") if outer is None else outer.text_model_type}
    encoder = find_encoder_family(fields["model_type"])
    fields |= part if isinstance(part, Mapping) else {}
    if encoder is not None:
        fields |= {name: raw.get(name) for name in encoder.outer_fields}
    if part and outer is not None and (family := find_any_family(fields["model_type"])) is not None:
        defaults = dict(family.multimodal_text_defaults)
    return normalize_fields({**defaults, **fields})


def checked_text_config(raw: dict[str, Any], file: str) -> dict[str, Any]:
    """The same; raises ModelError where it is no object."""
    for key in _TEXT_PARTS:
        if not isinstance(raw.get(key) or {}, dict):
            raise ModelError(f"model: {file}: {key}: expected object")
    return text_config(raw)


def has_file(raw: Mapping[str, Any]) -> bool:
    """Whether a file of ours serves such a model, rather than transformers' class. An encoder's config.json may be of a
    decoder."""
    kind, part = raw.get("model_type"), raw.get("text_config")
    if find_encoder_family(kind) is not None:
        return not raw.get("is_decoder")
    if find_family(kind) is not None:
        return True
    inner = part.get("model_type") if isinstance(part, Mapping) else None
    return find_multimodal_family(kind) is not None and (not inner or find_any_family(inner) is not None)


def family_not_served(raw: Mapping[str, Any]) -> str | None:
    """Why Quire does not serve a model's family; None where a file of ours or transformers' class serves it."""
    if has_file(raw) or (reason := class_not_served(raw)) is None:
        return None
    kind, part = str(raw.get("model_type") or ""), raw.get("text_config")
    inner = str(part.get("model_type") or "") if isinstance(part, Mapping) else ""
    shown = f"{kind} models, whose text part is {inner}" if inner else f"{kind or 'such'} models"
    return f"Quire does not serve {shown}: transformers' class: {reason}"


def why_not_served(raw: Mapping[str, Any]) -> list[str]:
    """What in a config.json keeps Quire from serving such a model, in lines that say it to people; [] for nothing."""
    family_problem = family_not_served(raw)
    problems = [] if family_problem is None else [family_problem]
    if (reason := why_not(raw.get("quantization_config") or {})) is not None:
        problems.append(reason)
    if not has_file(raw):
        return problems
    family = find_family(raw.get("model_type"))
    has_longrope = family is not None and family.has_longrope
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    parts = (rope, *rope.values()) if isinstance(rope, Mapping) else ()  # or one for each kind of layer
    kinds = {unserved_rope_type(part, has_longrope=has_longrope) for part in parts if isinstance(part, Mapping)}
    return problems + [f"Quire does not compute the rope_type {each} yet" for each in sorted(kinds - {""})]


def uses_transformers_class(content: Mapping[str, Any], impl: str) -> bool:
    """Whether transformers' class is to compute the model of a config.json. Raises ModelError where no file of ours
    does, and `impl` asks for one."""
    if has_file(content) and impl != "transformers":
        return False
    if impl == "quire" and content.get("model_type"):
        known = ", ".join(decoder_model_types())
        raise ModelError(f"model_impl: no file of Quire serves a {content['model_type']}; it has {known}")
    return bool(content.get("model_type"))


def weight_names_of(model_type: str, *, gguf: bool = False) -> WeightNames:
    """Of a family's checkpoints, or of its GGUF files."""
    family = find_family(model_type)
    names = WeightNames() if family is None else family.weight_names
    return names.of_gguf() if gguf else names


def wide_activations(text: Mapping[str, Any]) -> bool:
    """Whether nearly all matrices have few bits, whose kernels take activations of any type: then a CPU computes in
    float32 with keys and values of bfloat16, in the same memory. docs/quantization.md has what it gains and costs."""
    return (text.get("quantization_config") or {}).get("activations") == "float32"


def stored_dtype(text: Mapping[str, Any]) -> str:
    """The type of a checkpoint's numbers. Where config.json names none it is float32, but of weights in few bits
    bfloat16, which gpt-oss leaves unsaid."""
    return str(
        text.get("dtype") or text.get("torch_dtype") or ("bfloat16" if text.get("quantization_config") else "float32")
    )


def parse_family_config(content: Mapping[str, Any], label: str, eos_token_ids: Sequence[int] = ()) -> ModelConfig:
    """`content`: of a config.json of a family that a file of ours serves. `label`: what errors call the file. Raises
    ModelError, naming a wrong field."""
    names, family = names_in_file(content), find_family(content.get("model_type"))
    with errors_named_as_in_file(names):
        raw = convert_parsed_json(normalize_fields(content), ServedFields, label)
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        vocab_size = _integer(raw, "vocab_size")
        rope = rope_of(
            raw,
            rotates_part=family is not None and family.rotates_part,
            has_longrope=family is not None and family.has_longrope,
        )
        config = ModelConfig(
            model_type=raw.get("model_type") or "",
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_layers=_integer(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if raw.get("num_key_value_heads") is None else _integer(raw, "num_key_value_heads"),
            head_dim=raw.get("head_dim") or hidden // heads,
            max_position=positions_of(raw, rope),
            norm_eps=1e-6 if (eps := raw.get("rms_norm_eps")) is None else eps,
            tie_embeddings=bool(raw.get("tie_word_embeddings")),
            dtype=stored_dtype(raw),
            rope=rope,
            eos_token_ids=tuple(token for token in eos_token_ids if 0 <= token < vocab_size),
            raw=raw,
            names=names,
        )
        _check_shape(config)
        return config


def _check_shape(config: ModelConfig) -> None:
    """Raise ModelError where fields that are right alone contradict each other."""

    def wrong(text: str) -> ModelError:
        return ModelError(f"model: config.json: {text}")

    if config.num_heads % config.num_kv_heads:
        raise wrong(f"num_key_value_heads: {config.num_kv_heads} do not divide the {config.num_heads} query heads")
    if config.head_dim < 2 or config.head_dim % 2:
        source = "head_dim" if config.raw.get("head_dim") else "hidden_size / num_attention_heads"
        raise wrong(f"{source}: a head must have an even size, got {config.head_dim}")
    layer_types = config.raw.get("layer_types")
    for name, by_layer in (("layer_types", layer_types), ("no_rope_layers", config.raw.get("no_rope_layers"))):
        if by_layer and len(by_layer) != config.num_layers:
            raise wrong(f"{name}: {len(by_layer)} entries for {config.num_layers} layers")
    family = find_family(config.model_type)
    known = Family(model_types=()).layer_types if family is None else family.layer_types
    if unknown := sorted(set(layer_types or ()) - {*known}):
        raise wrong(f"layer_types: {unknown[0]!r} is not supported")


def _integer(raw: ServedFields, key: str) -> int:
    """An integer that config.json must have. Raises ModelError, naming the key."""
    value = raw.get(key)
    if not isinstance(value, int):
        family = f"config.json of a {raw.get('model_type')!r}"
        raise ModelError(f"model: {family} lacks {key}, needed to build a decoder")
    return value


def names_in_file(raw: Mapping[str, Any]) -> dict[str, str]:
    """By the names that Quire reads, those that stand in a config.json or would stand there, of fields that its family
    calls otherwise."""
    part = raw.get("text_config")
    fields = {**raw, **part} if isinstance(part, Mapping) else raw
    family, names = find_any_family(fields.get("model_type")), dict[str, str]()
    for other, name in ({} if family is None else family.field_names).items():
        if fields.get(other) is not None or (name not in names and name not in fields):
            names[name] = other
    return names


@contextmanager
def errors_named_as_in_file(names: Mapping[str, str]) -> Iterator[None]:
    """In its context a ModelError names fields by `names`."""
    try:
        yield
    except ModelError as error:
        message = error.message
        for name, other in names.items():
            message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", other, message)
        if message == error.message:
            raise
        raise ModelError(message) from error


def with_errors_named_as_in_file(read: Callable[[Mapping[str, Any]], _T]) -> Callable[[Mapping[str, Any]], _T]:
    """A function of a config.json's content whose errors do."""

    @wraps(read)
    def reading(raw: Mapping[str, Any]) -> _T:
        with errors_named_as_in_file(names_in_file(raw)):
            return read(raw)

    return reading
