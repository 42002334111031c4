"""A dense model's layers streamed from a CPU's disk (--weights-on-disk) or a GPU's host memory (--cpu-offload-gb)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.layer_placement import (
    DEFAULT_LAYER_MEMORY_FRACTION,
    STREAMED_LAYER_SLOTS,
    max_streamed_layers,
    min_streamed_layers,
)
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes
from quire.engine.common.config import EngineConfig
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine
from quire.server.cli.plan.weight_sizes import device_linear_bytes

_BUS_BYTES_PER_SECOND, _DISK_BYTES_PER_SECOND = 25e9, 1e9
"""Assumed: PCIe 4.0 with 16 lanes, and a disk that reads 1 GB/s."""


@dataclass(frozen=True, slots=True)
class StreamedLayersPlan:
    num_layers: int = 0
    num_streamed: int = 0
    from_disk: bool = False
    offloaded_bytes: int = 0
    read_bytes: int = 0
    saved_bytes: int = 0
    problem: str | None = None

    @property
    def max_steps_per_second(self) -> float:
        return (
            (_DISK_BYTES_PER_SECOND if self.from_disk else _BUS_BYTES_PER_SECOND) / self.read_bytes
            if self.read_bytes
            else 0.0
        )


def plan_streamed_layers(
    config: EngineConfig, sizes: ModelSizes, machine: Machine, dtype: str, device_weight_bytes: int
) -> StreamedLayersPlan:
    """`device_weight_bytes`: weight bytes without streaming."""
    from_disk, offloaded = config.weights_on_disk is not None, config.cpu_offload_gb
    if offloaded and not machine.gpu:
        return StreamedLayersPlan(
            problem="layers in the host's memory (--cpu-offload-gb) are a GPU's; see --weights-on-disk"
        )
    if from_disk and machine.gpu:
        return StreamedLayersPlan(problem="weights on a disk (--weights-on-disk) are for CPUs; see --cpu-offload-gb")
    if not offloaded and (not from_disk or sizes.num_experts):
        return StreamedLayersPlan()
    count = sizes.num_layers // machine.stages
    whole = device_linear_bytes(
        sizes.num_parameters - sizes.embedding_parameters, sizes, machine, dtype, config.online_quantization
    )
    each, parts = whole // count, machine.devices_per_memory * machine.replicas
    if config.weights_in_memory is None:
        memory = int(
            DEFAULT_LAYER_MEMORY_FRACTION * max(machine.memory - ENGINE_HOST_BYTES - device_weight_bytes + whole, 0)
        )
    else:
        memory = int(config.weights_in_memory * GIB) // parts
    try:
        layer_bytes = [each] * count
        order = (
            min_streamed_layers(layer_bytes, memory)
            if from_disk
            else max_streamed_layers(layer_bytes, int(offloaded * GIB))
        )
    except ValueError as error:
        return StreamedLayersPlan(problem=str(error))
    read = each * len(order)
    saved = max(read - each * STREAMED_LAYER_SLOTS, 0)
    return StreamedLayersPlan(count, len(order), from_disk, whole if from_disk else read, read, saved)
