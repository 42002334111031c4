from __future__ import annotations

from dataclasses import dataclass

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.sizes.model_sizes import ModelSizes
from quire.engine.common.config import EngineConfig
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.weight_sizes import device_linear_bytes


def experts_problem(config: EngineConfig, sizes: ModelSizes, machine: Machine) -> str | None:
    ranks = machine.count // machine.stages
    if config.enable_expert_parallel and not sizes.num_experts:
        return "the model has no experts, to be whole on devices"
    if config.enable_expert_parallel and ranks > sizes.num_experts:
        return f"the model's {sizes.num_experts} experts of a layer cannot be divided among {ranks} devices"
    return None


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    min_experts: int
    """Experts per layer on the device with the fewest."""
    max_experts: int
    """Experts per layer on the device with the most."""
    has_whole_experts: bool
    disk_bytes: int = 0
    """Bytes of the experts stored on disk; 0 if all are in memory."""
    memory_bytes: int = 0
    """Part of disk_bytes that is also kept in memory."""
    token_read_bytes: int = 0


def plan_experts(config: EngineConfig, sizes: ModelSizes, machine: Machine, dtype: str) -> ExpertsPlan:
    whole = config.enable_expert_parallel
    ranks = machine.count // machine.stages if whole else 1
    least, most = sizes.num_experts // ranks, -(-sizes.num_experts // ranks)
    if config.weights_on_disk is None or not sizes.num_experts or machine.gpu:
        return ExpertsPlan(least, most, whole)
    of_all = device_linear_bytes(sizes.expert_parameters, sizes, machine, dtype, config.online_quantization)
    size = round(of_all * fullest_device_ratio(config, sizes, machine))
    memory = int((config.weights_in_memory or 0.0) * GIB)
    memory_bytes = min(memory // (machine.devices_per_memory * machine.replicas), size)
    chosen = size * sizes.experts_per_token / sizes.num_experts
    return ExpertsPlan(least, most, whole, size, memory_bytes, round(chosen * (1 - memory_bytes / size)))


def imbalance_bytes(config: EngineConfig, sizes: ModelSizes, machine: Machine, device_weight_bytes: int) -> int:
    """Returns how many more weight bytes the device with the most experts has than with an even division."""
    more = fullest_device_ratio(config, sizes, machine) - 1
    return round(device_weight_bytes * more * sizes.expert_parameters / sizes.num_parameters)


def fullest_device_ratio(config: EngineConfig, sizes: ModelSizes, machine: Machine) -> float:
    """Returns the number of experts on the device with the most, divided by the number with an even division."""
    ranks = machine.count // machine.stages
    whole = config.enable_expert_parallel and sizes.num_experts
    return -(-sizes.num_experts // ranks) * ranks / sizes.num_experts if whole else 1.0
