"""What a step costs the host where a GPU computes: `python -m benchmarks.host_time`. Needs no GPU.

The engine is real but for its device: the model, the graphs' replays and the sampler's kernels give tensors that are
ready, and what would be uploaded is laid into memory that stays here. A GPU waits for the host where a step of its own
is shorter than this. The calls into CUDA that are missing take some microseconds each, a score of them in a step.
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
from quire.engine.config import EngineConfig
from quire.engine.core.steps import Steps
from quire.engine.engine_core import EngineCore
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.schemes import Unquantized
from quire.engine.link.engine_messages import Stepped, encode
from quire.engine.models.decoder import Decoder
from quire.engine.models.spec import DecoderSpec
from quire.engine.processes.heartbeat import NoHeartbeat
from quire.engine.types import EngineCoreRequest, SamplingParams
from quire.engine.worker import inputs, runner
from quire.engine.worker.graphs import prompts as prompt_graphs
from quire.engine.worker.loading import room
from quire.engine.worker.memory import allocate_pages, layers_of, prompts
from quire.engine.worker.sampling import device_sampler, sampling_rules
from quire.kernels.backend import AttentionMetadata, Linear
from quire.kernels.gpu import transfer, triton_sampling
from quire.kernels.reference import Reference
from quire.kernels.rotation import Rope
from quire.kernels.softmax import Softmax

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
    """`upload` up to the copy to the device."""
    staged = torch.empty(transfer._ends(arrays)[-1], dtype=torch.uint8)
    transfer.fill(staged, arrays)
    return transfer.split(staged, arrays)


@contextmanager
def free_device() -> Iterator[None]:
    """Everything that a GPU computes is there at once."""
    picks = torch.full((2048,), PICKED)

    def pick(logits: Tensor, *_: Tensor, drawn: bool, filtered: bool) -> Tensor:
        return picks[: len(logits)]

    def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, function()

    with ExitStack() as stack:
        for module in (device_sampler, prompt_graphs, inputs, runner, sampling_rules):
            stack.enter_context(patch.object(module, "upload", stage))
        for name in ("add", "ban", "penalize"):
            stack.enter_context(patch.object(device_sampler.DeviceChanges, name, lambda *_: None))
        stack.enter_context(patch.object(triton_sampling, "pick", pick))
        stack.enter_context(patch.object(room, "choose_capture", lambda *_: capture))
        stack.enter_context(patch.object(runner, "choose_sampler", lambda *_: device_sampler.sample_on_device))
        yield


def engine_of(rows: int) -> EngineCore:
    pages = max(rows, 2) * (PROMPT + 1024) // 16
    config = EngineConfig(
        max_num_seqs=rows, max_model_len=CONTEXT, num_kv_blocks=pages, warmup_seconds=0.0, attention_backend="cpu",
        max_num_batched_tokens=8192,
    )  # fmt: skip
    engine = EngineCore(config)  # on the CPU, but with a GPU's graphs, sampler and steps ahead
    engine._steps = Steps(engine.scheduler, engine.runner, 1, NoHeartbeat())
    hidden, logits = torch.zeros((8192, 8)), torch.zeros((rows, 4096))
    picked, known = torch.full((rows,), PICKED), torch.ones(rows, dtype=torch.bool)
    engine.runner._model = SimpleNamespace(
        forward_tapped=lambda ids, metadata, cache, kept, *_: (hidden[: len(kept)], []),
        logits=lambda states, context: logits[: len(states)],
        largest=lambda states, context: (picked[: len(states)], known[: len(states)]),
        offload=None,
        shard=SimpleNamespace(rank=0),
    )
    return engine


class Clock:
    """Adds up what the parts of a step take."""

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
    """Returns `encode`, watched too."""
    scheduler, worker = engine.scheduler, engine.runner
    scheduler.schedule = clock.watched("schedule", scheduler.schedule)
    scheduler.apply = clock.watched("apply", scheduler.apply)
    worker.launch = clock.watched("launch", worker.launch)
    return clock.watched("encode", encode)


def measure(rows: int, params: SamplingParams, steps: int) -> dict[str, float]:
    """Milliseconds of processor time of each part, and of all: medians of `steps` steps in which every row decodes."""
    with free_device(), ExitStack() as stack:
        engine = engine_of(rows)
        for index in range(rows):
            prompt = [3 + index + at for at in range(PROMPT)]
            engine.add(EngineCoreRequest(id=f"cmpl-{index}-0", prompt_ids=prompt, params=params, seed=index))
        while engine.stats.prompt_tokens < rows * PROMPT:
            engine.step()
        clock, taken, parts = Clock(), [], {part: [] for part in PARTS}
        result = clock.watched("result", runner.PendingStep.result)
        stack.enter_context(patch.object(runner.PendingStep, "result", result))
        encoded = watch(engine, clock)
        for _ in range(steps):
            clock.spent = dict.fromkeys(PARTS, 0.0)
            began = time.thread_time()
            outputs = engine.step()
            encoded(Stepped(outputs, engine.stats, engine.last_step))
            taken.append(time.thread_time() - began)
            for part, spent in clock.spent.items():
                parts[part].append(spent)
        assert len(outputs) == rows
    return {name: statistics.median(each) * 1e3 for name, each in [*parts.items(), ("all", taken)]}


class FreeBackend(Reference):
    """Every kernel gives a tensor that is ready; `launches` counts them."""

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

    def rope_store(
        self, qkv: Tensor, rope: Rope, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return self.ready(len(qkv), qkv.shape[1] // rope.head_dim - 2 * k_cache.shape[2], rope.head_dim)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        return self.ready(*q.shape)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Linear:
        out = len(weight)
        return lambda x, context: self.ready(len(x), out)


def measure_eager(layers: int, tokens: int, steps: int) -> tuple[float, int]:
    """Milliseconds of processor time of a forward pass without graphs, its kernels free, and how many these are."""
    backend = FreeBackend()
    norm, rope = NormSpec(1e-6), {"rope_type": "default", "rope_theta": 1e4}
    layer = AttentionSpec(4, 2, 16, scale=0.25, rope=rope, norm=norm), MlpSpec(64, norm)
    spec = DecoderSpec(512, 64, (layer,) * layers, norm, tie_embeddings=True)
    cpu = torch.device("cpu")
    scheme = Unquantized(backend, torch.bfloat16)
    model = Decoder(
        spec, backend, scheme, dtype=torch.bfloat16, device=cpu, max_model_len=tokens, progress=lambda: None
    )
    for parameter in model.parameters().values():
        parameter.put(torch.zeros(parameter.shape, dtype=parameter.dtype))
    cache = layers_of(model, allocate_pages(model, -(-tokens // backend.block_size)))
    metadata, ids = prompts(1, tokens, backend.block_size, cpu), torch.zeros(tokens, dtype=torch.int64)
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
