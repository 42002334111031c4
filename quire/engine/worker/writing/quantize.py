"""`python -m quire.engine.worker.writing.quantize MODEL OUT FORMAT [STRENGTH]`: writes a model's folder anew, its
linears in few bits; with STRENGTH smoothed first (engine/worker/writing/smooth.py) by the samples that stdin has, a
JSON list of lists of token ids. `quire quantize` starts it, because it needs torch."""

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

from quire.engine.checkpoint.safetensors import INDEX, read_file_headers, text_tensor, weight_files
from quire.engine.errors import ModelError, QuireError
from quire.engine.folder import read_json
from quire.engine.worker.loading.loader import present, stored_tensors
from quire.engine.worker.writing.formats import Layout, WrittenFormat, written_format
from quire.engine.worker.writing.safetensors import BYTES, SafetensorsFile
from quire.engine.worker.writing.smooth import Smoothing, smoothing
from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import Cpu
from quire.kernels.reference import Reference

_LINEAR = re.compile(r"(?:^|\.)layers\.\d+\..*\.weight$")
"""Weights of a decoder's layers; those of two axes are linears."""
_ROUTER = re.compile(r"\.(?:gate|router)\.weight$")
"""Those that choose experts, which stay as they are."""
_NAMED_OTHERWISE = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gptj", "mpt")
"""Families whose layers are not called layers, or whose weights are [in, out]."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*")
_IMAGES = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*")
"""Linears that Quire does not serve, and which stay as they are."""


def quantize_folder(
    model: Path, out: Path, name: str, backend: Backend, smooth: Callable[[], Smoothing] | None = None
) -> str:
    """Write the checkpoint of folder `model` to the new folder `out`, its linears in the format of this name. No more
    than one tensor is held, and what it becomes. Returns what was done, for people to read. `backend` searches for 4
    bits; `smooth` is called once it is known that the files can be written.

    Raises ModelError for files that cannot be read; OSError goes through. What was begun is removed, then.
    """
    begun = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    try:
        said = _write(model, begun, written_format(name, backend), smooth)
        mask = os.umask(0)
        os.umask(mask)
        begun.chmod(0o777 & ~mask)
        begun.rename(out)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    return said


@torch.inference_mode()
def _write(model: Path, out: Path, to: WrittenFormat, smooth: Callable[[], Smoothing] | None) -> str:
    config = read_json(model / "config.json") or {}
    if (kind := str(config.get("model_type"))) in _NAMED_OTHERWISE:
        raise ModelError(
            f"model: checkpoints of {kind} models are not written in few bits; serve it with --quantization"
        )
    shards = present(weight_files(model))
    layouts = {  # what becomes of each tensor of a file, by whole names; one tensor stays as it is
        shard: {name: _layout(name, *header, to) for name, header in (read_file_headers(shard) or {}).items()}
        for shard in shards
    }
    _copy_others(model, out)
    smoother = None if smooth is None else smooth()
    index: dict[str, str] = {}
    linears, before, after = 0, 0, 0
    for shard, becomes in layouts.items():
        file_name = f"{shard.stem.replace('pytorch_model', 'model')}.safetensors"
        tensors = {name: each for layout in becomes.values() for name, each in layout.items()}
        with SafetensorsFile(out / file_name, tensors) as file:
            for name, stored in stored_tensors(shard):
                tensor = stored if smoother is None else smoother.applied(name, stored)
                if len(becomes[name]) == 1:
                    file.put(name, tensor.to(stored.dtype))
                    continue
                linears += 1
                for part, content in to.tensors(tensor).items():
                    file.put(f"{_linear(name)}.{part}", content)
        index |= dict.fromkeys(tensors, file_name)
        before, after = before + shard.stat().st_size, after + (out / file_name).stat().st_size
    if {*index.values()} != {"model.safetensors"}:
        _write_json(out / INDEX, {"metadata": {"total_size": after}, "weight_map": index})
    left = _ignored({name: layout for each in layouts.values() for name, layout in each.items()})
    _write_json(out / "config.json", config | {"quantization_config": to.config(left)})
    norms = "" if smoother is None else f", {smoother.count} norms smoothed"
    return f"{linears} linears {to.stored}{norms}; {before / 1e6:,.1f} MB became {after / 1e6:,.1f} MB"


def _layout(name: str, dtype: str, shape: tuple[int, ...], to: WrittenFormat) -> Layout:
    if dtype not in BYTES:
        raise ModelError(f"model: {name[:100]} is stored as {dtype}, which is not known")
    linear = _LINEAR.search(name) and not _ROUTER.search(name) and text_tensor(name) is not None
    if linear and len(shape) == 2 and dtype in _FLOATS:
        parts = to.layout(*shape)
        if parts is not None:
            return {f"{_linear(name)}.{part}": each for part, each in parts.items()}
    return {name: (dtype, shape)}


def _ignored(layouts: Mapping[str, Layout]) -> list[str]:
    """The linears that stay as they are. The head is named where it is tied as well: other programs have it."""
    found = ["lm_head"]
    for name, layout in layouts.items():
        linear = _linear(name)
        is_matrix = len(layout) == 1 and len(layout[name][1]) == 2 and name.endswith(".weight")
        if is_matrix and text_tensor(name) is not None and "embed" not in linear and linear not in found:
            found.append(linear)
    return found + (list(_IMAGES) if any(text_tensor(name) is None for name in layouts) else [])


def _linear(name: str) -> str:
    return name.removesuffix(".weight")


def _copy_others(model: Path, out: Path) -> None:
    """The files beside the weights, and the folders of a model that makes vectors."""
    for pattern in _COPIED:
        for file in model.glob(pattern):
            if file.is_file() and file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
    for file in [*model.glob("[0-9]_*/*.json"), *model.glob("[0-9]_*/*.safetensors")]:
        (out / file.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(file, out / file.parent.name / file.name)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(model: str, out: str, name: str, strength: str | None = None) -> int:
    """Returns the exit status."""
    cpu, smooth = Cpu(), None
    if strength is not None:
        smooth = partial(smoothing, Path(model), json.load(sys.stdin), float(strength))
    try:
        said = quantize_folder(Path(model), Path(out), name, Reference() if cpu.missing else cpu, smooth)
    except QuireError as error:
        print(f"quire quantize: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # such as a full disk
        print(f"quire quantize: OUT: {error.filename or out}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{out}: {said}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
