"""Tests decode steps in graphs, on a fake of CUDA graphs (tests/kernels/fake_capture.py)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.kv_cache_groups import single_kv_cache_group
from quire.engine.checkpoint.kv_cache_plan import DRIVER_BYTES_PER_GRAPH, GIB
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Draft, Drafter, RequestsToDraft
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_store import AdapterStore
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.models.heads.eagle import Eagle3Head
from quire.engine.worker import batch_sampler, warmup
from quire.engine.worker.device_memory import AvailableMemory, GpuMemory
from quire.engine.worker.graphs import decode_graphs, mixed_batch_graphs
from quire.engine.worker.graphs.graph_capture import CudaGraphCapture
from quire.engine.worker.graphs.graphable_steps import GraphableSteps
from quire.engine.worker.loading import kv_allocation
from quire.engine.worker.loading import model_loader as loading
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.sampling.sampling_rules import SamplingRow
from quire.engine.worker.startup_steps import decoder_startup
from quire.engine.worker.warmup import total_graph_bytes, warm_up_runner
from quire.kernels.backend import AdapterSlotSpec, Linear, LinearContext, LinearWithLora, LoraDelta
from quire.kernels.gpu.libraries import flash2
from quire.kernels.probes.backend_probe import GraphCapture
from tests.adapters import save_adapter
from tests.engine.harness import Answer, request, run
from tests.engine.images.test_families import about
from tests.engine.test_heads import Recorded, made_head
from tests.engine.test_speculation import always
from tests.kernels.fake_capture import FakeCapture, Refusing
from tests.kernels.fake_flash import FakeFlashAttn
from tests.kernels.installed import install_flash
from tests.tiny_models import save_tiny_model
from tests.tiny_mtp import save_tiny_mtp
from tests.vision_families import save_family


@pytest.fixture
def fake_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn on the CPU, with the block size and layout that it requires."""
    library = FakeFlashAttn()
    install_flash(monkeypatch, library)
    monkeypatch.setattr(flash2.Flash2Backend, "unsupported_reason", lambda *_: None)
    monkeypatch.setattr(
        mixed_batch_graphs, "MIXED_GRAPH_PREFILL_SIZES", ()
    )  # steps with prompts: tests/engine/worker/test_prompt_graphs.py


def start(
    monkeypatch: pytest.MonkeyPatch,
    capture: GraphCapture | None,
    make_drafter: Any = None,
    *,
    ahead: int | None = None,
    **options: Any,
) -> EngineCore:
    """Start an engine. `ahead`: steps launched before the last step's tokens are read."""
    monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: capture)
    options = {
        "max_model_len": 1024,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 256,
        "warmup_seconds": 0.0,
        "num_kv_blocks": 40,
    } | options
    config = EngineConfig(attention_backend="flash", dtype="bfloat16", **options)
    return EngineCore(config, make_drafter=make_drafter, steps_ahead=ahead)


def traffic() -> list[EngineCoreRequest]:
    """Prompts of many lengths, so that decodes run at many batch sizes, over several blocks, together with prefills."""
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


def picked(answers: dict[str, Answer], of: list[EngineCoreRequest] | None = None) -> dict[str, Any]:
    names = answers if of is None else [each.id for each in of]
    return {name: (answers[name].ids, answers[name].logprobs) for name in names}


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_decode_graphs_equal_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    capture = FakeCapture()
    expected = run(start(monkeypatch, None), traffic())
    engine = start(monkeypatch, capture)
    assert picked(run(engine, traffic())) == picked(expected)
    assert len(capture.recordings) >= 5, "several sizes and context lengths were captured"
    assert capture.replays > 2 * len(capture.recordings)
    assert picked(run(engine, traffic()[::2])) == picked(expected, traffic()[::2]), "with everything captured"


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_decode_graphs_sample_greedy_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched ahead, so that a step reads what the graph before it wrote; and greedy rows run with sampled
    rows.
    """
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    greedy = [msgspec.structs.replace(each, params=SamplingParams(temperature=0.0, max_tokens=9)) for each in traffic()]
    for requests in (greedy, [*greedy[:5], *traffic()[5:]]):
        capture, picks = FakeCapture(), list[int]()
        expected = run(start(monkeypatch, None), requests)
        engine = start(monkeypatch, capture, ahead=1)
        assert isinstance(engine.executor, ModelRunner)
        pick = engine.executor.model.greedy_tokens_and_finite_flags

        def largest(hidden: Tensor, *rest: Any, pick: Any = pick, picks: list[int] = picks) -> tuple[Tensor, Tensor]:
            picks.append(len(hidden))
            return pick(hidden, *rest)

        monkeypatch.setattr(engine.executor.model, "greedy_tokens_and_finite_flags", largest)
        assert picked(run(engine, requests)) == picked(expected)
        assert engine.executor.decode_graphs is not None
        of_picks = [size for size, pages, _ in engine.executor.decode_graphs.graph_set.graphs if pages is None]
        assert (len(of_picks) > 1) == (requests is greedy)
        decoded = sum(len(answer.ids) for answer in expected.values()) - len(requests)
        assert sum(picks) < decoded, "others are replayed, or drawn"


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_decode_graphs_read_block_tables_of_every_kv_cache_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    path = save_tiny_model(tmp_path, "gemma2", dtype=torch.bfloat16, max_position_embeddings=1024, sliding_window=200)
    capture, options = FakeCapture(), {"model": str(path), "enable_prefix_caching": False}
    with monkeypatch.context() as patch:
        patch.setattr(loading, "build_kv_cache_groups", lambda states, *_, **__: single_kv_cache_group(len(states)))
        expected = run(start(patch, None, **options), traffic())
    engine = start(monkeypatch, capture, ahead=1, **options)
    assert engine.info.page_groups == 2
    assert picked(run(engine, traffic())) == picked(expected)
    assert capture.replays > len(capture.recordings) > 3


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "qwen2_5_vl", "mistral3"])
def test_decode_graphs_after_images_equal_eager_steps(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Positions are rotated according to the images. A last token within an image runs without a graph, also if the
    rest of the prompt is cached.
    """
    path = save_family(tmp_path, name)
    options: dict[str, Any] = {"max_tokens": 10, "logprobs": 1, "more": "?" * 230}  # two blocks
    shown = [about(path, name, str(count), *range(count), **options) for count in range(3)]
    requests, capture = [*shown, _end_prompt_within_image(shown[1])], FakeCapture()
    expected = picked(run(start(monkeypatch, None, model=str(path)), requests))
    engine = start(monkeypatch, capture, ahead=1, model=str(path))
    for _ in range(2):
        assert picked(run(engine, requests)) == expected
    assert capture.replays > len(capture.recordings) > 2
    assert engine.engine_stats.prefix_hits > 0


def _end_prompt_within_image(asked: EngineCoreRequest) -> EngineCoreRequest:
    """A prompt that ends with its image, of which the prefix cache leaves one token to compute."""
    end = asked.spans[-1].start + asked.spans[-1].count
    more = (1 - end) % 16
    spans = tuple(msgspec.structs.replace(each, start=each.start + more) for each in asked.spans)
    ids = [7] * more + list(asked.prompt_ids[:end])
    return msgspec.structs.replace(asked, id="within", prompt_ids=ids, spans=spans)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_decode_graphs_with_async_steps_and_preemption_equal_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(start(monkeypatch, None), traffic())
    engine = start(monkeypatch, FakeCapture(), ahead=1, enable_prefix_caching=False)
    engine.scheduler.kv_cache_manager.block_pool.allocate(36)  # four blocks are left
    answers: dict[str, Answer] = {each.id: Answer() for each in traffic()}
    for each in traffic():
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            answers[output.id].ids += output.new_ids
            answers[output.id].logprobs += output.logprobs or []
    assert engine.engine_stats.preemptions > 0
    assert picked(answers) == picked(expected)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_warmup_captures_every_graph_once_without_changing_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    capture = FakeCapture()
    engine = start(monkeypatch, capture)
    expected = run(start(monkeypatch, None), traffic())
    kv = engine.executor._kv_cache
    before = [(k[:-1].clone(), v[:-1].clone()) for k, v in kv]
    steps = 0
    engine.executor.warm_prompts()
    while engine.run_next_warmup():
        steps += 1
    # Graphs of 1, 2, 4, 8, 16 rows: for up to 256 tokens, for up to 1024 tokens, and for greedy sampling.
    assert len(capture.recordings) == steps == 5 * (2 + 1)
    for (k, v), (k_before, v_before) in zip(kv, before, strict=True):
        assert torch.equal(k[:-1].view(torch.int16), k_before.view(torch.int16))
        assert torch.equal(v[:-1].view(torch.int16), v_before.view(torch.int16))
    assert picked(run(engine, traffic())) == picked(expected)
    assert len(capture.recordings) == steps, "nothing was captured again"


@dataclass
class Right(Drafter):
    """Proposes the known answers, with every third token wrong."""

    answers: dict[str, Answer]

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        drafts = []
        for seq, most in asked:
            following = self.answers[seq.engine_request.id].ids[seq.num_output_tokens :][: min(most, 5)]
            wrong = len(seq.token_ids) % 3
            drafts.append(Draft([*following[:wrong], *(token ^ 1 for token in following[wrong:])]))
        return drafts


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_draft_verification_runs_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(start(monkeypatch, None), traffic())
    capture = FakeCapture()
    engine = start(monkeypatch, capture, lambda *_: Right(expected))
    assert picked(run(engine, traffic())) == picked(expected)
    assert engine.engine_stats.draft_tokens > 100
    assert sum(engine.engine_stats.accepted_drafts) > 20
    again = capture.replays
    assert picked(run(engine, traffic()[5:])) == picked(expected, traffic()[5:])
    assert capture.replays > again


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_draft_model_graphs_equal_eager_drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The drafts and the numbers accepted are the same for requests with one and with two new tokens, together with
    prefills, and in an engine whose graphs were captured while idle.
    """
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    options = {"hidden_size": 256, "max_position_embeddings": 1024, "dtype": torch.bfloat16}
    model = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=2, **options)
    small = save_tiny_model(tmp_path / "small", "llama", num_hidden_layers=1, **options)
    expected = run(start(monkeypatch, None, model=str(model)), traffic())
    for drafts in (model, small):
        speculative = SpeculativeConfig(method="draft_model", model=str(drafts), num_speculative_tokens=3)
        draft_counts = []
        for capture, idle in ((None, False), (FakeCapture(), False), (FakeCapture(), True)):
            engine = start(monkeypatch, capture, always, model=str(model), speculative_config=speculative)
            while idle and engine.run_next_warmup():
                pass
            assert picked(run(engine, traffic())) == picked(expected)
            draft_counts.append((engine.engine_stats.draft_tokens, engine.engine_stats.accepted_drafts))
            graphs = engine._device_drafter.graphs
            assert (graphs is None) == (capture is None)
            assert graphs is None or (len(graphs.graph_set.graphs) > 3 and not graphs.graph_set.eager_reasons)
        assert draft_counts[0] == draft_counts[1] == draft_counts[2]
        assert draft_counts[0][0] > 30


def with_heads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    method: str,
    capture: GraphCapture | None,
    family: str = "llama",
    **options: Any,
) -> tuple[EngineCore, Recorded]:
    """An engine of a small model with draft heads, all of whose drafts are verified."""
    monkeypatch.setattr(decode_graphs, "FIRST_GRAPH_CONTEXT", 256)
    shape = {"hidden_size": 64, "max_position_embeddings": 1024, "dtype": torch.bfloat16}
    model, head = tmp_path / "model", None if method == "mtp" else str(tmp_path / "head")
    if not model.exists():
        (save_tiny_mtp if head is None else save_tiny_model)(model, family, **shape)
        if head is not None:
            made_head(Path(head), method)
    speculative = SpeculativeConfig(method=method, model=head, num_speculative_tokens=3)
    options = {"model": str(model), "speculative_config": speculative, "max_num_seqs": 3} | options
    recorded = Recorded()
    engine = start(monkeypatch, capture, recorded.make, **options)
    for each in engine._device_drafter.kv_tensors:
        each.zero_()
    return engine, recorded


def few() -> list[EngineCoreRequest]:
    """Four requests: one is sampled, and one grows beyond a block."""
    shapes = ((1, 14, 0.0), (20, 9, 0.8), (255, 6, 0.0), (5, 5, 0.0))
    prompts = [[(7 * index + 3 * at) % 300 + 3 for at in range(length)] for index, (length, *_) in enumerate(shapes)]
    return [
        request(str(index), prompts[index], max_tokens=tokens, temperature=warm, seed=index)
        for index, (_, tokens, warm) in enumerate(shapes)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize(("method", "idle"), [("eagle3", False), ("mtp", False), ("medusa", False), ("eagle", True)])
def test_draft_head_graphs_equal_eager_drafts(
    method: str, idle: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The drafts and the heads' KV blocks are the same if graphs draft from the hidden states that decode graphs leave,
    and in an engine whose graphs were captured while idle.
    """
    results = []
    for capture in (None, FakeCapture()):
        engine, recorded = with_heads(monkeypatch, tmp_path, method, capture)
        while idle and engine.run_next_warmup():
            pass
        answers = run(engine, few())
        results.append((picked(answers), recorded.guesses))
        heads, behind = (
            engine._device_drafter,
            engine.executor.decode_graphs and engine.executor.decode_graphs.draft_head_graphs,
        )
        pages = [each[:, : engine.info.num_blocks].float() for each in heads.kv_tensors]
        if capture is None:
            assert heads.graphs is behind is None
            eager_pages = pages
            continue
        assert {kind.max_blocks is None for kind in heads.graphs.graph_set.graphs} == {True, method == "medusa"}
        assert bool(behind.graphs) == (method != "medusa")
        assert not heads.graphs.graph_set.eager_reasons
        assert not behind.eager_reasons
        assert all(torch.equal(*pair) for pair in zip(pages, eager_pages, strict=True))
    assert results[0] == results[1]
    assert sum(len(guesses) for _, guesses in results[0][1]) > 60


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_draft_heads_run_eager_after_failed_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine, recorded = with_heads(monkeypatch, tmp_path, "eagle3", None)
    expected = picked(run(engine, few())), recorded.guesses

    def short(whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Runs out of memory while it is captured."""

        def computed(*args: Any) -> Tensor:
            if Refusing.depth > 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return whole(*args)

        return computed

    monkeypatch.setattr(
        GraphableSteps, "compute_head_states_after_decode", short(GraphableSteps.compute_head_states_after_decode)
    )
    for name in ("compute_logits", "advance_states"):
        monkeypatch.setattr(Eagle3Head, name, short(getattr(Eagle3Head, name)))
    engine, recorded = with_heads(monkeypatch, tmp_path, "eagle3", FakeCapture(), warmup_seconds=60.0)
    assert (picked(run(engine, few())), recorded.guesses) == expected
    reason = "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB)"
    whose = ("heads beside 1, 2, 4 rows", "drafts of 1, 2, 4 rows")
    assert engine.info.notes[-2:] == [f"{each} run without graphs: {reason}" for each in whose]
    assert engine.info.notes[-3].startswith("9 of 9 decode graphs, and 0 of 9 of drafts, captured in")
    assert not engine.run_next_warmup(), "nothing is tried again"


class Gathered(LinearWithLora):
    """LoRA in operations that a graph can hold, as Triton's kernels are: tables at fixed addresses."""

    def __init__(self, linear: Linear, slots: AdapterSlotSpec) -> None:
        self.linear = linear
        self.down = torch.zeros((slots.num_slots + 1, slots.max_rank, slots.in_features))
        self.up = torch.zeros((slots.num_slots + 1, sum(slots.output_sizes), slots.max_rank))

    def __call__(self, x: Tensor, context: LinearContext) -> Tensor:
        out = self.linear(x, context)
        if context.adapter_slots is None:
            return out
        down, up = self.down[context.adapter_slots], self.up[context.adapter_slots]
        middle = (down * x[:, None].float()).sum(-1)
        return (out + (up * middle[:, None]).sum(-1)).to(out.dtype)

    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> Sequence[LoraDelta]:
        return deltas

    @torch.inference_mode()
    def put_adapter(self, slot: int, packed: Sequence[LoraDelta] | None) -> None:
        """Only the last part is kept if there are several."""
        self.up[slot] = 0
        for delta in packed or ():
            rank = len(delta.down)
            self.down[slot, :rank] = delta.down
            self.up[slot] = 0
            self.up[slot, delta.first_output : delta.first_output + len(delta.up), :rank] = delta.up


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize("slots", [1, 3])
def test_decode_graphs_apply_lora_adapters(slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With one adapter slot, captured graphs see each next adapter in it."""
    monkeypatch.setattr(
        flash2.Flash2Backend, "make_linear_with_lora", lambda self, linear, slots: Gathered(linear, slots)
    )
    shape = {"hidden_size": 128, "max_position_embeddings": 1024, "dtype": torch.bfloat16}
    path = save_tiny_model(tmp_path / "model", "llama", **shape)
    (tmp_path / "spool").mkdir()
    store = AdapterStore(tmp_path / "spool", adaptable_modules(read_model_config(path)), 8)
    base = AutoModelForCausalLM.from_pretrained(path)
    adapters = [
        None,
        *(store.add_adapter(f"a{n}", str(save_adapter(tmp_path / f"a{n}", base, 4 + n, seed=n))) for n in (1, 2)),
    ]
    every = [msgspec.structs.replace(each, adapter=adapters[at % 3]) for at, each in enumerate(traffic())]
    lora = {"model": str(path), "enable_lora": True, "max_loras": slots, "max_lora_rank": 8}
    expected = run(start(monkeypatch, None, **lora), every)
    capture = FakeCapture()
    engine = start(monkeypatch, capture, ahead=1, **lora)
    answers = run(engine, every)
    plain = run(start(monkeypatch, None, model=str(path)), traffic())
    assert {name: answer.ids for name, answer in answers.items()} == {name: each.ids for name, each in expected.items()}
    for at, each in enumerate(every):
        assert (answers[each.id].ids == plain[each.id].ids) == (at % 3 == 0), each.id
    assert capture.replays > 10
    count = len(capture.recordings)
    run(engine, [each for each in every if each.adapter is None])
    captured = engine.executor.decode_graphs.graph_set.graphs
    assert {parts for _, _, parts in captured} == {2, 3}, "rows without adapters have their own"
    assert picked(run(engine, every[1:2])) == picked({every[1].id: expected[every[1].id]})
    assert len(capture.recordings) >= count


class Short(FakeCapture):
    """A device whose memory suffices for graphs of at most `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.refused = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if len(function()) > self.rows:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().__call__(function)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_sizes_that_fail_capture_run_without_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(start(monkeypatch, None), traffic())
    capture = Short(2)
    engine = start(monkeypatch, capture, warmup_seconds=60.0)
    assert len(capture.recordings) == 4, "1 and 2 rows, with a graph of picks each"
    assert engine.info.notes[0].startswith("4 of 10 decode graphs captured in ")
    reason = "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB)"
    assert engine.info.notes[1:] == [f"decodes of 4, 8, 16 rows run without graphs: {reason}"]
    refused = capture.refused
    assert refused == 6, "4, 8 and 16 rows, and their picks"
    assert picked(run(engine, traffic())) == picked(expected)
    assert not engine.run_next_warmup()
    assert (capture.refused, len(capture.recordings)) == (refused, 4), "no size was tried again"
    assert capture.replays > 0


@pytest.mark.usefixtures("fake_flash")
def test_triton_out_of_resources_disables_only_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_resources = pytest.importorskip("triton.runtime.errors").OutOfResources

    class Small(FakeCapture):
        def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
            raise out_of_resources(98304, 65536, "shared memory")

    engine = start(monkeypatch, Small(), warmup_seconds=60.0)
    assert engine.info.notes[1].startswith("decodes of 1, 2, 4, 8, 16 rows run without graphs: OutOfResources")


@pytest.mark.usefixtures("fake_flash")
def test_largest_graphs_are_captured_first_within_warmup_time(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def decode(forms: GraphableSteps, rows: Tensor, pages: int) -> Tensor:
        captured.append(rows.shape[1])
        return torch.zeros(1)

    monkeypatch.setattr(
        GraphableSteps, "compute_decode_hidden", decode
    )  # hundreds of rows would take gigabytes to record
    engine = start(monkeypatch, FakeCapture(), max_num_seqs=300)
    assert captured == []
    times = iter([0.0, 0.0, 10.0, 20.0, 30.0, 30.5])
    notes = warm_up_runner(engine.executor, 30.0, 64, clock=lambda: next(times)).notes
    assert captured == [384, 256, 192]
    assert notes == ["3 of 21 decode graphs captured in 30.5 s"]
    assert engine.run_next_warmup(), "the rest follow in idle moments"
    assert captured[3:] == [128]


class GraphMemory:
    """A GPU's free memory, of which each graph takes `graph_bytes`, and the graphs of a freed engine nothing."""

    def __init__(self, graph_bytes: int) -> None:
        self.graph_bytes = graph_bytes
        self.captures: list[weakref.ref[FakeCapture]] = []

    def make_capture(self, *_: object) -> FakeCapture:
        assert not any(each() for each in self.captures), "the first engine's graphs are gone before blocks are made"
        capture = FakeCapture()
        self.captures.append(weakref.ref(capture))
        return capture

    def measure(self, device: torch.device) -> GpuMemory:
        graphs = sum(len(capture.recordings) for each in self.captures if (capture := each()) is not None)
        return GpuMemory(total=80 * GIB, free=GIB - graphs * self.graph_bytes, allocator=0)


def start_with_graph_memory(
    monkeypatch: pytest.MonkeyPatch, memory: GraphMemory, kv_bytes: int, graph_bytes: int, **options: Any
) -> EngineCore:
    """`graph_bytes`: set aside beside `kv_bytes`."""
    available = AvailableMemory(kv_bytes, graph_bytes)
    monkeypatch.setattr(decoder_startup, "measure_available_memory", lambda *_: available)
    monkeypatch.setattr(warmup, "measure_gpu_memory", memory.measure)
    monkeypatch.setattr(kv_allocation, "make_graph_capture", memory.make_capture)
    options = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 256} | options
    config = EngineConfig(attention_backend="flash", dtype="bfloat16", warmup_seconds=600.0, **options)
    return EngineCore(config)


@pytest.mark.usefixtures("fake_flash")
def test_blocks_shrink_once_if_graphs_take_more_than_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 graphs of decodes and picks; 32 of steps with prompts may follow."""
    plain = start(monkeypatch, None)
    block_bytes = plain.info.kv_bytes // plain.info.num_blocks
    memory, set_aside = GraphMemory(2**20), 36 * 2**20 - 2 * block_bytes
    engine = start_with_graph_memory(monkeypatch, memory, 7 * block_bytes, set_aside)
    assert len(memory.captures) == 2
    assert engine.info.num_blocks == 5
    assert engine.info.notes[0] == (
        f"CUDA graphs may take 36 MiB, {set_aside / 2**20:.0f} were set aside: 5 blocks of KV cache instead of 7"
    )
    assert engine.info.notes[1].startswith("4 of 4 decode graphs captured in ")
    assert engine.info.notes[1].endswith("; they take 4 MiB")
    requests = traffic()[3:5]
    assert picked(run(engine, requests)) == picked(run(plain, requests))


@pytest.mark.usefixtures("fake_flash")
@pytest.mark.parametrize(
    ("kv_bytes", "graph_bytes", "options"),
    [
        (40 * 2**20, 36 * 2**20, {}),
        (40 * 2**20, 0, {"num_kv_blocks": 8}),
        (40 * 2**20, 0, {"kv_cache_memory": 0.1}),
        (GIB, 0, {}),
    ],
    ids=["they fit", "blocks are given", "memory is given", "blocks are not limited by memory"],
)
def test_blocks_do_not_shrink_if_graphs_fit_or_blocks_are_given(
    monkeypatch: pytest.MonkeyPatch, kv_bytes: int, graph_bytes: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(GraphableSteps, "compute_decode_hidden", lambda *_: torch.zeros(1))
    memory = GraphMemory(2**20)
    engine = start_with_graph_memory(monkeypatch, memory, kv_bytes, graph_bytes, **options)
    assert len(memory.captures) == 1
    assert "decode graphs captured" in engine.info.notes[0]


@pytest.mark.usefixtures("fake_flash")
def test_blocks_that_max_model_len_needs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphableSteps, "compute_decode_hidden", lambda *_: torch.zeros(1))
    memory = GraphMemory(2**20)
    engine = start_with_graph_memory(monkeypatch, memory, 30 * 2**20, 0)
    assert len(memory.captures) == 1
    assert engine.info.notes[0] == (
        "CUDA graphs may take 36 MiB, 0 were set aside: "
        "more memory is used than --gpu-memory-utilization says, for --max-model-len"
    )
    assert "decode graphs captured" in engine.info.notes[1]


def test_missing_graphs_count_as_later_captured_ones() -> None:
    assert total_graph_bytes([], 9) == 0
    assert total_graph_bytes([900, 10, 30], 0) == 940
    assert total_graph_bytes([900, 10, 30], 5) == 940 + 5 * 20
    assert total_graph_bytes([900], 2) == 900 + 2 * DRIVER_BYTES_PER_GRAPH


@pytest.mark.slow
@pytest.mark.usefixtures("fake_flash")
def test_warmup_runs_sampler_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, float]] = []
    choose = batch_sampler.choose_sampler

    def watched(*of: Any) -> Callable[..., Tensor]:
        sample = choose(*of)

        def pick(logits: Tensor, rows: list[SamplingRow], mask: Any) -> Tensor:
            seen.extend((each.rules.params.is_greedy, each.rules.params.top_p) for each in rows)
            return sample(logits, rows, mask)

        return pick

    monkeypatch.setattr(batch_sampler, "choose_sampler", watched)
    engine = start(monkeypatch, FakeCapture())
    seen.clear()
    warm_up_runner(engine.executor, 0.0, 64)
    assert seen == []
    warm_up_runner(engine.executor, 60.0, 64)
    assert seen == [(True, 1.0), (False, 1.0), (False, 0.5)]


def test_cpu_start_runs_no_warmup() -> None:
    engine = EngineCore(EngineConfig(num_kv_blocks=40))
    assert engine.info.notes == []
    assert engine.executor._prefaulter._num_touched == 0, "memory is touched in idle moments"


class FakeStream:
    device_index = 0

    def __init__(self, *_: object) -> None:
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeCuda:
    """The current stream, the memory pools with an open capture, and captures whose end fails: torch.cuda.graph then
    leaves its stream current and its pool open. Also stands for PyTorch's allocator.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends: bool = False) -> None:
        """`ends`: the capture fails before its end, so that its end succeeds."""
        self.current = self.first = FakeStream()
        self.ends, self.pools = ends, iter(range(1, 9))
        self.captured: list[object] = []
        self.released: list[object] = []
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(self.pools)))
        self.streams: list[FakeStream] = []
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self.switch)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def make_stream(self, device: torch.device) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def switch(self, stream: FakeStream) -> None:
        self.current = stream

    def _cuda_endAllocateToPool(self, device: int, pool: object) -> None:
        if pool not in self.captured:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.captured.remove(pool)

    def _cuda_releasePool(self, device: int, pool: object) -> None:
        self.released.append(pool)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads copy pages meanwhile"
        assert pool not in self.captured, "already recording to mempool_id"
        self.current = stream
        self.captured.append(pool)
        yield
        if self.ends:
            self.captured.remove(pool)
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("ends", [False, True])
def test_failed_capture_restores_stream_and_pools(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """The stream is restored. No pool stays open for capture, which would keep all memory that downloads have used from
    being free again. The graph is kept, since PyTorch's allocator for pinned memory still queries it.
    """
    cuda, before = FakeCuda(monkeypatch, ends=ends), len(CudaGraphCapture.failed_graphs)
    capture = CudaGraphCapture(torch.device("cuda"), cuda)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="previous error"):
            capture(lambda: torch.zeros(1))
    assert cuda.current is cuda.first
    assert cuda.first.waited_for == cuda.streams * 4, "for the run without recording, and for the capture"
    assert cuda.captured == []
    assert cuda.released == ([] if ends else [(0, 1), (0, 2)])
    assert len(CudaGraphCapture.failed_graphs) == before + 2


def test_fake_capture_detects_waits() -> None:
    """The fake rejects, or gets wrong, what a CUDA graph would."""
    static, weight = torch.zeros(3), torch.ones(3)
    waiting = (
        lambda: static * static.sum().item(),
        lambda: static * static.tolist()[0],
        lambda: static if static[0] > 0 else weight,
        lambda: static.cpu(),
        lambda: static + torch.tensor([1.0, 2.0, 3.0]),
    )
    for function, mode in product(waiting, (False, True)):
        with torch.inference_mode(mode), pytest.raises(AssertionError, match="waits for the device"):
            FakeCapture()(function)
    holder = [weight]
    replay, result = FakeCapture()(lambda: static + holder[0])
    holder[0] = torch.full((3,), 5.0)  # a new tensor, unknown to the recording
    static.fill_(2)
    replay()
    assert result.tolist() == [3.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_decode_graphs_equal_eager_steps_on_gpu(backend: str) -> None:
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 12, "attention_backend": backend}
    eager = EngineCore(
        EngineConfig(dtype="bfloat16", deterministic=True, enforce_eager=True, num_kv_blocks=400, **options)
    )
    graphed = EngineCore(EngineConfig(dtype="bfloat16", deterministic=True, num_kv_blocks=400, **options))
    expected = {name: answer.ids for name, answer in run(eager, traffic()).items()}
    assert {name: answer.ids for name, answer in run(graphed, traffic()).items()} == expected


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_draft_model_keeps_tokens_on_gpu(backend: str, tmp_path: Path) -> None:
    """The model drafts for itself, so most drafts are right; the drafter's products do not follow --deterministic."""
    shape = {"hidden_size": 256, "max_position_embeddings": 1024, "dtype": torch.bfloat16}
    path = save_tiny_model(tmp_path, "llama", num_hidden_layers=2, **shape)
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 12, "attention_backend": backend}
    options |= {"model": str(path), "dtype": "bfloat16", "deterministic": True, "num_kv_blocks": 400}
    expected = run(EngineCore(EngineConfig(**options)), traffic())
    speculative = SpeculativeConfig(method="draft_model", model=str(path), num_speculative_tokens=3)
    speculative_engine = EngineCore(EngineConfig(speculative_config=speculative, **options), make_drafter=always)
    answers = run(speculative_engine, traffic())
    assert {name: answer.ids for name, answer in answers.items()} == {name: each.ids for name, each in expected.items()}
    graphs = speculative_engine._device_drafter.graphs
    assert graphs is not None
    assert len(graphs.graph_set.graphs) > 3
    assert not graphs.graph_set.eager_reasons
    assert sum(speculative_engine.engine_stats.accepted_drafts) > speculative_engine.engine_stats.draft_tokens / 2 > 20


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa"])
def test_draft_heads_keep_tokens_on_gpu(method: str, backend: str, tmp_path: Path) -> None:
    """The heads have random weights, so nearly all drafts are wrong, except for a request that allows one token."""
    shape = {"hidden_size": 256, "max_position_embeddings": 1024, "dtype": torch.bfloat16}
    path = save_tiny_model(tmp_path / "model", "llama", **shape)
    head, _ = made_head(tmp_path / "head", method, 256)
    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 12, "attention_backend": backend}
    options |= {"model": str(path), "dtype": "bfloat16", "deterministic": True, "num_kv_blocks": 400}
    requests = [*traffic(), request("one", [7, 9, 11], max_tokens=60, allowed_token_ids=(40,))]
    expected = {name: answer.ids for name, answer in run(EngineCore(EngineConfig(**options)), requests).items()}
    speculative = SpeculativeConfig(method=method, model=str(head), num_speculative_tokens=3)
    for eager in (True, False):
        config = EngineConfig(speculative_config=speculative, enforce_eager=eager, **options)
        speculative_engine = EngineCore(config, make_drafter=always)
        assert {name: answer.ids for name, answer in run(speculative_engine, requests).items()} == expected
        assert sum(speculative_engine.engine_stats.accepted_drafts) > 20
        graphs = speculative_engine._device_drafter.graphs
        assert (graphs is None) == eager
    assert len(graphs.graph_set.graphs) > 3
    assert bool(speculative_engine.executor.decode_graphs.draft_head_graphs.graphs) == (method != "medusa")
    for each in (
        graphs.graph_set,
        speculative_engine.executor.decode_graphs.graph_set,
        speculative_engine.executor.decode_graphs.draft_head_graphs,
    ):
        assert not each.eager_reasons
