from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quire.engine.checkpoint.model_resolver import locate_adapter, resolve_weights
from quire.engine.common import clock
from quire.engine.common.errors import AdapterError, ConfigError, InvalidRequest, ModelError, ModelNotFound
from quire.engine.common.types import Adapter
from quire.engine.lora.adapter_files import read_adapter_specs
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import ModuleShapes
from quire.server.config import ServerConfig

log = logging.getLogger("quire.adapters")

MAX_NAME_LENGTH = 256
MAX_ADAPTERS = 10_000
_NAMES_FILE = "adapters.json"
_UNNAMED_SECONDS = 600.0
"""The files of an adapter without a name are kept for at least this many seconds, because a request that is not open
yet may still need them.
"""


class AdapterRegistry:
    def __init__(
        self,
        config: ServerConfig,
        adapter_store: AdapterStore,
        digests_in_use: Callable[[], Collection[str]],
        names_file: Path | None,
    ) -> None:
        """`names_file` stores the names for the next start; None: they are not stored."""
        self._adapter_store = adapter_store
        self._digests_in_use = digests_in_use
        self._model_names = config.model_names
        self._allowed_paths = tuple(config.allowed_lora_paths)
        self._names_file = names_file
        self._adapters: dict[str, Adapter] = {}
        self._configured_names: set[str] = set()
        self._unnamed_since: dict[str, float] = {}
        self._change_lock = asyncio.Lock()

    @property
    def adapters_by_name(self) -> Mapping[str, Adapter]:
        """A live view, not a copy."""
        return MappingProxyType(self._adapters)

    def load_initial_adapters(self, modules: Sequence[str]) -> None:
        """A stored adapter that cannot be loaded is skipped with a warning. Raises ConfigError."""
        for name, digest in self._read_saved_digests_by_name().items():
            try:
                self._adapters[name] = self._adapter_store.reopen_stored_adapter(name, digest)
            except (AdapterError, OSError) as error:
                log.warning("the adapter %s, loaded earlier, is not served: %s", name, error)
        for text in modules:
            name, path = parse_adapter_option(text)
            try:
                self._check_name(name)
                self._adapters[name] = self._adapter_store.add_adapter(name, path)
            except InvalidRequest as error:
                raise ConfigError(f"lora_modules: {name}: {error}", param="lora_modules") from None
            self._configured_names.add(name)
        for digest in self._adapter_store.stored_adapter_digests:
            self._mark_if_unnamed(digest)
        self._delete_unused_files()

    async def load_lora_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Raises InvalidRequest, also if `name` belongs to an adapter with other content and `replace` is False."""
        self._check_name(name)
        async with self._change_lock:
            if name not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
                raise InvalidRequest(f"{MAX_ADAPTERS} adapters are served already", param="lora_name")
            try:
                adapter = await asyncio.to_thread(
                    self._adapter_store.add_adapter, name, path, allowed_folders=self._allowed_paths
                )
            except AdapterError as error:
                raise AdapterError(f"lora_path: {error}", param="lora_path") from None
            before = self._adapters.get(name)
            if before is not None and before.digest != adapter.digest and not replace:
                self._mark_if_unnamed(adapter.digest)
                raise InvalidRequest(
                    f"lora_name: the adapter {name} is already served with other content; load_inplace replaces it",
                    param="lora_name",
                )
            self._adapters[name] = adapter
            self._unnamed_since.pop(adapter.digest, None)
            self._save_and_clean_up(before)

    async def unload_lora_adapter(self, name: str) -> None:
        """Open requests that use the adapter still finish. Raises ModelNotFound."""
        async with self._change_lock:
            if name not in self._adapters:
                raise ModelNotFound(f"There is no adapter `{name[:100]}`", param="lora_name")
            self._configured_names.discard(name)
            self._save_and_clean_up(self._adapters.pop(name))

    def find_adapter(self, name: str) -> Adapter | None:
        return self._adapters.get(name)

    def _check_name(self, name: str) -> None:
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable() or name != name.strip():
            raise InvalidRequest(f"lora_name: must be 1 to {MAX_NAME_LENGTH} printable characters", param="lora_name")
        if name in self._model_names:
            raise InvalidRequest(f"lora_name: {name} is the model's own name", param="lora_name")

    def _save_and_clean_up(self, before: Adapter | None) -> None:
        if before is not None:
            self._mark_if_unnamed(before.digest)
        self._delete_unused_files()
        digests_by_name = {
            name: each.digest for name, each in self._adapters.items() if name not in self._configured_names
        }
        write_json_file(self._names_file, digests_by_name, "the adapters' names")

    def _mark_if_unnamed(self, digest: str) -> None:
        if all(each.digest != digest for each in self._adapters.values()):
            self._unnamed_since.setdefault(digest, clock.monotonic())

    def _delete_unused_files(self) -> None:
        used, now = self._digests_in_use(), clock.monotonic()
        for digest, since in list(self._unnamed_since.items()):
            if now - since > _UNNAMED_SECONDS and digest not in used:
                del self._unnamed_since[digest]
                self._adapter_store.remove_adapter(digest)

    def _read_saved_digests_by_name(self) -> dict[str, str]:
        if self._names_file is None or not self._names_file.exists():
            return {}
        try:
            digests_by_name = json.loads(self._names_file.read_text(encoding="utf-8"))
            return {str(name): str(digest) for name, digest in digests_by_name.items() if str(digest).isalnum()}
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"data_dir: {self._names_file} cannot be read: {error}", param="data_dir") from None


def write_json_file(file: Path | None, content: Mapping[str, Any], description: str) -> None:
    """Writes atomically, readable by this user only. Logs errors instead of raising them."""
    if file is None:
        return
    temporary = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8"
        ) as out:
            json.dump(content, out)
        temporary.replace(file)
    except OSError as error:
        log.error("%s cannot be saved for the next start: %s", description, error)


def parse_adapter_option(text: str) -> tuple[str, str]:
    """Parses NAME=PATH, or vLLM's {"name": ..., "path": ...}. Raises ConfigError."""
    if text.startswith("{"):
        try:
            option = json.loads(text)
            return str(option["name"]), str(option["path"])
        except (ValueError, KeyError, RecursionError):
            raise ConfigError('lora_modules: an object needs "name" and "path"', param="lora_modules") from None
    name, sign, path = text.partition("=")
    if not sign or not name or not path:
        raise ConfigError(f"lora_modules: expected NAME=PATH, got {text!r}", param="lora_modules")
    return name, path


def configured_adapter_names(config: ServerConfig) -> tuple[str, ...]:
    """Raises ConfigError, also if lora_modules is set without enable_lora."""
    if config.lora_modules and not config.enable_lora:
        raise ConfigError("lora_modules: needs --enable-lora (enable_lora = true)", param="lora_modules")
    return tuple(parse_adapter_option(text)[0] for text in config.lora_modules)


def check_local_adapters(config: ServerConfig, modules: ModuleShapes | None) -> None:
    """Raises ConfigError if a local adapter of --lora-modules is missing or does not fit the model. Hub ids are not
    checked. If `modules` is None, the fit is not checked.
    """
    configured_adapter_names(config)
    for name, path in map(parse_adapter_option, config.lora_modules):
        try:
            folder = locate_adapter(path)
            if isinstance(folder, Path) and modules:
                read_adapter_specs(folder, modules, config.max_lora_rank)
        except (AdapterError, ModelError) as error:
            why = error.message.removeprefix("model: ")
            raise ConfigError(f"lora_modules: {name}: {why}", param="lora_modules") from None


@contextmanager
def open_adapter_registry(
    config: ServerConfig,
    modules: ModuleShapes | None,
    digests_in_use: Callable[[], Collection[str]],
    data_dir: Path | None,
    *,
    device: str,
) -> Iterator[AdapterRegistry | None]:
    """Yields None if no adapters are served. Stores adapters in `data_dir`, where they outlive the server; without
    `data_dir`, in a temporary folder. Raises ConfigError.
    """
    configured_adapter_names(config)
    if not config.enable_lora or modules is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as temporary:
        folder, file = Path(temporary), None
        if data_dir is not None:
            folder, file = data_dir / "adapters", data_dir / _NAMES_FILE
            try:
                for each in (data_dir, folder):
                    os.makedirs(each, mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"data_dir: {folder}: {error.strerror}", param="data_dir") from None
        weights = resolve_weights(config)
        adapter_store = AdapterStore(folder, modules, config.max_lora_rank, embedding=device == "cpu", weights=weights)
        adapters = AdapterRegistry(config, adapter_store, digests_in_use, file)
        adapters.load_initial_adapters(config.lora_modules)
        yield adapters
