"""Compiles every Triton kernel for an H100 (sm_90), on a machine without a GPU, and prints what ptxas made of each.

The kernels are launched through the functions that serve them, with a driver that names the target and runs nothing: so
arguments, specializations and options are those of a real launch. One JSON object per compiled kernel:
    python -m tests.kernels.triton.compile_for_gpu FOLDER
The folder takes temporary files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Rope, Softmax
from quire.kernels.gpu import triton_fused, triton_linear, triton_logits, triton_paged, triton_sampling

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

PLAIN, CAPPED = Softmax(0.1), Softmax(0.1, window=500, softcap=30.0)


class NoGPU:
    """A driver of which the compiler asks the target alone."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: list[Any] = []
launch = jit.JITFunction.run


def compile_only(self: jit.JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    if not any(kernel is known for known in compiled):
        compiled.append(kernel)
        print(json.dumps(report(kernel)), flush=True)


def report(kernel: Any) -> dict[str, Any]:
    """Name, registers a thread, bytes a thread spills, bytes of shared memory, and instructions that tell the path."""
    path = Path(sys.argv[1], "kernel.cubin")
    path.write_bytes(kernel.asm["cubin"])
    usage, code = (
        subprocess.run([CUOBJDUMP, option, path], check=True, capture_output=True, text=True).stdout
        for option in ("--dump-resource-usage", "--dump-sass")
    )
    path.unlink()
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    told = ("HGMMA", "HMMA", "LDGSTS", "LDG.E.128", "STG.E.128", "STL")
    counts = {name: len(re.findall(rf"\b{re.escape(name)}\b", code)) for name in told}
    meta = kernel.metadata
    dtype = "bf16" if "bf16" in kernel.asm["ttir"] else "fp32"
    return {
        "name": meta.name,
        "dtype": dtype,
        "registers": registers,
        "spilled": stack,
        "shared": meta.shared,
        "code": counts,
    }


def attention(
    contexts: list[int],
    queries: int,
    dim: int,
    softmax: Softmax = PLAIN,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    fixed: bool = False,
) -> None:
    """Llama's heads: 32 of queries, 8 of keys."""
    pages, seqs = -(-max(contexts) // page), len(contexts)
    tokens = queries * seqs
    metadata = AttentionMetadata(
        query_start=torch.arange(seqs + 1, dtype=torch.int32) * queries,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        key_start=torch.zeros(seqs + 1, dtype=torch.int32),
        block_table=torch.zeros((seqs, pages), dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slots=torch.zeros(tokens, dtype=torch.int64),
        max_query_len=queries,
        max_context_len=max(contexts),
    )
    k_cache, v_cache = torch.empty((2, 4, page, 8, dim), dtype=dtype)
    q = torch.empty((tokens, 32, dim), dtype=dtype)
    triton_paged.paged_attention(q, k_cache, v_cache, metadata, softmax, fixed=fixed)


def attentions() -> None:
    for dim in (64, 96, 128, 256):
        for contexts, queries in (([2000], 1), ([600] * 40, 1), ([600] * 2, 300)):
            attention(contexts, queries, dim)
            attention(contexts, queries, dim, fixed=True)
    for dim in (128, 256):
        attention([2000], 1, dim, CAPPED, page=256)
        attention([600], 300, dim, CAPPED, page=256)
        attention([600], 300, dim, CAPPED, fixed=True)
        attention([2000], 1, dim, dtype=torch.float32)
        attention([600], 300, dim, dtype=torch.float32, softmax=CAPPED)
    attention([600], 12, 128, page=256)


def elementwise() -> None:
    x, weight = torch.empty((3, 4096), dtype=torch.bfloat16), torch.empty(4096)
    triton_fused.rms_norm(x, weight, 1e-5)
    triton_fused.add_rms_norm(x, x.clone(), weight, 1e-5)
    triton_fused.silu_mul(x)
    triton_fused.gelu_mul(x)
    positions = torch.zeros(3, dtype=torch.int64)
    metadata = AttentionMetadata(*[positions] * 6, max_query_len=1, max_context_len=1)
    k_cache, v_cache = torch.empty((2, 4, 16, 8, 128), dtype=torch.bfloat16)
    k = torch.empty((3, 8, 128), dtype=torch.bfloat16)
    triton_fused.store_kv(k, k, k_cache, v_cache, positions)
    qkv, norm = torch.empty((3, 48 * 128), dtype=torch.bfloat16), torch.empty(128)
    for norms in ((None, None), (norm, norm)):
        rope = Rope(128, torch.empty(9, 128), *norms, 1e-5)
        triton_fused.rope_store(qkv, rope, k_cache, v_cache, metadata)


def sampling(rows: int) -> None:
    logits, tokens = torch.empty((rows, 128_256)), torch.zeros((rows, 100), dtype=torch.int32)
    real, whole = torch.ones(rows), torch.ones(rows, dtype=torch.int64)
    for filtered in (False, True):
        asked = (real, whole.int(), real.double(), real, whole, whole)
        triton_sampling.pick(logits, *asked, drawn=True, filtered=filtered)
    triton_logits.penalize(logits, tokens, whole, whole, whole, whole, real, real, real, longest=7 * rows)
    triton_logits.add(logits, whole, whole, real)
    triton_logits.ban(logits, tokens, whole, whole, whole, whole.int(), whole.int())


def linear(rows: int) -> None:
    for outs, wide in ((4096, False), (32_064, True)):
        weight = torch.empty((outs, 1024), dtype=torch.bfloat16)
        triton_linear.pack_linear(weight, None, wide=wide)(torch.empty((rows, 1024), dtype=torch.bfloat16), NO_ADAPTERS)


def main() -> None:
    driver.set_active(NoGPU())
    jit.JITFunction.run = compile_only
    attentions()
    elementwise()
    sampling(3)
    linear(3)
    before = len(compiled)
    # What changes from step to step compiles nothing anew.
    for seqs in (1, 2, 16, 17):
        attention([1 + 500 * seqs] * seqs, 1, 128)
        attention([160 * seqs] * seqs, 80, 128)
    for rows in (1, 16, 33):
        sampling(rows)
        linear(rows)
    print(json.dumps({"compiled_anew": len(compiled) - before}))


if __name__ == "__main__":
    main()
