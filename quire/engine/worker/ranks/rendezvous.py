"""Ranks communicate by shared memory if the backend has kernels for it, by NCCL between GPUs, and otherwise by a
torch.distributed group.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.processes.gpus import visible_list, visible_variable
from quire.engine.worker.device_plan import DevicePlan
from quire.engine.worker.ranks.rank_messages import RankStart
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.distributed import join_ranks

_STORE_SECONDS = timedelta(seconds=60)
_PROBE_NUMBERS = 2**20
_PROBE_MODULUS = 251


def open_store(listener: socket.socket) -> dist.TCPStore:
    host, port, *_ = listener.getsockname()
    descriptor = listener.detach()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_STORE_SECONDS, master_listen_fd=descriptor
    )


def connect_store(place: tuple[str, int]) -> dist.TCPStore:
    """Raises ConnectionError."""
    try:
        return dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=_STORE_SECONDS)
    except RuntimeError as error:
        raise ConnectionError(str(error).partition("\n")[0]) from error


def join_group(start: RankStart, config: EngineConfig, chosen: DevicePlan, address: str) -> Collective:
    count = config.world_size
    if start.store is None:
        (memory,) = start.descriptors
        group = chosen.backend.make_collective(memory, start.rank, count, os.getppid())
        os.close(memory)
        return group
    needs_order = needs_ordered_sums(config, chosen.device)
    store = connect_store(start.store)
    sum_options = {"in_order": needs_order, "one_shot": config.one_shot_sums}
    return join_ranks(store, start.rank, count, chosen.device, **sum_options, address=address)


def needs_ordered_sums(config: EngineConfig, device: torch.device) -> bool:
    return config.deterministic or device.type == "cpu"


def check_connection(
    group: Collective, device: torch.device, setting: str = "tensor_parallel_size", seconds: float = 60.0
) -> None:
    """Raises ConfigError if a sum over the ranks fails or is wrong, as on GPUs behind some IOMMUs, or if it takes GPUs
    more than `seconds`.
    """
    try:
        wrong = _find_all_reduce_error(group, device, seconds)
    except (RankEnded, RuntimeError) as error:
        message_lines = (str(error.__cause__ or error).strip() or "no message").splitlines()
        wrong = next((line for line in message_lines if "rror" in line), message_lines[0])
        advice = "NCCL_DEBUG=WARN shows more; in a container NCCL needs --shm-size 1g or more"
        cause: Exception | None = error
    else:
        advice, cause = "NCCL_P2P_DISABLE=1 has them meet in the host's memory", None
    if wrong is not None:
        wrong = f"the ranks cannot reach each other: {wrong}"
        wrong = f"{wrong}; {advice}" if device.type == "cuda" else wrong
        raise ConfigError(f"{setting}: {wrong}", param=setting) from cause


def _find_all_reduce_error(group: Collective, device: torch.device, seconds: float) -> str | None:
    """Sums integers, which are exact in float32."""
    numbers = torch.arange(_PROBE_NUMBERS, device=device, dtype=torch.float32) % _PROBE_MODULUS
    total = group.all_reduce(numbers.clone())
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record()
        until = time.monotonic() + seconds
        while not done.query():  # NCCL's own timeout takes minutes
            if time.monotonic() > until:
                return f"an all-reduce did not finish in {seconds:g} s"
            time.sleep(0.01)
    return None if torch.equal(total, group.world_size * numbers) else "an all-reduce gave a wrong result"


def rank_environment(rank: int, device: torch.device) -> dict[str, str] | None:
    if device.type != "cuda":
        return None
    is_hip = torch.version.hip is not None
    visible = visible_list(os.environ, is_hip=is_hip)
    return os.environ | {
        visible_variable(is_hip=is_hip): visible_gpus_for_rank(rank, visible, torch.cuda.device_count())
    }


def visible_gpus_for_rank(rank: int, visible: str | None, count: int) -> str:
    """The rank's GPU comes first, because the first one is every thread's default. The other GPUs stay visible, because
    NCCL may otherwise choose inconsistent paths (https://github.com/NVIDIA/nccl/issues/1066).
    """
    gpus = [str(gpu) for gpu in range(count)] if visible is None else [each.strip() for each in visible.split(",")]
    return ",".join([gpus.pop(rank), *gpus])
