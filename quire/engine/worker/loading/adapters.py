"""Reads adapters and puts them into the model's slots, in a thread of its own: steps go on meanwhile.

What was read and packed is kept in the host's memory while there is room, least recently used out first, so an adapter
that comes back to a slot is there at once.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.layers.adapters import Adapters, LowRank, PackedAdapter
from quire.engine.lora.files import WEIGHTS, read_adapter
from quire.engine.lora.modules import Modules, adaptable_modules, kept_adapters
from quire.engine.models.spec import DecoderSpec
from quire.engine.types import Adapter
from quire.engine.worker.loading.layout import Arrangement

log = logging.getLogger("quire.adapters")


class ModelAdapters:
    """An AdapterLoader. `load`, `loaded` and `wait` are called by the engine's loop."""

    def __init__(
        self, adapters: Adapters, modules: Modules, arrangement: Arrangement | None, *, max_rank: int, most: int
    ) -> None:
        """`modules`, `arrangement`: what adapters may be of, and what that is in the model; None: the same. `most`:
        adapters that the host's memory keeps, those in slots included."""
        self._adapters, self._arrangement = adapters, arrangement
        self._modules = modules
        self._max_rank = max_rank
        self._most = most
        self._packed: OrderedDict[str, PackedAdapter] = OrderedDict()
        """By digest, the least recently used first."""
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._done: deque[tuple[int, Adapter, PackedAdapter | str]] = deque()
        """What the thread has made, or why it could not."""
        self._news = threading.Event()

    def load(self, slot: int, adapter: Adapter) -> None:
        if adapter.digest in self._packed:
            self._done.append((slot, adapter, self._packed[adapter.digest]))
            self._news.set()
        else:
            self._thread.submit(self._read, slot, adapter)

    def loaded(self) -> list[tuple[int, str | None]]:
        found: list[tuple[int, str | None]] = []
        self._news.clear()
        while self._done:
            slot, adapter, packed = self._done.popleft()
            if isinstance(packed, PackedAdapter):
                self._keep(adapter.digest, packed)
                self._adapters.put(slot, packed)
            found.append((slot, packed if isinstance(packed, str) else None))
        return found

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)

    def _keep(self, digest: str, packed: PackedAdapter) -> None:
        self._packed[digest] = packed
        self._packed.move_to_end(digest)
        while len(self._packed) > self._most:
            self._packed.popitem(last=False)

    def _read(self, slot: int, adapter: Adapter) -> None:
        """In the thread."""
        result: PackedAdapter | str
        try:
            result = self._adapters.pack(self._low_ranks(adapter))
        except QuireError as error:
            result = f"the adapter {adapter.name} cannot be loaded: {error}"
        except Exception as error:  # whatever it is, it must end this adapter's requests, and no others
            log.exception("the adapter %s cannot be loaded", adapter.name)
            result = f"the adapter {adapter.name} cannot be loaded: {type(error).__name__}"
        self._done.append((slot, adapter, result))
        self._news.set()

    def _low_ranks(self, adapter: Adapter) -> dict[str, LowRank]:
        embedding = self._adapters.serves_embeddings
        stored = read_low_ranks(Path(adapter.folder), self._modules, self._max_rank, embedding=embedding)
        if self._arrangement is None:
            return stored
        return {
            own: LowRank(part.down, rows)
            for name, part in stored.items()
            for own, rows in self._arrangement.outputs(name, part.up)
        }


def adapter_loader(config: EngineConfig, model_config: ModelConfig, spec: DecoderSpec, room: Adapters) -> ModelAdapters:
    most = kept_adapters(config.max_loras, config.max_cpu_loras)
    modules = adaptable_modules(model_config) if spec.linears is None else spec.linears
    arrangement = Arrangement(model_config) if spec.linears is None else None
    return ModelAdapters(room, modules, arrangement, max_rank=config.max_lora_rank, most=most)


@torch.inference_mode()
def read_low_ranks(folder: Path, modules: Modules, max_rank: int, *, embedding: bool) -> dict[str, LowRank]:
    """The tensors of an adapter by module, float32, with its scale in `up`. Raises AdapterError."""
    parts = read_adapter(folder, modules, max_rank, embedding=embedding)
    found = {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name, part in parts.items():
            down, up = file.get_tensor(part.down).float(), file.get_tensor(part.up).float()
            found[name] = LowRank(down, up * part.scale)
    return found
