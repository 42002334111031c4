"""Ranks that all run the same steps (SPMD), each on a GPU of its own. The first one is the engine: it sends each batch,
and what else its runner is asked for, before it does the same. So every rank makes its tensors on its own GPU, captures
the same decode graphs in the same order, and launches a step before the last one's picks are read. What is picked the
first rank decides (choose_sampler), and the others hear it from their GPUs."""

from __future__ import annotations

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from msgspec.structs import replace

from quire.engine.batch import Admission, Batch, StepOutput
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, EngineError
from quire.engine.executor import Pending
from quire.engine.types import SamplingParams
from quire.engine.worker.ranks.messages import Measure, Measured, Preparation, Prepare, Step
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.runner import Runner
from quire.kernels.collective import Collective, RankEnded
from quire.kernels.distributed import join_ranks

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CUMEM = "NCCL_CUMEM_ENABLE"
"""With 1, NCCL pays for what decode graphs hold of its calls with memory of its own, gigabytes with some drivers
(https://github.com/NVIDIA/nccl/issues/1234), which nobody has set aside."""


_TRIED = 2**20
_PRIME = 251
"""Numbers of a first sum, and what they stay under."""
_SUM_SECONDS = 60.0


class SpmdRanks(Ranks):
    """The processes of the ranks but the first."""

    setting, called, pinned, spmd = "tensor_parallel_size", "ranks", False, True

    def __init__(self, config: EngineConfig, device: torch.device, on_end: Callable[[int], None] | None = None) -> None:
        """`device`: the first rank's. Raises ConfigError."""
        self._device = device
        count, memory, key = config.tensor_parallel_size, _meeting_place(), secrets.token_bytes(8)
        if device.type == "cuda":
            os.environ.setdefault(_CUMEM, "0")
        super().__init__(config, [[os.dup(memory)]] * (count - 1), on_end, key=key)
        self.group = join_ranks(memory, key, 0, count, device, in_order=in_order(config, device))
        self._over = threading.Event()
        # NCCL waits in `close` until the GPU has stopped, and until no decode graph holds its calls any more. The
        # thread is there from the start: this may be let go of when a program ends, which begins no threads any more.
        threading.Thread(target=_close, args=(self._over, self.group), name="let-go", daemon=True).start()
        weakref.finalize(self, self._over.set).atexit = False  # the process' end does it

    @property
    def note(self) -> str:
        return f"{super().note}{', each on a GPU of its own' if self._device.type == 'cuda' else ''}"

    def environment(self, rank: int) -> dict[str, str] | None:
        if self._device.type != "cuda":
            return None
        return os.environ | {_VISIBLE: visible_gpus(rank, os.environ.get(_VISIBLE), torch.cuda.device_count())}

    def least(self, measure: Callable[[], int]) -> int:
        """The least of what `measure` finds here and on the other ranks, which do the same at the same time, once all
        have reached each other. Raises ConfigError."""
        self.send(Measure())
        with self.watched():
            check_connection(self.group, self._device)
            own = measure()
        return min([own, *(each.available for each in self.read(Measured))])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Also where a GPU that waits no longer for a rank that has ended goes on with what it has."""
        self._check()
        try:
            with super().watched():
                yield
        except RuntimeError as error:  # PyTorch's
            self._check(error)
            raise
        self._check()

    def _check(self, error: Exception | None = None) -> None:
        if self.failure:
            raise EngineError(self.failure) from error

    def _let_go(self) -> None:
        if (over := getattr(self, "_over", None)) is not None:  # None: one has ended before it joined
            over.set()


class SpmdRunner(Runner):
    """The first rank's."""

    _ranks: SpmdRanks

    def lead(self, ranks: SpmdRanks) -> None:
        """Call it before use."""
        self._ranks = ranks

    def launch(self, batch: Batch) -> Pending:
        self._ranks.send(Step(for_others(batch)))
        with self._ranks.watched():
            return _Watched(self._ranks, super().launch(batch))

    def warm_up(self) -> bool:
        with self._others("warm_up"):
            return super().warm_up()

    def warm_sampler(self) -> None:
        with self._others("warm_sampler"):
            super().warm_sampler()

    def warm_prompts(self) -> None:
        with self._others("warm_prompts"):
            super().warm_prompts()

    @contextmanager
    def _others(self, what: Preparation) -> Iterator[None]:
        self._ranks.send(Prepare(what))
        with self._ranks.watched():
            yield


@dataclass(frozen=True, slots=True)
class _Watched:
    """A step under way."""

    ranks: SpmdRanks
    own: Pending

    def result(self) -> StepOutput:
        with self.ranks.watched():
            return self.own.result()


@cache
def _meeting_place() -> int:
    """The descriptor of a file where the ranks of this process' engines meet: see join_ranks."""
    return os.memfd_create("quire-ranks")


def _close(over: threading.Event, group: Collective) -> None:
    """In a thread."""
    over.wait()
    group.close()


def for_others(batch: Batch) -> Batch:
    """What ranks that answer nobody need of a batch. How tokens are picked is not theirs to know: not even grammars."""
    return Batch(batch.rows, [_computed(each) for each in batch.admissions], batch.copies)


def _computed(admission: Admission) -> Admission:
    if not isinstance(admission.params, SamplingParams):
        return admission
    return replace(admission, params=SamplingParams(prompt_logprobs=admission.params.prompt_logprobs))


def in_order(config: EngineConfig, device: torch.device) -> bool:
    """Whether sums must have an order that nothing else changes."""
    return config.deterministic or device.type == "cpu"


def visible_gpus(rank: int, visible: str | None, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a rank, by the engine's and the number of GPUs: its own first, so that in each rank every
    thread's GPU is the right one. It sees the others too, for where one rank sees a GPU and another does not, NCCL may
    choose different ways between them (https://github.com/NVIDIA/nccl/issues/1066)."""
    gpus = [str(gpu) for gpu in range(count)] if visible is None else [each.strip() for each in visible.split(",")]
    return ",".join([gpus.pop(rank), *gpus])


def check_connection(group: Collective, device: torch.device) -> None:
    """Sum some megabytes once. Raises ConfigError where the ranks cannot reach each other, with what the library says
    of it, and where what they add does not come, or comes wrong, as between GPUs behind some IOMMUs."""
    try:
        wrong = _wrong_sum(group, device)
    except (RankEnded, RuntimeError) as error:
        said = (str(error.__cause__ or error).strip() or "no message").splitlines()
        wrong = next((line for line in said if "rror" in line), said[0])
        advice = "NCCL_DEBUG=WARN says more; in a container NCCL needs --shm-size 1g or more"
        cause: Exception | None = error
    else:
        advice, cause = "NCCL_P2P_DISABLE=1 has them meet in the host's memory", None
    if wrong is not None:
        wrong = f"the ranks' GPUs cannot reach each other: {wrong}; {advice}"
        raise ConfigError(f"tensor_parallel_size: {wrong}", param="tensor_parallel_size") from cause


def _wrong_sum(group: Collective, device: torch.device) -> str | None:
    """What is wrong with a sum of whole numbers, which float32 holds."""
    numbers = torch.arange(_TRIED, device=device, dtype=torch.float32) % _PRIME
    found = group.sum(numbers.clone())
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record()
        until = time.monotonic() + _SUM_SECONDS
        while not done.query():  # else it would be NCCL's timeout that ends the start, after minutes
            if time.monotonic() > until:
                return f"a sum did not come in {_SUM_SECONDS:g} s"
            time.sleep(0.01)
    return None if torch.equal(found, group.count * numbers) else "a sum came wrong"
