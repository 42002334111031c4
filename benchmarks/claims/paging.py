"""What paging costs: attention of one decoded token over blocks, compared with contiguous keys; and the scheduler's
step.

`python -m benchmarks.claims.paging`, on a CPU with compiled kernels. The variants take turns on one thread, and medians
of their processor time are printed, so that other load on the machine meets all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import ModelRunnerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.scheduler_config import SchedulerConfig
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu.backend import CpuBackend

HEADS, KV_HEADS, DIM = 32, 8, 128
NUM_REQUESTS = 32


def median_seconds(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        for name, run in variants.items():
            began = time.process_time()
            run()
            if turn >= 2:  # the first two warm up
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


def attention_variants(context: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """One layer's attention of the last of `context` tokens. All variants compute the same."""
    backend, generator = CpuBackend(), torch.Generator().manual_seed(0)
    k, v = torch.randn((2, context, KV_HEADS, DIM), generator=generator).to(dtype)
    q = torch.randn((1, HEADS, DIM), generator=generator).to(dtype)
    num_blocks = -(-context // backend.block_size)
    positions = torch.arange(context)
    lengths = [torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [context], [0, context])]
    softmax = AttentionParams(DIM**-0.5)
    contiguous = [each.transpose(0, 1).contiguous()[None] for each in (q, k, v)]
    blocks = [each.view(num_blocks, backend.block_size, KV_HEADS, DIM).clone() for each in (k, v)]
    order = torch.randperm(num_blocks, generator=generator)

    def paged(table: Tensor) -> Callable[[], Tensor]:
        shape = backend.kv_cache_shape(num_blocks, KV_HEADS, DIM, dtype)
        k_cache, v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        slots = table[positions // backend.block_size] * backend.block_size + positions % backend.block_size
        backend.store_kv(k, v, k_cache, v_cache, slots)
        metadata = AttentionMetadata(*lengths, table.int()[None], positions[-1:], slots[-1:], 1, context)
        return lambda: backend.paged_attention(q, k_cache, v_cache, metadata, softmax)

    def gather_then_attend() -> Tensor:
        gathered = [each[order].flatten(0, 1).transpose(0, 1).contiguous()[None] for each in blocks]
        return F.scaled_dot_product_attention(contiguous[0], *gathered, enable_gqa=True)

    return {
        "Quire's kernel, blocks in order": paged(torch.arange(num_blocks)),
        "Quire's kernel, blocks scattered": paged(order),
        "PyTorch's kernel, contiguous keys": lambda: F.scaled_dot_product_attention(*contiguous, enable_gqa=True),
        "PyTorch's kernel, blocks gathered first": gather_then_attend,
    }


def decode_steps(block_size: int, context: int, steps: int) -> Callable[[], None]:
    """Schedule and apply `steps` steps of requests that decode, each from `context` tokens on."""
    length = context + steps
    config = SchedulerConfig(
        num_blocks=NUM_REQUESTS * -(-length // block_size),
        block_size=block_size,
        max_model_len=length,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=NUM_REQUESTS * context,
        enable_prefix_caching=False,
    )

    def run() -> None:
        for _ in range(steps):
            batch = scheduler.schedule()
            assert batch is not None
            sampled = {row.request_id: [7] for row in batch.scheduled_requests}
            scheduler.update_from_output(batch, ModelRunnerOutput(sampled))
            scheduler.take_outputs()

    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(NUM_REQUESTS):
        prompt = [index] * (context - 1)
        scheduler.add_request(EngineCoreRequest(id=str(index), prompt_ids=prompt, params=params, seed=0))
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=101)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{HEADS} query heads, {KV_HEADS} KV heads of {DIM}, {args.dtype}, medians of {args.rounds}")
    for context in args.contexts:
        medians = median_seconds(attention_variants(context, getattr(torch, args.dtype)), args.rounds)
        for name, seconds in medians.items():
            print(f"{context:6} tokens  {name:40} {seconds * 1e6:8.0f} us")
    for block_size in (16, 1024):
        seconds = []
        for _ in range(11):
            run = decode_steps(block_size, 256, 256)
            began = time.process_time()
            run()
            seconds.append((time.process_time() - began) / 256)
        median = statistics.median(seconds) * 1e6
        print(f"scheduler, {NUM_REQUESTS} decodes, blocks of {block_size:5}: {median:.0f} us a step")


if __name__ == "__main__":
    main()
