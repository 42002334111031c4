"""Ranks that divide every layer, and all run the same program, each on its part (SPMD: Darema et al., 1988). The first
one is the engine: it sends each batch, and what else its runner is asked for, before it does the same. So every rank
makes its tensors on its own device, captures the same decode graphs in the same order, and launches a step before the
last one's picks are read. What is picked the first rank decides (choose_sampler), and the others hear it by their
collective."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any

import torch
from msgspec.structs import replace

from quire.engine.config import EngineConfig
from quire.engine.core.batch import Admission, Batch, DraftRow, StepOutput
from quire.engine.core.executor import Pending
from quire.engine.errors import ConfigError, EngineError
from quire.engine.layers.shard import Shard
from quire.engine.types import SamplingParams
from quire.engine.worker.device import Chosen
from quire.engine.worker.heads import Heads
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.loading.samples import sampled
from quire.engine.worker.ranks.meeting import check_connection, in_order, open_store
from quire.engine.worker.ranks.messages import (
    Draft,
    Measure,
    Measured,
    Prepare,
    Step,
    ToRank,
    TryGuess,
)
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.ranks.remote import Gathering, Remote
from quire.engine.worker.runner import Runner
from quire.engine.worker.sampling.sampling_rules import only_largest
from quire.kernels.collective import Collective
from quire.kernels.distributed import join_ranks

_CLOSE_SECONDS = 5.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CUMEM = "NCCL_CUMEM_ENABLE"
"""With 1, NCCL pays for what decode graphs hold of its calls with memory of its own, gigabytes with some drivers
(https://github.com/NVIDIA/nccl/issues/1234), which nobody has set aside. Without, there are no sums by NVLink's
switches (NVLS); so it stays as it is where no graph is captured."""


class SpmdRanks(Ranks):
    """The processes of the ranks but the first, on this machine and on others."""

    setting, called = "tensor_parallel_size", "ranks"

    def __init__(
        self, config: EngineConfig, local: EngineConfig, chosen: Chosen, on_end: Callable[[int], None] | None = None
    ) -> None:
        """Waits until all machines have joined. `local`: `config` with this machine's own paths. Raises ConfigError."""
        self._config, self._device = local, chosen.device
        self.pinned = chosen.device.type == "cpu"
        if chosen.device.type == "cuda" and not config.enforce_eager:
            os.environ.setdefault(_CUMEM, "0")
        gathering = Gathering(config) if config.nnodes > 1 else None
        remote = [] if gathering is None else gathering.wait()
        self._over = threading.Event()
        try:
            self.group, memory, store = self._meet(local, chosen, gathering)
            # NCCL waits in `close` until the GPU has stopped, and until no decode graph holds its calls any more. The
            # thread is there from the start: this may be let go of when a program ends, which begins no threads then.
            closing = threading.Thread(target=_close, args=(self._over, self.group), name="let-go", daemon=True)
            closing.start()
            waits = chosen.device.type == "cpu"  # for the store's port, which the next engine listens at
            weakref.finalize(self, _let_go, self._over, closing if waits else None).atexit = False
            super().__init__(local, [memory] * (config.ranks_here - 1), on_end, remote, store)
        except BaseException:
            for each in remote:
                each.destroy()
            raise

    def _meet(
        self, config: EngineConfig, chosen: Chosen, gathering: Gathering | None
    ) -> tuple[Collective, list[int], tuple[str, int] | None]:
        """The ranks as this one sees them, and by which descriptors or at which place the others find them."""
        count, device = config.tensor_parallel_size, chosen.device
        row = 4 * -(-chosen.spec.vocab_size // count)
        memory = None if gathering is not None else chosen.backend.ranks_memory(count, row)
        if memory is not None:
            return chosen.backend.collective(memory, 0, count), [memory], None
        host = "127.0.0.1" if gathering is None else gathering.host
        store = open_store(socket.create_server((host, 0))) if gathering is None else gathering.store
        group = join_ranks(store, 0, count, device, in_order=in_order(config, device), address=host)
        return group, [], (host, store.port)

    @property
    def note(self) -> str:
        return f"{super().note}{', each on a GPU of its own' if self._device.type == 'cuda' else ''}"

    def environment(self, rank: int) -> dict[str, str] | None:
        if self._device.type != "cuda":
            return None
        return os.environ | {_VISIBLE: visible_gpus(rank, os.environ.get(_VISIBLE), torch.cuda.device_count())}

    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        own = load(shard=Shard(0, self.count, self.group, self._config.divides_tokens))
        others = self.wait_loaded()
        digest = sampled(self._config) if self._config.nnodes > 1 else ""
        for process, each in zip(self._processes, others, strict=True):
            if each.digest != digest:
                where = f"the machine at {process.host}" if isinstance(process, Remote) else "a rank"
                raise ConfigError(f"model: {where} has other weights than machine 0", param="model")
        return replace_fields(own, read_bytes=own.read_bytes + sum(each.weight_bytes for each in others)), 0

    def available(self, measure: Callable[[], int]) -> int:
        """What the ranks of a machine have together, as the machine, or the GPU, with the least room decides; once all
        have reached each other. Raises ConfigError."""
        self.send(Measure())
        with self.watched():
            check_connection(self.group, self._device)
            own = measure()
        least = min([own, *(each.available for each in self.read(Measured))])
        return least * self.count if self._device.type == "cuda" else least

    def runner(self, *parts: Any) -> Runner:
        return SpmdRunner(self, *parts)

    def heads(self, *parts: Any) -> Heads:
        return SpmdHeads(self, *parts)

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

    @contextmanager
    def told(self, message: ToRank) -> Iterator[None]:
        """All other ranks do what runs inside."""
        self.send(message)
        with self.watched():
            yield

    def _check(self, error: Exception | None = None) -> None:
        if self.failure:
            raise EngineError(self.failure) from error

    def let_go(self) -> None:
        self._over.set()


class SpmdRunner(Runner):
    """The first rank's."""

    def __init__(self, ranks: SpmdRanks, *parts: Any) -> None:
        """`parts`: a Runner's."""
        super().__init__(*parts)
        self._ranks = ranks

    def launch(self, batch: Batch) -> Pending:
        with self._ranks.told(Step(for_others(batch))):
            return _Watched(self._ranks, super().launch(batch))

    def warm_up(self) -> bool:
        with self._ranks.told(Prepare("warm_up")):
            return super().warm_up()

    def warm_sampler(self) -> None:
        with self._ranks.told(Prepare("warm_sampler")):
            super().warm_sampler()

    def warm_prompts(self) -> None:
        with self._ranks.told(Prepare("warm_prompts")):
            super().warm_prompts()


class SpmdHeads(Heads):
    """The first rank's. All ranks have whole heads, which ask the decoder that the ranks share for embeddings and
    logits."""

    def __init__(self, ranks: SpmdRanks, *parts: Any) -> None:
        """`parts`: those of Heads."""
        super().__init__(*parts)
        self._ranks = ranks

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        with self._ranks.told(Draft(list(rows))):
            return super().draft(rows)

    def try_guess(self, count: int) -> None:
        with self._ranks.told(TryGuess(count)):
            super().try_guess(count)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A step under way."""

    ranks: SpmdRanks
    own: Pending

    def result(self) -> StepOutput:
        with self.ranks.watched():
            return self.own.result()


def _let_go(over: threading.Event, closing: threading.Thread | None) -> None:
    over.set()
    if closing is not None:
        closing.join(_CLOSE_SECONDS)


def _close(over: threading.Event, group: Collective) -> None:
    """In a thread."""
    over.wait()
    group.close()


def for_others(batch: Batch) -> Batch:
    """What ranks that answer nobody need of a batch. How tokens are picked is not theirs to know, not even grammars;
    but whether it is by the largest logit alone, which all ranks find together."""
    admissions = [_computed(each) for each in batch.admissions]
    return Batch(batch.rows, admissions, batch.copies, slot_copies=batch.slot_copies)


def _computed(admission: Admission) -> Admission:
    if not isinstance(admission.params, SamplingParams):
        return admission
    temperature = 0.0 if only_largest(admission.params) else 1.0
    params = SamplingParams(temperature=temperature, prompt_logprobs=admission.params.prompt_logprobs)
    return replace(admission, params=params)


def visible_gpus(rank: int, visible: str | None, count: int) -> str:
    """CUDA_VISIBLE_DEVICES of a rank, by the engine's and the number of GPUs: its own first, so that in each rank every
    thread's GPU is the right one. It sees the others too, for where one rank sees a GPU and another does not, NCCL may
    choose different ways between them (https://github.com/NVIDIA/nccl/issues/1066)."""
    gpus = [str(gpu) for gpu in range(count)] if visible is None else [each.strip() for each in visible.split(",")]
    return ",".join([gpus.pop(rank), *gpus])
