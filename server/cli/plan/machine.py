"""What a plan is made for: a GPU of the table, an amount of memory, or the machine at hand."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from quire.engine.checkpoint.kv_plan import (
    CUDA_CONTEXT_BYTES,
    GIB,
    available_host_bytes,
    device_kv_budget,
    host_kv_budget,
)
from quire.engine.errors import ConfigError

_CARDS = Path(__file__).with_name("cards.toml")
_DRIVER = Path("/proc/driver/nvidia/gpus")
_CPU = Path("/proc/cpuinfo")
ENGINE_HOST_BYTES = 200 * 2**20
"""Memory of their own that the API and engine processes take beside weights and KV cache; measured on Linux."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One device of `count` alike."""

    name: str
    memory: int
    """Bytes: a GPU's whole memory, a CPU machine's free memory."""
    gpu: bool
    bandwidth: float | None = None
    """Bytes a second."""
    flops: float | None = None
    """16-bit, a second."""
    bf16: bool = True
    compresses: bool = False
    """A CPU whose kernels keep bfloat16 linears in 12 bits."""
    count: int = 1

    def kv_budget(self, weight_bytes: int, step_bytes: int, utilization: float) -> int:
        """Bytes for the KV cache of each device that holds so many bytes of weights, by the engine's own rule; on a GPU
        a step needs `step_bytes` beside it."""
        if self.gpu:
            free = self.memory - CUDA_CONTEXT_BYTES - weight_bytes
            return max(device_kv_budget(free, self.memory, utilization) - step_bytes, 0)
        return host_kv_budget(self.memory - ENGINE_HOST_BYTES - weight_bytes)


def read_cards() -> dict[str, Machine]:
    """The table of common GPUs, by name."""
    table = tomllib.loads(_CARDS.read_text(encoding="utf-8"))
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


def find_card(name: str) -> Machine:
    """By the table's name, or by a driver's, such as NVIDIA H100 80GB HBM3. Raises ConfigError with the names known."""
    cards = read_cards()
    asked = _plain(name)
    for known, card in cards.items():
        if _plain(known) == asked:
            return card
    words = _words(name)
    if inside := [card for known, card in cards.items() if _words(known) <= words]:
        return max(inside, key=lambda card: len(card.name))
    close = [known for known in cards if asked in _plain(known)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(cards)}"
    raise ConfigError(f"gpu: {name!r} is not in the table; {hint}; or give --memory in GiB", param="gpu")


def this_machine(*, gpu: bool = True) -> Machine:
    """Its first GPU, as the driver names it, or its CPU with the memory that is free now."""
    for file in sorted(_DRIVER.glob("*/information")) if gpu else ():
        model = next((line for line in file.read_text().splitlines() if line.startswith("Model:")), "")
        try:
            return find_card(model.removeprefix("Model:").strip())
        except ConfigError:
            continue
    compresses = _CPU.exists() and " avx512_bf16 " in _CPU.read_text(encoding="utf-8")
    return Machine("this machine's CPU", memory=available_host_bytes(), gpu=False, compresses=compresses)


def with_memory(gib: float) -> Machine:
    """Some GPU of so much memory."""
    return Machine(f"a GPU of {gib:g} GiB", memory=int(gib * GIB), gpu=True)


def _plain(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum())


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower())) - {""}
