"""Small sums in one launch over the GPUs of one machine, because launches dominate the time of a decode's sums.

CUDA IPC shares memory. PyTorch's symmetric memory is unsuitable: its rendezvous changes between versions, its sums
never end if a rank is missing, and timeouts destroy the CUDA context.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.collective import RankEnded
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu.ranks.triton_sum import sum_over_ranks
from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2

log = logging.getLogger("quire.kernels")

NUM_PROGRAMS, _ELEMENTS_PER_PROGRAM = 128, 2048
"""All programs must run at once. Every GPU can run this many."""
MAX_ELEMENTS = NUM_PROGRAMS * _ELEMENTS_PER_PROGRAM
"""Each rank reads all ranks' numbers, so larger tensors are faster with an all-reduce in pieces."""
_MAX_ELEMENT_BYTES = 4
_MAX_POLLS = 2**30
"""This many polls take minutes. Other mechanisms notice earlier that a rank has ended."""
_TRIAL_POLLS = 2**26
_TRIAL_SECONDS = 45.0
"""Less than the minute that a failed rank waits at the store for the other ranks' answers."""
SumShape = tuple[int, torch.dtype]
"""(number of elements, dtype)."""
_TRIAL_SUMS: tuple[SumShape, ...] = (
    (1, torch.bfloat16),
    (5000, torch.float16),
    (MAX_ELEMENTS, torch.float32),
    (77, torch.bfloat16),
    (MAX_ELEMENTS, torch.bfloat16),
)


class OneShotAllReduce:
    """Sums must not overlap, and must have the same order and sizes on all ranks."""

    def __init__(
        self, rank: int, rank_memories: Sequence[Tensor], host_flags: Tensor, max_polls: int = _MAX_POLLS
    ) -> None:
        """rank_memories: `rank_memory_bytes` zeros of each rank, as this rank reaches them. host_flags: [2] int32 zeros
        in host memory that the GPU reaches. max_polls: how often another rank's count is polled before a sum is given
        up.
        """
        self._rank = rank
        self.rank_memories = tuple(rank_memories)
        self.host_flags = host_flags
        self.max_polls = max_polls
        device = rank_memories[rank].device
        addresses = torch.tensor([each.data_ptr() for each in rank_memories], dtype=torch.int64)
        self._addresses = addresses.to(device)
        self._sum_counts = torch.zeros(NUM_PROGRAMS + 1, dtype=torch.int64, device=device)

    def can_reduce(self, x: Tensor) -> bool:
        return 0 < x.numel() <= MAX_ELEMENTS and x.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add in float32 and rank order. A sum that is given up is garbage: see `raise_if_failed`."""
        x = x.contiguous()
        out, ranks = torch.empty_like(x), len(self.rank_memories)
        sum_over_ranks[cdiv(x.numel(), _ELEMENTS_PER_PROGRAM),](
            out, x, self._addresses, self._sum_counts, self.host_flags, x.numel(), self.max_polls, self._rank, ranks,
            next_power_of_2(ranks), NUM_PROGRAMS, _ELEMENTS_PER_PROGRAM, counter_bytes(ranks), num_warps=8,
        )  # fmt: skip
        return out

    def stop_waiting(self) -> None:
        self.host_flags[0] = 1

    def raise_if_failed(self) -> None:
        """Raises RankEnded if a sum was given up."""
        if self.host_flags[1]:
            raise RankEnded("an all-reduce was given up")


def counter_bytes(ranks: int) -> int:
    """The counters come before the numbers in a rank's memory."""
    return cdiv(NUM_PROGRAMS * ranks * 8, 4096) * 4096


def rank_memory_bytes(ranks: int) -> int:
    return counter_bytes(ranks) + 2 * MAX_ELEMENTS * _MAX_ELEMENT_BYTES


def verify_all_reduce(
    sums: OneShotAllReduce,
    rank: int,
    count: int,
    device: torch.device,
    sizes: Sequence[SumShape] = _TRIAL_SUMS,
    max_polls: int = _TRIAL_POLLS,
) -> None:
    """Raise ValueError unless sums have the same bits as on a CPU."""
    sums.max_polls, until = max_polls, time.monotonic() + _TRIAL_SECONDS
    for number, (size, dtype) in enumerate((*sizes, *sizes)):
        generator = torch.Generator().manual_seed(number)
        parts = (torch.randn((count, size), generator=generator) * 100).to(dtype)
        wanted = parts[0].float()
        for part in parts[1:]:
            wanted = wanted + part.float()
        reduced, done = sums.all_reduce(parts[rank].to(device)), torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() > until:
                sums.stop_waiting()
            time.sleep(0.001)
        try:
            sums.raise_if_failed()
        except RankEnded as error:
            raise ValueError("an all-reduce did not finish") from error
        if not torch.equal(reduced.cpu(), wanted.to(dtype)):
            raise ValueError("an all-reduce gave a wrong result")
    sums.max_polls = _MAX_POLLS


def connect_one_shot(
    store: dist.Store,
    rank: int,
    count: int,
    device: torch.device,
    *,
    storages: Any = torch.UntypedStorage,
    trial: Callable[[OneShotAllReduce, int, int, torch.device], None] = verify_all_reduce,
) -> OneShotAllReduce | None:
    """Call on all ranks. Returns None on all, and logs why, if a GPU does not reach another's memory or the trial
    fails. Raises RuntimeError if a rank does not call. storages: PyTorch's class that shares GPU memory.
    """

    def exchange_answers(what: str, own: bytes) -> list[bytes]:
        store.set(f"one-shot {what} {rank}", own.hex())
        return [bytes.fromhex(store.get(f"one-shot {what} {each}").decode()) for each in range(count)]

    errors = list[str]()

    def try_action(make: Callable[[], bytes]) -> bytes:
        try:
            return make()
        except Exception as error:  # the fallback is NCCL
            errors.append(describe_kernel_error(error))
            return b"-"

    memory, all_reduces = list[Tensor](), list[OneShotAllReduce]()

    def share_memory() -> bytes:
        memory.append(torch.zeros(rank_memory_bytes(count), dtype=torch.uint8, device=device))
        torch.cuda.synchronize(device)  # the memory must be zero before another rank writes to it
        return pickle.dumps(storages._share_cuda_(memory[0].untyped_storage())[1:])

    handles = exchange_answers("memory", try_action(share_memory))

    def open_memories() -> bytes:
        near = [
            memory[0] if each == rank else _open_shared_memory(handle, device, storages)
            for each, handle in enumerate(handles)
        ]
        all_reduces.append(OneShotAllReduce(rank, near, torch.zeros(2, dtype=torch.int32, pin_memory=True)))
        return b"opened"

    reached = exchange_answers("reached", try_action(open_memories) if b"-" not in handles else b"-")

    def run_trial() -> bytes:
        trial(all_reduces[0], rank, count, device)
        return b"right"

    right = exchange_answers("right", try_action(run_trial) if b"-" not in reached else b"-")
    if b"-" not in right:
        return all_reduces[0]
    others = [each for each, answer in enumerate(right) if answer == b"-"]
    log.warning("all-reduce uses only NCCL: %s", "; ".join(errors) or f"ranks {others} cannot reach all others")
    return None


def _open_shared_memory(handle: bytes, device: torch.device, storages: Any) -> Tensor:
    storage = storages._new_shared_cuda(device.index or 0, *pickle.loads(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
