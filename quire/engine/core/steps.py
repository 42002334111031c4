"""Runs steps: schedule, launch, apply. On a GPU a step is launched before the result of the last one is applied."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from quire.engine import clock
from quire.engine.core.executor import Executor, PendingOutput
from quire.engine.core.history import step_record
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_output import SchedulerOutput
from quire.engine.core.stats import StepRecord
from quire.engine.processes.heartbeat import NoHeartbeat
from quire.engine.types import EngineCoreOutput


@dataclass(frozen=True, slots=True)
class _Launched:
    batch: SchedulerOutput
    pending: PendingOutput
    began: float
    decided: float


class Steps:
    """Runs the steps that a scheduler decides on an executor, in order.

    ahead: how many steps may be under way while the next one is decided. With 0 the scheduler learns from each step at
    once. With 1 the device gets its next step before it ends the current one, so it never waits for Python; the
    scheduler then finds a stop condition one step late, and drops the token computed in vain. While a sequence runs
    that looks back, the oldest step is learnt from first: otherwise such a sequence would sit out every other step.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, ahead: int, heartbeat: NoHeartbeat) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._ahead = ahead
        self._heartbeat = heartbeat
        self._under_way: deque[_Launched] = deque()
        self._learnt = 0
        self.last: StepRecord | None = None
        """The record of the step whose result the last call of step() applied; None if it applied none."""

    @property
    def busy(self) -> bool:
        return self._scheduler.busy or bool(self._under_way)

    def step(self) -> list[EngineCoreOutput]:
        """Launch a step if there is one, and apply the oldest step's result once more than `ahead` are under way.

        Returns the outputs of that and of adds and aborts.
        """
        self.last = None
        if self._under_way and self._scheduler.needs_host_tokens:
            self._heartbeat.begin_step([])
            self._learn(self._under_way.popleft())
        began = clock.monotonic()
        batch = self._scheduler.schedule()
        self._heartbeat.begin_step([] if batch is None else batch.new_request_ids)
        if batch is not None:
            decided = clock.monotonic()
            self._under_way.append(_Launched(batch, self._executor.launch(batch), began, decided))
        if self.last is None and len(self._under_way) > (0 if batch is None else self._ahead):
            self._learn(self._under_way.popleft())
        elif not self.busy:
            self._scheduler.pool.audit()
        elif batch is None and not self._under_way:
            self._scheduler.wait()
        self._heartbeat.end_step()
        outputs = self._scheduler.take_outputs()
        if self.last is not None:
            self.last = msgspec.structs.replace(self.last, generated=sum(len(each.new_ids) for each in outputs))
        return outputs

    def _learn(self, step: _Launched) -> None:
        output = step.pending.result()
        computed = clock.monotonic()
        self._scheduler.apply(step.batch, output)
        self._learnt += 1
        self.last = step_record(
            step.batch,
            self._learnt,
            (step.began, step.decided, computed, clock.monotonic()),
            captured=output.used_cuda_graph,
        )
        self._scheduler.tiers.computed(self.last.tokens, computed - step.decided)
