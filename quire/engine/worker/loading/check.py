"""Checks weights by what their files' headers say, before those that are served are let go for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from quire.engine.checkpoint.families import ENCODERS
from quire.engine.checkpoint.files import ModelConfig, read_model_config
from quire.engine.checkpoint.quantization import is_aside
from quire.engine.checkpoint.safetensors import read_tensor_headers, weight_files
from quire.engine.encoders import encoder_spec
from quire.engine.errors import ModelError
from quire.engine.gguf.files import read_gguf
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.engine.models import decoder_spec
from quire.engine.worker.loading.checkpoint import as_linears
from quire.engine.worker.loading.loader import TensorStream, load_weights, named_stream, present, within

_TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""By their names in safetensors."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the weights of a model must hold."""

    table: ParameterTable
    folders: tuple[str, ...] = ()
    """Those in the model's that hold more of them."""
    unused: tuple[str, ...] = ()
    """What names begin like that it may hold too."""

    def joined(self, others: Iterable[Mapping[str, tuple[tuple[int, ...], str]]]) -> Checkpoint:
        """Of this stage and of the others; by name, the shapes and types of theirs."""
        each = {name: kind for other in others for name, kind in other.items()}
        types = {name: getattr(torch, kind.removeprefix("torch.")) for name, (_, kind) in each.items()}
        table = {name: Parameter(shape, types[name], _drop) for name, (shape, _) in each.items()}
        return Checkpoint(self.table | table, self.folders)

    def bare(self) -> Checkpoint:
        """Without the model that the table fills."""
        table = {name: Parameter(each.shape, each.dtype, _drop) for name, each in self.table.items()}
        return replace(self, table=table)


def check_weights(checkpoint: Checkpoint, served: ModelConfig, path: Path, before: Path) -> None:
    """Raise ModelError where the weights at `path` are not of the served model's shape; `before`: some that are."""
    check_meaning(served, path, before)
    if path.is_file():
        found, wanted = (
            {name: each.shape for name, each in read_gguf(file).tensors.items()} for file in (path, before)
        )
        if wrong := sorted(name for name in found | wanted if found.get(name) != wanted.get(name)):
            name = wrong[0]
            raise ModelError(f"weights: {name} has shape {found.get(name)}, the model's {wanted.get(name)}")
        return
    shapes = as_linears(served, _shapes(path))
    if served.given is not None:
        shapes = import_module("quire.engine.models.adapted.weights").converted_shapes(served.given, shapes)
    stream = named_stream(shapes, checkpoint.table, checkpoint.unused)
    more = [within(folder, _shapes(path / folder)) for folder in checkpoint.folders]
    load_weights(checkpoint.table, chain(stream, *more), device=torch.device("meta"))


def check_meaning(served: ModelConfig, path: Path, before: Path) -> None:
    """Raise ModelError where the weights at `path` are of another model than the served one, as far as its config says;
    `before`: weights that are the served one's."""
    if path.is_dir() != before.is_dir():
        kinds = "safetensors", "GGUF"
        raise ModelError(f"weights: the model is served from {kinds[before.is_file()]}, not {kinds[path.is_file()]}")
    if path.is_file() or (path / "config.json").exists():
        _check_config(
            read_model_config(path, "auto" if served.given is None else "transformers"), served, quantized=path.is_dir()
        )


def _check_config(found: ModelConfig, served: ModelConfig, *, quantized: bool) -> None:
    """`quantized`: they must agree on how weights are stored in few bits, which a GGUF file says of each tensor."""
    if found.model_type != served.model_type:
        raise ModelError(f"weights: config.json: model_type is {found.model_type!r}, the model's {served.model_type!r}")
    spec_of = encoder_spec if served.model_type in ENCODERS else decoder_spec
    if (difference := _difference("the model", spec_of(found), spec_of(served))) is not None:
        name, is_now, was = difference
        raise ModelError(f"weights: config.json: {name} is {is_now}, the model's {was}")
    if quantized and found.raw.get("quantization_config") != served.raw.get("quantization_config"):
        raise ModelError("weights: config.json: quantization_config is not the model's")


def _difference(name: str, found: Any, served: Any) -> tuple[str, Any, Any] | None:
    """The first field in which two specs differ, within them at whatever depth: its name and both values."""
    if found == served:
        return None
    pairs: list[tuple[str, Any, Any]] = []
    if is_dataclass(served) and type(found) is type(served):
        pairs = [(each.name, getattr(found, each.name), getattr(served, each.name)) for each in fields(served)]
    elif isinstance(served, tuple) and isinstance(found, tuple):
        if len(found) != len(served):
            return f"the number of {name}", len(found), len(served)
        pairs = [(name, *pair) for pair in zip(found, served, strict=True)]
    return next(filter(None, (_difference(*pair) for pair in pairs)), (name, found, served))


def _shapes(path: Path) -> TensorStream:
    """The tensors of a folder's safetensors files without their numbers."""
    present(weight_files(path))
    for name, header in read_tensor_headers(path).items():
        if header.dtype not in _TYPES:
            raise ModelError(f"weights: {name} is stored as {header.dtype}, which is not served")
        if not is_aside(name):
            yield name, torch.empty(header.shape, dtype=_TYPES[header.dtype], device="meta")


def _drop(tensor: torch.Tensor) -> None:
    pass
