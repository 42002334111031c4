"""Scheduler outputs, model runner outputs and requests survive encoding for another process."""

from __future__ import annotations

import msgspec

from quire.engine.common.request_params import Grammar, PoolingParams, SamplingParams, ThinkingBudget
from quire.engine.common.scheduler_output import (
    BlockCopy,
    ModelRunnerOutput,
    NewRequestData,
    RequestFailure,
    ScheduledRequest,
    SchedulerOutput,
)
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest, TokenLogprob

PARAMS = SamplingParams(
    temperature=0.5,
    logit_bias={5: 1.5, 7: -100.0},
    allowed_token_ids=(3, 5),
    bad_words_ids=((4,), (5, 6)),
    max_tokens=None,
    grammar=Grammar("regex", "a|b"),
    thinking=ThinkingBudget(6, end_id=3, begin_id=None),
    stop="end",
)


def test_scheduler_output_round_trips_through_msgpack() -> None:
    batch = SchedulerOutput(
        scheduled_requests=[
            ScheduledRequest("a", 0, 0, 17, [4, 9], False),
            ScheduledRequest("b", 2, 40, 1, [], True),
            ScheduledRequest("c", 3, 9, 4, [], True, [5, 6, 7]),
        ],
        new_requests=[
            NewRequestData(0, [1, 2, 3], 3, PARAMS, 2**63 - 1),
            NewRequestData(4, [7], 1, PoolingParams(), 0),
        ],
        block_copies=[BlockCopy(1, 4, 16)],
        preempted_ids=["c"],
    )
    sent = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(sent, type=SchedulerOutput) == batch
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode(SchedulerOutput(batch.scheduled_requests)), type=SchedulerOutput
    ) == SchedulerOutput(batch.scheduled_requests)


def test_model_runner_output_round_trips_through_msgpack() -> None:
    logprob = TokenLogprob(5, -0.25, 1, [(5, -0.25), (6, -1.5)])
    output = ModelRunnerOutput(
        {"b": [5], "c": [1, 2]},
        {"b": [logprob]},
        {"a": [logprob, logprob]},
        {"c": RequestFailure("why", "grammar")},
        {"d": b"\x00\x80"},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=ModelRunnerOutput) == output


def test_engine_request_keeps_sampling_or_pooling_params() -> None:
    for params in (PARAMS, SamplingParams(), PoolingParams()):
        request = EngineCoreRequest(id="a", prompt_ids=[1], params=params, seed=0)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request
    output = EngineCoreOutput("a", [], finish_reason="stop", vector=b"\x00\x80")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=EngineCoreOutput) == output


def test_sampling_params_convert_from_plain_dict() -> None:
    assert msgspec.convert({"temperature": 0.5}, SamplingParams) == SamplingParams(temperature=0.5)
