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

from quire.engine.checkpoint.model_resolver import resolve_weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import AdapterError, InvalidRequest
from quire.engine.common.types import Adapter, EngineInfo
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter: a folder in PEFT's format, or a hub id.

    Its files are read again under a new `lora_int_id`, or once `max_cpu_loras` (by default 4 * `max_loras`) other
    adapters have been requested.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path
    load_inplace: bool = False
    """Read the files again for this request."""


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LocalAdapters:
    """Deletes copies of adapters that are neither recent nor in use. Otherwise a trainer that writes an adapter at
    every step would fill the disk.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-adapters-")
        self._config = config
        self._modules, self._max_rank = adaptable_modules(model), config.max_lora_rank
        self._max_known = config.max_cpu_loras or 4 * config.max_loras
        self._recent_adapters: dict[tuple[str, int, str], Adapter] = {}
        self._num_copies = Counter[str]()
        self._lock = threading.RLock()

    def use_engine_modules(self, info: EngineInfo) -> None:
        self._modules = info.adaptable or self._modules

    def resolve_requests(self, lora_request: LoRARequests, count: int) -> list[Adapter | None]:
        """Raises InvalidRequest."""
        is_single = lora_request is None or not isinstance(lora_request, list | tuple)
        requests: Sequence[LoRARequest | None] = [lora_request] * count if is_single else lora_request  # type: ignore[assignment, list-item]
        if invalid := [each for each in requests if each is not None and not isinstance(each, LoRARequest)]:
            message = f"lora_request: must be LoRARequest, or a list of these, got {invalid[0]!r}"
            raise InvalidRequest(message, param="lora_request")
        if len(requests) != count:
            raise InvalidRequest(f"lora_request: {len(requests)} for {count} prompts", param="lora_request")
        with self._lock:
            reread = {
                each: self._add_adapter(each)
                for each in dict.fromkeys(requests)
                if each is not None and each.load_inplace
            }
            return [None if each is None else reread.get(each) or self._get_adapter(each) for each in requests]

    def _get_adapter(self, request: LoRARequest) -> Adapter:
        adapter = self._recent_adapters.pop(key := _adapter_key(request), None)
        if adapter is None:
            return self._add_adapter(request)
        self._recent_adapters[key] = adapter
        return adapter

    def _add_adapter(self, request: LoRARequest) -> Adapter:
        root = Path(self._folder.name)
        store = AdapterStore(root, self._modules, self._max_rank, weights=resolve_weights(self._config))
        try:
            adapter = store.add_adapter(request.lora_name, os.fspath(request.lora_path))
        except AdapterError as error:
            raise AdapterError(f"lora_request: {request.lora_name}: {error}", param="lora_request") from None
        self._num_copies[adapter.digest] += 1
        weakref.finalize(adapter, _release_copy, self._lock, self._num_copies, root, adapter.digest).atexit = False
        self._recent_adapters.pop(key := _adapter_key(request), None)
        self._recent_adapters[key] = adapter
        while len(self._recent_adapters) > self._max_known:
            del self._recent_adapters[next(iter(self._recent_adapters))]
        return adapter


def _adapter_key(request: LoRARequest) -> tuple[str, int, str]:
    return request.lora_name, request.lora_int_id, os.fspath(request.lora_path)


def _release_copy(lock: threading.RLock, copies: Counter[str], root: Path, digest: str) -> None:
    with lock:
        copies[digest] -= 1
        if not copies[digest]:
            del copies[digest]
            shutil.rmtree(root / digest, ignore_errors=True)


def resolve_lora_requests(
    adapters: LocalAdapters | None, lora_request: LoRARequests, count: int
) -> list[Adapter | None]:
    """Raises InvalidRequest."""
    if adapters is not None:
        return adapters.resolve_requests(lora_request, count)
    if lora_request is not None:
        raise InvalidRequest("lora_request: needs LLM(enable_lora=True)", param="lora_request")
    return [None] * count
