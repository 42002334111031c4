"""Loads LoRA adapters in a background thread, and caches packed adapters on the host."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors import safe_open

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import QuireError, refuse_setting_if
from quire.engine.common.types import Adapter
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.adapters import AdapterManager, LoRALayerWeights, PackedAdapter
from quire.engine.lora.adapter_files import WEIGHTS_FILE, read_adapter_specs
from quire.engine.lora.target_modules import ModuleShapes, adaptable_modules, effective_max_cpu_loras
from quire.engine.worker.loading.weight_mapper import WeightMapper
from quire.kernels.backend import Backend
from quire.kernels.gpu.other_devices import is_other_device

log = logging.getLogger("quire.adapters")


class ModelAdapterLoader:
    """Only the engine's loop calls the public methods."""

    def __init__(
        self,
        adapter_slots: AdapterManager,
        modules: ModuleShapes,
        weight_mapper: WeightMapper | None,
        *,
        max_rank: int,
        max_cached: int,
    ) -> None:
        """`weight_mapper` is None if the checkpoint's names are the model's names. `max_cached` includes the adapters
        in slots.
        """
        self._adapter_slots, self._weight_mapper = adapter_slots, weight_mapper
        self._modules = modules
        self._max_rank = max_rank
        self._max_cached = max_cached
        self._packed_by_digest: OrderedDict[str, PackedAdapter] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._finished_loads: deque[tuple[int, Adapter, PackedAdapter | str]] = deque()
        self._load_finished = threading.Event()

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        if adapter.digest in self._packed_by_digest:
            self._finished_loads.append((slot, adapter, self._packed_by_digest[adapter.digest]))
            self._load_finished.set()
        else:
            self._thread.submit(self._read_pack_and_queue_adapter, slot, adapter)

    def install_finished_loads(self) -> list[tuple[int, str | None]]:
        loaded_slots: list[tuple[int, str | None]] = []
        self._load_finished.clear()
        while self._finished_loads:
            slot, adapter, packed = self._finished_loads.popleft()
            if isinstance(packed, PackedAdapter):
                self._cache_packed(adapter.digest, packed)
                self._adapter_slots.put_adapter(slot, packed)
            loaded_slots.append((slot, packed if isinstance(packed, str) else None))
        return loaded_slots

    def wait_for_any_load(self, seconds: float) -> None:
        self._load_finished.wait(seconds)

    def _cache_packed(self, digest: str, packed: PackedAdapter) -> None:
        self._packed_by_digest[digest] = packed
        self._packed_by_digest.move_to_end(digest)
        while len(self._packed_by_digest) > self._max_cached:
            self._packed_by_digest.popitem(last=False)

    def _read_pack_and_queue_adapter(self, slot: int, adapter: Adapter) -> None:
        result: PackedAdapter | str
        try:
            result = self._adapter_slots.pack_adapter(self._read_lora_weights(adapter))
        except QuireError as error:
            result = f"the adapter {adapter.name} cannot be loaded: {error}"
        except Exception as error:  # an error must fail only this adapter's requests
            log.exception("the adapter %s cannot be loaded", adapter.name)
            result = f"the adapter {adapter.name} cannot be loaded: {type(error).__name__}"
        self._finished_loads.append((slot, adapter, result))
        self._load_finished.set()

    def _read_lora_weights(self, adapter: Adapter) -> dict[str, LoRALayerWeights]:
        embedding = self._adapter_slots.supports_embeddings
        stored = read_lora_weights(Path(adapter.folder), self._modules, self._max_rank, embedding=embedding)
        if self._weight_mapper is None:
            return stored
        return {
            own: LoRALayerWeights(part.down, rows)
            for name, part in stored.items()
            for own, rows in self._weight_mapper.split_outputs(name, part.up)
        }


def make_adapter_loader(
    config: EngineConfig, model_config: ModelConfig, spec: DecoderSpec, adapter_slots: AdapterManager
) -> ModelAdapterLoader:
    max_cached = effective_max_cpu_loras(config.max_loras, config.max_cpu_loras)
    modules = adaptable_modules(model_config) if spec.lora_target_sizes is None else spec.lora_target_sizes
    weight_mapper = WeightMapper(model_config) if spec.lora_target_sizes is None else None
    return ModelAdapterLoader(
        adapter_slots, modules, weight_mapper, max_rank=config.max_lora_rank, max_cached=max_cached
    )


@torch.inference_mode()
def read_lora_weights(
    folder: Path, modules: ModuleShapes, max_rank: int, *, embedding: bool
) -> dict[str, LoRALayerWeights]:
    """Returns float32 weights by module name. `up` is already multiplied by LoRA's scale. Raises AdapterError."""
    parts = read_adapter_specs(folder, modules, max_rank, embedding=embedding)
    low_ranks = {}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        for name, part in parts.items():
            down, up = file.get_tensor(part.lora_a).float(), file.get_tensor(part.lora_b).float()
            low_ranks[name] = LoRALayerWeights(down, up * part.scale)
    return low_ranks


def make_adapter_slots(
    config: EngineConfig, backend: Backend, dtype: torch.dtype, device: torch.device
) -> AdapterManager | None:
    """Raises ConfigError."""
    if not config.enable_lora:
        return None
    refuse_setting_if(
        "enable_lora",
        is_other_device(device) and f"adapters are served only on CPUs and CUDA GPUs so far, not on {device.type}",
        device.type == "cuda" and find_spec("triton") is None and "on a GPU it needs Triton (pip install triton)",
    )
    return AdapterManager(backend, config.max_loras, config.max_lora_rank, dtype, device)
