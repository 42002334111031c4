"""Opens a model's weights: the tensors as they come, and the scheme that makes linears of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.engine.checkpoint.alike.mtp import MtpNames
from quire.engine.checkpoint.families import ENCODERS, STACKED
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.kv_plan import QUANTIZED_BITS, TABLE_BITS, int8_embedding
from quire.engine.checkpoint.quantization import is_aside, weight_formats
from quire.engine.checkpoint.safetensors import read_tensor_headers, text_tensor
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.gguf.files import read_gguf
from quire.engine.gguf.header import Header
from quire.engine.layers.parameters import ParameterTable
from quire.engine.layers.quantize import AtLoad, Int8Table
from quire.engine.layers.schemes import Scheme, Unquantized
from quire.engine.layers.schemes.formats import formats_of
from quire.engine.layers.schemes.gguf import Gguf
from quire.engine.layers.schemes.mixed import MixedScheme
from quire.engine.layers.stream.layer_inputs import TABLE
from quire.engine.worker.loading.experts import experts_apart
from quire.engine.worker.loading.gguf_delta import DeltaNets
from quire.engine.worker.loading.gguf_loader import gguf_stream, linear_types
from quire.engine.worker.loading.layout import Arrangement, names_in_files
from quire.engine.worker.loading.loader import Tensors, TensorStream, checkpoint_stream
from quire.kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class Weights:
    scheme: Scheme
    stream: TensorStream
    quantization: str = ""
    """How they are stored in few bits, for people to read."""


def open_weights(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    tensors: Tensors | None = None,
    mtp: MtpNames | None = None,
) -> Weights:
    """The weights at `path`, as resolve_model gives it, or `tensors` in their place. Dummy ones are quantized at load
    alone. `mtp`: those of the layer that these are the names of, which `model_config` is then of. Raises ConfigError
    for a checkpoint that has few bits already and is to be quantized at load, and for tensors in place of a GGUF
    file's.
    """
    given = model_config.raw.get("quantization_config") or {}
    if tensors is not None and not path.is_dir():
        raise ConfigError("model: tensors cannot take the place of a GGUF file's", param="model")
    stored = _stored(path, model_config, mtp) if tensors is None else iter(tensors)
    stream = as_linears(model_config, stored, gguf=not path.is_dir())
    dummy = config.load_format == "dummy"
    if not dummy:
        _check_quantization(config, given.get("quant_method"))
    if config.quantize_embedding is not None and not dummy and given and not path.is_dir():
        raise ConfigError("quantize_embedding: a GGUF file's embedding is held as stored", param="quantize_embedding")
    if config.at_load is not None:
        scheme: Scheme = AtLoad(backend, dtype, config.at_load)
        weights = Weights(scheme, stream, f"{config.at_load} at load")
    elif dummy or not given:
        weights = Weights(Unquantized(backend, dtype), stream)
    elif path.is_dir():
        formats = weight_formats(given)
        arrangement = Arrangement(model_config)
        headers = arrangement.headers(read_tensor_headers(path, text_tensor if mtp is None else mtp.own))

        name_in_files = names_in_files(read_tensor_headers(path, str)) if mtp is None else mtp.stored

        def stored_name(linear: str) -> str:
            return name_in_files(arrangement.stored(linear))

        scheme = MixedScheme(backend, dtype, formats_of(formats, headers, stored_name, beside=mtp is not None))
        needed = ((name, tensor) for name, tensor in stream if not is_aside(name))
        return _with_table(config, Weights(scheme, needed, formats.said), backend, dtype)
    else:
        said = f"{given.get('fmt')}, {given.get('bits'):.3g} bits"
        return _gguf(_header(path, mtp), model_config, backend, dtype, said)
    weights = _with_table(config, weights, backend, dtype)
    held = "" if backend.keeps_bits else f", held in {str(dtype).removeprefix('torch.')} by this backend"
    return replace(weights, quantization=weights.quantization and weights.quantization + held)


def _check_quantization(config: EngineConfig, method: str | None) -> None:
    """Raise ConfigError where another one is asked for than the checkpoint's. method: config.json's quant_method."""
    if config.at_load is not None and method is not None:
        message = f"quantization: {config.at_load} is asked for, but the checkpoint's weights are {method} already"
        raise ConfigError(message, param="quantization")
    if config.stored_as not in (None, method):
        has = "not quantized" if method is None else method
        message = f"quantization: {config.quantization} is asked for, but the checkpoint's weights are {has}"
        raise ConfigError(message, param="quantization")


def _stored(path: Path, model_config: ModelConfig, mtp: MtpNames | None) -> TensorStream:
    if path.is_dir():
        by_class = model_config.given is not None  # which has the names that are stored
        return checkpoint_stream(path, str if by_class else text_tensor if mtp is None else mtp.own)
    return gguf_stream(_header(path, mtp), model_config)


def _header(path: Path, mtp: MtpNames | None) -> Header:
    """A GGUF file's, with the tensors that are asked for."""
    header = read_gguf(path)
    if mtp is None:
        return header
    names = {stored: mtp.own(stored) for stored in header.tensors}
    return replace(header, tensors={own: header.tensors[stored] for stored, own in names.items() if own is not None})


def as_linears(model_config: ModelConfig, stream: TensorStream, *, gguf: bool = False) -> TensorStream:
    """The tensors of a checkpoint of this family, or of a GGUF file, each that of one linear; what transformers' class
    computes puts them in order itself."""
    if model_config.model_type in ENCODERS or model_config.given is not None:
        return stream
    kind = model_config.model_type
    turned, columns = model_config.hidden_size if kind == "qwen3_vl_moe_text" else None, kind == "llama4_text"
    halves = turned is not None or columns or kind in ("gemma4_text", "qwen3_5_moe_text")
    apart = experts_apart(stream, halves=halves, turned=turned, columns=columns) if kind in STACKED else stream
    return Arrangement(model_config, gguf=gguf).arranged(apart)


def _with_table(config: EngineConfig, weights: Weights, backend: Backend, dtype: torch.dtype) -> Weights:
    """The weights, embedding and head in 8 bits where they are to be."""
    said, in_8_bits = weights.quantization, int8_embedding(config.at_load, config.quantize_embedding)
    if in_8_bits != int8_embedding(config.at_load, None):
        said += f"{', ' if said else ''}embedding and head {'int8' if in_8_bits else 'whole'}"
    scheme = Int8Table(weights.scheme, backend, dtype) if in_8_bits else weights.scheme
    return replace(weights, scheme=scheme, quantization=said)


def _gguf(header: Header, model_config: ModelConfig, backend: Backend, dtype: torch.dtype, said: str) -> Weights:
    arrangement = Arrangement(model_config, gguf=True)
    found = linear_types(header, model_config)
    types = {own: kind for name, kind in found.items() for own in arrangement.modules(name)}
    deltas = DeltaNets(model_config)
    stored = {name: Gguf(kind, deltas.order(name)) for name, kind in types.items()}
    scheme = MixedScheme(backend, dtype, stored.get, stored.get("model.embed_tokens"))
    return Weights(scheme, arrangement.arranged(gguf_stream(header, model_config)), said)


def held_bytes(table: ParameterTable, config: EngineConfig, backend: Backend, loaded: int) -> int:
    """Bytes of weights as they are held, where `loaded` were read."""
    quantizes = config.at_load is not None or config.quantize_embedding
    return quantized_bytes(table, config) if backend.keeps_bits and quantizes else loaded


def quantized_bytes(table: ParameterTable, config: EngineConfig) -> int:
    """Of all weights, as they are held after what is quantized at load."""
    bits, in_8_bits = 0.0, int8_embedding(config.at_load, config.quantize_embedding)
    for name, each in table.items():
        held = 8.0 * each.dtype.itemsize
        if name in (f"{TABLE}.weight", "model.embed_tokens.weight", "lm_head.weight"):
            held = TABLE_BITS if in_8_bits else held
        elif config.at_load is not None and len(each.shape) > 1:
            held = QUANTIZED_BITS[config.at_load]
        bits += math.prod(each.shape) * held
    return round(bits / 8)
