"""Routed experts, as `quire plan` counts them: whole ones on each of several devices, and such that lie on a disk."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.checkpoint.kv_plan import DTYPE_BYTES, GIB, QUANTIZED_BITS
from quire.engine.checkpoint.sizes import ModelSizes
from quire.engine.config import EngineConfig
from quire.server.cli.plan.machine import Machine
from quire.server.cli.plan.weights import COMPRESSION_SAVES


@dataclass(frozen=True, slots=True)
class ExpertsWish:
    """What the user asked for."""

    whole: bool = False
    """Each is whole on one of the ranks that divide every layer."""
    folder: str | None = None
    """On a disk, where they lie; None: they are in memory."""
    memory: float = 0.0
    """GiB of memory for those of them that are used most, of all processes together."""

    @property
    def disk_flags(self) -> list[str]:
        """Of `quire serve`."""
        if self.folder is None:
            return []
        kept = ["--experts-in-memory", f"{self.memory:g}"] if self.memory else []
        return ["--experts-on-disk", self.folder, *kept]

    def impossible(self, sizes: ModelSizes, machine: Machine) -> str | None:
        """Why a model's experts cannot be placed so; None: they can."""
        ranks = machine.count // machine.stages
        if (self.whole or self.folder is not None) and not sizes.experts:
            return "the model has no experts, to be whole on devices or on a disk"
        if self.whole and ranks > sizes.experts:
            return f"the model's {sizes.experts} experts of a layer cannot be divided among {ranks} devices"
        if self.folder is not None and machine.gpu:
            return "experts on a disk (--experts-on-disk) are for CPUs: a GPU's weights are in its memory"
        return None


NO_WISH = ExpertsWish()


def experts_of(config: EngineConfig) -> ExpertsWish:
    return ExpertsWish(config.enable_expert_parallel, config.experts_on_disk, config.experts_in_memory or 0.0)


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Of each device."""

    least: int
    """Experts of a layer: the fewest that a device has of them, or a part of them,"""
    most: int
    """and the most."""
    whole: bool
    on_disk: int = 0
    """Bytes in a file; 0: all are in memory."""
    kept: int = 0
    """Bytes of them that are in memory too."""
    token_bytes: int = 0
    """Of those that a token chooses, without the share that is kept."""


def plan_experts(
    wish: ExpertsWish, sizes: ModelSizes, machine: Machine, dtype: str, quantized: str | None
) -> ExpertsPlan:
    ranks = machine.count // machine.stages if wish.whole else 1
    least, most = sizes.experts // ranks, -(-sizes.experts // ranks)
    if wish.folder is None or wish.impossible(sizes, machine) is not None:
        return ExpertsPlan(least, most, wish.whole)
    size = round(_bytes(sizes, machine, dtype, quantized) * share_of_fullest(wish, sizes, machine))
    kept = min(int(wish.memory * GIB) // (machine.sharing * machine.replicas), size)
    chosen = size * sizes.experts_per_token / sizes.experts
    return ExpertsPlan(least, most, wish.whole, size, kept, round(chosen * (1 - kept / size)))


def more_than_even(wish: ExpertsWish, sizes: ModelSizes, machine: Machine, on_device: int) -> int:
    """Bytes that the device with the most experts has beside what all would have if it went evenly."""
    return round(on_device * (share_of_fullest(wish, sizes, machine) - 1) * sizes.expert_parameters / sizes.parameters)


def share_of_fullest(wish: ExpertsWish, sizes: ModelSizes, machine: Machine) -> float:
    """Experts of the device with the most of them, as a multiple of what each would have if it went evenly."""
    ranks = machine.count // machine.stages
    return -(-sizes.experts // ranks) * ranks / sizes.experts if wish.whole and sizes.experts else 1.0


def _bytes(sizes: ModelSizes, machine: Machine, dtype: str, quantized: str | None) -> int:
    """Of all routed experts, as a device keeps them."""
    bits = QUANTIZED_BITS[quantized] if quantized is not None else sizes.bits or 8.0 * DTYPE_BYTES[dtype]
    if quantized is None and not sizes.bits and machine.compresses and dtype == "bfloat16":
        bits *= 1 - COMPRESSION_SAVES
    return round(sizes.expert_parameters * bits / 8) // machine.count
