"""A model whose layers are divided among processes, the stages of a pipeline. The engine is the last one: it decides
the steps, sends each to all stages, and samples. While it computes its layers of one step, the stages before are at the
next ones, which are of other sequences (Scheduler's `micro_batches`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quire.engine.config import EngineConfig
from quire.engine.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from quire.engine.models.decoder import Decoder
from quire.engine.worker.device import Chosen
from quire.engine.worker.loading.model import LoadedModel
from quire.engine.worker.pending import PendingStep
from quire.engine.worker.ranks.messages import Allocate, Loaded, Picked, Step
from quire.engine.worker.ranks.processes import Ranks
from quire.engine.worker.ranks.spmd import for_others
from quire.engine.worker.ranks.stages import Stage
from quire.engine.worker.runner import Begun, ModelRunner
from quire.kernels.distributed import DistributedCollective


class Stages(Ranks):
    """The processes of all stages but the last, in their order."""

    setting, called = "pipeline_parallel_size", "stages"
    over_memory = False

    def __init__(
        self,
        config: EngineConfig,
        chosen: Chosen,
        progress: Callable[[], None],
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """`progress` is called, by a thread, after each part of a step of any of them. Raises ConfigError."""
        super().__init__(config, chosen, on_end)
        self._progress = progress

    def load(self, load: Callable[..., LoadedModel]) -> tuple[LoadedModel, int]:
        own = load(kind=Stage)
        assert isinstance(own.model, Stage)
        assert isinstance(self.group, DistributedCollective)
        own.model.follow(self.group, self.count - 1)
        others = self.read(Loaded)
        checkpoint = own.checkpoint.joined(each.table for each in others)
        return replace(own, checkpoint=checkpoint), sum(each.weight_bytes for each in others)

    def allocate(self, message: Allocate) -> None:
        super().allocate(message)
        for read in self._answers:  # from now on they answer nothing else
            hearing = (partial(read, None), self._progress)
            threading.Thread(target=_hear, args=hearing, name="progress", daemon=True).start()

    def runner(self, *parts: Any) -> ModelRunner:
        return PipelineRunner(self, *parts)

    def everywhere(self, model: Decoder) -> None:
        """Stages answer nothing once they have loaded."""


def _hear(read: Callable[[], bytes | None], progress: Callable[[], None]) -> None:
    while read() is not None:
        progress()


class PipelineRunner(ModelRunner):
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
    def launch(self, batch: SchedulerOutput) -> _Passing:
        """Begin a batch in the first stage. None of its rows may follow a pick that is still under way."""
        taken = {admission.slot for admission in batch.new_requests}
        if any(row.slot in taken for step in self._under_way for row in step.begun.batch.scheduled_requests):
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

    def result(self) -> ModelRunnerOutput:
        return self.runner.finish(self).result()


class StageRunner(ModelRunner):
    """That of a stage but the last one, which sends on what it has computed."""

    def __init__(self, group: DistributedCollective, *parts: Any) -> None:
        """`parts`: a Runner's."""
        super().__init__(*parts)
        self._group = group

    @torch.inference_mode()
    def compute(self, batch: SchedulerOutput, picked: list[Picked]) -> None:
        """`picked`: by steps before, what later ones go on with. Raises RankEnded where the next stage has."""
        for each in picked:
            at = torch.tensor([each.slots, each.positions], dtype=torch.int64)
            self._slots.token_ids[at[0], at[1]] = torch.tensor(each.token_ids, dtype=torch.int32)
        begun = self._begin(batch)
        self._copy(batch)
        if (inputs := begun.inputs) is not None:
            for passed in self._model.pass_on(inputs.token_ids, inputs.metadata, self._kv_cache, begun.features):
                self._group.send(passed, (self._group.rank + 1) % self._group.count)
