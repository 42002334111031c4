"""Layers streamed from host memory: in any order that streams and events allow, a layer is computed with its own
weights, and no copy is pending after the last layer.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.engine.checkpoint.layer_placement import STREAMED_LAYER_SLOTS, pick_evenly_spaced_layers
from quire.kernels.reference import ReferenceBackend
from quire.kernels.streaming.host_layers import HostLayerStreamer

_SIZE = 40


class Event:
    done = False


class Stream:
    """Runs actions in order; an action waits for the events before it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.queue = runtime, deque[Callable[[], bool]]()

    def do(self, action: Callable[[], Any]) -> None:
        def done() -> bool:
            action()
            return True

        self.queue.append(done)

    def record_event(self) -> Event:
        event = Event()
        self.do(lambda: setattr(event, "done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.runtime.waited.append(event)
        self.queue.append(lambda: event.done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Runtime:
    """A GPU's two streams. `finish` does their work in a random order that they allow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited = list[Event]()
        self.main, self.copies = Stream(self), Stream(self)
        self.current, self.pinned = self.main, list[Tensor]()
        empty, copy = torch.empty, Tensor.copy_

        def streamer(*shape: Any, pin_memory: bool = False, device: Any = None, **named: Any) -> Tensor:
            tensor = empty(*shape, **named)
            if pin_memory:
                self.pinned.append(tensor)
            return tensor

        def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not non_blocking:
                return copy(target, source)
            assert any(source is each for each in self.pinned), "memory that may move"
            middle = len(target) // 2  # a copy takes its time
            self.current.do(lambda: copy(target[:middle], source[:middle]))
            self.current.do(lambda: copy(target[middle:], source[middle:]))
            return target

        @contextlib.contextmanager
        def entered(stream: Stream) -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        monkeypatch.setattr(torch, "empty", streamer)
        monkeypatch.setattr(Tensor, "copy_", copied)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.copies)
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.main)

    @torch.inference_mode()
    def finish(self, rng: random.Random) -> None:
        streams, idle = [self.main, self.copies], 0
        while any(each.queue for each in streams):
            idle += 1
            assert idle < 100, "streams wait for each other"
            for each in rng.sample(streams, 2):
                for _ in range(rng.randrange(4)):
                    if each.queue and each.queue[0]():
                        each.queue.popleft()
                        idle = 0


class PackedWeight:
    def __init__(self, weight: Tensor) -> None:
        self.offloadable_tensors = (weight,)

    def __call__(self, x: Tensor, context: object) -> Tensor:
        return x


def load_streamer(layers: int, streamed: int) -> tuple[HostLayerStreamer, list[Tensor]]:
    """A streamer of layers of two tensors each, filled with the layer's number; and each layer's first tensor."""
    choice = lambda sizes: pick_evenly_spaced_layers(len(sizes), streamed)  # noqa: E731
    streamer = HostLayerStreamer(ReferenceBackend(), torch.device("cuda", 0), choice, STREAMED_LAYER_SLOTS)
    streamer.set_expected_layer_bytes([1] * layers)
    weights = [torch.full((_SIZE, 3), float(layer)) for layer in range(layers)]
    for layer, weight in enumerate(weights):
        streamer.register_packed_linear(layer, PackedWeight(weight))
        streamer.register_packed_linear(layer, PackedWeight(torch.full((layer + 1,), layer, dtype=torch.int8)))
    streamer.finish_loading()
    return streamer, weights


@pytest.mark.parametrize(("layers", "streamed"), [(8, 3), (7, 7), (12, 5)])
def test_streamed_layer_reads_correct_weights_in_any_stream_order(
    layers: int, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(5)
    for _ in range(60):
        with monkeypatch.context() as patch:
            runtime = Runtime(patch)
            streamer, weights = load_streamer(layers, streamed)
            assert sum(each.nbytes for each in streamer._slots) < sum(each.nbytes for each in runtime.pinned)
            seen = list[bool]()

            def look(weight: Tensor, layer: int, seen: list[bool] = seen) -> None:
                seen.append(bool((weight == layer).all()))

            for _ in range(rng.randrange(1, 4)):
                streamer.begin_pass()
                for layer in range(layers if rng.random() < 0.8 else rng.randrange(1, layers)):
                    streamer.enter_layer(layer)
                    for _ in range(3):  # computing takes its time
                        runtime.main.do(partial(look, weights[layer], layer))
                    streamer.leave_layer(layer)
            runtime.finish(rng)
            assert seen
            assert all(seen)


def test_pass_waits_for_all_layer_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a graph capture could not end."""
    runtime = Runtime(monkeypatch)
    streamer, _ = load_streamer(9, 4)
    streamer.begin_pass()
    for layer in range(9):
        streamer.enter_layer(layer)
        streamer.leave_layer(layer)
    assert all(event in runtime.waited for event in streamer._copy_events.values())
    assert {*streamer._copy_events} == {*streamer.streamed_layers}


def test_streamer_rejects_backend_with_immovable_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    Runtime(monkeypatch)
    streamer = HostLayerStreamer(
        ReferenceBackend(),
        torch.device("cuda", 0),
        lambda sizes: pick_evenly_spaced_layers(len(sizes), 3),
        STREAMED_LAYER_SLOTS,
    )
    streamer.set_expected_layer_bytes([1] * 4)
    for layer in range(4):
        streamer.register_packed_linear(layer, lambda x, context: x)
    with pytest.raises(ValueError, match="the linears of backend 'reference' cannot be moved"):
        streamer.finish_loading()
