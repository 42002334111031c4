"""Checked copies of adapters, named by content hash."""

from __future__ import annotations

import os
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path

from quire.engine.checkpoint.model_resolver import resolve_adapter
from quire.engine.common.errors import AdapterError, ModelError
from quire.engine.common.folder_reader import open_if_present
from quire.engine.common.types import Adapter
from quire.engine.lora.adapter_files import CONFIG_FILE, WEIGHTS_FILE, find_base_weights_in_adapter, read_adapter_specs
from quire.engine.lora.target_modules import ModuleShapes
from quire.engine.lora.weight_checks import check_base_weights, check_finite

_COPY_BYTES = 2**20
_UNFINISHED_PREFIX = "new-"
_MAX_HEADER_BYTES = 16 * 2**20


class AdapterStore:
    """Methods raise AdapterError."""

    def __init__(
        self, root: Path, modules: ModuleShapes, max_rank: int, *, embedding: bool = True, weights: Path | None = None
    ) -> None:
        """`root` must belong to this store alone. `weights`: the model's folder."""
        self._weights = weights
        for unfinished in root.glob(f"{_UNFINISHED_PREFIX}*"):  # left by a killed process
            shutil.rmtree(unfinished, ignore_errors=True)
        self._root = root
        self._modules = modules
        self._max_rank = max_rank
        self._embedding = embedding
        self._max_bytes = _MAX_HEADER_BYTES + 8 * max_rank * sum(map(sum, modules.values()))

    def add_adapter(self, name: str, path: str, *, allowed_folders: tuple[Path, ...] = ()) -> Adapter:
        """`path` is a folder or a hub id. This is slow, so call it in a thread. If `allowed_folders` is empty, every
        folder is allowed.
        """
        folder = _resolve_folder(path, allowed_folders)
        try:
            temporary = Path(tempfile.mkdtemp(dir=self._root, prefix=_UNFINISHED_PREFIX))
        except OSError as error:
            raise AdapterError(f"its copy cannot be created: {error.strerror}") from error
        try:
            digest = blake2b(digest_size=16)
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                self._copy_and_hash_file(folder / file, temporary / file, digest, allowed_folders)
            read_adapter_specs(temporary, self._modules, self._max_rank, embedding=self._embedding)
            check_finite(temporary / WEIGHTS_FILE)
            check_base_weights(
                temporary / WEIGHTS_FILE, find_base_weights_in_adapter(temporary, self._modules), self._weights
            )
            target = self._root / digest.hexdigest()
            _rename_unless_stored(temporary, target)
        except OSError as error:
            raise AdapterError(f"it cannot be copied: {error.strerror}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Adapter(name, digest.hexdigest(), str(target))

    def reopen_stored_adapter(self, name: str, digest: str) -> Adapter:
        folder = self._root / digest
        read_adapter_specs(folder, self._modules, self._max_rank, embedding=self._embedding)
        return Adapter(name, digest, str(folder))

    def remove_adapter(self, digest: str) -> None:
        shutil.rmtree(self._root / digest, ignore_errors=True)

    @property
    def stored_adapter_digests(self) -> list[str]:
        return [
            each.name for each in self._root.iterdir() if each.is_dir() and not each.name.startswith(_UNFINISHED_PREFIX)
        ]

    def _copy_and_hash_file(
        self, source: Path, target: Path, digest: blake2b, allowed_folders: tuple[Path, ...]
    ) -> None:
        _check_inside(source, allowed_folders)
        try:
            file = open_if_present(source)
        except ModelError as error:
            raise AdapterError(error.message.removeprefix("model: ")) from None
        if file is None:
            other = "; pickled files (.bin) are not read" if source.name == WEIGHTS_FILE else ""
            raise AdapterError(f"there is no {source.name} in {source.parent.name}{other}")
        size = 0
        with file, target.open("wb") as copy:
            while piece := file.read(_COPY_BYTES):
                size += len(piece)
                if size > self._max_bytes:
                    most = self._max_bytes / 2**20
                    raise AdapterError(
                        f"{source.name}: is larger than the {most:,.0f} MiB of any adapter of this model"
                    )
                digest.update(piece)
                copy.write(piece)
        digest.update(size.to_bytes(8, "little"))


def _rename_unless_stored(temporary: Path, target: Path) -> None:
    """Keeps an existing folder, because another thread may have stored the same adapter."""
    if target.is_dir():
        return
    try:
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():
            raise


def _resolve_folder(path: str, allowed_folders: tuple[Path, ...]) -> Path:
    if not path or "\0" in path or len(path) > 4096:
        raise AdapterError("it must be a folder or a hub id")
    if allowed_folders and not Path(path).is_dir():
        raise AdapterError("there is no such folder inside the folders of --allowed-lora-paths")
    try:
        folder = resolve_adapter(path)
    except ModelError as error:
        raise AdapterError(error.message.removeprefix("model: ")) from None
    _check_inside(folder, allowed_folders)
    return folder


def _check_inside(path: Path, allowed_folders: tuple[Path, ...]) -> None:
    real = path.resolve()
    if allowed_folders and not any(real.is_relative_to(each.resolve()) for each in allowed_folders):
        raise AdapterError("there is no such folder inside the folders of --allowed-lora-paths")
