"""Sums of few numbers over the ranks of one machine, by the kernel of triton_sum.py, where their GPUs reach each
other's memory: the time of a decode step's sum is that of starting, and this starts once.

A rank's memory is shared as torch.multiprocessing shares tensors of GPUs (CUDA IPC). PyTorch's symmetric memory would
do as well, but for how ranks meet in it, which changes from version to version, and for its own waits: none of its sums
ends without all ranks, and its barriers and signals, which can time out, then end the CUDA context.
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
from quire.kernels.gpu.faults import fault
from quire.kernels.gpu.ranks.triton_sum import sum_over_ranks
from quire.kernels.gpu.triton_sizes import cdiv, power_of_2

log = logging.getLogger("quire.kernels")

PROGRAMS, _PART = 128, 2048
"""Of a kernel: so many are on any GPU at once, as they must be; and numbers of each."""
MOST = PROGRAMS * _PART
"""Numbers of a sum. Each rank reads what all have, so of more an all-reduce in pieces is faster."""
_WIDEST = 4
"""Bytes of a number."""
_MOST_LOOKS = 2**30
"""Minutes: that a rank has ended is noticed otherwise, and earlier."""
_LOOKS_OF_TRIAL = 2**26
_TRIAL_SECONDS = 45.0
"""Of all its sums. One whose trial has failed waits at the store for what the others say of theirs, for a minute."""
Size = tuple[int, torch.dtype]
"""Numbers and type of a sum."""
_TRIED: tuple[Size, ...] = (
    (1, torch.bfloat16),
    (5000, torch.float16),
    (MOST, torch.float32),
    (77, torch.bfloat16),
    (MOST, torch.bfloat16),
)
"""The sums of a trial."""


class OneShot:
    """One rank's view. Sums begin in the same order on all ranks, with as many numbers; no two of them run at once."""

    def __init__(self, rank: int, memory: Sequence[Tensor], words: Tensor, most_looks: int = _MOST_LOOKS) -> None:
        """memory: of each rank, `memory_bytes` of zeros, as this one reaches it. words: [2] int32 of zeros in the
        host's memory, which the GPU reaches. most_looks: after so many at another's count a sum is given up."""
        self._rank, self.memory, self.words = rank, tuple(memory), words
        self.most_looks = most_looks
        device = memory[rank].device
        addresses = torch.tensor([each.data_ptr() for each in memory], dtype=torch.int64)
        self._addresses = addresses.to(device)
        self._counts = torch.zeros(PROGRAMS + 1, dtype=torch.int64, device=device)

    def takes(self, x: Tensor) -> bool:
        return 0 < x.numel() <= MOST and x.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def sum(self, x: Tensor) -> Tensor:
        """As `Collective.sum`, of x that it takes: added in float32 in the order of the ranks. What a sum gives that
        was given up is nothing: see `check`."""
        x = x.contiguous()
        out, ranks = torch.empty_like(x), len(self.memory)
        sum_over_ranks[cdiv(x.numel(), _PART),](
            out, x, self._addresses, self._counts, self.words, x.numel(), self.most_looks, self._rank, ranks,
            power_of_2(ranks), PROGRAMS, _PART, head_bytes(ranks), num_warps=8,
        )  # fmt: skip
        return out

    def stop(self) -> None:
        """Let no sum wait any longer. Any thread may call it."""
        self.words[0] = 1

    def check(self) -> None:
        """Of the sums that have ended: raises RankEnded where one was given up."""
        if self.words[1]:
            raise RankEnded("a sum over ranks was given up")


def head_bytes(ranks: int) -> int:
    """Of counts, before the numbers."""
    return cdiv(PROGRAMS * ranks * 8, 4096) * 4096


def memory_bytes(ranks: int) -> int:
    return head_bytes(ranks) + 2 * MOST * _WIDEST


def try_sums(
    sums: OneShot,
    rank: int,
    count: int,
    device: torch.device,
    sizes: Sequence[Size] = _TRIED,
    most_looks: int = _LOOKS_OF_TRIAL,
) -> None:
    """Raises ValueError where sums of these sizes do not have the bits that they have on a CPU. most_looks: as OneShot
    has it, until the trial ends."""
    sums.most_looks, until = most_looks, time.monotonic() + _TRIAL_SECONDS
    for number, (size, dtype) in enumerate((*sizes, *sizes)):
        generator = torch.Generator().manual_seed(number)
        parts = (torch.randn((count, size), generator=generator) * 100).to(dtype)
        wanted = parts[0].float()
        for part in parts[1:]:
            wanted = wanted + part.float()
        found, done = sums.sum(parts[rank].to(device)), torch.cuda.Event()
        done.record()
        while not done.query():
            if time.monotonic() > until:
                sums.stop()
            time.sleep(0.001)
        try:
            sums.check()
        except RankEnded as error:
            raise ValueError("a sum did not come") from error
        if not torch.equal(found.cpu(), wanted.to(dtype)):
            raise ValueError("a sum came wrong")
    sums.most_looks = _MOST_LOOKS


def meet(
    store: dist.Store,
    rank: int,
    count: int,
    device: torch.device,
    *,
    storages: Any = torch.UntypedStorage,
    trial: Callable[[OneShot, int, int, torch.device], None] = try_sums,
) -> OneShot | None:
    """All ranks call it, and all get the same: None where a GPU does not reach another's memory, or sums come wrong,
    which the log says. Raises RuntimeError where another rank does not come. storages: PyTorch's class, whose functions
    share a GPU's memory between processes and open what is shared. trial: raises an error where sums come wrong."""

    def agreed(what: str, own: bytes) -> list[bytes]:
        """What each of them says."""
        store.set(f"one-shot {what} {rank}", own.hex())
        return [bytes.fromhex(store.get(f"one-shot {what} {each}").decode()) for each in range(count)]

    said = list[str]()

    def perhaps(make: Callable[[], bytes]) -> bytes:
        """b"-" where it fails."""
        try:
            return make()
        except Exception as error:  # of CUDA, of PyTorch's storages, of Triton: NCCL sums all the same
            said.append(fault(error))
            return b"-"

    memory, made = list[Tensor](), list[OneShot]()

    def shared() -> bytes:
        memory.append(torch.zeros(memory_bytes(count), dtype=torch.uint8, device=device))
        torch.cuda.synchronize(device)  # zeros, before another rank tells something
        return pickle.dumps(storages._share_cuda_(memory[0].untyped_storage())[1:])

    handles = agreed("memory", perhaps(shared))

    def opened() -> bytes:
        near = [memory[0] if each == rank else _opened(handle, device, storages) for each, handle in enumerate(handles)]
        made.append(OneShot(rank, near, torch.zeros(2, dtype=torch.int32, pin_memory=True)))
        return b"opened"

    reached = agreed("reached", perhaps(opened) if b"-" not in handles else b"-")

    def tried() -> bytes:
        trial(made[0], rank, count, device)
        return b"right"

    right = agreed("right", perhaps(tried) if b"-" not in reached else b"-")
    if b"-" not in right:
        return made[0]
    others = [each for each, answer in enumerate(right) if answer == b"-"]
    log.warning("sums over ranks go over NCCL alone: %s", "; ".join(said) or f"ranks {others} cannot reach all others")
    return None


def _opened(handle: bytes, device: torch.device, storages: Any) -> Tensor:
    """Another rank's memory. It is opened for this rank's own GPU, which then reaches that of the other."""
    storage = storages._new_shared_cuda(device.index or 0, *pickle.loads(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
