"""The adapters beside the model: which names there are, which content each stands for, and where it is kept."""

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

from quire.engine import clock
from quire.engine.checkpoint.files import adapter_folder, stored_at
from quire.engine.errors import AdapterError, ConfigError, InvalidRequest, ModelError, ModelNotFound
from quire.engine.lora.files import read_adapter
from quire.engine.lora.modules import Modules
from quire.engine.lora.spool import Spool
from quire.engine.types import Adapter
from quire.server.config import ServerConfig

log = logging.getLogger("quire.adapters")

MAX_NAME = 256
MAX_ADAPTERS = 10_000
_NAMES = "adapters.json"
_LINGER = 600.0
"""Seconds for which the files of an adapter without a name are kept: a request may be about to need them."""


class Adapters:
    """Adapters by name. `names` is live; the other methods are for the routes that change it."""

    def __init__(
        self, config: ServerConfig, spool: Spool, in_use: Callable[[], Collection[str]], names_file: Path | None
    ) -> None:
        """`in_use`: digests of the adapters that open requests need. `names_file`: where the names that are loaded at
        run time are kept for the next start."""
        self._spool = spool
        self._in_use = in_use
        self._taken = config.model_names
        self._allowed = tuple(config.allowed_lora_paths)
        self._file = names_file
        self._named: dict[str, Adapter] = {}
        self._fixed: set[str] = set()
        """The names that --lora-modules gives."""
        self._unnamed: dict[str, float] = {}
        """Digests without a name, and since when."""
        self._turn = asyncio.Lock()

    @property
    def names(self) -> Mapping[str, Adapter]:
        return MappingProxyType(self._named)

    def start(self, modules: Sequence[str]) -> None:
        """Take in what was loaded before this server's start, and `modules` of --lora-modules. Raises ConfigError."""
        for name, digest in self._kept_names().items():
            try:
                self._named[name] = self._spool.find(name, digest)
            except (AdapterError, OSError) as error:
                log.warning("the adapter %s, loaded before, is not served: %s", name, error)
        for text in modules:
            name, path = named_path(text)
            try:
                self._check_name(name)
                self._named[name] = self._spool.add(name, path)
            except InvalidRequest as error:
                raise ConfigError(f"lora_modules: {name}: {error}", param="lora_modules") from None
            self._fixed.add(name)
        for digest in self._spool.digests:
            self._note(digest)
        self._sweep()

    async def load(self, name: str, path: str, *, replace: bool) -> None:
        """Serve the adapter at `path` under this name, from the next request on. Raises InvalidRequest, naming the
        field; for a name that has another content already, unless it may be replaced."""
        self._check_name(name)
        async with self._turn:
            if name not in self._named and len(self._named) >= MAX_ADAPTERS:
                raise InvalidRequest(f"{MAX_ADAPTERS} adapters are served already", param="lora_name")
            try:
                made = await asyncio.to_thread(self._spool.add, name, path, inside=self._allowed)
            except AdapterError as error:
                raise AdapterError(f"lora_path: {error}", param="lora_path") from None
            before = self._named.get(name)
            if before is not None and before.digest != made.digest and not replace:
                self._note(made.digest)
                raise InvalidRequest(
                    f"lora_name: the adapter {name} is served with other content; load_inplace replaces it",
                    param="lora_name",
                )
            self._named[name] = made
            self._unnamed.pop(made.digest, None)
            self._changed(before)

    async def unload(self, name: str) -> None:
        """Requests under way finish. Raises ModelNotFound."""
        async with self._turn:
            if name not in self._named:
                raise ModelNotFound(f"There is no adapter `{name[:100]}`", param="lora_name")
            self._fixed.discard(name)
            self._changed(self._named.pop(name))

    def find(self, name: str) -> Adapter | None:
        return self._named.get(name)

    def _check_name(self, name: str) -> None:
        if not name or len(name) > MAX_NAME or not name.isprintable() or name != name.strip():
            raise InvalidRequest(f"lora_name: must be 1 to {MAX_NAME} printable characters", param="lora_name")
        if name in self._taken:
            raise InvalidRequest(f"lora_name: {name} is the model's own name", param="lora_name")

    def _changed(self, before: Adapter | None) -> None:
        if before is not None:
            self._note(before.digest)
        self._sweep()
        kept = {name: each.digest for name, each in self._named.items() if name not in self._fixed}
        keep(self._file, kept, "the adapters' names")

    def _note(self, digest: str) -> None:
        if all(each.digest != digest for each in self._named.values()):
            self._unnamed.setdefault(digest, clock.monotonic())

    def _sweep(self) -> None:
        """Delete the files that nobody can need any more."""
        used, now = self._in_use(), clock.monotonic()
        for digest, since in list(self._unnamed.items()):
            if now - since > _LINGER and digest not in used:
                del self._unnamed[digest]
                self._spool.remove(digest)

    def _kept_names(self) -> dict[str, str]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(name): str(digest) for name, digest in kept.items() if str(digest).isalnum()}
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"data_dir: {self._file} cannot be read: {error}", param="data_dir") from None


def keep(file: Path | None, content: Mapping[str, Any], what: str) -> None:
    """Replace a file of the data folder, as JSON: whole or not at all, for this user alone. Without a file nothing is
    kept; where it cannot be written, that is logged, and `what` is missing at the next start."""
    if file is None:
        return
    made = file.with_suffix(".new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made.unlink(missing_ok=True)
        with open(
            os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8"
        ) as out:
            json.dump(content, out)
        made.replace(file)
    except OSError as error:
        log.error("%s cannot be kept for the next start: %s", what, error)


def named_path(text: str) -> tuple[str, str]:
    """Of --lora-modules: NAME=PATH, or vLLM's {"name": ..., "path": ...}. Raises ConfigError."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
            return str(given["name"]), str(given["path"])
        except (ValueError, KeyError, RecursionError):
            raise ConfigError('lora_modules: an object needs "name" and "path"', param="lora_modules") from None
    name, sign, path = text.partition("=")
    if not sign or not name or not path:
        raise ConfigError(f"lora_modules: expected NAME=PATH, got {text!r}", param="lora_modules")
    return name, path


def named_adapters(config: ServerConfig) -> tuple[str, ...]:
    """The names of --lora-modules. Raises ConfigError."""
    if config.lora_modules and not config.enable_lora:
        raise ConfigError("lora_modules: need --enable-lora (enable_lora = true)", param="lora_modules")
    return tuple(named_path(text)[0] for text in config.lora_modules)


def check_local_adapters(config: ServerConfig, modules: Modules | None) -> None:
    """Raise ConfigError for adapters of --lora-modules that are missing on this machine or do not fit the model: this
    takes milliseconds, and the model is still loading. `modules`: of the model; None or empty: not known yet."""
    named_adapters(config)
    for name, path in map(named_path, config.lora_modules):
        try:
            folder = adapter_folder(path)
            if isinstance(folder, Path) and modules:
                read_adapter(folder, modules, config.max_lora_rank)
        except (AdapterError, ModelError) as error:
            why = error.message.removeprefix("model: ")
            raise ConfigError(f"lora_modules: {name}: {why}", param="lora_modules") from None


@contextmanager
def adapters_of(
    config: ServerConfig,
    modules: Modules | None,
    in_use: Callable[[], Collection[str]],
    kept: Path | None,
    *,
    device: str,
) -> Iterator[Adapters | None]:
    """The adapters of a model that has these modules; None where none are served. `kept`: the folder where they are
    kept for the next start. Raises ConfigError."""
    named_adapters(config)
    if not config.enable_lora or modules is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="quire-adapters-") as temporary:
        folder, file = Path(temporary), None
        if kept is not None:
            folder, file = kept / "adapters", kept / _NAMES
            try:
                for each in (kept, folder):
                    os.makedirs(each, mode=0o700, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"data_dir: {folder}: {error.strerror}", param="data_dir") from None
        weights = stored_at(config)
        spool = Spool(folder, modules, config.max_lora_rank, embedding=device == "cpu", weights=weights)
        adapters = Adapters(config, spool, in_use, file)
        adapters.start(config.lora_modules)
        yield adapters
