from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from quire.engine.common import clock
from quire.engine.common.executor import Executor, PendingOutput
from quire.engine.common.scheduler_output import SchedulerOutput
from quire.engine.common.types import EngineCoreOutput
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.stats import StepRecord, make_step_record
from quire.engine.processes.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    scheduler_output: SchedulerOutput
    pending_output: PendingOutput
    began_at: float
    scheduled_at: float


class StepRunner:
    """`steps_ahead`: number of steps in flight while the next one is scheduled. With 1, the device never waits for
    Python, but a stop condition is found one step late. If a request needs its tokens on the host, the oldest step is
    applied before the next is scheduled. Otherwise the request would miss every other step.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, steps_ahead: int, heartbeat: Heartbeat) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._steps_ahead = steps_ahead
        self._heartbeat = heartbeat
        self._in_flight: deque[_LaunchedStep] = deque()
        self._num_applied = 0
        self.last_record: StepRecord | None = None
        """None if the last run_step() applied no step."""

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_requests or bool(self._in_flight)

    def run_step(self) -> list[EngineCoreOutput]:
        self.last_record = None
        if self._in_flight and self._scheduler.needs_host_tokens:
            self._heartbeat.begin_step([])
            self._apply_step(self._in_flight.popleft())
        began_at = clock.monotonic()
        scheduler_output = self._scheduler.schedule()
        self._heartbeat.begin_step([] if scheduler_output is None else _new_request_ids(scheduler_output))
        if scheduler_output is not None:
            scheduled_at = clock.monotonic()
            self._in_flight.append(
                _LaunchedStep(scheduler_output, self._executor.launch(scheduler_output), began_at, scheduled_at)
            )
        if self.last_record is None and len(self._in_flight) > (0 if scheduler_output is None else self._steps_ahead):
            self._apply_step(self._in_flight.popleft())
        elif not self.has_work:
            self._scheduler.kv_cache_manager.block_pool.check_invariants()
        elif scheduler_output is None and not self._in_flight:
            self._scheduler.wait_for_loads()
        if self._in_flight:
            self._in_flight[-1].pending_output.sample_tokens()
        self._heartbeat.end_step()
        outputs = self._scheduler.take_outputs()
        if self.last_record is not None:
            self.last_record = msgspec.structs.replace(
                self.last_record, num_generated_tokens=sum(len(each.new_ids) for each in outputs)
            )
        return outputs

    def _apply_step(self, step: _LaunchedStep) -> None:
        output = step.pending_output.result()
        computed_at = clock.monotonic()
        self._scheduler.update_from_output(step.scheduler_output, output)
        self._num_applied += 1
        self.last_record = make_step_record(
            step.scheduler_output,
            self._num_applied,
            (step.began_at, step.scheduled_at, computed_at, clock.monotonic()),
            used_cuda_graph=output.used_cuda_graph,
        )
        if (offloader := self._scheduler.kv_offloader) is not None:
            offloader.record_step_cost(self.last_record.num_tokens, computed_at - step.scheduled_at)


def _new_request_ids(scheduler_output: SchedulerOutput) -> list[str]:
    """Ids of requests that start in this step or resume after preemption."""
    slots = {new_request.slot for new_request in scheduler_output.new_requests}
    return [row.request_id for row in scheduler_output.scheduled_requests if row.slot in slots] if slots else []
