"""All-reduce over ranks, one GPU each: NCCL, one kernel, and after a rank has ended. Needs two GPUs."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from benchmarks.flight.finding import Finding, Say, tried
from quire.engine.worker.ranks.rendezvous import visible_gpus_for_rank
from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective, join_ranks

_SIZES = {"8 KB": 4096, "64 KB": 32_768, "512 KB": 262_144}
"""Elements of bfloat16."""
_SUMS = 200
_DEAD_SECONDS = 1.0
"""Seconds until the others learn that a rank has ended."""
_PATIENCE = 20.0


def ranks(device: torch.device, say: Say) -> None:
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count < 2:
        say(Finding("sums over ranks", "not tried: there is no second card"))
        return
    tried(say, f"sums over {count} ranks", lambda: _of_processes(count))


def _of_processes(count: int) -> str:
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ours, theirs = context.Pipe()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    processes = [
        context.Process(target=_rank, args=(rank, count, store.port, visible, theirs), daemon=True)
        for rank in range(count)
    ]
    for each in processes:
        each.start()
    said = ours.recv() if ours.poll(_PATIENCE) else "nothing came"
    for each in processes:
        each.join(_PATIENCE)
        if each.is_alive():
            each.kill()
            raise ValueError(f"{said}; a rank did not end")
    return str(said)


def _rank(rank: int, count: int, port: int, visible: str | None, out: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus_for_rank(rank, visible, count)
    device = torch.device("cuda", 0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    ways = {
        "NCCL": join_ranks(dist.PrefixStore("nccl", store), rank, count, device, in_order=False),
        "one kernel": join_ranks(store, rank, count, device, in_order=True, one_shot=True),
    }
    said = []
    for name, numbers in _SIZES.items():
        x = torch.full((numbers,), 0.5, dtype=torch.bfloat16, device=device)
        times = [f"{way} {_seconds(group, x) * 1e6:.1f} us" for way, group in ways.items()]
        said.append(f"{name} {', '.join(times)}")
    if rank == count - 1:
        torch.cuda.synchronize()
        os._exit(0)
    ended = _left(ways["one kernel"])
    if rank == 0:
        out.send("; ".join([*said, ended]))
    os._exit(0)


def _seconds(group: DistributedCollective, x: torch.Tensor) -> float:
    """Seconds per all-reduce."""
    for _ in range(3):
        group.all_reduce(x.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            found = group.all_reduce(x)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x.fill_(0.0)  # all-reduce accumulates in place
    graph.replay()
    began.record()
    graph.replay()
    ended.record()
    torch.cuda.synchronize()
    group.raise_if_failed()
    assert not found.any()
    return began.elapsed_time(ended) / 1e3 / _SUMS


def _left(group: DistributedCollective) -> str:
    """How long an all-reduce waits for an ended rank."""
    x, done = torch.ones(4096, dtype=torch.bfloat16, device="cuda"), torch.cuda.Event()
    threading.Timer(_DEAD_SECONDS, group.abort_collectives).start()
    began = time.monotonic()
    group.all_reduce(x)
    done.record()
    while not done.query() and time.monotonic() < began + _PATIENCE / 2:
        time.sleep(0.001)
    waited = time.monotonic() - began
    try:
        group.raise_if_failed()
    except RankEnded:
        return f"without the last rank it was given up after {waited:.2f} s, {_DEAD_SECONDS:g} s of which nobody knew"
    return "a sum without the last rank came, or NCCL made it"
