"""Batches and what comes of them can be sent to another process."""

from __future__ import annotations

import msgspec

from quire.engine.core.batch import Admission, Batch, Failure, PageCopy, Row, StepOutput
from quire.engine.types import (
    Grammar,
    PoolingParams,
    Request,
    RequestOutput,
    SamplingParams,
    ThinkingBudget,
    TokenLogprob,
)

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


def test_a_batch_survives_the_way_to_another_process() -> None:
    batch = Batch(
        rows=[Row("a", 0, 0, 17, [4, 9], False), Row("b", 2, 40, 1, [], True), Row("c", 3, 9, 4, [], True, [5, 6, 7])],
        admissions=[Admission(0, [1, 2, 3], 3, PARAMS, 2**63 - 1), Admission(4, [7], 1, PoolingParams(), 0)],
        copies=[PageCopy(1, 4, 16)],
        preempted=["c"],
    )
    sent = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(sent, type=Batch) == batch
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Batch(batch.rows)), type=Batch) == Batch(batch.rows)


def test_so_does_what_comes_of_it() -> None:
    logprob = TokenLogprob(5, -0.25, 1, [(5, -0.25), (6, -1.5)])
    output = StepOutput(
        {"b": [5], "c": [1, 2]},
        {"b": [logprob]},
        {"a": [logprob, logprob]},
        {"c": Failure("why", "grammar")},
        {"d": b"\x00\x80"},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput) == output


def test_requests_for_tokens_and_for_vectors_are_told_apart() -> None:
    for params in (PARAMS, SamplingParams(), PoolingParams()):
        request = Request(id="a", prompt_ids=[1], params=params, seed=0)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
    output = RequestOutput("a", [], finish_reason="stop", vector=b"\x00\x80")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=RequestOutput) == output


def test_params_are_also_read_from_plain_settings() -> None:
    assert msgspec.convert({"temperature": 0.5}, SamplingParams) == SamplingParams(temperature=0.5)
