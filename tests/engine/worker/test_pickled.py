"""Tests weights in PyTorch's pickle format: the model equals the one from safetensors, and no file executes code."""

import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.checkpoint.pickled import read_pickled_tensor_headers
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size, read_file_headers
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.engine_core import EngineCore
from quire.engine.worker.checkpoint_writer.quantize_checkpoint import quantize_folder
from quire.engine.worker.loading.weight_loader import checkpoint_stream
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.tiny_classes import save_tiny_class
from tests.tiny_models import save_tiny_model

FILE, OTHER = "model.safetensors", "pytorch_model.bin"
ROW = {"w": torch.ones(3)}


def generate_ids(path: Path) -> list[int]:
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=32))
    return run(engine, [request("a", range(3, 20), max_tokens=8)])["a"].ids


def save_as_pickle(path: Path, out: Path, *, old: bool = False, shards: int = 1) -> Path:
    """Copy the folder with its weights in PyTorch's format."""
    shutil.copytree(path, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = list(load_file(path / FILE).items())
    files = {OTHER: dict(tensors)}
    if shards > 1:
        files = {f"pytorch_model-{i + 1:05}-of-{shards:05}.bin": dict(tensors[i::shards]) for i in range(shards)}
        index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
        (out / f"{OTHER}.index.json").write_text(json.dumps(index))
    for file, part in files.items():
        torch.save(part, out / file, _use_new_zipfile_serialization=not old)
    return out


@pytest.mark.parametrize("options", [{}, {"old": True}, {"shards": 3}], ids=["zip", "old", "shards"])
def test_pickled_checkpoint_equals_safetensors(options: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "a", "qwen3")
    other = save_as_pickle(path, tmp_path / "b", **options)
    assert generate_ids(other) == generate_ids(path)
    assert read_checkpoint_size(other) == read_checkpoint_size(path)


def test_transformers_class_loads_pickled_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_tiny_class(tmp_path / "a", "laguna")
    assert generate_ids(save_as_pickle(tmp_path / "a", tmp_path / "b")) == generate_ids(tmp_path / "a")


def test_safetensors_are_preferred_to_pickle(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    expected = generate_ids(path)
    (path / OTHER).write_bytes(b"not read")
    assert generate_ids(path) == expected


@pytest.mark.parametrize("old", [False, True])
def test_pickled_tensor_headers_equal_safetensors_headers(old: bool, tmp_path: Path) -> None:
    """Covers every dtype, views, parameters, and tensors stored twice."""
    plain: dict[str, Tensor] = {
        **{str(kind): torch.ones((2, 3)).to(kind) for kind in (torch.float64, torch.float32, torch.float16)},
        **{str(kind): torch.ones((2, 3)).to(kind) for kind in (torch.bfloat16, torch.int64, torch.int32, torch.int16)},
        **{str(kind): torch.ones(5).to(kind) for kind in (torch.int8, torch.uint8, torch.bool)},
        **{str(kind): torch.ones(5).to(kind) for kind in (torch.float8_e4m3fn, torch.float8_e5m2)},
        "number": torch.tensor(1.0),
        "turned": torch.ones(4, 6).t(),
        "none": torch.ones(0, 6),
    }
    tensors = plain | {"twice": plain["number"], "parameter": torch.nn.Parameter(torch.ones(7))}
    torch.save(tensors, tmp_path / OTHER, _use_new_zipfile_serialization=not old)
    save_file({name: each.detach().clone().contiguous() for name, each in tensors.items()}, tmp_path / FILE)
    assert read_file_headers(tmp_path / OTHER) == read_file_headers(tmp_path / FILE)
    sizes = read_pickled_tensor_headers(tmp_path / OTHER) or {}
    assert sum(each.nbytes for each in sizes.values()) == sum(each.nbytes for each in plain.values()) + 28


class _MakesFolder:
    def __init__(self, told: Path) -> None:
        self._told = told

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._told),)


BROKEN: dict[str, tuple[Any, str]] = {
    "text": (b"not weights", ""),
    "empty": (b"", ""),
    "a list": ([torch.ones(2)], "does not hold tensors by name"),
    "within": ({"model": ROW}, "does not hold tensors by name"),
    "a number": ({"step": 3, **ROW}, "does not hold tensors by name"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_pickle_raises_single_line_model_error(name: str, tmp_path: Path) -> None:
    content, message = BROKEN[name]
    if isinstance(content, bytes):
        (tmp_path / OTHER).write_bytes(content)
    else:
        torch.save(content, tmp_path / OTHER)
    for read in (read_checkpoint_size, lambda path: list(checkpoint_stream(path))):
        with pytest.raises(ModelError, match=rf"^model: pytorch_model\.bin .*{message}") as refused:
            read(tmp_path)
        assert "\n" not in refused.value.message


@pytest.mark.parametrize("old", [False, True])
def test_pickle_that_calls_function_is_rejected_unexecuted(old: bool, tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(2), "x": _MakesFolder(tmp_path / "ran")},
        tmp_path / OTHER,
        _use_new_zipfile_serialization=not old,
    )
    with pytest.raises(ModelError, match="calls 'posix mkdir', which tensors do not need"):
        read_checkpoint_size(tmp_path)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin cannot be read"):
        list(checkpoint_stream(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_malformed_pickle_opcodes_use_bounded_memory(tmp_path: Path) -> None:
    """A memo index beyond all others, and opcodes that pop what is not on the stack."""
    for instructions in (b"}r\xff\xff\xff\x7f.", b"\x80\x02u.", b"\x80\x02q\x00.", b"\x80\x02(((", b"\x80\x02h\x05."):
        start = b"".join(pickle.dumps(each, 2) for each in (1, 2, {}))
        (tmp_path / OTHER).write_bytes(start + b"\x80\x02" + instructions)
        with suppress(ModelError):
            assert read_pickled_tensor_headers(tmp_path / OTHER) == {}


def test_quantizing_pickled_checkpoint_writes_safetensors(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "a", "llama")
    whole, sharded = save_as_pickle(path, tmp_path / "b"), save_as_pickle(path, tmp_path / "c", shards=2)
    for name, folder in (("from", path), ("whole", whole), ("sharded", sharded)):
        quantize_folder(folder, tmp_path / name, "int8", ReferenceBackend())
    assert not list((tmp_path / "sharded").glob("*.bin*"))
    assert generate_ids(tmp_path / "from") == generate_ids(tmp_path / "whole") == generate_ids(tmp_path / "sharded")
