"""Checks replacement weights by file headers, before the served weights are released."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from quire.engine.checkpoint.family_spec import build_encoder_spec, is_encoder
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.quantization import is_unneeded_scale
from quire.engine.checkpoint.tensor_headers import find_weight_files, read_tensor_headers
from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.gguf.model_files import read_gguf_header
from quire.engine.layers.parameters import LoadableParameter, ParameterTable
from quire.engine.layers.schemes.formats import SAFETENSORS_DTYPES
from quire.engine.models import decoder_spec
from quire.engine.worker.loading.stacked_experts import map_checkpoint_tensors
from quire.engine.worker.loading.weight_loader import (
    TensorStream,
    load_weights,
    prefix_names,
    rename_tensors_to_table_names,
    require_shards,
)


@dataclass(frozen=True, slots=True)
class ExpectedWeights:
    parameter_table: ParameterTable
    extra_folders: tuple[str, ...] = ()
    optional_prefixes: tuple[str, ...] = ()

    def merge_stages(self, stage_tables: Iterable[Mapping[str, tuple[tuple[int, ...], str]]]) -> ExpectedWeights:
        """`stage_tables`: for each other pipeline stage, the shapes and dtypes by tensor name."""
        each = {name: kind for other in stage_tables for name, kind in other.items()}
        types = {name: getattr(torch, kind.removeprefix("torch.")) for name, (_, kind) in each.items()}
        table = {name: LoadableParameter(shape, types[name], _discard_tensor) for name, (shape, _) in each.items()}
        return ExpectedWeights(self.parameter_table | table, self.extra_folders)

    def detach_from_model(self) -> ExpectedWeights:
        """The copy's weight loaders discard tensors."""
        table = {
            name: LoadableParameter(each.shape, each.dtype, _discard_tensor)
            for name, each in self.parameter_table.items()
        }
        return replace(self, parameter_table=table)


def check_weights(expected: ExpectedWeights, served: ModelConfig, path: Path, served_path: Path) -> None:
    """Raises ModelError."""
    check_same_model(served, path, served_path)
    if path.is_file():
        new_shapes, served_shapes = (
            {name: each.shape for name, each in read_gguf_header(file).tensors.items()} for file in (path, served_path)
        )
        if wrong := sorted(
            name for name in new_shapes | served_shapes if new_shapes.get(name) != served_shapes.get(name)
        ):
            name = wrong[0]
            raise ModelError(f"weights: {name} has shape {new_shapes.get(name)}, the model's {served_shapes.get(name)}")
        return
    shapes = map_checkpoint_tensors(served, _read_meta_tensors(path))
    if served.transformers_config is not None:
        shapes = import_module("quire.engine.models.transformers_backend.weight_conversion").convert_meta_tensors(
            served.transformers_config, shapes
        )
    stream = rename_tensors_to_table_names(shapes, expected.parameter_table, expected.optional_prefixes)
    folder_streams = [prefix_names(folder, _read_meta_tensors(path / folder)) for folder in expected.extra_folders]
    load_weights(expected.parameter_table, chain(stream, *folder_streams), device=torch.device("meta"))


def check_same_model(served: ModelConfig, path: Path, served_path: Path) -> None:
    """Raises ModelError."""
    if path.is_dir() != served_path.is_dir():
        kinds = "safetensors", "GGUF"
        raise ModelError(
            f"weights: the model is served from {kinds[served_path.is_file()]}, not {kinds[path.is_file()]}"
        )
    if path.is_file() or (path / "config.json").exists():
        _check_same_config(
            read_model_config(path, "auto" if served.transformers_config is None else "transformers"),
            served,
            quantized=path.is_dir(),
        )


def _check_same_config(new_config: ModelConfig, served: ModelConfig, *, quantized: bool) -> None:
    """GGUF files lack quantization_config, because each of their tensors has a type."""
    if new_config.model_type != served.model_type:
        raise ModelError(
            f"weights: config.json: model_type is {new_config.model_type!r}, the model's {served.model_type!r}"
        )
    spec_of = build_encoder_spec if is_encoder(served) else decoder_spec
    if (difference := _first_difference("the model", spec_of(new_config), spec_of(served))) is not None:
        name, is_now, was = difference
        raise ModelError(f"weights: config.json: {name} is {is_now}, the model's {was}")
    if quantized and new_config.raw.get("quantization_config") != served.raw.get("quantization_config"):
        raise ModelError("weights: config.json: quantization_config is not the model's")


def _first_difference(name: str, new: Any, served: Any) -> tuple[str, Any, Any] | None:
    if new == served:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if is_dataclass(served) and type(new) is type(served):
        pairs = [(each.name, getattr(new, each.name), getattr(served, each.name)) for each in fields(served)]
    elif isinstance(served, tuple) and isinstance(new, tuple):
        if len(new) != len(served):
            return f"the number of {name}", len(new), len(served)
        pairs = [(name, *pair) for pair in zip(new, served, strict=True)]
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), (name, new, served))


def _read_meta_tensors(path: Path) -> TensorStream:
    require_shards(find_weight_files(path))
    for name, header in read_tensor_headers(path).items():
        if header.dtype not in SAFETENSORS_DTYPES:
            raise ModelError(f"weights: {name} is stored as {header.dtype}, which is not served")
        if not is_unneeded_scale(name):
            yield name, torch.empty(header.shape, dtype=SAFETENSORS_DTYPES[header.dtype], device="meta")


def _discard_tensor(tensor: torch.Tensor) -> None:
    pass
