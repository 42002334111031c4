"""A model whose layers are divided among processes, the stages of a pipeline. The engine is the last one: it decides
the steps, sends each to all stages, and samples. While it computes its layers of one step, the stages before are at the
next ones, which are of other sequences (Scheduler's `micro_batches`)."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import torch

from quire.engine.config import EngineConfig
from quire.engine.core.batch import Batch, StepOutput
from quire.engine.models.decoder import Decoder
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.pending import PendingStep
from quire.engine.worker.ranks.messages import Loaded, Picked, Step
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.ranks.spmd import for_others
from quire.engine.worker.ranks.stages import Stage, of_pipe, pass_to
from quire.engine.worker.runner import Begun, Runner


class Stages(Ranks):
    """The processes of all stages but the last, in their order."""

    setting, called = "pipeline_parallel_size", "stages"

    def __init__(
        self, config: EngineConfig, progress: Callable[[], None], on_end: Callable[[int], None] | None = None
    ) -> None:
        """`progress` is called, by a thread, after each part of a step of any of them. Raises ConfigError."""
        pipes = [os.pipe() for _ in range(config.pipeline_parallel_size - 1)]
        reads, writes = zip(*pipes, strict=True)
        last = os.fdopen(reads[-1], "rb")
        try:
            super().__init__(config, [[writes[0]], *map(list, zip(writes[1:], reads, strict=False))], on_end)
        except BaseException:
            last.close()
            raise
        self._passed = of_pipe(last)
        """What the last of them passes on."""
        self._progress = progress

    def wait_loaded(self) -> list[Loaded]:
        found = super().wait_loaded()
        for read in self._answers:
            threading.Thread(target=_hear, args=(read, self._progress), name="progress", daemon=True).start()
        return found

    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        own = load(kind=Stage)
        assert isinstance(own.model, Stage)
        own.model.follow(self._passed)
        others = self.wait_loaded()
        checkpoint = own.checkpoint.joined(each.table for each in others)
        return replace(own, checkpoint=checkpoint), sum(each.weight_bytes for each in others)

    def runner(self, *parts: Any) -> Runner:
        return PipelineRunner(self, *parts)

    def everywhere(self, model: Decoder) -> None:
        """Stages answer nothing once they have loaded."""


def _hear(read: Callable[[], bytes | None], progress: Callable[[], None]) -> None:
    while read() is not None:
        progress()


class PipelineRunner(Runner):
    """The last stage's. What a step picks is computed when it is asked for, and the steps launched meanwhile are under
    way in the stages before."""

    def __init__(self, stages: Stages, *parts: Any) -> None:
        """`parts`: a Runner's."""
        super().__init__(*parts)
        self._stages = stages
        self._under_way: deque[_Passing] = deque()
        self._picked: list[Picked] = []
        """What the stages before have not heard yet."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> _Passing:
        """Begin a batch in the first stage. None of its rows may follow a pick that is still under way."""
        taken = {admission.slot for admission in batch.admissions}
        if any(row.slot in taken for step in self._under_way for row in step.begun.batch.rows):
            self.finish(self._under_way[-1])  # what it picks for who had the slot, it must read there
        self._stages.send(Step(for_others(batch), self._picked))
        self._picked = []
        self._under_way.append(step := _Passing(self, self._begin(batch)))
        return step

    @torch.inference_mode()
    def finish(self, step: _Passing) -> PendingStep:
        """Compute the last layers of a step, and of all before it."""
        while step.pending is None:
            first = self._under_way.popleft()
            with self._stages.watched():
                first.pending = self._finish(first.begun)
            picks, picked = first.begun.picks, first.pending.download.wait()[0]
            self._picked.append(Picked(picks.slots.tolist(), picks.positions.tolist(), picked.tolist()))
        return step.pending


@dataclass(slots=True)
class _Passing:
    """A step under way."""

    runner: PipelineRunner
    begun: Begun
    pending: PendingStep | None = None

    def result(self) -> StepOutput:
        return self.runner.finish(self).result()


class StageRunner(Runner):
    """That of a stage but the last one, which passes on what it has computed."""

    def __init__(self, after: BinaryIO, *parts: Any) -> None:
        """`after`: the pipe to the next stage. `parts`: a Runner's."""
        super().__init__(*parts)
        self._after = after

    @torch.inference_mode()
    def compute(self, batch: Batch, picked: list[Picked]) -> None:
        """`picked`: by steps before, what later ones go on with. Raises BrokenPipeError where the next stage has
        ended."""
        for each in picked:
            at = torch.tensor([each.slots, each.positions], dtype=torch.int64)
            self._slots.token_ids[at[0], at[1]] = torch.tensor(each.token_ids, dtype=torch.int32)
        begun = self._begin(batch)
        self._copy(batch)
        if (inputs := begun.inputs) is not None:
            passed = self._model.pass_on(inputs.token_ids, inputs.metadata, self._kv_cache, begun.features)
            pass_to(self._after, *passed)
