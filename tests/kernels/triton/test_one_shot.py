"""One-shot all-reduce: several ranks' kernels run at once under Triton's interpreter and take turns at every memory
access, in random orders.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective
from quire.kernels.gpu.ranks import one_shot_all_reduce
from quire.kernels.gpu.ranks.one_shot_all_reduce import MAX_ELEMENTS, NUM_PROGRAMS, OneShotAllReduce, rank_memory_bytes
from tests.kernels.triton.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("ranks that take turns are the interpreter's", allow_module_level=True)

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

LANGUAGE = (tl, core)
"""The parts of Triton's language that a kernel of this file uses, and that a launch therefore patches."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Turns:
    """One thread runs at a time; each memory access may switch to another."""

    def __init__(self, seed: int, threads: int) -> None:
        self._random, self._turn = random.Random(seed), threading.Condition()
        self._alive, self._now = set(range(threads)), 0
        self._mine = threading.local()
        self.switches = 0

    def begin(self, number: int) -> None:
        self._mine.number = number
        with self._turn:
            self._turn.wait_for(lambda: self._now == number)

    def end(self) -> None:
        with self._turn:
            self._alive.discard(self._mine.number)
            self._give()

    def perhaps_another(self) -> None:
        if (number := getattr(self._mine, "number", None)) is None or self._random.random() < 0.5:
            return
        builder = interpreter.interpreter_builder
        kept = builder.grid_dim, builder.grid_idx
        with self._turn:
            self._give()
            self._turn.wait_for(lambda: self._now == number)
        builder.grid_dim, builder.grid_idx = kept

    def _give(self) -> None:
        if self._alive:
            self._now = self._random.choice(sorted(self._alive))
            self.switches += 1
            self._turn.notify_all()


@triton.jit
def around(work):
    """A kernel that the interpreter runs as Python. Each launch patches Triton's language and restores it at the end. A
    launch within this one finds the language patched and leaves it so.
    """
    work()


@contextmanager
def at_once(seed: int, threads: int) -> Iterator[Turns]:
    """Kernels that `threads` threads launch within the block take turns."""
    turns, builder = Turns(seed, threads), interpreter.InterpreterBuilder

    def taking_turns(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            turns.perhaps_another()
            return method(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("create_masked_load", "create_masked_store", "create_load", "create_store"):
            if hasattr(builder, name):
                patch.setattr(builder, name, taking_turns(getattr(builder, name)))
        patch.setattr(builder, "create_atomic_rmw", taking_turns(builder.create_atomic_rmw))
        # Kernels call tl.min: its call, too, would look through the language for what `around` has changed already.
        patch.setattr(
            interpreter.InterpretedFunction, "__call__", lambda own, *args, **named: own.rewrite()(*args, **named)
        )
        yield turns


def ranks(count: int, most_looks: int = 10**9) -> list[OneShotAllReduce]:
    memory = [torch.zeros(rank_memory_bytes(count), dtype=torch.uint8) for _ in range(count)]
    return [OneShotAllReduce(rank, memory, torch.zeros(2, dtype=torch.int32), most_looks) for rank in range(count)]


def run_in_turns(seed: int, work: list[Callable[[], Any]]) -> list[Any]:
    """The result of each function, each run in a thread. Threads that do no work are dead ranks."""
    with at_once(seed, len(work)) as turns:

        def run(number: int) -> Any:
            turns.begin(number)
            try:
                return work[number]()
            finally:
                turns.end()

        with ThreadPoolExecutor(len(work)) as pool:
            asked = list[Future[Any]]()

            def launch() -> None:
                asked.extend(pool.submit(run, number) for number in range(len(work)))
                wait(asked)

            around[(1,)](launch)
            results = [each.result() for each in asked]
    assert len(work) == 1 or turns.switches > 10
    return results


def sum_in_rank_order(parts: list[Tensor]) -> Tensor:
    """DistributedCollective adds in this order with --deterministic."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_one_shot_all_reduce_equals_sum_in_rank_order(count: int, seed: int) -> None:
    """Sums of one element up to several programs' parts follow one another, so that fewer or more programs reuse a
    place. Negative zeros stay.
    """
    made, rng = ranks(count), random.Random(seed)
    sizes = [rng.choice((1, 7, 2048, 2049, 5000)) for _ in range(6)]
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for size in sizes:
        parts = [torch.randn(size, generator=generator).to(rng.choice(DTYPES)) * 100 for _ in range(count)]
        parts = [part.to(parts[0].dtype) for part in parts]
        for part in parts:
            part[0] = -0.0
        inputs.append(parts)

    def of(rank: int) -> list[Tensor]:
        return [made[rank].all_reduce(parts[rank].view(1, -1)).view(-1) for parts in inputs]

    results = run_in_turns(seed, [lambda rank=rank: of(rank) for rank in range(count)])
    for number, parts in enumerate(inputs):
        expected = sum_in_rank_order(parts)
        for rank_sums in results:
            assert torch.equal(rank_sums[number].view(torch.uint8), expected.view(torch.uint8))
    for each in made:
        each.raise_if_failed()


def test_can_reduce_accepts_only_small_float_tensors() -> None:
    (made,) = ranks(1)
    assert made.can_reduce(torch.zeros(MAX_ELEMENTS))
    assert not made.can_reduce(torch.zeros(MAX_ELEMENTS + 1))
    assert not made.can_reduce(torch.zeros(0))
    assert not made.can_reduce(torch.zeros(3, dtype=torch.int64))
    x = torch.randn(3, 5).t()
    assert torch.equal(made.all_reduce(x), x)


@pytest.mark.parametrize("how", ["stopped", "looked often enough"])
def test_one_shot_all_reduce_gives_up_on_dead_rank(how: str) -> None:
    """The other ranks' kernels end, report it, and announce no later sum. Earlier sums stay right."""
    made = ranks(3, 10**9 if how == "stopped" else 2000)
    x = torch.randn(5000)

    def alive(rank: int) -> None:
        assert torch.equal(made[rank].all_reduce(x), sum_in_rank_order([x, x, x]))
        made[rank].all_reduce(x)  # the last rank never joins this sum
        with pytest.raises(RankEnded, match="given up"):
            made[rank].raise_if_failed()
        made[rank].all_reduce(x)

    def dies() -> None:
        made[2].all_reduce(x)
        if how == "stopped":
            for each in made[:2]:
                each.stop_waiting()

    run_in_turns(5, [lambda: alive(0), lambda: alive(1), dies])
    told = made[2].rank_memories[2][: 8 * NUM_PROGRAMS * 3].view(torch.int64).view(NUM_PROGRAMS, 3)
    assert told[:, 2].max() == 1
    assert told[:, :2].max() == 2, "of the sum that was given up, and of none after it"


def test_late_rank_fails_after_peer_gave_up() -> None:
    """A rank that gave up stays silent, because no other rank may add what it computes from then on."""
    made = ranks(2, 300)
    x = torch.ones(10)
    made[0].all_reduce(x)  # alone
    with pytest.raises(RankEnded):
        made[0].raise_if_failed()
    made[0].all_reduce(x * 100)
    assert torch.equal(made[1].all_reduce(x), 2 * x), "what was told before is right"
    made[1].raise_if_failed()
    made[1].all_reduce(x)
    with pytest.raises(RankEnded):
        made[1].raise_if_failed()


class FinishedEvent:
    """Stands for torch.cuda.Event."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


class SharedStorages:
    """Stands for torch.UntypedStorage: storages on the CPU whose handles are numbers."""

    def __init__(self, fails: str = "") -> None:
        """fails: "sharing" or "opening", which fails at its first call."""
        self.shared, self._fails = list[torch.UntypedStorage](), fails

    def _share_cuda_(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        self._work("sharing")
        self.shared.append(storage)
        return 0, len(self.shared) - 1

    def _new_shared_cuda(self, device: int, number: int) -> torch.UntypedStorage:
        self._work("opening")
        return self.shared[number]

    def _work(self, what: str) -> None:
        if self._fails == what:
            self._fails = ""
            raise RuntimeError("peer access is not supported between these two devices")


@pytest.fixture
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the memory of connecting ranks on the CPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", FinishedEvent)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **named: zeros(*size, **named))


def connect_two_ranks(memories: SharedStorages) -> list[Any]:
    """Connect two ranks. They wait for each other at the store, so they take no turns and try no sums."""
    store, device = dist.HashStore(), torch.device("cpu")
    with ThreadPoolExecutor(2) as pool:
        meet = partial(one_shot_all_reduce.connect_one_shot, store, storages=memories, trial=lambda *_: None)
        asked = [pool.submit(meet, rank, 2, device) for rank in range(2)]
        return [each.result(30) for each in asked]


@pytest.mark.usefixtures("_no_gpu")
def test_connect_one_shot_shares_rank_memory() -> None:
    """Ranks use one-shot sums only if the sums of all ranks are right."""
    memories = SharedStorages()
    made = connect_two_ranks(memories)
    assert len(memories.shared) == 2
    assert [each.rank_memories[0].data_ptr() for each in made if each] == [made[0].rank_memories[0].data_ptr()] * 2
    x = torch.ones(9)
    assert [
        each.tolist() for each in run_in_turns(1, [lambda: made[0].all_reduce(x), lambda: made[1].all_reduce(x)])
    ] == [[2.0] * 9] * 2


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("fails", ["sharing", "opening"])
def test_connect_one_shot_returns_none_when_peer_access_fails(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    """One rank fails, and none uses one-shot sums. Each logs the reason."""
    assert connect_two_ranks(SharedStorages(fails)) == [None, None]
    assert "only NCCL: RuntimeError: peer access is not supported" in caplog.text
    assert "cannot reach all others" in caplog.text


@pytest.mark.parametrize("fault", [None, "wrong", "silent"])
def test_verify_all_reduce_detects_wrong_or_missing_sums(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks verify at once."""
    monkeypatch.setattr(torch.cuda, "Event", FinishedEvent)
    made = ranks(2)
    if fault == "wrong":
        launched = OneShotAllReduce.all_reduce
        monkeypatch.setattr(OneShotAllReduce, "all_reduce", lambda own, x: launched(own, x) + (own is made[1]))

    def tried(rank: int) -> str:
        if fault == "silent" and rank == 1:
            return ""
        sizes = ((1, torch.bfloat16), (3000, torch.float32))
        try:
            one_shot_all_reduce.verify_all_reduce(made[rank], rank, 2, torch.device("cpu"), sizes, max_polls=600)
        except ValueError as error:
            return str(error)
        return "right"

    expected = {
        None: ["right", "right"],
        "wrong": ["an all-reduce did not finish", "an all-reduce gave a wrong result"],
        "silent": ["an all-reduce did not finish", ""],
    }
    assert run_in_turns(2, [lambda: tried(0), lambda: tried(1)]) == expected[fault]


def test_verify_all_reduce_gives_up_within_60_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose verification fails must reach the store within the minute that the others wait there, however slow
    sums are.
    """
    (made,) = ranks(1)
    clock, begun = [0.0], [0.0]

    def slept(seconds: float) -> None:
        clock[0] += 1

    def summed(own: OneShotAllReduce, x: Tensor) -> Tensor:
        begun[0] = clock[0]
        return x

    class Late(FinishedEvent):
        def query(self) -> bool:
            return bool(made.host_flags[0]) or clock[0] > begun[0] + 25

    monkeypatch.setattr(one_shot_all_reduce, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=slept))
    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(OneShotAllReduce, "all_reduce", summed)
    monkeypatch.setattr(OneShotAllReduce, "stop_waiting", lambda own: own.host_flags.fill_(1))
    with pytest.raises(ValueError, match="an all-reduce did not finish"):
        one_shot_all_reduce.verify_all_reduce(made, 0, 1, torch.device("cpu"))
    assert clock[0] < 60


class NullProcessGroup:
    """Sums nothing."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_collective_uses_one_shot_for_small_tensors() -> None:
    """Used with --deterministic too. abort_collectives of the collective ends it."""
    made, groups = ranks(2), [NullProcessGroup(), NullProcessGroup()]
    both = [
        DistributedCollective(
            lambda rank=rank: groups[rank], rank, 2, in_order=False, make_small_all_reduce=lambda rank=rank: made[rank]
        )
        for rank in range(2)
    ]
    x = torch.randn(3, 11)
    results = run_in_turns(4, [lambda each=each: each.all_reduce(x) for each in both])
    assert torch.equal(results[0], x + x)
    assert torch.equal(results[1], x + x)
    with pytest.raises(AttributeError, match="allreduce"):
        both[0].all_reduce(torch.zeros(MAX_ELEMENTS + 1))
    both[0].abort_collectives()
    assert groups[0].aborted
    assert made[0].host_flags.tolist() == [1, 0]
    with pytest.raises(RankEnded):
        both[0].all_reduce(x)
    made[1].stop_waiting()
    made[1].all_reduce(x)  # rank 0 has ended
    with pytest.raises(RankEnded):
        both[1].raise_if_failed()
