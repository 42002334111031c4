"""Kernels touch no byte outside of their tensors, and give the same bits in any order of their programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.engine.layers.schemes.online_quantization import quantize_int4, quantize_int8
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.gpu.experts import grouped_matmul, grouped_trial
from quire.kernels.gpu.experts.grouped_moe import GroupedMoE
from quire.kernels.gpu.mla.expanded_attention import run_expanded_attention
from quire.kernels.gpu.quantization.activation_rounding import EightBitRounding
from quire.kernels.gpu.quantization.quantized_linear import TritonQuantizedLinear
from quire.kernels.gpu.quantization.weight_packing import PackedWeight
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.quantized_tensors import GroupedWeight, RoundedActivations
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import page, random_part
from tests.kernels.recurrences import Kept, Row, given
from tests.kernels.test_experts import HIDDEN, experts, weights
from tests.kernels.test_short_conv import Kept as KeptColumns
from tests.kernels.test_short_conv import made as convolution
from tests.kernels.triton.conftest import INTERPRETED

if not INTERPRETED:
    pytest.skip("guards are the interpreter's", allow_module_level=True)

from tests.kernels.triton.guarded import guarded
from tests.kernels.triton.test_experts import mxfp4
from tests.kernels.triton.test_grouped import components, stacks
from tests.kernels.triton.test_recurrent import KINDS

MIXES = {"decodes": [(33, 1), (1, 1), (270, 1)], "both": [(40, 1), (17, 1), (5, 5), (60, 33)]}


def assert_in_bounds_in_any_order(compute: Callable[[], Tensor], *others: Tensor) -> None:
    """Compute under guards in three orders."""
    wanted = compute()
    for seed in range(3):
        with guarded(seed, others) as memory:
            assert torch.equal(compute(), wanted)
        assert memory.reads > 0
        assert memory.writes > 0


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "size"), [(7, 1, 80, 16), (6, 2, 64, 256), (2, 2, 96, 32)])
@pytest.mark.parametrize("fixed", [False, True])
def test_attention_stays_in_bounds_in_any_program_order(
    mix: str, heads: int, kv_heads: int, dim: int, size: int, fixed: bool, generator: torch.Generator
) -> None:
    backend = TritonBackend(deterministic=fixed)
    backend.block_size = size
    parts = [random_part(c, q, heads, kv_heads, dim, torch.bfloat16, generator) for c, q in MIXES[mix]]
    k_cache, v_cache, metadata = page(backend, parts, spare=1)
    q, sinks = torch.cat([part.q for part in parts]), torch.zeros(heads)
    for softmax in (AttentionParams(0.1), AttentionParams(0.1, window=20, sinks=sinks)):
        assert_in_bounds_in_any_order(lambda: backend.paged_attention(q, k_cache, v_cache, metadata, softmax))  # noqa: B023


def test_norms_and_rope_stay_in_bounds_in_any_program_order(generator: torch.Generator) -> None:
    backend, parts = TritonBackend(), [random_part(20, 7, 3, 1, 96, torch.bfloat16, generator)]
    x, weight = torch.randn((5, 96), generator=generator).bfloat16(), torch.ones(96)
    assert_in_bounds_in_any_order(lambda: backend.rms_norm(x, weight, 1e-6))
    assert_in_bounds_in_any_order(lambda: backend.silu_mul(x))
    assert_in_bounds_in_any_order(lambda: backend.layer_norm(x, weight, weight, 1e-6))
    k_cache, v_cache, metadata = page(backend, parts)
    qkv = torch.cat([parts[0].q.flatten(1), parts[0].k[-7:].flatten(1), parts[0].v[-7:].flatten(1)], dim=1)
    rope = QKNormRopeParams(96, torch.randn((20, 96), generator=generator), weight, weight, 1e-6)
    assert_in_bounds_in_any_order(lambda: backend.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata))


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("integers", [False, True])
def test_8_bit_norms_and_gates_stay_in_bounds_in_any_program_order(
    integers: bool, by_blocks: bool, generator: torch.Generator
) -> None:
    form = EightBitRounding(integers, by_blocks, pair_distance=0)
    x, residual = torch.randn((2, 5, 300), generator=generator).bfloat16()
    weight, gate_up = torch.ones(300), torch.randn((5, 2 * 300), generator=generator).bfloat16()

    def bits(made: RoundedActivations) -> Tensor:
        return torch.cat([made.codes.view(torch.uint8).flatten(), made.scales.flatten().view(torch.uint8)])

    def norm() -> Tensor:
        made, total = form.norm_and_round(x.clone(), residual.clone(), weight, weight, 1e-6, whole=True)
        assert made.unrounded is not None
        return torch.cat([bits(made), *(each.flatten().view(torch.uint8) for each in (made.unrounded, total))])

    assert_in_bounds_in_any_order(norm)
    assert_in_bounds_in_any_order(lambda: bits(form.norm_and_round(x, None, weight, None, 1e-6, whole=False)[0]))
    assert_in_bounds_in_any_order(lambda: bits(form.gate_and_round(gate_up, gelu=True, whole=False)))
    assert_in_bounds_in_any_order(lambda: bits(form.round_rows(x)))


@pytest.mark.parametrize(
    "form", [quantize_int8, lambda weight: quantize_int4(weight, ReferenceBackend())], ids=["int8", "int4"]
)
@pytest.mark.parametrize("rows", [1, 70])
def test_quantized_linear_stays_in_bounds_in_any_program_order(
    form: Callable[[Tensor], object], rows: int, generator: torch.Generator
) -> None:
    """Fewer outputs than a tile of few rows has: tiles end where the rows of the output do."""
    weight = torch.randn((60, 160), generator=generator)
    linear = TritonBackend().pack_quantized([form(weight)], None, dtype=torch.bfloat16)
    x = torch.randn((rows, 160), generator=generator).bfloat16()
    assert_in_bounds_in_any_order(lambda: linear(x, NO_ADAPTERS))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("size", [16, 128])
def test_mla_kernels_stay_in_bounds_in_any_program_order(size: int, fixed: bool, generator: torch.Generator) -> None:
    backend = TritonBackend(deterministic=fixed)
    backend.block_size = size
    for mix in MIXES.values():
        parts = [random_part(context, count, 5, 1, 40, torch.bfloat16, generator) for context, count in mix]
        cache, _, metadata = page(backend, parts, spare=1)
        q = torch.cat([part.q for part in parts])
        softmax = AttentionParams(0.1, value_dim=32)
        assert_in_bounds_in_any_order(lambda: backend.paged_attention(q, cache, cache, metadata, softmax))  # noqa: B023
        kv, rule = (
            torch.randn((len(q), 40), generator=generator).bfloat16(),
            LatentNormRopeParams(torch.ones(32), 1e-6, angles(8), True),
        )
        assert_in_bounds_in_any_order(lambda: backend.rope_and_store_latent_kv(q.clone(), kv, rule, cache, metadata))  # noqa: B023
    blocks = backend.pack_per_head_linear(list(torch.randn((3, 20, 12), generator=generator).bfloat16()), 6)
    x = torch.randn((70, 3 * 18), generator=generator).bfloat16()
    assert_in_bounds_in_any_order(lambda: blocks(x, NO_ADAPTERS))


def angles(size: int) -> Tensor:
    return torch.ones((300, size))


@pytest.mark.parametrize("kind", ["delta", "space", "scan with norms"])
def test_recurrence_stays_in_bounds_in_any_program_order(kind: str) -> None:
    """The states are reset before each order."""
    generator = torch.Generator().manual_seed(4)
    shape = KINDS[kind][0](generator)
    kept = Kept(TritonBackend(), shape, torch.bfloat16, 3)
    numbers = [given(shape, length, generator, torch.bfloat16) for length in (9, 6)]
    kept.step([Row(each[:4], 0, 0, 4 - at, at) for at, each in enumerate(numbers)])
    before = [each.clone() for each in (kept.states.matrices, kept.states.draft_inputs)]

    def compute() -> Tensor:
        for each, was in zip((kept.states.matrices, kept.states.draft_inputs), before, strict=True):
            each.copy_(was)
        rows = [Row(each, 4, 4 - at, len(each) - 2, at) for at, each in enumerate(numbers)]
        found = torch.cat(kept.step(rows)).flatten()
        states = [each[:2].flatten().float() for each in (kept.states.matrices, kept.states.draft_inputs)]
        return torch.cat([found.float(), *states]).nan_to_num(77.0)  # one draft position is never written

    assert_in_bounds_in_any_order(compute)


@pytest.mark.parametrize("kind", ["delta", "space"])
def test_chunked_recurrence_stays_in_bounds_in_any_program_order(kind: str) -> None:
    """A prompt whose last chunk is partial, batched with a decode."""
    generator = torch.Generator().manual_seed(4)
    shape = KINDS[kind][0](generator)
    kept = Kept(TritonBackend(), shape, torch.bfloat16)
    numbers = [given(shape, length, generator, torch.bfloat16) for length in (1, 71)]
    kept.states.matrices.zero_()

    def compute() -> Tensor:
        kept.states.matrices.zero_()
        found = torch.cat(kept.step([Row(each, 0, 0, len(each), at) for at, each in enumerate(numbers)])).flatten()
        return torch.cat([found.float(), kept.states.matrices.flatten()])

    assert_in_bounds_in_any_order(compute)


def test_ungated_short_conv_stays_in_bounds_in_any_program_order(generator: torch.Generator) -> None:
    conv = convolution(40, 4, bias=True, generator=generator, gated=False)
    kept = KeptColumns(TritonBackend(), conv, torch.bfloat16, paged=False, drafts=2)
    prompt = torch.randn((20, 40), generator=generator).bfloat16()
    kept.step([(prompt[:11], 0, [0], 1)])
    before = kept.columns.slot_columns.clone()

    def compute() -> Tensor:
        kept.columns.slot_columns.copy_(before)
        return kept.step([(prompt, 11, [0], 1)])[0]

    assert_in_bounds_in_any_order(compute)


def test_moe_stays_in_bounds_in_any_program_order(generator: torch.Generator) -> None:
    given, x = weights(torch.bfloat16, generator), torch.randn((9, HIDDEN), generator=generator).bfloat16()
    backend = TritonBackend()
    whole = experts(backend, given)
    of_a_rank = replace(whole, gate_up=whole.gate_up[2:5], down=whole.down[2:5], first_expert=2)
    for each in (whole, of_a_rank):
        moe = backend.make_moe(each)
        assert isinstance(moe, GroupedMoE)
        moe(x)
        assert_in_bounds_in_any_order(partial(moe, x), *given.values())


def test_grouped_moe_stays_in_bounds_in_any_program_order(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_matmul, "is_supported", lambda *_: True)
    monkeypatch.setattr(grouped_trial, "find_min_rows", lambda *_: 1)
    given, x = stacks(generator), torch.randn((9, HIDDEN), generator=generator).bfloat16()
    backend = TritonBackend()
    whole = components(backend, given, x.device)
    of_a_rank = replace(whole, gate_up=whole.gate_up[2:5], down=whole.down[2:5], first_expert=2)
    for each in (whole, of_a_rank):
        assert_in_bounds_in_any_order(partial(backend.make_moe(each), x))


@pytest.mark.parametrize("form", [mxfp4, quantize_int8])
def test_quantized_moe_stays_in_bounds_in_any_program_order(
    form: Callable[[Tensor], GroupedWeight], generator: torch.Generator
) -> None:
    given, x = weights(torch.bfloat16, generator), torch.randn((9, HIDDEN), generator=generator).bfloat16()
    backend = TritonBackend()
    of = experts(backend, given, form=form)
    packed = [
        part for linear in (*of.gate_up, *of.down) if isinstance(linear, TritonQuantizedLinear) for part in linear.parts
    ]
    assert_in_bounds_in_any_order(
        partial(backend.make_moe(of), x), *given.values(), *(each.codes for each in packed), *scales_of(packed)
    )


def scales_of(packed: list[PackedWeight]) -> list[Tensor]:
    return [each for part in packed for each in (part.factors, *part.kernel_scales_and_offsets)]


@pytest.mark.parametrize(("plain", "rotated", "values"), [(24, 8, 20), (32, 16, 48)])
def test_expanded_mla_stays_in_bounds_in_any_program_order(
    plain: int, rotated: int, values: int, generator: torch.Generator
) -> None:
    """Both parts of a key together or apart; sequences end within tiles."""
    heads, size, lengths = 3, 40, (70, 1, 33)
    parts = [random_part(length, length, 1, 1, size + rotated, torch.bfloat16, generator) for length in lengths]
    cache, _, metadata = page(TritonBackend(), parts)
    q = torch.randn((sum(lengths), heads, plain + rotated), generator=generator).bfloat16()
    # Small integers: PyTorch's CPU products round their sums alike at any memory address.
    absorb = torch.randint(-2, 3, (heads, size, plain), generator=generator).bfloat16()
    halves = absorb, torch.randint(-2, 3, (heads, values, size), generator=generator).bfloat16()
    assert_in_bounds_in_any_order(
        lambda: run_expanded_attention(q, halves, cache, metadata, AttentionParams(0.3, value_dim=size))
    )


def test_guard_detects_out_of_bounds_access() -> None:
    @triton.jit
    def beyond(out, x, size, by: tl.constexpr):
        i = tl.arange(0, 16)
        tl.store(out + i, tl.load(x + i + by, mask=i < size), mask=i < size)

    x = torch.zeros(10)
    for by, ends in ((0, False), (1, True), (-1, True)):
        with guarded(0):
            if ends:
                with pytest.raises(Exception, match="a read outside of every tensor"):
                    beyond[1,](torch.zeros(10), x, 10, by)
            else:
                beyond[1,](torch.zeros(10), x, 10, by)
    with guarded(0), pytest.raises(Exception, match="a write outside of every tensor"):
        beyond[1,](torch.zeros(9), x, 10, 0)
