from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.engine.checkpoint.kv_cache_plan import is_embedding_quantized
from quire.engine.checkpoint.mtp_names import MTPTensorNames
from quire.engine.checkpoint.quantization import is_unneeded_scale, parse_quantization_config
from quire.engine.checkpoint.tensor_headers import read_tensor_headers, text_tensor_name
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.gguf.header import GGUFHeader
from quire.engine.gguf.model_files import read_gguf_header
from quire.engine.layers.schemes import QuantizationScheme, UnquantizedScheme
from quire.engine.layers.schemes.formats import make_format_lookup
from quire.engine.layers.schemes.gguf import GGUFFormat
from quire.engine.layers.schemes.mixed import MixedScheme
from quire.engine.layers.schemes.online_quantization import Int8EmbeddingAndHeadScheme, OnlineQuantizedScheme
from quire.engine.worker.loading.gguf_delta_net import GGUFDeltaNetConverter
from quire.engine.worker.loading.gguf_loader import gguf_stream, linear_tensor_types, tensor_scales
from quire.engine.worker.loading.stacked_experts import map_checkpoint_tensors
from quire.engine.worker.loading.weight_loader import NamedTensors, TensorStream, checkpoint_stream
from quire.engine.worker.loading.weight_mapper import WeightMapper, make_stored_module_name_lookup
from quire.kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    scheme: QuantizationScheme
    stream: TensorStream
    quantization: str = ""


def open_weights(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    backend: Backend,
    dtype: torch.dtype,
    tensors: NamedTensors | None = None,
    mtp: MTPTensorNames | None = None,
) -> CheckpointWeights:
    """Dummy weights ignore the checkpoint's quantization; only online quantization applies to them. Raises
    ConfigError.
    """
    quantization_config = model_config.raw.get("quantization_config") or {}
    if tensors is not None and not path.is_dir():
        raise ConfigError("model: tensors cannot take the place of a GGUF file's", param="model")
    stored_stream = _open_stream(path, model_config, mtp) if tensors is None else iter(tensors)
    stream = map_checkpoint_tensors(model_config, stored_stream, gguf=not path.is_dir())
    dummy = config.load_format == "dummy"
    if not dummy:
        _check_quantization(config, quantization_config.get("quant_method"))
    if config.quantize_embedding is not None and not dummy and quantization_config and not path.is_dir():
        raise ConfigError("quantize_embedding: a GGUF file's embedding is held as stored", param="quantize_embedding")
    if config.online_quantization is not None:
        scheme: QuantizationScheme = OnlineQuantizedScheme(backend, dtype, config.online_quantization)
        weights = CheckpointWeights(scheme, stream, f"{config.online_quantization} at load")
    elif dummy or not quantization_config:
        weights = CheckpointWeights(UnquantizedScheme(backend, dtype), stream)
    elif path.is_dir():
        formats = parse_quantization_config(quantization_config)
        weight_mapper = WeightMapper(model_config)
        headers = weight_mapper.map_headers(
            read_tensor_headers(path, text_tensor_name if mtp is None else mtp.mtp_name_from_checkpoint)
        )

        name_in_files = (
            make_stored_module_name_lookup(read_tensor_headers(path, str))
            if mtp is None
            else mtp.checkpoint_name_from_mtp
        )

        def linear_file_name(linear: str) -> str:
            return name_in_files(weight_mapper.checkpoint_module_name(linear))

        scheme = MixedScheme(
            backend, dtype, make_format_lookup(formats, headers, linear_file_name, is_extra_layer=mtp is not None)
        )
        needed_tensors = ((name, tensor) for name, tensor in stream if not is_unneeded_scale(name))
        return _apply_embedding_scheme(
            config, CheckpointWeights(scheme, needed_tensors, formats.format_summary), backend, dtype
        )
    else:
        description = f"{quantization_config.get('fmt')}, {quantization_config.get('bits'):.3g} bits"
        return _open_gguf_weights(_read_filtered_gguf_header(path, mtp), model_config, backend, dtype, description)
    weights = _apply_embedding_scheme(config, weights, backend, dtype)
    held_note = (
        "" if backend.keeps_weights_quantized else f", held in {str(dtype).removeprefix('torch.')} by this backend"
    )
    return replace(weights, quantization=weights.quantization and weights.quantization + held_note)


def _check_quantization(config: EngineConfig, method: str | None) -> None:
    if config.online_quantization is not None and method is not None:
        message = (
            f"quantization: {config.online_quantization} was given, but the checkpoint's weights are {method} already"
        )
        raise ConfigError(message, param="quantization")
    if config.required_checkpoint_quant_method not in (None, method):
        has = "not quantized" if method is None else method
        message = f"quantization: {config.quantization} was given, but the checkpoint's weights are {has}"
        raise ConfigError(message, param="quantization")


def _open_stream(path: Path, model_config: ModelConfig, mtp: MTPTensorNames | None) -> TensorStream:
    if path.is_dir():
        by_class = model_config.transformers_config is not None  # the files' tensor names are the model's
        return checkpoint_stream(
            path, str if by_class else text_tensor_name if mtp is None else mtp.mtp_name_from_checkpoint
        )
    return gguf_stream(_read_filtered_gguf_header(path, mtp), model_config)


def _read_filtered_gguf_header(path: Path, mtp: MTPTensorNames | None) -> GGUFHeader:
    header = read_gguf_header(path)
    if mtp is None:
        return header
    names = {stored: mtp.mtp_name_from_checkpoint(stored) for stored in header.tensors}
    return replace(header, tensors={own: header.tensors[stored] for stored, own in names.items() if own is not None})


def _apply_embedding_scheme(
    config: EngineConfig, weights: CheckpointWeights, backend: Backend, dtype: torch.dtype
) -> CheckpointWeights:
    description, in_8_bits = (
        weights.quantization,
        is_embedding_quantized(config.online_quantization, config.quantize_embedding),
    )
    if in_8_bits != is_embedding_quantized(config.online_quantization, None):
        description += f"{', ' if description else ''}embedding and head {'int8' if in_8_bits else 'whole'}"
    scheme = Int8EmbeddingAndHeadScheme(weights.scheme, backend, dtype) if in_8_bits else weights.scheme
    return replace(weights, scheme=scheme, quantization=description)


def _open_gguf_weights(
    header: GGUFHeader, model_config: ModelConfig, backend: Backend, dtype: torch.dtype, description: str
) -> CheckpointWeights:
    weight_mapper = WeightMapper(model_config, gguf=True)
    stored_types = linear_tensor_types(header, model_config)
    types = {own: kind for name, kind in stored_types.items() for own in weight_mapper.map_module_name(name)}
    deltas = GGUFDeltaNetConverter(model_config)
    stored_scales = tensor_scales(header, model_config)
    scales = {own: scale for name, scale in stored_scales.items() for own in weight_mapper.map_module_name(name)}
    schemes = {name: GGUFFormat(kind, deltas.input_order(name), scales.get(name, 1.0)) for name, kind in types.items()}
    scheme = MixedScheme(backend, dtype, schemes.get, schemes.get("model.embed_tokens"))
    return CheckpointWeights(scheme, weight_mapper.map_stream(gguf_stream(header, model_config)), description)
