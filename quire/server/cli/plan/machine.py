from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from quire.engine.checkpoint.kv_cache_plan import (
    CUDA_CONTEXT_BYTES,
    GIB,
    available_host_bytes,
    device_kv_budget,
    host_kv_budget,
)
from quire.engine.common.errors import ConfigError
from quire.engine.processes.gpus import CUDA_VARIABLE, VisibleGPUs, divide_gpus, find_gpus

_GPU_TABLE = Path(__file__).with_name("cards.toml")
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_CPU_INFO = Path("/proc/cpuinfo")
CPU_RANK_BLOCK_SIZE = 256
"""Tokens per block and rank if CPU ranks divide the tokens of a context."""
BLOCK_SIZE, FLASH_BLOCK_SIZE = 16, 256
"""Tokens per block for most attention backends, and for most that use flash-attn."""
FLASH_BLOCK_SIZES = {
    "flash3": FLASH_BLOCK_SIZE,
    "flash4": 128,
    "flash": FLASH_BLOCK_SIZE,
    "torch_varlen": FLASH_BLOCK_SIZE,
}
MAX_FLASH_HEAD_DIM = 256
"""flash-attn also needs 16-bit numbers and bfloat16 support."""
ENGINE_HOST_BYTES = 200 * 2**20
"""Host memory that an engine uses besides weights and KV cache, measured on Linux."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory`, `bandwidth` and `flops` are per device."""

    name: str
    memory: int
    gpu: bool
    bandwidth: float | None = None
    """Bytes per second; None: unknown."""
    flops: float | None = None
    """16-bit operations per second; None: unknown."""
    measured: bool = False
    """If False, `bandwidth` and `flops` are the maker's figures."""
    bf16: bool = True
    compresses_weights: bool = False
    """True if the CPU kernels compress bfloat16 linears to 12 bits on this machine."""
    count: int = 1
    stages: int = 1
    """Equal to `count` with pipeline parallelism, otherwise 1."""
    replicas: int = 1
    """Each replica has `count` devices."""
    visible_gpus: VisibleGPUs | None = None
    """None if the machine is another one, or if its GPUs are unknown."""
    replica_gpus: tuple[tuple[str, ...], ...] = ()
    nodes: int = 1

    @property
    def devices_per_memory(self) -> int:
        return 1 if self.gpu else self.count // self.nodes

    def expands_weights(self, backend: str = "auto") -> bool:
        """True if quantized weights are expanded at loading, because `backend` has no kernels for them on this GPU."""
        return self.gpu and (backend in ("sdpa", "reference") or (not self.bf16 and backend != "triton"))

    def kv_block_size(
        self,
        dtype: str,
        head_dim: int,
        backend: str = "auto",
        *,
        is_8_bit: bool = False,
        divides_tokens: bool = False,
        block_size: int | None = None,
    ) -> int:
        """Returns the tokens per block of an attention backend. "auto" means flash-attn if the GPU and model permit it,
        as if everything were installed. `is_8_bit` excludes flash-attn, whose larger blocks cannot store 8-bit KV.
        `divides_tokens`: ranks divide each context, and a block counts the tokens of all ranks. `block_size` is used if
        "auto" means flash-attn and some backend has this size.
        """
        if divides_tokens:
            return self.count * (BLOCK_SIZE if self.gpu or backend == "reference" else CPU_RANK_BLOCK_SIZE)
        if is_8_bit:
            return BLOCK_SIZE
        flash = self.gpu and self.bf16 and dtype != "float32" and head_dim % 8 == 0 and head_dim <= MAX_FLASH_HEAD_DIM
        if backend == "auto" and flash and block_size in (BLOCK_SIZE, *FLASH_BLOCK_SIZES.values()):
            return block_size
        return FLASH_BLOCK_SIZE if backend == "auto" and flash else FLASH_BLOCK_SIZES.get(backend, BLOCK_SIZE)

    def max_kv_bytes(self, weight_bytes: int, step_bytes: int) -> int:
        others = CUDA_CONTEXT_BYTES + step_bytes if self.gpu else ENGINE_HOST_BYTES
        return max(self.memory - weight_bytes - others, 0)

    def kv_budget_bytes(self, weight_bytes: int, step_bytes: int, utilization: float) -> int:
        """`step_bytes`, the maximum of a step, counts only on a GPU."""
        if self.gpu:
            free = self.memory - CUDA_CONTEXT_BYTES - weight_bytes
            return max(device_kv_budget(free, self.memory, utilization) - step_bytes, 0)
        parts = self.devices_per_memory * self.replicas
        return host_kv_budget(parts * (self.memory - ENGINE_HOST_BYTES - weight_bytes)) // parts


def read_gpu_table() -> dict[str, Machine]:
    table = tomllib.loads(_GPU_TABLE.read_text(encoding="utf-8"))
    return {
        name: Machine(
            name,
            memory=card["memory"] * 2**20,
            gpu=True,
            bandwidth=card["bandwidth"] * 1e9,
            flops=card["tflops"] * 1e12,
            bf16=card.get("bf16", True),
        )
        for name, card in table.items()
    }


def find_gpu(name: str) -> Machine:
    """`name` is the table's or the driver's name, such as NVIDIA H100 80GB HBM3. Raises ConfigError."""
    cards = read_gpu_table()
    plain_name = _normalize_gpu_name(name)
    for known, gpu in cards.items():
        if _normalize_gpu_name(known) == plain_name:
            return gpu
    words = _gpu_name_words(name)
    if inside := [gpu for known, gpu in cards.items() if _gpu_name_words(known) <= words]:
        return max(inside, key=lambda gpu: len(gpu.name))
    close = [known for known in cards if plain_name in _normalize_gpu_name(known)]
    if len(close) == 1 and _normalize_gpu_name(close[0]).endswith(plain_name):  # for example, 4090
        return cards[close[0]]
    hint = f"did you mean {' or '.join(close)}" if close else f"it has {', '.join(cards)}"
    asks = "?" if close else ""
    raise ConfigError(f"gpu: {name!r} is not in the table; {hint}; or give --memory in GiB{asks}", param="gpu")


def detect_machine(*, gpu: bool = True) -> Machine:
    for file in sorted(_DRIVER_FOLDER.glob("*/information")) if gpu else ():
        model = next((line for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        try:
            card = find_gpu(model.removeprefix("Model:").strip())
            return replace(card, visible_gpus=find_gpus("auto"))
        except ConfigError:
            continue
    compresses = _CPU_INFO.exists() and " avx512_bf16 " in _CPU_INFO.read_text(encoding="utf-8")
    return Machine("this machine's CPU", memory=available_host_bytes(), gpu=False, compresses_weights=compresses)


def divide_machine_by_parallelism(
    machine: Machine, ranks: int, replicas: int = 1, stages: int = 1, nodes: int = 1
) -> Machine:
    """Each rank or stage of a replica gets a GPU of its own. On CPUs, all processes share the machine evenly. Raises
    ConfigError.
    """
    if ranks > 1 and stages > 1:
        message = "pipeline_parallel_size: cannot be combined with tensor_parallel_size"
        raise ConfigError(message, param="pipeline_parallel_size")
    if nodes > 1 and (machine.gpu or replicas > 1 or stages > 1 or ranks % nodes):
        message = (
            f"nnodes: {nodes} machines have equal numbers of ranks (tensor_parallel_size), on CPUs, and nothing else"
        )
        raise ConfigError(message, param="nnodes")
    count = ranks * stages
    parts = count // nodes * replicas
    if machine.gpu and replicas > 1:
        gpus = machine.visible_gpus or VisibleGPUs(CUDA_VARIABLE, tuple(map(str, range(parts))))
        machine = replace(machine, replicas=replicas, replica_gpus=tuple(divide_gpus(gpus, replicas, count)))
    if machine.gpu or parts == 1:
        return replace(machine, count=count, stages=stages, nodes=nodes)
    bandwidth, flops = (None if each is None else each / parts for each in (machine.bandwidth, machine.flops))
    part = replace(machine, name=f"part of {machine.name}", memory=machine.memory // parts)
    return replace(part, bandwidth=bandwidth, flops=flops, count=count, stages=stages, replicas=replicas, nodes=nodes)


def generic_gpu_with_memory(gib: float) -> Machine:
    return Machine(f"a GPU of {gib:g} GiB", memory=int(gib * GIB), gpu=True)


def _normalize_gpu_name(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def _gpu_name_words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}
