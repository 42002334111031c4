"""Token gaps, timelines and step records in the request history of one or more engines."""

from __future__ import annotations

import gc

import msgspec

from quire.engine.client.request_history import RequestHistory
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.stats import StepRecord


def record(number: int, ended: float = 3.0) -> StepRecord:
    return StepRecord(number, 1.0, 1.0, 2.0, ended, 1, 1, (), ())


def test_token_gaps_equal_times_between_engine_steps() -> None:
    """However late the steps are recorded, and however many tokens a step gives."""
    history, gaps = RequestHistory(), list[float]()
    history.token_gap_listeners.append(gaps.append)
    for name in ("a", "b"):
        history.record_submission(EngineCoreRequest(id=name, prompt_ids=[1], params=SamplingParams(), seed=0))
    history.record_step([EngineCoreOutput("a", [7])], record(1, 3.0))
    history.record_step([EngineCoreOutput("a", [8, 9]), EngineCoreOutput("b", [8])], record(2, 3.5))
    history.record_step([EngineCoreOutput("b", [])], record(3, 4.0))
    history.record_step([EngineCoreOutput("a", [7]), EngineCoreOutput("b", [9])], record(4, 5.5))
    assert gaps == [0.5, 2.0, 2.0]


def test_timeline_follows_request_across_replicas() -> None:
    history = RequestHistory(replicas=2)
    for name in ("a", "b"):
        history.record_submission(EngineCoreRequest(id=name, prompt_ids=[1], params=SamplingParams(), seed=0))
    history.record_step([EngineCoreOutput("a", [7])], record(1), 0)
    history.record_step([EngineCoreOutput("b", [7])], record(1), 1)
    history.record_engine_death(0, ["a"])
    history.record_step([EngineCoreOutput("a", [8]), EngineCoreOutput("b", [8])], record(2), 1)
    history.record_engine_death(1, ["a", "b"])
    history.record_step([EngineCoreOutput("a", [9])], record(1), 0)
    history.record_step([EngineCoreOutput("b", [9])], record(1), 1)
    timelines = {timeline.id: timeline for timeline in history.open_timelines}
    assert [(step.engine_number, step.replica) for step in timelines["a"].steps] == [(0, 0), (1, 1), (2, 0)]
    assert [(step.engine_number, step.replica) for step in timelines["b"].steps] == [(1, 1), (1, 1), (3, 1)]
    assert (timelines["a"].count_phase("recovering"), timelines["b"].count_phase("recovering")) == (2, 1)
    assert timelines["a"].steps[1].request_ids == ("a", "b")


def test_step_records_are_not_tracked_by_gc() -> None:
    """A history has 100,000 steps: garbage collections of new ones stalled the event loop."""
    history = RequestHistory()
    history.record_submission(EngineCoreRequest(id="a", prompt_ids=[1, 2], params=SamplingParams(), seed=0))
    step_record = StepRecord(1, 1.0, 1.0, 2.0, 3.0, 1, 2, (("a", 0, 2),), ())
    history.record_step(
        [EngineCoreOutput("a", [7])], msgspec.msgpack.decode(msgspec.msgpack.encode(step_record), type=StepRecord)
    )
    (step,) = history.open_timelines[0].steps
    assert step.record == step_record
    tracked = [each for each in (step, step.record, step.record.preempted_ids) if gc.is_tracked(each)]
    assert not tracked
