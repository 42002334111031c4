from __future__ import annotations

import os
import struct
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import open_if_present
from quire.engine.families import find_gguf_families, gguf_architectures
from quire.engine.families.base.family import DecoderFamily
from quire.engine.families.base.gguf.gguf_format import GGUFFormat, GGUFMetadata
from quire.engine.gguf.header import GGUFHeader, GGUFTensor
from quire.engine.gguf.hf_tokenizer import eos_token_ids, tokenizer_vocab_size
from quire.engine.gguf.tensor_types import FLOAT_TYPES

_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "xtc_probability": "general.sampling.xtc_probability",
    "xtc_threshold": "general.sampling.xtc_threshold",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_NULLABLE_FIELDS = ("num_key_value_heads", "q_lora_rank")
EMBEDDING_TENSOR = "token_embd.weight"
_LM_HEAD_TENSOR = "output.weight"
_ROPE_FACTORS_TENSOR = "rope_freqs.weight"
_MAX_ROPE_FACTORS = 2**16


def config_json(header: GGUFHeader) -> dict[str, Any]:
    """Raises ModelError naming the wrong or unsupported key."""
    metadata = GGUFMetadata(header, header.get_string("general.architecture") or "")
    family, gguf = _find_family(metadata)
    heads, hidden = _uniform_integer(metadata, "attention.head_count"), metadata.integer("embedding_length")
    even = hidden // heads if hidden and heads else 0
    head_dim = metadata.integer("attention.key_length") or even or None
    if not gguf.has_latent_attention:
        _check_head_dims(metadata, family, head_dim)
    is_hybrid = bool(family.other_layer_types)
    config: dict[str, Any] = {
        "model_type": family.model_types[0],
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": _uniform_integer(metadata, "feed_forward_length", ignore_zeros=is_hybrid),
        "num_hidden_layers": _num_layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform_integer(metadata, "attention.head_count_kv", ignore_zeros=is_hybrid),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.float("attention.layer_norm_rms_epsilon")
        or metadata.float("attention.layer_norm_epsilon"),
        "tie_word_embeddings": _LM_HEAD_TENSOR not in header.tensors,
        **_bias_fields(header),
        "dtype": _dtype(header),
        "quantization_config": _quantization_config(header),
        "rope_parameters": _rope_parameters(header, metadata, family),
        "rotary_dim": metadata.integer("rope.dimension_count") if family.has_partial_rotary else None,
    }
    if experts := metadata.integer("expert_count"):
        config |= {"num_local_experts": experts, "num_experts_per_tok": metadata.integer("expert_used_count")}
    if gguf.read_fields is not None:
        config |= gguf.read_fields(metadata, config)
    fields = {key: value for key, value in config.items() if value is not None or key in _NULLABLE_FIELDS}
    return fields | (_sliding_window_fields(metadata) if gguf.has_optional_window else {})


def _find_family(metadata: GGUFMetadata) -> tuple[DecoderFamily, GGUFFormat]:
    arch = metadata.architecture
    if not (families := find_gguf_families(arch)):
        known = ", ".join(gguf_architectures())
        problem = f"general.architecture: {arch[:40]!r} is not served; served: {known}"
        raise ModelError(f"model: {metadata.header.name}: {problem}")
    formats = [(family, family.gguf) for family in families if family.gguf is not None]
    family, gguf = next((f, g) for f, g in formats if g.matches is None or g.matches(metadata))
    experts = metadata.integer("expert_count")
    if experts and not (family.has_experts or gguf.has_optional_experts):
        raise metadata.field_error("expert_count", f"{experts}, where models of this architecture have none")
    if not experts and family.has_experts and not gguf.has_optional_experts:
        raise metadata.field_error("expert_count", "missing, where models of this architecture have experts")
    return family, gguf


def generation_config_json(header: GGUFHeader) -> dict[str, Any]:
    """Raises ModelError."""
    ends = {"eos_token_id": eos_token_ids(header)} if tokenizer_vocab_size(header) else {}
    sampling: dict[str, float | None] = {name: header.get_float(key) for name, key in _SAMPLING_KEYS.items()}
    # Values are float32, which cannot represent 0.2 exactly.
    sampling = {name: float(f"{value:.6g}") for name, value in sampling.items() if value is not None}
    top_k = header.get_integer("general.sampling.top_k")
    return ends | sampling | ({} if top_k is None else {"top_k": top_k})


def bytes_by_weight_type(header: GGUFHeader) -> dict[str, int]:
    """Counts matrices only. Types with most bytes come first."""
    bytes_by_type: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            bytes_by_type[tensor.type.name] = bytes_by_type.get(tensor.type.name, 0) + tensor.nbytes
    return dict(sorted(bytes_by_type.items(), key=lambda item: -item[1]))


def _check_head_dims(metadata: GGUFMetadata, family: DecoderFamily, head_dim: int | None) -> None:
    for key in ("attention.value_length", *(() if family.has_partial_rotary else ("rope.dimension_count",))):
        size = metadata.integer(key)
        if size is not None and size != head_dim:
            raise metadata.field_error(key, f"{size}, where heads have {head_dim}, is not served")


def _uniform_integer(metadata: GGUFMetadata, key: str, *, ignore_zeros: bool = False) -> int | None:
    if not metadata.is_list(key):
        return metadata.integer(key)
    values = set(metadata.integers(key)) - ({0} if ignore_zeros else set())
    if len(values) != 1:
        raise metadata.field_error(key, "layers of different sizes are not served")
    return values.pop()


def _num_layers(metadata: GGUFMetadata) -> int | None:
    layers, more = metadata.integer("block_count"), metadata.integer("nextn_predict_layers") or 0
    return None if layers is None else layers - more


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get(EMBEDDING_TENSOR)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"model: {header.name} lacks the matrix {EMBEDDING_TENSOR}")
    return embedding.shape[0]


_MAX_FLOAT_FRACTION = 0.02
"""Routers and convolutions are never quantized, so files with fewer floats than this count as quantized throughout."""


def _dtype(header: GGUFHeader) -> str:
    """Quantized models have bfloat16, the dtype of training."""
    most = next(iter(bytes_by_weight_type(header)), "")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _quantization_config(header: GGUFHeader) -> dict[str, Any] | None:
    linears = [
        tensor
        for name, tensor in header.tensors.items()
        if len(tensor.shape) > 1 and name not in (EMBEDDING_TENSOR, _LM_HEAD_TENSOR)
    ]
    types = [name for name in bytes_by_weight_type(header) if name not in FLOAT_TYPES]
    if not types or not linears:
        return None
    bits = 8 * sum(tensor.nbytes for tensor in linears) / sum(tensor.num_elements for tensor in linears)
    quantization = {"quant_method": "gguf", "fmt": ", ".join(types), "bits": round(bits, 2), "group_size": -1}
    matrices = [each for each in header.tensors.values() if len(each.shape) > 1]
    floats = sum(each.num_elements for each in matrices if each.type.name in FLOAT_TYPES)
    few = floats < _MAX_FLOAT_FRACTION * sum(each.num_elements for each in matrices)
    return quantization | ({"activations": "float32"} if few else {})


def _rope_parameters(header: GGUFHeader, metadata: GGUFMetadata, family: DecoderFamily) -> dict[str, Any]:
    kind = header.get_string(f"{metadata.architecture}.rope.scaling.type")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.float("rope.freq_base") or 10000.0}
    factor = metadata.float("rope.scaling.factor")
    if kind is None:  # old files do not name a kind
        factor = factor or metadata.float("rope.scale_linear")
        kind = "none" if factor in (None, 1.0) else "linear"
    if kind not in ("none", "linear", "yarn"):
        raise metadata.field_error("rope.scaling.type", f"{kind[:40]!r} is not computed (none, linear, yarn)")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": factor or 1.0}
    if kind == "yarn":
        rope |= _yarn_parameters(metadata)
    if family.has_longrope and (long := header.tensors.get("rope_factors_long.weight")) is not None:
        return _longrope_parameters(header, metadata, rope, long)
    if (factors := header.tensors.get(_ROPE_FACTORS_TENSOR)) is not None:
        if rope["rope_type"] != "default":
            raise metadata.field_error("rope.scaling.type", f"{kind!r} beside {_ROPE_FACTORS_TENSOR} is not computed")
        rope |= {"rope_type": "factors", "factors": _read_floats(header, _ROPE_FACTORS_TENSOR, factors)}
    return rope


def _longrope_parameters(
    header: GGUFHeader, metadata: GGUFMetadata, rope: dict[str, Any], long: GGUFTensor
) -> dict[str, Any]:
    """GGUF files store LongRoPE's factors as tensors."""
    name = "rope_factors_short.weight"
    if (short := header.tensors.get(name)) is None:
        raise ModelError(f"model: {header.name} lacks {name}")
    factors = {"long_factor": _read_floats(header, "rope_factors_long.weight", long)}
    factors |= {"short_factor": _read_floats(header, name, short)}
    optional_fields = {
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
        "attention_factor": metadata.float("rope.scaling.attn_factor"),
    }
    given = {key: value for key, value in optional_fields.items() if value is not None}
    return rope | factors | {"rope_type": "longrope"} | given


def _yarn_parameters(metadata: GGUFMetadata) -> dict[str, Any]:
    """Excludes factor."""
    for part in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        if (value := metadata.float(f"rope.scaling.{part}")) not in (None, 1.0):
            raise metadata.field_error(f"rope.scaling.{part}", f"{value:g} is not computed (1)")
    positions = metadata.integer("rope.scaling.original_context_length") or metadata.integer("context_length")
    betas = {name: metadata.float(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    betas_in_file = {name: beta for name, beta in betas.items() if beta is not None}
    return {"original_max_position_embeddings": positions, "truncate": True, **betas_in_file}


def _bias_fields(header: GGUFHeader) -> dict[str, bool]:
    keys = any(f"blk.0.attn_{name}.bias" in header.tensors for name in ("q", "qkv"))
    out, mlp = (f"blk.0.{name}.bias" in header.tensors for name in ("attn_output", "ffn_up"))
    biases = {"attention_bias": keys, "use_qkv_bias": keys, "attention_out_bias": out, "mlp_bias": mlp}
    return biases | {"use_bias": keys and out}


def _sliding_window_fields(metadata: GGUFMetadata) -> dict[str, Any]:
    key, kinds = "attention.sliding_window", ("full_attention", "sliding_attention")
    types: dict[str, Any] = {}
    if isinstance(slides := metadata.header.metadata.get(f"{metadata.architecture}.{key}_pattern"), list):
        types["layer_types"] = [kinds[bool(each)] for each in slides]
    return {"sliding_window": metadata.integer(key) or None, **types}


def _read_floats(header: GGUFHeader, name: str, tensor: GGUFTensor) -> list[float]:
    if tensor.type.name != "F32" or tensor.num_elements > _MAX_ROPE_FACTORS:
        raise ModelError(f"model: {header.name}: {name}: expected up to {_MAX_ROPE_FACTORS} numbers of type F32")
    file = open_if_present(tensor.file)
    content = b"" if file is None else os.pread(file.fileno(), tensor.nbytes, tensor.offset)
    if file is not None:
        file.close()
    if len(content) != tensor.nbytes:
        raise ModelError(f"model: {header.name}: {name}: cannot be read")
    return list(struct.unpack(f"<{tensor.num_elements}f", content))
