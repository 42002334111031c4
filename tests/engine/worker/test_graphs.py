"""Decode steps as graphs, on a fake of CUDA graphs that is as forgetful as the real ones.

The fake records every operation of the captured function with the very tensors it read and wrote, and a replay runs
these again on the same memory: it takes no other Python step, sees no new tensor, and refuses at capture what would
make the host wait or read from it. Between replays everything the recording computed is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.engine.client.heartbeat import NoHeartbeat
from quire.engine.config import EngineConfig
from quire.engine.loop import Engine
from quire.engine.steps import Steps
from quire.engine.types import Request
from quire.engine.worker import graphs, startup
from quire.kernels.gpu import flash
from tests.engine.harness import Answer, request, run
from tests.kernels.fake_flash import FakeFlashAttn

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.lift_fresh.default}
POISON = 77


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.fresh: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITS, f"{func} waits for the device or reads from the host"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {leaf.untyped_storage()._cdata for leaf in dense((args, kwargs))}
        made = [out for out in dense(result) if out.untyped_storage()._cdata not in inputs]  # others are views
        self.calls.append((func, args, kwargs, made))
        self.fresh += made
        return result

    def poison(self) -> None:
        for tensor in self.fresh:
            tensor.fill_(True if tensor.dtype == torch.bool else POISON)

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            again = dense(func(*args, **kwargs))
            if outputs:
                for out, new in zip(outputs, again, strict=True):
                    out.copy_(new)


def dense(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


class FakeCapture:
    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        recording = Recording()
        with recording:
            result = function()
        recording.poison()
        self.recordings.append(recording)

        def replay() -> None:
            self.replays += 1
            for each in self.recordings:  # they share memory, as graphs of one pool do
                each.poison()
            recording.replay()

        return replay, result


@pytest.fixture
def fake_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn on the CPU, with the pages and the layout it asks for."""
    library = FakeFlashAttn()
    monkeypatch.setattr(flash, "_load", lambda: library)
    monkeypatch.setattr(flash.Flash, "cannot_serve", lambda *_: None)


def start(monkeypatch: pytest.MonkeyPatch, capture: FakeCapture | None, **options: Any) -> Engine:
    monkeypatch.setattr(startup, "choose_capture", lambda config, backend, device: capture)
    options = {"max_model_len": 1024, "max_num_seqs": 12, "max_num_batched_tokens": 256} | options
    return Engine(EngineConfig(attention_backend="flash", dtype="bfloat16", num_kv_blocks=40, **options))


def traffic() -> list[Request]:
    """Prompts of many lengths, so that decodes run at many batch sizes, over several pages, beside prefills."""
    return [
        request(
            str(index),
            [(7 * index + 3 * at) % 300 + 3 for at in range(length)],
            max_tokens=tokens,
            temperature=0.0 if index % 2 else 0.8,
            seed=index,
            logprobs=1,
        )
        for index, (length, tokens) in enumerate(
            [(1, 20), (250, 10), (511, 4), (30, 24), (5, 5), (256, 6), (600, 8), (255, 3), (60, 12), (3, 2)]
        )
    ]


def picked(answers: dict[str, Answer], of: list[Request] | None = None) -> dict[str, Any]:
    names = answers if of is None else [each.id for each in of]
    return {name: (answers[name].ids, answers[name].logprobs) for name in names}


@pytest.mark.usefixtures("fake_flash")
def test_graphs_compute_what_the_eager_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FIRST_CONTEXT", 256)
    capture = FakeCapture()
    wanted = run(start(monkeypatch, None), traffic())
    engine = start(monkeypatch, capture)
    assert picked(run(engine, traffic())) == picked(wanted)
    assert len(capture.recordings) >= 5, "several sizes and context lengths were captured"
    assert capture.replays > 2 * len(capture.recordings)
    assert picked(run(engine, traffic()[::2])) == picked(wanted, traffic()[::2]), "with everything captured"


@pytest.mark.usefixtures("fake_flash")
def test_graphs_with_steps_under_way_and_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = run(start(monkeypatch, None), traffic())
    engine = start(monkeypatch, FakeCapture(), enable_prefix_caching=False)
    engine.scheduler.pool.allocate(36)  # four pages are left
    engine._steps = Steps(engine.scheduler, engine.runner, 1, NoHeartbeat())
    got: dict[str, Answer] = {each.id: Answer() for each in traffic()}
    for each in traffic():
        engine.add(each)
    while engine.busy:
        for output in engine.step():
            got[output.id].ids += output.new_ids
            got[output.id].logprobs += output.logprobs or []
    assert engine.stats.preemptions > 0
    assert picked(got) == picked(wanted)


@pytest.mark.usefixtures("fake_flash")
def test_warming_up_captures_every_graph_once_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "FIRST_CONTEXT", 256)
    capture = FakeCapture()
    engine = start(monkeypatch, capture)
    wanted = run(start(monkeypatch, None), traffic())
    kv = engine.runner._kv_cache
    before = [(k[:-1].clone(), v[:-1].clone()) for k, v in kv]
    steps = 0
    while engine.prepare():
        steps += 1
    assert len(capture.recordings) == steps == 5 * 2  # 1, 2, 4, 8, 16 rows; up to 256 and up to 1024 tokens
    for (k, v), (k_before, v_before) in zip(kv, before, strict=True):
        assert torch.equal(k[:-1].view(torch.int16), k_before.view(torch.int16))
        assert torch.equal(v[:-1].view(torch.int16), v_before.view(torch.int16))
    assert picked(run(engine, traffic())) == picked(wanted)
    assert len(capture.recordings) == steps, "nothing was captured again"


def test_a_fake_that_can_tell() -> None:
    """What a CUDA graph would get wrong or refuse, the fake does too."""
    static, weight = torch.zeros(3), torch.ones(3)
    for function in (lambda: static * static.sum().item(), lambda: static + torch.tensor([1.0, 2.0, 3.0])):
        with pytest.raises(AssertionError, match="waits for the device"):
            FakeCapture()(function)
    holder = [weight]
    replay, result = FakeCapture()(lambda: static + holder[0])
    holder[0] = torch.full((3,), 5.0)  # a new tensor, which the recording has never seen
    static.fill_(2)
    replay()
    assert result.tolist() == [3.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_real_graphs_on_a_gpu(backend: str) -> None:
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 12, "attention_backend": backend}
    eager = Engine(EngineConfig(dtype="bfloat16", deterministic=True, enforce_eager=True, num_kv_blocks=400, **options))
    graphed = Engine(EngineConfig(dtype="bfloat16", deterministic=True, num_kv_blocks=400, **options))
    wanted = {name: answer.ids for name, answer in run(eager, traffic()).items()}
    assert {name: answer.ids for name, answer in run(graphed, traffic()).items()} == wanted
