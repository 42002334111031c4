"""Compiles Triton kernels for a GPU on a machine without one, and prints what ptxas made of each.

The kernels are launched through the functions that serve them, with a driver that names the target and runs nothing: so
arguments, specializations and options are those of a real launch. One JSON object per compiled kernel:
    python -m tests.kernels.triton.compile_for_gpu FOLDER CAPABILITY NAME ...
The folder takes temporary files; the capability is a number such as 120; a name is one of PARTS below, after which the
number of kernels that its later steps compiled anew is printed too, or a function here that needs no arguments.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AdapterSlotSpec, AttentionMetadata, Linear, LinearContext, MoEComponents
from quire.kernels.gpu import (
    triton_backend,
    triton_fused,
    triton_launch_sizes,
    triton_logits,
    triton_paged_attention,
    triton_sampling,
    triton_short_conv,
)
from quire.kernels.gpu.experts import grouped_matmul
from quire.kernels.gpu.experts.grouped_matmul import GroupedMatmul
from quire.kernels.gpu.experts.grouped_moe import ExpertLinearGroup, GroupedMoE
from quire.kernels.gpu.linears import triton_linear, triton_lora
from quire.kernels.gpu.linears.triton_linear import DenseLinear
from quire.kernels.gpu.quantization import quantized_linear, torch_matmul, triton_quantized, weight_packing
from quire.kernels.gpu.quantization.activation_rounding import EightBitRounding
from quire.kernels.gpu.quantization.weight_packing import interleave_output_rows
from quire.kernels.gpu.ranks.context_parallel import merge_rank_outputs
from quire.kernels.gpu.ranks.one_shot_all_reduce import OneShotAllReduce
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, num_scale_elements
from quire.kernels.parameters.routing import Routing
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from tests.kernels.triton.compile_layers import latent, latents, recurrences

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

CAPABILITY = int(sys.argv[2])

PLAIN, CAPPED = AttentionParams(0.1), AttentionParams(0.1, window=500, softcap=30.0)


class NoGPU:
    """A driver of which the compiler asks the target alone."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

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
    told = (
        "HGMMA",
        "HMMA",
        "IGMMA",
        "IMMA",
        "QGMMA",
        "QMMA",
        "LDGSTS",
        "LDG.E.128",
        "STG.E.128",
        "STL",
        "I2F",
        "I2F.S8",
    )
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
        "first_sum": first_sum(kernel.asm["ttgir"]),
    }


def first_sum(ir: str) -> str | None:
    """How numbers lie on threads in a kernel's first reduction, which says in which order they are added."""
    found = re.search(r'"tt\.reduce"\(.*?\) : \(tensor<[^>]*, (#\w+)>\)', ir, re.DOTALL)
    layout = None if found is None else re.search(rf"^{found[1]} = (.*)$", ir, re.MULTILINE)
    return None if layout is None else layout[1]


def attention(
    contexts: list[int],
    queries: int,
    dim: int,
    softmax: AttentionParams = PLAIN,
    *,
    dtype: torch.dtype = torch.bfloat16,
    page: int = 16,
    fixed: bool = False,
    kv_dtype: torch.dtype | None = None,
    own: ContextShard | None = None,
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
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        max_query_len=queries,
        max_context_len=max(contexts),
    )
    held = dtype if kv_dtype is None else kv_dtype
    k_cache, v_cache = torch.empty((2, 4, page, 8, dim + num_scale_elements(held)), dtype=held)
    q = torch.empty((tokens, 32, dim), dtype=dtype)
    triton_paged_attention.paged_attention(q, k_cache, v_cache, metadata, softmax, fixed=fixed, shard=own)


def divided() -> None:
    """Of two ranks that divide the tokens of sequences."""
    own = ContextShard(1, 2, 16)
    for fixed, dim in product((False, True), (64, 128)):
        for contexts, queries in (([4000], 1), ([1200] * 40, 1), ([600] * 2, 300)):
            attention(contexts, queries, dim, fixed=fixed, own=own)
            attention(contexts, queries, dim, CAPPED, fixed=fixed, own=own)
            latent(16, contexts, queries, torch.bfloat16, fixed=fixed, own=own)
    for sinks in (None, torch.zeros(16)):
        merge_rank_outputs(torch.empty((2, 3, 16, 130)), sinks, torch.bfloat16)


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
    attention([600], 80, 128)  # so few tiles that they are split
    for kv_dtype in QUANTIZED_KV_DTYPES:
        for dim in (64, 128):  # at 256, deterministic, an H100 spills 48 bytes
            attention([2000], 1, dim, kv_dtype=kv_dtype)
            attention([600] * 2, 300, dim, kv_dtype=kv_dtype)
            attention([600] * 2, 300, dim, kv_dtype=kv_dtype, fixed=True)


def decodes() -> None:
    """Attention of one query each alone, of all kinds of pages and types."""
    for fixed, contexts, dim in product((False, True), ([2000], [600] * 40), (64, 96, 128, 256)):
        attention(contexts, 1, dim, fixed=fixed)
        for kv_dtype in QUANTIZED_KV_DTYPES:
            attention(contexts, 1, dim, kv_dtype=kv_dtype, fixed=fixed)
    for contexts, dim in product(([2000], [600] * 40), (64, 128, 256)):
        attention(contexts, 1, dim, dtype=torch.float32)
        attention(contexts, 1, dim, CAPPED, page=256)


def elementwise() -> None:
    x, weight = torch.empty((3, 4096), dtype=torch.bfloat16), torch.empty(4096)
    triton_fused.rms_norm(x, weight, 1e-5)
    triton_fused.add_rms_norm(x, x.clone(), weight, 1e-5)
    triton_fused.layer_norm(x, weight, weight, 1e-5)
    triton_fused.add_layer_norm(x, x.clone(), weight, weight, 1e-5)
    triton_fused.silu_mul(x)
    triton_fused.gelu_mul(x)
    positions = torch.zeros(3, dtype=torch.int64)
    metadata = AttentionMetadata(*[positions] * 6, max_query_len=1, max_context_len=1)
    k_cache, v_cache = torch.empty((2, 4, 16, 8, 128), dtype=torch.bfloat16)
    k = torch.empty((3, 8, 128), dtype=torch.bfloat16)
    triton_fused.store_kv(k, k, k_cache, v_cache, positions)
    qkv, norm = torch.empty((3, 48 * 128), dtype=torch.bfloat16), torch.empty(128)
    for norms in ((None, None), (norm, norm)):
        rope = QKNormRopeParams(128, torch.empty(9, 128), *norms, 1e-5)
        triton_fused.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)
    for kv_dtype in QUANTIZED_KV_DTYPES:
        codes = torch.empty((2, 4, 16, 8, 128 + num_scale_elements(kv_dtype)), dtype=kv_dtype)
        triton_fused.rope_and_store_kv(qkv, rope, *codes, metadata)


def sampling(rows: int = 3) -> None:
    logits, tokens = torch.empty((rows, 128_256)), torch.zeros((rows, 100), dtype=torch.int32)
    real, whole = torch.ones(rows), torch.ones(rows, dtype=torch.int64)
    for filtered in (False, True):
        asked = (real, whole.int(), real.double(), real, whole, whole)
        triton_sampling.sample_tokens(logits, *asked, has_sampling=True, has_filters=filtered)
    triton_logits.penalize_tokens(logits, tokens, whole, whole, whole, whole, real, real, real, longest=7 * rows)
    triton_logits.add_logit_bias(logits, whole, whole, real)
    triton_logits.ban_bad_words(logits, tokens, whole, whole, whole, whole.int(), whole.int())


def linear(rows: int = 3) -> None:
    for outs, wide in ((4096, False), (32_064, True)):
        weight = torch.empty((outs, 1024), dtype=torch.bfloat16)
        triton_linear.pack_linear(weight, None, wide=wide)(torch.empty((rows, 1024), dtype=torch.bfloat16), NO_ADAPTERS)


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def weights_of_few_bits() -> list[weight_packing.PackedWeight]:
    outs, inner = 4096, 1024
    codes, halves = torch.empty((outs, inner), dtype=torch.int8), torch.empty((outs, inner // 2), dtype=torch.uint8)
    floats = torch.zeros((outs, inner), dtype=torch.float8_e4m3fn)

    def scales(group: int) -> torch.Tensor:
        return torch.ones((outs, inner // group))

    native = CAPABILITY >= 89
    made = [
        weight_packing.pack_group_quantized(GroupedWeight(halves, scales(32), scales(32))),
        weight_packing.pack_group_quantized(GroupedWeight(halves, scales(128))),
        weight_packing.pack_group_quantized(GroupedWeight(halves, scales(16), code_values=tuple(range(16)))),
        weight_packing.pack_group_quantized(GroupedWeight(halves, scales(32), code_values=E2M1)),
        weight_packing.pack_group_quantized(GroupedWeight(codes, scales(32), scales(32))),
        weight_packing.pack_group_quantized(GroupedWeight(codes, scales(inner))),
        weight_packing.pack_float8(
            Float8Weight(floats, torch.ones((outs // 128, inner // 128)), (128, 128)), native=native
        ),
        weight_packing.pack_float8(Float8Weight(floats, torch.ones((outs, 1)), (1, inner)), native=native),
        weight_packing.pack_float8(Float8Weight(floats, scales(64), (1, 64)), native=native),
    ]
    return [interleave_output_rows(each) for each in made if each is not None]


def few_bits(rows: int) -> None:
    """By Triton, and what it does beside PyTorch's products."""
    parts = weights_of_few_bits()
    x = torch.empty((rows, parts[0].in_features), dtype=torch.bfloat16)
    for fixed in (False, True):
        for part in parts:
            quantized_linear.TritonQuantizedLinear([part], None, wide=False, fixed=fixed)(x, NO_ADAPTERS)
    for part in parts:
        out = x.new_empty((rows, part.out_features))
        quantized_linear.multiply_unrounded(part, x, None, out, fixed=False)
        torch_matmul.multiply_dequantized(part, x, None, out)
        if part.rounds_activations:
            EightBitRounding(
                part.kernel_form[0] == triton_quantized.INTEGERS,
                has_block_scales=False,
                pair_distance=part.pair_distance,
            ).round_rows(x)


def rounded(rows: int = 3) -> None:
    """Norms and gates in 8 bits and as they are, of gpt-oss' width, Llama's and DeepSeek's."""
    for (size, integers), by_blocks in product(((2880, False), (4096, True), (7168, False)), (False, True)):
        form, weight = (
            EightBitRounding(integers, by_blocks, pair_distance=64 if size % weight_packing.SCALE_BLOCK == 0 else 32),
            torch.empty(size),
        )
        x, gate_up = (torch.empty((rows, width), dtype=torch.bfloat16) for width in (size, 2 * size))
        for bias, residual, whole in ((None, None, False), (None, x, False), (None, x, True), (weight, x, False)):
            form.norm_and_round(x, residual, weight, bias, 1e-5, whole=whole)
        for whole in (False, True):
            form.gate_and_round(gate_up, gelu=False, whole=whole)
        form.round_rows(x)
        triton_fused.rms_norm(x, weight, 1e-5)
        triton_fused.add_rms_norm(x, x.clone(), weight, 1e-5)
        triton_fused.add_layer_norm(x, x.clone(), weight, weight, 1e-5)


def products() -> None:
    """Of weights of few bits, for few, some and many rows."""
    for rows in (3, 40, 600):
        few_bits(rows)


def few_bits_elsewhere() -> None:
    """Other types, and rows of a table."""
    parts = weights_of_few_bits()
    for part in parts[:2]:
        for dtype in (torch.float32, torch.float16):
            linear = quantized_linear.TritonQuantizedLinear([part], torch.empty(4096), wide=True, fixed=False)
            linear(torch.empty((70, part.in_features), dtype=dtype), NO_ADAPTERS)
    for part in parts:
        quantized_linear.look_up_rows(part, torch.zeros(3, dtype=torch.int64), torch.bfloat16)


def adapters(rows: int = 3) -> None:
    """Llama's qkv and down projections, and a head."""
    shapes = ((4096, (4096, 1024, 1024), False), (14_336, (4096,), False), (4096, (128_256,), True))
    for dtype, (inner, parts, wide), ranks in product((torch.bfloat16, torch.float32), shapes, (16, 256)):
        slots = AdapterSlotSpec(1, inner, parts, ranks, dtype, wide, torch.device("cpu"))
        out = torch.empty((rows, sum(parts)), dtype=torch.float32 if wide else dtype)
        linear = triton_lora.TritonLinearWithLora(lambda x, context, out=out: out, slots)
        slot = torch.ones(2 * rows, dtype=torch.int64)[rows % 2 :][:rows]  # any alignment
        linear(torch.empty((rows, inner), dtype=dtype), LinearContext(slot, slot))


def convolutions(rows: int = 3) -> None:
    """LFM2-1.2B's, of a token of each of so many sequences."""
    positions = torch.zeros(rows, dtype=torch.int64)
    step = AttentionMetadata(
        *[positions.int()] * 3, torch.zeros((rows, rows), dtype=torch.int32), positions, positions, 1, 1
    )
    bcx = torch.empty((rows, 3 * 2048), dtype=torch.bfloat16)
    columns = ConvStates(torch.empty((4, 1, 2, 2048)).bfloat16(), 16, torch.empty((3, 10, 2048)).bfloat16())
    for bias in (None, torch.empty(2048)):
        conv = ShortConv(torch.empty((3, 2048)), bias)
        triton_short_conv.short_conv(bcx, conv, columns, replace(step, state_slots=positions))


def mixtures() -> None:
    for rows in (3, 900, 9000):  # few, some and many of each expert
        mixture(rows)


def mixture(rows: int) -> None:
    """gpt-oss-20b's and Qwen3-30B-A3B's experts, in the forms in which they are stored."""
    for hidden, inner, count, chosen, forms in ((2880, 2880, 32, 4, "wm"), (2048, 768, 128, 8, "wif")):
        for form in forms:
            backend = triton_backend.TritonBackend()
            gate_up, down = (expert_linear(backend, *shape, form) for shape in ((2 * inner, hidden), (hidden, inner)))
            for fixed in (False, True):
                stacks = [ExpertLinearGroup.from_linears([each] * count, fixed=fixed) for each in (gate_up, down)]
                experts = MoEComponents(lambda x, _: torch.zeros((len(x), count)), [], [], Routing(chosen))  # noqa: B023
                assert stacks[0] is not None
                assert stacks[1] is not None
                GroupedMoE(backend, experts, stacks[0], stacks[1])(torch.empty((rows, hidden), dtype=torch.bfloat16))
        grouped_mixture(rows, hidden, inner, count, chosen)


def grouped_mixture(rows: int, hidden: int, inner: int, count: int, chosen: int) -> None:
    """The kernels beside PyTorch's product, which is not computed."""
    grouped_matmul.grouped_mm = lambda x, weights, _: x.new_empty((len(x), weights.shape[2]))
    backend = triton_backend.TritonBackend()
    gate_up, down = (torch.empty(shape).bfloat16() for shape in ((1, 2 * inner, hidden), (1, hidden, inner)))
    matmul = GroupedMatmul(*(each.expand(count, -1, -1).transpose(1, 2) for each in (gate_up, down)))
    parts = [
        ExpertLinearGroup.from_linears([backend.pack_linear(each[0], None)] * count, fixed=False)
        for each in (gate_up, down)
    ]
    assert parts[0] is not None
    assert parts[1] is not None
    experts = MoEComponents(lambda x, _: torch.zeros((len(x), count)), [], [], Routing(chosen))
    GroupedMoE(backend, experts, parts[0], parts[1], (matmul, 1))(torch.empty((rows, hidden), dtype=torch.bfloat16))


def expert_linear(backend: triton_backend.TritonBackend, outs: int, inner: int, form: str) -> Linear:
    bias, scales = torch.empty(outs).bfloat16(), torch.ones((outs, inner // 32))
    if form == "w":
        return DenseLinear(torch.empty((outs, inner), dtype=torch.bfloat16), bias, False, lambda x, _: x)
    halves = torch.zeros((outs, inner // 2), dtype=torch.uint8)
    weight: QuantizedWeight = GroupedWeight(halves, scales, code_values=tuple(range(16)))
    if form == "i":
        weight = GroupedWeight(halves, scales, scales)
    if form == "f":
        weight = Float8Weight(torch.zeros((outs, inner), dtype=torch.float8_e4m3fn), torch.ones((outs, 1)), (1, inner))
    return backend.pack_quantized([weight], bias, dtype=torch.bfloat16)


def one_shot_sums(rows: int = 3) -> None:
    """Over two, four and eight ranks."""
    words = torch.zeros(2, dtype=torch.int32)
    for ranks, dtype in product((2, 4, 8), (torch.bfloat16, torch.float32)):
        memory = [torch.zeros(4096, dtype=torch.uint8)] * ranks
        OneShotAllReduce(ranks - 1, memory, words).all_reduce(torch.empty((rows, 4096), dtype=dtype))


def sinks() -> None:
    """gpt-oss'."""
    for fixed in (False, True):
        sinking = replace(PLAIN, sinks=torch.zeros(32))
        attention([2000], 1, 64, sinking, fixed=fixed)
        attention([600] * 40, 1, 64, replace(sinking, window=128), fixed=fixed)
        attention([600], 300, 64, sinking, fixed=fixed)


def attentions_of_later_steps(rows: int) -> None:
    attention([1 + 500 * rows] * rows, 1, 128)
    attention([160 * rows] * rows, 80, 128)


PARTS: dict[str, tuple[Sequence[Callable[[], None]], Sequence[Callable[[int], None]]]] = {
    "attention": ((attentions, divided, sinks), (attentions_of_later_steps,)),
    "experts": ((mixtures,), (mixture,)),
    "latents": ((latents,), (latents,)),
    "products": ((products, few_bits_elsewhere), (few_bits,)),
    "recurrences": ((convolutions, recurrences), (convolutions, recurrences)),
    "rows": (
        (elementwise, one_shot_sums, rounded, sampling, linear, adapters),
        (one_shot_sums, rounded, sampling, linear, adapters),
    ),
}
"""First launches, and later ones of so many rows. What changes from step to step must compile nothing anew."""


def main() -> None:
    driver.set_active(NoGPU())
    triton_launch_sizes.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    shared = 227 if CAPABILITY in (90, 100) else 99
    triton_launch_sizes.shared_memory_bytes = lambda device: shared * 1024  # type: ignore[assignment]
    triton_launch_sizes.is_hopper = lambda device: CAPABILITY == 90  # type: ignore[assignment]
    jit.JITFunction.run = compile_only
    for name in sys.argv[3:]:
        if name not in PARTS:
            globals()[name]()
            continue
        first, later = PARTS[name]
        for launch_first in first:
            launch_first()
        before = len(compiled)
        for rows in (1, 2, 16, 33):
            for launch_later in later:
                launch_later(rows)
        print(json.dumps({"compiled_anew": len(compiled) - before}))


if __name__ == "__main__":
    main()
