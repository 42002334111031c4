"""The engine process's loop between messages, with a fake socket and engine."""

from __future__ import annotations

from typing import cast

import zmq

from quire.engine.client.messages import EngineCoreMethods, Submit, ToEngine
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.stats import EngineStats, EngineView
from quire.engine.engine_core import EngineCore
from quire.engine.engine_core_process import _handle_messages_and_get_change
from quire.engine.processes.utility_calls import encode, make_call


class Idle:
    """An engine with `left` warmup steps and nothing to compute."""

    has_work = False

    def __init__(self, left: int) -> None:
        self.left = left
        self.done: list[str] = []

    def run_next_warmup(self) -> bool:
        self.done.append("prepare")
        self.left = max(0, self.left - 1)
        return self.left > 0

    def make_engine_view(self) -> EngineView:
        self.done.append("view")
        return EngineView(EngineStats(), [], b"", 0, 0.0)

    def add_request(self, request: EngineCoreRequest) -> None:
        self.done.append("add")


class Script:
    """Messages that arrive once the engine has done a given number of things; a blocking receive lets the next one
    arrive.
    """

    def __init__(self, engine: Idle, messages: list[tuple[int, ToEngine]]) -> None:
        self.engine = engine
        self.messages = messages
        self.sent = 0

    def poll(self, timeout: int) -> bool:
        assert timeout == 0
        return bool(self.messages) and len(self.engine.done) >= self.messages[0][0]

    def recv(self) -> bytes:
        if not self.poll(0):
            self.engine.done.append("wait")
        return encode(self.messages.pop(0)[1])

    def send(self, message: bytes) -> None:
        self.sent += 1


def receive(left: int, messages: list[tuple[int, ToEngine]]) -> list[str]:
    engine = Idle(left)
    socket = Script(engine, messages)
    _handle_messages_and_get_change(cast(EngineCore, engine), cast("zmq.Socket[bytes]", socket))
    assert not socket.messages
    assert socket.sent == sum(each == "view" for each in engine.done)
    return engine.done


LOOK = make_call(EngineCoreMethods.take_snapshot, 1)
SUBMIT = Submit([EngineCoreRequest(id="a", prompt_ids=[1], params=SamplingParams(), seed=0)])


def test_engine_view_call_does_not_stop_warmup() -> None:
    done = receive(4, [(1, LOOK), (3, LOOK), (100, SUBMIT)])
    assert done == ["prepare", "view", "prepare", "view", "prepare", "prepare", "wait", "add"]


def test_request_waits_for_at_most_one_warmup_step() -> None:
    assert receive(9, [(2, SUBMIT)]) == ["prepare", "prepare", "add"]


def test_idle_engine_waits_and_answers_view_calls() -> None:
    assert receive(0, [(100, LOOK), (100, SUBMIT)])[-4:] == ["view", "prepare", "wait", "add"]
