"""`python -m quire.engine.worker.checkpoint_writer.quantize_checkpoint MODEL OUT FORMAT [STRENGTH]` writes a quantized
checkpoint. With STRENGTH, it first applies SmoothQuant, using samples from stdin: a JSON list of lists of token ids.
`quire quantize` starts this module as a process, because it needs torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.engine.checkpoint.tensor_headers import INDEX_FILE, find_weight_files, read_file_headers, text_tensor_name
from quire.engine.common.errors import ModelError, QuireError
from quire.engine.common.folder_reader import read_json_if_present
from quire.engine.common.safetensors_dtypes import DTYPE_BYTES
from quire.engine.worker.checkpoint_writer.quantized_formats import QuantizedFormat, TensorLayout, make_quantized_format
from quire.engine.worker.checkpoint_writer.safetensors_writer import SafetensorsFileWriter
from quire.engine.worker.checkpoint_writer.smoothquant import Smoothing, fit_smoothing
from quire.engine.worker.loading.weight_loader import iter_file_tensors, require_shards
from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend

_LINEAR_NAME = re.compile(r"(?:^|\.)layers\.\d+\..*\.weight$")
_ROUTER_NAME = re.compile(r"\.(?:gate|router)\.weight$")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_COPIED_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_VISION_LINEARS = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*")
"""These linears stay unquantized, because Quire cannot load a quantized vision tower from a checkpoint."""


def quantize_folder(
    model: Path, out: Path, name: str, backend: Backend, make_smoothing: Callable[[], Smoothing] | None = None
) -> str:
    """Keeps one tensor and its quantized result in memory at a time. Raises ModelError and OSError, and in both cases
    does not create `out`.
    """
    partial_folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        summary = _write_quantized_checkpoint(
            model, partial_folder, make_quantized_format(name, backend), make_smoothing
        )
        mask = os.umask(0)
        os.umask(mask)
        partial_folder.chmod(0o777 & ~mask)
        partial_folder.rename(out)
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return summary


@torch.inference_mode()
def _write_quantized_checkpoint(
    model: Path, out: Path, target_format: QuantizedFormat, make_smoothing: Callable[[], Smoothing] | None
) -> str:
    config = read_json_if_present(model / "config.json") or {}
    shards = require_shards(find_weight_files(model))
    headers = {shard: read_file_headers(shard) or {} for shard in shards}
    if not any(_LINEAR_NAME.search(name) for each in headers.values() for name in each):
        kind = config.get("model_type")
        raise ModelError(
            f"model: checkpoints of {kind} models are not written in few bits; serve it with --quantization"
        )
    layouts = {  # by shard and tensor: the tensors to write, only one if the tensor is not quantized
        shard: {name: _tensor_layout(name, *header, target_format) for name, header in by_name.items()}
        for shard, by_name in headers.items()
    }
    _copy_other_files(model, out)
    smoother = None if make_smoothing is None else make_smoothing()
    index: dict[str, str] = {}
    linears = 0
    before = 0
    after = 0
    for shard, tensor_layouts in layouts.items():
        file_name = f"{shard.stem.replace('pytorch_model', 'model')}.safetensors"
        linears += _write_quantized_shard(shard, out / file_name, tensor_layouts, target_format, smoother)
        index |= {name: file_name for layout in tensor_layouts.values() for name in layout}
        before, after = before + shard.stat().st_size, after + (out / file_name).stat().st_size
    if {*index.values()} != {"model.safetensors"}:
        _write_json(out / INDEX_FILE, {"metadata": {"total_size": after}, "weight_map": index})
    unquantized = _list_unquantized({name: layout for each in layouts.values() for name, layout in each.items()})
    _write_json(out / "config.json", config | {"quantization_config": target_format.quantization_config(unquantized)})
    norms = "" if smoother is None else f", {smoother.num_norms} norms smoothed"
    return f"{linears} linears {target_format.format_name}{norms}; {before / 1e6:,.1f} MB became {after / 1e6:,.1f} MB"


def _write_quantized_shard(
    shard: Path,
    out: Path,
    tensor_layouts: Mapping[str, TensorLayout],
    target_format: QuantizedFormat,
    smoother: Smoothing | None,
) -> int:
    """Returns the number of quantized linears."""
    linears = 0
    tensors = {name: each for layout in tensor_layouts.values() for name, each in layout.items()}
    with SafetensorsFileWriter(out, tensors) as file:
        for name, stored in iter_file_tensors(shard):
            tensor = stored if smoother is None else smoother.smooth_tensor(name, stored)
            if len(tensor_layouts[name]) == 1:
                file.write_tensor(name, tensor.to(stored.dtype))
                continue
            linears += 1
            for part, content in target_format.quantize_weight(tensor).items():
                file.write_tensor(f"{_strip_weight_suffix(name)}.{part}", content)
    return linears


def _tensor_layout(name: str, dtype: str, shape: tuple[int, ...], target_format: QuantizedFormat) -> TensorLayout:
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"model: {name[:100]} is stored as {dtype}, which is not known")
    linear = _LINEAR_NAME.search(name) and not _ROUTER_NAME.search(name) and text_tensor_name(name) is not None
    if linear and len(shape) == 2 and dtype in _FLOAT_DTYPES:
        parts = target_format.tensor_layout(*shape)
        if parts is not None:
            return {f"{_strip_weight_suffix(name)}.{part}": each for part, each in parts.items()}
    return {name: (dtype, shape)}


def _list_unquantized(layouts: Mapping[str, TensorLayout]) -> list[str]:
    """The list always has lm_head, even if it is tied, because other programs treat it as a linear of its own."""
    linears = ["lm_head"]
    for name, layout in layouts.items():
        linear = _strip_weight_suffix(name)
        is_matrix = len(layout) == 1 and len(layout[name][1]) == 2 and name.endswith(".weight")
        if is_matrix and text_tensor_name(name) is not None and "embed" not in linear and linear not in linears:
            linears.append(linear)
    return linears + (list(_VISION_LINEARS) if any(text_tensor_name(name) is None for name in layouts) else [])


def _strip_weight_suffix(name: str) -> str:
    return name.removesuffix(".weight")


def _copy_other_files(model: Path, out: Path) -> None:
    for pattern in _COPIED_PATTERNS:
        for file in model.glob(pattern):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    for file in [*model.glob("[0-9]_*/*.json"), *model.glob("[0-9]_*/*.safetensors")]:
        (out / file.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(file, out / file.parent.name / file.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(model: str, out: str, name: str, strength: str | None = None) -> int:
    cpu, smooth = CpuBackend(), None
    if strength is not None:
        smooth = partial(fit_smoothing, Path(model), json.load(sys.stdin), float(strength))
    try:
        summary = quantize_folder(
            Path(model), Path(out), name, ReferenceBackend() if cpu.missing_reason else cpu, smooth
        )
    except QuireError as error:
        print(f"quire quantize: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"quire quantize: OUT: {error.filename or out}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{out}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
