"""Adapters without a server: vLLM's LoRARequest, and the store of their files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.config import EngineConfig
from quire.engine.errors import AdapterError, InvalidRequest
from quire.engine.lora.modules import adaptable_modules
from quire.engine.lora.spool import Spool
from quire.engine.types import Adapter, EngineInfo


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: a folder in PEFT's format, or a hub id. Its files are read at the first request; a new `lora_int_id`
    makes the engine read them again."""

    lora_name: str
    lora_int_id: int
    lora_path: str


AskedAdapters = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one for each prompt."""


class LocalAdapters:
    """The adapters that requests have named. Their copies are deleted with this object."""

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-adapters-")
        self._modules, self._max_rank = adaptable_modules(model), config.max_lora_rank
        self._known: dict[LoRARequest, Adapter] = {}

    def learn(self, info: EngineInfo) -> None:
        """Take the names of the model's modules from an engine that is ready."""
        self._modules = info.adaptable or self._modules

    def each(self, asked: AskedAdapters, count: int) -> list[Adapter | None]:
        """The adapter of each of `count` prompts. Raises InvalidRequest with param lora_request."""
        many = [asked] * count if asked is None or isinstance(asked, LoRARequest) else list(asked)
        if len(many) != count:
            raise InvalidRequest(f"lora_request: {len(many)} for {count} prompts", param="lora_request")
        return [None if each is None else self._adapter(each) for each in many]

    def _adapter(self, asked: LoRARequest) -> Adapter:
        if asked not in self._known:
            spool = Spool(Path(self._folder.name), self._modules, self._max_rank)
            try:
                self._known[asked] = spool.add(asked.lora_name, asked.lora_path)
            except AdapterError as error:
                raise AdapterError(f"lora_request: {asked.lora_name}: {error}", param="lora_request") from None
        return self._known[asked]


def adapters_for(kept: LocalAdapters | None, asked: AskedAdapters, count: int) -> list[Adapter | None]:
    """As `kept.each`. Without `kept`, a request may not name an adapter."""
    if kept is not None:
        return kept.each(asked, count)
    if asked is not None:
        raise InvalidRequest("lora_request: needs LLM(enable_lora=True)", param="lora_request")
    return [None] * count
