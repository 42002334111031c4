"""Keeps copies of adapters, named by a hash of their content. An engine can load a copy again, whatever happens to the
original folder.

The copy is made first and checked afterwards. So every engine reads exactly what was checked, also one that is started
later.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path

from quire.engine.checkpoint.files import resolve_adapter
from quire.engine.errors import AdapterError, ModelError
from quire.engine.folder import open_file
from quire.engine.lora.files import CONFIG, WEIGHTS, base_weights, read_adapter
from quire.engine.lora.modules import Modules
from quire.engine.lora.values import check_base_weights, check_finite
from quire.engine.types import Adapter

_PIECE = 2**20
_UNFINISHED = "new-"
_HEADERS = 16 * 2**20
"""How many bytes a file may have beside its numbers."""


class Spool:
    """A folder with a subfolder for each adapter. Its methods raise AdapterError for an adapter that cannot be
    served."""

    def __init__(
        self, root: Path, modules: Modules, max_rank: int, *, embedding: bool = True, weights: Path | None = None
    ) -> None:
        """`root`: an existing folder that nobody else uses. `modules`: the model's modules. `embedding`: whether
        adapters of embeddings are served. `weights`: the folder of the model's files."""
        self._weights = weights
        for unfinished in root.glob(f"{_UNFINISHED}*"):  # of a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        self._root = root
        self._modules = modules
        self._max_rank = max_rank
        self._embedding = embedding
        self._most_bytes = _HEADERS + 8 * max_rank * sum(map(sum, modules.values()))

    def add(self, name: str, path: str, *, inside: tuple[Path, ...] = ()) -> Adapter:
        """Copy an adapter and check the copy. `path`: a folder or a hub id. `inside`: the folders that must contain its
        files; (): any folder may. Call it in a thread, because copying takes time."""
        folder = _folder(path, inside)
        try:
            made = Path(tempfile.mkdtemp(dir=self._root, prefix=_UNFINISHED))
        except OSError as error:
            raise AdapterError(f"there is no folder for its copy: {error.strerror}") from error
        try:
            digest = blake2b(digest_size=16)
            for file in (CONFIG, WEIGHTS):
                self._copy(folder / file, made / file, digest, inside)
            read_adapter(made, self._modules, self._max_rank, embedding=self._embedding)
            check_finite(made / WEIGHTS)
            check_base_weights(made / WEIGHTS, base_weights(made, self._modules), self._weights)
            kept = self._root / digest.hexdigest()
            if not kept.is_dir():
                os.rename(made, kept)
        except OSError as error:
            raise AdapterError(f"it cannot be copied: {error.strerror}") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return Adapter(name, digest.hexdigest(), str(kept))

    def find(self, name: str, digest: str) -> Adapter:
        """An adapter that an earlier process added."""
        folder = self._root / digest
        read_adapter(folder, self._modules, self._max_rank, embedding=self._embedding)
        return Adapter(name, digest, str(folder))

    def remove(self, digest: str) -> None:
        shutil.rmtree(self._root / digest, ignore_errors=True)

    @property
    def digests(self) -> list[str]:
        """The digests of all adapters here."""
        return [each.name for each in self._root.iterdir() if each.is_dir() and not each.name.startswith(_UNFINISHED)]

    def _copy(self, source: Path, target: Path, digest: blake2b, inside: tuple[Path, ...]) -> None:
        _check_inside(source, inside)
        try:
            file = open_file(source)
        except ModelError as error:
            raise AdapterError(error.message.removeprefix("model: ")) from None
        if file is None:
            other = "; pickled files (.bin) are not read" if source.name == WEIGHTS else ""
            raise AdapterError(f"there is no {source.name} in {source.parent.name}{other}")
        size = 0
        with file, target.open("wb") as copy:
            while piece := file.read(_PIECE):
                size += len(piece)
                if size > self._most_bytes:
                    most = self._most_bytes / 2**20
                    raise AdapterError(
                        f"{source.name}: is larger than the {most:,.0f} MiB of any adapter of this model"
                    )
                digest.update(piece)
                copy.write(piece)
        digest.update(size.to_bytes(8, "little"))


def _folder(path: str, inside: tuple[Path, ...]) -> Path:
    if not path or "\0" in path or len(path) > 4096:
        raise AdapterError("it must be a folder or a hub id")
    if inside and not Path(path).is_dir():
        raise AdapterError("there is no such folder inside of those that --allowed-lora-paths names")
    try:
        folder = resolve_adapter(path)
    except ModelError as error:
        raise AdapterError(error.message.removeprefix("model: ")) from None
    _check_inside(folder, inside)
    return folder


def _check_inside(path: Path, inside: tuple[Path, ...]) -> None:
    real = path.resolve()
    if inside and not any(real.is_relative_to(each.resolve()) for each in inside):
        raise AdapterError("there is no such folder inside of those that --allowed-lora-paths names")
