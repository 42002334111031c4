"""Ranks that meet at a store, as on GPUs, here on a CPU over connections with plain PyTorch and steps launched ahead:
they give the tokens of one process.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common import clock
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.common.request_params import Grammar, PoolingParams, SamplingParams
from quire.engine.common.scheduler_output import BlockCopy, NewRequestData, ScheduledRequest, SchedulerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.layers.shard import ModelShard
from quire.engine.processes.child import end_processes
from quire.engine.processes.frames import encode_frame, read_frame
from quire.engine.processes.utility_calls import UtilityResult
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter
from quire.engine.spec_decode.ngram_drafter import NgramDrafter, SuffixDrafter
from quire.engine.text.grammar_compiler import json_grammar
from quire.engine.worker import warmup
from quire.engine.worker.device_memory import AvailableMemory, GpuMemory
from quire.engine.worker.device_plan import choose_device_plan
from quire.engine.worker.graphs import decode_graphs
from quire.engine.worker.loading import kv_allocation
from quire.engine.worker.ranks import follower_rank, rank_processes, rank_startup, rendezvous
from quire.engine.worker.ranks.follower import make_pipe_sender, run_follower
from quire.engine.worker.ranks.rank_messages import RankStart, decode_reply
from quire.engine.worker.ranks.rank_processes import STOP_SECONDS
from quire.engine.worker.ranks.rendezvous import check_connection, needs_ordered_sums, visible_gpus_for_rank
from quire.engine.worker.ranks.spmd import SpmdRunner, redact_for_followers
from quire.engine.worker.startup_steps import decoder_startup
from quire.kernels import backend_selection
from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention.reference_attention import PartialSoftmax
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, CachePair
from quire.kernels.collective import RankEnded
from quire.kernels.distributed import DistributedCollective, join_ranks
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import (
    SHAPES,
    SMALL,
    asked,
    asked_with_adapters,
    assert_same,
    assert_same_alone,
    one_thread,
    prompts,
)
from tests.engine.test_speculation import CHEAP, always
from tests.engine.worker.test_graphs import fake_flash, picked, traffic
from tests.kernels.fake_capture import FakeCapture
from tests.tiers import slow
from tests.tiny_models import save_tiny_model

__all__ = ["fake_flash", "one_thread", "thread_ranks"]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="ranks that all run the same steps are GPUs', on Linux"),
    pytest.mark.usefixtures("one_thread"),
]
BASE = {"dtype": "float32", "attention_backend": "reference", "threads": 4}


def engine(path: Path | str, ranks: int, make_drafter: Any = None, *, ahead: int = 1, **settings: Any) -> EngineCore:
    """`ahead`: steps that are launched before the last one's tokens are read."""
    config = EngineConfig(model=str(path), tensor_parallel_size=ranks, **BASE | settings)
    return EngineCore(config, make_drafter=make_drafter, steps_ahead=ahead)


@pytest.mark.few(1)
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *((family, 2) for family in SHAPES),
        *((family, 4) for family in ("llama", "gpt_oss", "deepseek_v2-lite", "qwen3_5", "mamba2")),
    ],
)
def test_spmd_tokens_equal_single_process(family: str, ranks: int, tmp_path: Path) -> None:
    """Chunked, after preemptions, with seeds, penalties, and log probabilities of answers and prompts.
    tests/engine/test_ranks.py has every family on four ranks, with compiled kernels.
    """
    path = save_tiny_model(tmp_path, family)
    expected = run(engine(path, 1, **SMALL), asked())
    divided = engine(path, ranks, **SMALL)
    assert isinstance(divided.executor, SpmdRunner)
    answers = run(divided, asked())
    assert_same(answers, expected)
    assert divided.engine_stats.preemptions > 0
    assert_same_alone(divided, answers)


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
def test_spmd_expert_parallel_tokens_equal_single_process(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gpt_oss")
    expected = run(engine(path, 1, **SMALL), asked())
    divided = engine(path, 2, enable_expert_parallel=True, **SMALL)
    answers = run(divided, asked())
    assert_same(answers, expected)
    assert_same_alone(divided, answers)


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
def test_spmd_grammar_tokens_equal_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched with requests that have no grammar, with stops, biases, bans and thinking. The other ranks load no
    compiler.
    """
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    kinds: list[dict[str, Any]] = [
        {"grammar": json_grammar(schema), "ignore_eos": False, "logprobs": 1},
        {"grammar": Grammar("regex", "(ab|c){4,9}"), "ignore_eos": False},
        {"stop_token_ids": (261,), "min_tokens": 2},
        {"logit_bias": {300: 5.0}, "allowed_token_ids": (299, 300, 301), "temperature": 1.0},
        {"bad_words_ids": ((261,), (419, 343)), "presence_penalty": 0.4, "logprob_token_ids": (3, 5)},
    ]
    requests = [request(str(at), [435, 1029, 261 + at], seed=at, **each) for at, each in enumerate(kinds)]
    settings: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 64}
    synchronous = run(engine(DEMO_MODEL, 1, ahead=0, **settings), requests)
    assert_same(run(engine(DEMO_MODEL, 2, **settings), requests), synchronous)
    assert_same(run(engine(DEMO_MODEL, 1, **settings), requests), synchronous)


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("way", ["int8", "int4", "fp8"])
def test_spmd_quantized_weights_equal_single_process(way: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    path = save_tiny_model(tmp_path, "llama", **wide)
    few = {"quantization": way}
    assert_same(run(engine(path, 2, **few), asked()), run(engine(path, 1, **few), asked()))


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
def test_spmd_lora_tokens_equal_single_process(tmp_path: Path) -> None:
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    assert_same(run(engine(path, 2, **lora), requests), run(engine(path, 1, **lora), requests))


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_spmd_drafts_do_not_change_tokens(method: str, tmp_path: Path) -> None:
    """A draft model is whole on the first rank; the other ranks have none."""
    path, settings = save_tiny_model(tmp_path / "model", "llama"), {"num_kv_blocks": 96, "max_model_len": 128}
    speculative_config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        speculative_config["model"] = str(path)
    lookup = NgramDrafter(2) if method == "ngram" else SuffixDrafter(1)
    make = always if method == "draft_model" else lambda *_: AdaptiveLengthDrafter(lookup, 3, CHEAP)
    guessing = engine(path, 2, make, speculative_config=speculative_config, **settings)
    assert_same(run(guessing, asked()), run(engine(path, 1, **settings), asked()))
    assert guessing.engine_stats.drafts > 0


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("kind", ["mean", "last"])
def test_spmd_vectors_equal_single_process(kind: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")

    def vectors(ranks: int) -> dict[str, np.ndarray]:
        made, found = engine(path, ranks, runner="pooling", pooling_type=kind), {}
        for at, ids in enumerate(prompts()):
            made.add_request(EngineCoreRequest(id=str(at), prompt_ids=ids, params=PoolingParams(), seed=0))
        while made.has_work:
            found |= {each.id: np.frombuffer(each.vector, "<f4") for each in made.step() if each.vector is not None}
        return found

    one, two = vectors(1), vectors(2)
    assert one.keys() == two.keys() == {str(at) for at in range(len(prompts()))}
    for name, vector in one.items():
        np.testing.assert_allclose(two[name], vector, atol=1e-5)


DIVIDED = ["llama", "gemma2", "gpt_oss", "bloom", "deepseek_v2-lite"]
"""Windows, sinks, ALiBi, latents."""


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("ranks", [2, *slow(4)])
@pytest.mark.parametrize("family", [*DIVIDED[:2], *slow(*DIVIDED[2:])])
def test_spmd_context_parallel_tokens_equal_single_process(family: str, ranks: int, tmp_path: Path) -> None:
    """Alone and together, chunked, after preemptions, with cached prefixes."""
    path = save_tiny_model(tmp_path, family)
    expected = run(engine(path, 1, **SMALL), asked())
    pages = {"num_kv_blocks": {2: 7, 4: 3}[ranks]}
    divided = engine(path, ranks, **SMALL | {"decode_context_parallel_size": ranks} | pages)
    assert divided.info.block_size == 16 * ranks
    answers = run(divided, asked())
    assert_same(answers, expected)
    assert divided.engine_stats.preemptions > 0
    assert_same_alone(divided, answers)


class DenseReferenceBackend(ReferenceBackend):
    """The reference with decodes that a graph can hold."""

    def attend_context_shard(
        self, q: Tensor, caches: CachePair, metadata: AttentionMetadata, softmax: AttentionParams, shard: ContextShard
    ) -> Tensor:
        if metadata.max_query_len > 1:
            return super().attend_context_shard(q, caches, metadata, softmax, shard)
        k, v = (each[metadata.block_table.long()].flatten(1, 2).float() for each in caches)
        unseen = shard.global_positions(torch.arange(k.shape[1])) > metadata.positions[:, None]
        k, v = (each.masked_fill(unseen[:, :, None, None], 0).repeat_interleave(2, 2) for each in (k, v))
        scores = torch.einsum("shd,skhd->shk", q.float(), k) * softmax.scale
        scores = scores.masked_fill(unseen[:, None], -torch.inf)
        peaks = scores.amax(2)
        weights = torch.exp(scores - peaks.masked_fill(peaks == -torch.inf, 0)[:, :, None])
        return PartialSoftmax(torch.einsum("shk,skhd->shd", weights, v), peaks, weights.sum(2)).to_packed_tensor()


class Operators:
    """A group whose calls are PyTorch operators, so that a fake capture records them and a replay repeats them."""

    groups: ClassVar[list[Any]] = []

    def __init__(self, group: Any) -> None:
        self._number = len(self.groups)
        self.groups.append(group)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor) -> Any:
        torch.ops.quire_test.collect(self._number, "_allgather_base", out, x)
        return self

    def alltoall_base(self, out: torch.Tensor, x: torch.Tensor, taken: list[int], given: list[int]) -> Any:
        torch.ops.quire_test.collect(self._number, "alltoall_base", out, x)
        return self

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        torch.ops.quire_test.collect(self._number, "allreduce", tensors[0], tensors[0].new_empty(0))
        return self

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        torch.ops.quire_test.collect(self._number, "broadcast", tensors[0], tensors[0].new_empty(0))
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        pass


@cache
def define_operators() -> torch.library.Library:
    """Once a process, and never undone: if a test runs out of time, its ranks' threads still call the operators."""
    library = torch.library.Library("quire_test", "FRAGMENT")
    library.define("collect(int number, str what, Tensor(a!) out, Tensor x) -> ()")

    def collect(number: int, what: str, out: torch.Tensor, x: torch.Tensor) -> None:
        call = getattr(Operators.groups[number], what)
        given = {"_allgather_base": (out, x), "alltoall_base": (out, x, [], [])}
        call(*given.get(what, ([out],))).wait()

    library.impl("collect", collect, "CompositeExplicitAutograd")
    return library


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    define_operators()

    def join(store: dist.Store, rank: int, count: int, *parts: Any, **settings: Any) -> DistributedCollective:
        made = join_ranks(store, rank, count, *parts, **settings)
        return DistributedCollective(lambda: Operators(made._join()), rank, count, in_order=settings["in_order"])

    for module in (rank_processes, rendezvous):
        monkeypatch.setattr(module, "join_ranks", join)


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks", "operators", "fake_flash")
@pytest.mark.parametrize(("ranks", "ordered"), [*slow((2, False), (4, True)), (2, True)])
def test_spmd_decode_graphs_equal_eager_steps(ranks: int, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks capture the same graphs in the same order, some at the start and some when a step needs them. Replays
    equal eager steps bit for bit.
    """
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    for module in (rank_processes, rendezvous):
        monkeypatch.setattr(module, "needs_ordered_sums", lambda *_: ordered)
    settings: dict[str, Any] = {"attention_backend": "flash", "dtype": "bfloat16", "num_kv_blocks": 40}
    settings |= {"max_num_seqs": 6, "max_model_len": 1024, "max_num_batched_tokens": 256, "warmup_seconds": 0.0}
    requests = traffic()[:6]
    made: list[FakeCapture] = []
    lock = threading.Lock()

    def capture(*_: object) -> FakeCapture:
        with lock:
            made.append(FakeCapture())
            return made[-1]

    monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: None)
    expected, greedy = (
        picked(run(engine(DEMO_MODEL, ranks, **settings), each)) for each in (requests, all_greedy(requests))
    )
    monkeypatch.setattr(kv_allocation, "make_graph_capture", capture)
    graphed = engine(DEMO_MODEL, ranks, **settings)
    graphed.executor.warm_sampler()
    graphed.executor.warm_prompts()
    assert graphed.run_next_warmup()
    assert picked(run(graphed, requests)) == expected
    assert len(made) == ranks
    assert {len(each.recordings) for each in made} == {len(graphed.executor.decode_graphs.graph_set.graphs)}
    assert {each.replays for each in made} == {made[0].replays}
    assert made[0].replays > 10
    while graphed.run_next_warmup():
        pass
    assert picked(run(graphed, requests)) == expected
    assert picked(run(graphed, all_greedy(requests))) == greedy


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks", "operators", "fake_flash")
def test_all_ranks_make_fewer_blocks_if_graphs_take_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 1024, "max_num_batched_tokens": 256}
    settings |= {"attention_backend": "flash", "dtype": "bfloat16"}
    requests = traffic()[3:5]
    plain = engine(DEMO_MODEL, 2, num_kv_blocks=8, warmup_seconds=0.0, **settings)
    expected = picked(run(plain, requests))
    block_bytes = plain.info.kv_bytes // plain.info.num_blocks
    made: list[FakeCapture] = []
    lock, free = threading.Lock(), itertools.count(2**30, -(2**20))

    def capture(*_: object) -> FakeCapture:
        with lock:
            made.append(FakeCapture())
            return made[-1]

    available = AvailableMemory(7 * block_bytes // 2, 36 * 2**20 - block_bytes)
    for each in (decoder_startup, follower_rank):
        monkeypatch.setattr(each, "measure_available_memory", lambda *_: available)
    monkeypatch.setattr(
        rank_processes.MultiProcessRanks, "measure_total_kv_bytes", lambda ranks, measure: 2 * measure()
    )
    monkeypatch.setattr(warmup, "measure_gpu_memory", lambda device: GpuMemory(2**33, next(free), 0))
    monkeypatch.setattr(kv_allocation, "make_graph_capture", capture)
    graphed = engine(DEMO_MODEL, 2, warmup_seconds=600.0, **settings)
    assert len(made) == 4, "two ranks, twice"
    assert graphed.info.num_blocks == 5, "each rank's graphs take a block more than was set aside"
    assert picked(run(graphed, requests)) == expected


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks", "operators")
def test_context_parallel_decode_graphs_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    monkeypatch.setitem(backend_selection._BACKEND_FACTORIES, "reference", DenseReferenceBackend)
    settings: dict[str, Any] = {"num_kv_blocks": 40, "max_num_seqs": 6, "max_model_len": 1024}
    settings |= {"max_num_batched_tokens": 256, "warmup_seconds": 0.0, "decode_context_parallel_size": 2}
    requests = traffic()[:6]
    expected = picked(run(engine(DEMO_MODEL, 2, **settings), requests))
    made: list[FakeCapture] = []

    def capture(*_: object) -> FakeCapture:
        made.append(FakeCapture())
        return made[-1]

    monkeypatch.setattr(kv_allocation, "make_graph_capture", capture)
    graphed = engine(DEMO_MODEL, 2, **settings)
    graphed.executor.warm_sampler()
    graphed.executor.warm_prompts()
    assert graphed.run_next_warmup()
    assert picked(run(graphed, requests)) == expected
    assert {each.replays for each in made} == {made[0].replays}
    assert made[0].replays > 10


@pytest.mark.usefixtures("thread_ranks")
def test_rank_with_least_memory_limits_kv_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr(decoder_startup, "measure_available_memory", lambda *_: AvailableMemory(2**30, 0))
    monkeypatch.setattr(follower_rank, "measure_available_memory", lambda *_: AvailableMemory(2**20, 0))
    made = engine(path, 2, max_model_len=128)
    assert made.info.kv_bytes <= 2**20 < made.info.kv_bytes + 4 * made.info.kv_bytes // made.info.num_blocks
    assert "x 2 ranks" in made.info.arithmetic

    def nothing(*_: object) -> int:
        raise ConfigError("gpu_memory_utilization: leaves nothing", param="gpu_memory_utilization")

    monkeypatch.setattr(follower_rank, "measure_available_memory", nothing)
    with pytest.raises(ConfigError, match="gpu_memory_utilization: leaves nothing"):
        engine(path, 2)


@pytest.mark.usefixtures("thread_ranks")
def test_step_raises_engine_error_after_rank_ended(tmp_path: Path) -> None:
    """A GPU that stops waiting for the rank continues with what it has, and its output looks like any result."""
    made = engine(save_tiny_model(tmp_path, "llama"), 2)
    assert isinstance(made.executor, SpmdRunner)
    made.add_request(request("a", [3, 4, 5]))
    made.step()
    ranks = made.executor._ranks
    ranks.failure = "rank 1 of 2 (process 7) was killed by SIGKILL"
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        made.step()
    with pytest.raises(EngineError, match="was killed by SIGKILL"), ranks.rank_failures_as_engine_errors():
        raise RuntimeError("NCCL communicator was aborted on rank 0")


class UnreachableCollective(DistributedCollective):
    """Ranks whose GPUs cannot reach each other."""

    def __init__(self, said: str) -> None:
        self._said = said

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            raise RuntimeError(self._said)
        except RuntimeError as error:
            raise RankEnded from error


class Event:
    """An event of a GPU that has finished, or never will."""

    done = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU whose tensors are the host's."""
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda n, device, dtype: arange(n, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return torch.device("cuda")


def test_unreachable_gpus_raise_config_error(cuda: torch.device) -> None:
    error_text = "NCCL error in: ProcessGroupNCCL.cpp:9, unhandled system error\nLast error:\nError while creating shm"
    with pytest.raises(ConfigError, match=r"reach each other: NCCL error in: .*unhandled system error; .*--shm-size"):
        check_connection(UnreachableCollective(error_text), cuda)


class WrongCollective(DistributedCollective):
    """Ranks of which one reads what another has not written."""

    def __init__(self, place: int | None) -> None:
        self.world_size, self._place = 2, place

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x *= 2
        if self._place is not None:
            x[self._place] = 0
        return x


def test_wrong_all_reduce_result_raises_config_error(cuda: torch.device) -> None:
    check_connection(WrongCollective(None), cuda)
    with pytest.raises(ConfigError, match=r"reach each other: an all-reduce gave a wrong result; NCCL_P2P_DISABLE=1"):
        check_connection(WrongCollective(999_999), cuda)
    with pytest.raises(ConfigError, match=r"reach each other: an all-reduce gave a wrong result$"):
        check_connection(WrongCollective(999_999), torch.device("cpu"))


def test_all_reduce_timeout_raises_config_error(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "done", False)
    with pytest.raises(ConfigError, match=r"an all-reduce did not finish in 0\.05 s; NCCL_P2P_DISABLE=1"):
        check_connection(WrongCollective(None), cuda, seconds=0.05)


def test_failed_rank_waits_until_error_is_read(tmp_path: Path) -> None:
    """Its exit alone would end the engine, which may still be loading its own part."""
    config = EngineConfig(model=str(tmp_path / "nowhere"), tensor_parallel_size=2)
    orders, tell = os.pipe()
    hear, answers = os.pipe()
    codes = []

    def run() -> None:
        with os.fdopen(orders, "rb") as told, os.fdopen(answers, "wb") as said:
            codes.append(run_follower(partial(read_frame, told), make_pipe_sender(said)))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with os.fdopen(tell, "wb") as pipe, os.fdopen(hear, "rb") as heard:
        pipe.write(encode_frame(RankStart(config.model_dump_json(), 1, [], [])))
        pipe.flush()
        content = read_frame(heard)
        assert content is not None
        failed = decode_reply(content)
        assert isinstance(failed, UtilityResult)
        assert failed.error is not None
        assert "nowhere" in failed.error.message
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(10)
    assert codes == [0]


class StuckProcess:
    """A process that waits in NCCL for another one, and so never sees the end of its pipe."""

    returncode: int | None = None

    def end(self) -> None:
        pass

    def kill(self) -> None:
        self.returncode = -signal.SIGKILL


def test_stuck_ranks_share_one_stop_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    stuck = [StuckProcess() for _ in range(7)]
    end_processes(stuck, STOP_SECONDS, sleep)
    assert all(each.returncode == -signal.SIGKILL for each in stuck)
    assert now[0] - 100 == pytest.approx(STOP_SECONDS, abs=0.1)


def test_draft_heads_are_rejected_on_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_startup, "missing_gpus_reason", lambda *_: None)
    speculative_config: Any = {"method": "eagle", "model": "x"}
    config = EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), speculative_config=speculative_config, **BASE)
    chosen = replace(choose_device_plan(config, read_model_config(tmp_path)), device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="speculative_config: 'eagle' does not run on"):
        rank_startup.check_tensor_parallel(config, chosen, weights_are_tensors=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_shot_sums_requires_several_gpus(ranks: int) -> None:
    with pytest.raises(ConfigError, match="one_shot_sums: it only affects several GPUs"):
        engine(DEMO_MODEL, ranks, one_shot_sums=True)


@pytest.mark.usefixtures("thread_ranks")
def test_abandoned_all_reduce_ends_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has been computed from invalid numbers."""
    made = engine(save_tiny_model(tmp_path, "llama"), 2)

    def given_up(group: DistributedCollective) -> None:
        raise RankEnded

    assert isinstance(made.executor, SpmdRunner)
    made.executor._ranks.stop_seconds = 0.01
    monkeypatch.setattr(DistributedCollective, "raise_if_failed", given_up)
    with pytest.raises(EngineError, match="a rank has closed its pipe"):
        run(made, [request("0", [5, 6, 7])])


def test_missing_gpus_or_nccl_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "2 ranks need 2 GPUs, and 1 can be seen here" in str(rank_startup.missing_gpus_reason(2, cuda))
    assert rank_startup.missing_gpus_reason(2, torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert "without NCCL" in str(rank_startup.missing_gpus_reason(2, cuda))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert rank_startup.missing_gpus_reason(2, cuda) is None


def test_visible_gpus_are_rotated_per_rank() -> None:
    assert [visible_gpus_for_rank(rank, None, 4) for rank in (0, 3)] == ["0,1,2,3", "3,0,1,2"]
    assert visible_gpus_for_rank(1, "4, 6", 2) == "6,4"
    assert visible_gpus_for_rank(1, "GPU-aa,GPU-bb", 2) == "GPU-bb,GPU-aa"


def test_deterministic_engine_needs_ordered_sums() -> None:
    cuda = torch.device("cuda")
    assert needs_ordered_sums(EngineConfig(deterministic=True), cuda)
    assert not needs_ordered_sums(EngineConfig(), cuda)


def test_scheduler_output_for_followers_omits_sampling_params() -> None:
    params = SamplingParams(grammar=Grammar("regex", "a"), logprobs=2, prompt_logprobs=1, logit_bias={1: 2.0})
    vector = NewRequestData(1, [5], 1, PoolingParams(), 0)
    rows = [ScheduledRequest("a", 0, 0, 3, [4], should_sample=True)]
    batch = SchedulerOutput(
        rows, [NewRequestData(0, [1, 2, 3], 3, params, 7, adapter_slot=2), vector], [BlockCopy(1, 2, 3)], ["b"]
    )
    sent = redact_for_followers(batch)
    assert sent.scheduled_requests == rows
    assert sent.block_copies == batch.block_copies
    assert sent.new_requests == [
        NewRequestData(0, [1, 2, 3], 3, SamplingParams(prompt_logprobs=1), 7, adapter_slot=2),
        vector,
    ]


class RecordedCollective:
    """A rank's collective with known contributions of the other ranks."""

    def __init__(self, sent: list[Tensor]) -> None:
        self.sent = sent

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        assert widths == [x.shape[1]] * len(self.sent)
        return torch.cat(self.sent, 1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(("ranks", "vocab"), [(2, 10), (3, 32_001), (4, 7)])
def test_gather_argmax_equals_argmax_of_whole_vocabulary(ranks: int, vocab: int) -> None:
    """With ties within a rank and between ranks, and rows of nothing but -inf."""
    logits = torch.randint(0, 3, (40, vocab), generator=torch.Generator().manual_seed(ranks)).float()
    logits[3], logits[4, : vocab // 2] = -torch.inf, -torch.inf
    shards = [ModelShard(rank, ranks) for rank in range(ranks)]
    parts = [logits[:, shard.rank_span(vocab).start : shard.rank_span(vocab).stop] for shard in shards]
    sent = [
        torch.stack((part.amax(1), (part.argmax(1) + shard.rank_span(vocab).start).float()), 1)
        for part, shard in zip(parts, shards, strict=True)
    ]
    first = replace(shards[0], group=RecordedCollective(sent))
    assert torch.equal(first.gather_argmax(parts[0].amax(1), parts[0].argmax(1), vocab), logits.argmax(1))


def all_greedy(requests: list[EngineCoreRequest]) -> list[EngineCoreRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=7)
    return [msgspec.structs.replace(each, params=params) for each in requests]


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
def test_greedy_sampling_gathers_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row and rank sends two numbers. Tokens equal those of one process, also next to sampled rows."""
    widths, gather = list[int](), DistributedCollective.gather_columns

    def gathered(group: DistributedCollective, x: Tensor, own: list[int]) -> Tensor:
        widths.append(max(own))
        return gather(group, x, own)

    monkeypatch.setattr(DistributedCollective, "gather_columns", gathered)
    settings: dict[str, Any] = {"max_model_len": 256, "num_kv_blocks": 100}
    greedy = all_greedy(asked())
    expected = [run(engine(DEMO_MODEL, 1, **settings), each) for each in (greedy, [*greedy[:3], *asked()[3:]])]
    two = engine(DEMO_MODEL, 2, **settings)
    assert_same(run(two, greedy), expected[0])
    assert set(widths) == {2}
    assert_same(run(two, [*greedy[:3], *asked()[3:]]), expected[1])
    assert max(widths) > 1000


TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this PyTorch has no NCCL"),
]
REAL: dict[str, Any] = {"attention_backend": "triton", "deterministic": True, "max_model_len": 256, "threads": None}


@pytest.mark.parametrize("eager", [pytest.param(eager, marks=TWO_GPUS) for eager in (True, False)])
def test_two_gpus_tokens_equal_one_gpu(eager: bool) -> None:
    """Real processes with NCCL in the decode graphs; then the end of a rank ends the engine."""
    settings = REAL | {"enforce_eager": eager, "num_kv_blocks": 64, "max_num_seqs": 8}
    requests = [
        request(str(at), list(range(300, 340 - at)), seed=at, logprobs=1, temperature=at % 2) for at in range(6)
    ]
    expected = run(engine(DEMO_MODEL, 1, **settings), requests)
    free_engine_memory()
    divided = engine(DEMO_MODEL, 2, **settings)
    answers = run(divided, requests)
    assert_same(answers, expected, 1e-4)
    for each in requests:
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (answers[each.id].ids, answers[each.id].logprobs)
    assert isinstance(divided.executor, SpmdRunner)
    (pid,) = divided.executor._ranks.pids
    divided.add_request(requests[0])
    divided.step()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=f"rank 1 of 2 .process {pid}. was killed by SIGKILL"):
        run(divided, [])
