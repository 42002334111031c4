"""Adapters without a server: vLLM's LoRARequest, and the store of their files."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.engine.checkpoint.files import ModelConfig, stored_at
from quire.engine.config import EngineConfig
from quire.engine.errors import AdapterError, InvalidRequest
from quire.engine.lora.modules import adaptable_modules
from quire.engine.lora.spool import Spool
from quire.engine.types import Adapter, EngineInfo


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: a folder in PEFT's format, or a hub id. Its files are read at the first request, and again when it is
    not among the last `max_cpu_loras` that were asked for; a new `lora_int_id` makes the engine read them again."""

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    load_inplace: bool = False
    """Read the files again for this request, whatever was read before."""


AskedAdapters = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each prompt."""


class LocalAdapters:
    """The adapters that requests have named. A copy is deleted when it is not among the last `max_cpu_loras` and no
    request has it any more, so that a trainer that writes one at every step does not fill the disk; all are with this
    object."""

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-adapters-")
        self._config = config
        self._modules, self._max_rank = adaptable_modules(model), config.max_lora_rank
        self._most = config.max_cpu_loras or 4 * config.max_loras
        self._known: dict[tuple[str, int, str], Adapter] = {}
        """Those asked for last, the very last one last."""
        self._copies = Counter[str]()
        """By digest, how many Adapters of it there are, in requests or here."""
        self._turn = threading.RLock()

    def learn(self, info: EngineInfo) -> None:
        """Take the names of the model's modules from an engine that is ready."""
        self._modules = info.adaptable or self._modules

    def each(self, asked: AskedAdapters, count: int) -> list[Adapter | None]:
        """The adapter of each of `count` prompts. Raises InvalidRequest with param lora_request."""
        alone = asked is None or not isinstance(asked, list | tuple)
        many: Sequence[LoRARequest | None] = [asked] * count if alone else asked  # type: ignore[assignment, list-item]
        if wrong := [each for each in many if each is not None and not isinstance(each, LoRARequest)]:
            message = f"lora_request: must be LoRARequest, or a list of these, got {wrong[0]!r}"
            raise InvalidRequest(message, param="lora_request")
        if len(many) != count:
            raise InvalidRequest(f"lora_request: {len(many)} for {count} prompts", param="lora_request")
        with self._turn:
            fresh = {each: self._read(each) for each in dict.fromkeys(many) if each is not None and each.load_inplace}
            return [None if each is None else fresh.get(each) or self._adapter(each) for each in many]

    def _adapter(self, asked: LoRARequest) -> Adapter:
        found = self._known.pop(key := _key(asked), None)
        if found is None:
            return self._read(asked)
        self._known[key] = found
        return found

    def _read(self, asked: LoRARequest) -> Adapter:
        """Raises AdapterError."""
        root = Path(self._folder.name)
        spool = Spool(root, self._modules, self._max_rank, weights=stored_at(self._config))
        try:
            found = spool.add(asked.lora_name, os.fspath(asked.lora_path))
        except AdapterError as error:
            raise AdapterError(f"lora_request: {asked.lora_name}: {error}", param="lora_request") from None
        self._copies[found.digest] += 1
        weakref.finalize(found, _let_go, self._turn, self._copies, root, found.digest).atexit = False
        self._known.pop(key := _key(asked), None)
        self._known[key] = found
        while len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return found


def _key(asked: LoRARequest) -> tuple[str, int, str]:
    return asked.lora_name, asked.lora_int_id, os.fspath(asked.lora_path)


def _let_go(turn: threading.RLock, copies: Counter[str], root: Path, digest: str) -> None:
    """One that had a copy is gone."""
    with turn:
        copies[digest] -= 1
        if not copies[digest]:
            del copies[digest]
            shutil.rmtree(root / digest, ignore_errors=True)


def adapters_for(kept: LocalAdapters | None, asked: AskedAdapters, count: int) -> list[Adapter | None]:
    """As `kept.each`. Without `kept`, a request may not name an adapter."""
    if kept is not None:
        return kept.each(asked, count)
    if asked is not None:
        raise InvalidRequest("lora_request: needs LLM(enable_lora=True)", param="lora_request")
    return [None] * count
