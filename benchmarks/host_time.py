"""Host time of a step when a GPU computes: `python -m benchmarks.host_time`. Needs no GPU.

Everything but the device is real: model, graph replays and sampling kernels return ready tensors, uploads stay in host
memory. A GPU with shorter steps waits for the host. About twenty missing CUDA calls per step take microseconds each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.options import options
from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.client.messages import Stepped
from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.step_runner import StepRunner
from quire.engine.engine_core import EngineCore
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.sublayer import BuildContext
from quire.engine.models.decoder import Decoder
from quire.engine.processes.heartbeat import NullHeartbeat
from quire.engine.processes.utility_calls import encode
from quire.engine.worker import input_batch, model_runner
from quire.engine.worker.device_memory import allocate_kv_blocks, kv_cache_by_layer, prefill_metadata
from quire.engine.worker.graphs import mixed_batch_graphs as prompt_graphs
from quire.engine.worker.loading import kv_allocation
from quire.engine.worker.sampling import device_sampler, sampling_rules
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, Linear
from quire.kernels.gpu import host_transfer, triton_sampling
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend

ROWS = (1, 8, 32, 64, 128, 256, 512)
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
    "drawn": SamplingParams(temperature=0.8, top_p=0.9, max_tokens=None),
    "ruled": SamplingParams(repetition_penalty=1.1, logit_bias={5: 1.0}, stop_token_ids=(3, 4), max_tokens=None),
}
PROMPT, CONTEXT = 100, 2048
PARTS = ("schedule", "launch", "result", "apply", "encode")
PICKED = 300


def stage(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """`upload` without the copy to the device."""
    staged = torch.empty(host_transfer._end_offsets(arrays)[-1], dtype=torch.uint8)
    host_transfer.pack_arrays_into(staged, arrays)
    return host_transfer.unpack_arrays(staged, arrays)


@contextmanager
def free_device() -> Iterator[None]:
    picks = torch.full((2048,), PICKED)

    def pick(logits: Tensor, *_: Tensor, has_sampling: bool, has_filters: bool) -> Tensor:
        return picks[: len(logits)]

    def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, function()

    with ExitStack() as stack:
        for module in (device_sampler, prompt_graphs, input_batch, model_runner, sampling_rules):
            stack.enter_context(patch.object(module, "upload_arrays", stage))
        for name in ("add_biases", "ban_words", "apply_penalties"):
            stack.enter_context(patch.object(device_sampler.DeviceLogitsProcessor, name, lambda *_: None))
        stack.enter_context(patch.object(triton_sampling, "sample_tokens", pick))
        stack.enter_context(patch.object(kv_allocation, "make_graph_capture", lambda *_: capture))
        stack.enter_context(patch.object(model_runner, "choose_sampler", lambda *_: device_sampler.sample_on_device))
        yield


def engine_of(rows: int) -> EngineCore:
    pages = max(rows, 2) * (PROMPT + 1024) // 16
    config = EngineConfig(
        max_num_seqs=rows, max_model_len=CONTEXT, num_kv_blocks=pages, warmup_seconds=0.0, attention_backend="cpu",
        max_num_batched_tokens=8192,
    )  # fmt: skip
    engine = EngineCore(config)  # on the CPU, but with a GPU's graphs, sampler and asynchronous steps
    engine._step_runner = StepRunner(engine.scheduler, engine.executor, 1, NullHeartbeat())
    hidden, logits = torch.zeros((8192, 8)), torch.zeros((rows, 4096))
    picked, known = torch.full((rows,), PICKED), torch.ones(rows, dtype=torch.bool)
    engine.executor._model = SimpleNamespace(
        forward_with_aux=lambda ids, metadata, cache, kept, *_: (hidden[: len(kept)], []),
        compute_logits=lambda states, context: logits[: len(states)],
        greedy_tokens_and_finite_flags=lambda states, context: (picked[: len(states)], known[: len(states)]),
        offload=None,
        shard=SimpleNamespace(rank=0),
    )
    return engine


class Clock:
    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.thread_time()
            found = function(*args)
            self.spent[part] += time.thread_time() - began
            return found

        return call


def watch(engine: EngineCore, clock: Clock) -> Callable[..., bytes]:
    """Returns the watched `encode`."""
    scheduler, worker = engine.scheduler, engine.executor
    scheduler.schedule = clock.watched("schedule", scheduler.schedule)
    scheduler.update_from_output = clock.watched("apply", scheduler.update_from_output)
    worker.launch = clock.watched("launch", worker.launch)
    return clock.watched("encode", encode)


def measure(rows: int, params: SamplingParams, steps: int) -> dict[str, float]:
    """Median milliseconds of processor time, by part and in total; every row decodes."""
    with free_device(), ExitStack() as stack:
        engine = engine_of(rows)
        for index in range(rows):
            prompt = [3 + index + at for at in range(PROMPT)]
            engine.add_request(EngineCoreRequest(id=f"cmpl-{index}-0", prompt_ids=prompt, params=params, seed=index))
        while engine.engine_stats.prompt_tokens < rows * PROMPT:
            engine.step()
        clock, taken, parts = Clock(), [], {part: [] for part in PARTS}
        result = clock.watched("result", model_runner.PendingStep.result)
        stack.enter_context(patch.object(model_runner.PendingStep, "result", result))
        encoded = watch(engine, clock)
        for _ in range(steps):
            clock.spent = dict.fromkeys(PARTS, 0.0)
            began = time.thread_time()
            outputs = engine.step()
            encoded(Stepped(outputs, engine.engine_stats, engine.last_step_record))
            taken.append(time.thread_time() - began)
            for part, spent in clock.spent.items():
                parts[part].append(spent)
        assert len(outputs) == rows
    return {name: statistics.median(each) * 1e3 for name, each in [*parts.items(), ("all", taken)]}


class FreeBackend(ReferenceBackend):
    """Kernels return ready tensors; `launches` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self._ready: dict[tuple[int, ...], Tensor] = {}

    def ready(self, *shape: int) -> Tensor:
        self.launches += 1
        if shape not in self._ready:
            self._ready[shape] = torch.zeros(shape, dtype=torch.bfloat16)
        return self._ready[shape]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.ready(*x.shape)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self.ready(*x.shape), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.ready(gate_up.shape[0], gate_up.shape[1] // 2)

    def rope_and_store_kv(
        self, qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self.ready(len(qkv), qkv.shape[1] // rope.head_dim - 2 * k_cache.shape[2], rope.head_dim)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return self.ready(*q.shape)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        out = len(weight)
        return lambda x, context: self.ready(len(x), out)


def measure_eager(layers: int, tokens: int, steps: int) -> tuple[float, int]:
    """Milliseconds of processor time of a forward pass, and its number of kernels."""
    backend = FreeBackend()
    norm, rope = NormSpec(1e-6), {"rope_type": "default", "rope_theta": 1e4}
    layer = AttentionLayerSpec(4, 2, 16, scale=0.25, rope=rope, norm=norm), MLPSpec(64, norm)
    spec = DecoderSpec(512, 64, (layer,) * layers, norm, tie_embeddings=True)
    cpu = torch.device("cpu")
    scheme = UnquantizedScheme(backend, torch.bfloat16)
    model = Decoder(
        spec,
        BuildContext(backend, scheme, spec.hidden_size, torch.bfloat16, torch.bfloat16, cpu, max_model_len=tokens),
        lambda: None,
    )
    for parameter in model.parameters().values():
        parameter.weight_loader(torch.zeros(parameter.shape, dtype=parameter.dtype))
    cache = kv_cache_by_layer(model, allocate_kv_blocks(model, -(-tokens // backend.block_size)))
    metadata, ids = prefill_metadata(1, tokens, backend.block_size, cpu), torch.zeros(tokens, dtype=torch.int64)
    taken = []
    with torch.inference_mode():
        for _ in range(steps):
            backend.launches = 0
            began = time.thread_time()
            model.forward(ids, metadata, cache, torch.arange(1))
            taken.append(time.thread_time() - began)
    return statistics.median(taken) * 1e3, backend.launches


def main() -> None:
    kinds = {"nargs": "*", "default": list(KINDS), "choices": KINDS}
    args = options(__doc__, {"--rows": {"nargs": "*", "default": ROWS}, "--kinds": kinds, "--steps": 200})
    torch.set_num_threads(1)
    spent, kernels = measure_eager(32, 256, args.steps)
    print(f"a forward pass of 32 layers without graphs: {spent:.3f} ms beside the launches of {kernels} kernels")
    print("ms of processor time in a step, median:", *PARTS, "all", sep="\t")
    for kind in args.kinds:
        for rows in args.rows:
            found = measure(rows, KINDS[kind], args.steps)
            print(f"{kind}, {rows} rows", *(f"{found[part]:.3f}" for part in (*PARTS, "all")), sep="\t", flush=True)


if __name__ == "__main__":
    main()
