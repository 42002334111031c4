"""The reference backend against PyTorch's functions in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.parameters.activation import Activation, ClampedSwiGLU
from quire.kernels.parameters.routing import Routing
from quire.kernels.reference import ReferenceBackend
from quire.kernels.routing import choose_experts
from tests.kernels.ragged import Part, attend, error, random_part
from tests.kernels.test_routing import router

reference = ReferenceBackend()
MIX = [(1, 1), (5, 5), (130, 1), (129, 129), (300, 20)]


def attention_by_pytorch(
    part: Part, window: int | None, softcap: float | None, ahead: int | None = 0, bias: Tensor | None = None
) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (part.q, part.k, part.v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    queries, keys = q.shape[1], k.shape[1]
    at, key = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    seen = key <= at + (keys if ahead is None else ahead)
    if window is not None:
        seen &= key > at - window
    if bias is not None:  # [H, 2 L + 15]
        longest = (bias.shape[1] - 15) // 2
        mask = bias[:, key - at + longest - 1].to(q.dtype).masked_fill(~seen, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)
    scores = softcap * torch.tanh(q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 / softcap)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("size", [1, 40, 128, 200])
def test_chunked_attention_matches_pytorch(size: int, generator: torch.Generator) -> None:
    """Each query sees the keys of its own chunk up to itself."""
    parts = [random_part(c, q, 6, 2, 16, torch.float64, generator) for c, q in MIX]
    for part, out in zip(parts, attend(reference, parts, window=size, chunked=True), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (part.q, part.k, part.v))
        at, key = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None], torch.arange(k.shape[1])
        seen = (key <= at) & (key // size == at // size)
        k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
        assert error(out, F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)) < 1e-13


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 80), (8, 1, 64)])
def test_attention_matches_pytorch(
    heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, generator: torch.Generator
) -> None:
    parts = [random_part(c, q, heads, kv_heads, dim, torch.float64, generator) for c, q in MIX]
    for part, out in zip(parts, attend(reference, parts, window=window, softcap=softcap), strict=True):
        assert error(out, attention_by_pytorch(part, window, softcap)) < 1e-13


WHOLE = [(1, 1), (5, 5), (129, 129), (300, 300)]
"""Sequences that are computed at once, as in encoders."""


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("ahead", "window"), [(None, None), (10, 11), (200, 30), (3, None)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (6, 2, 80)])
def test_lookahead_attention_matches_pytorch(
    heads: int,
    kv_heads: int,
    dim: int,
    ahead: int | None,
    window: int | None,
    biased: bool,
    generator: torch.Generator,
) -> None:
    parts = [random_part(c, q, heads, kv_heads, dim, torch.float64, generator) for c, q in WHOLE]
    bias = torch.randn((heads, 2 * 310 + 15), generator=generator) if biased else None
    output = attend(reference, parts, window=window, ahead=ahead, bias=bias)
    for part, out in zip(parts, output, strict=True):
        assert error(out, attention_by_pytorch(part, window, None, ahead, bias)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_bits_do_not_depend_on_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    parts = [random_part(c, q, 6, 2, 64, dtype, generator) for c, q in MIX]
    for part, out in zip(parts, attend(reference, parts), strict=True):
        pieces = [attend(reference, [part.rows(i, i + 1)], seed=i)[0] for i in range(len(part.q))]
        assert torch.equal(torch.cat(pieces), out)


def test_norms_and_activations_match_pytorch(generator: torch.Generator) -> None:
    x, residual = (torch.randn((5, 64), generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(64, generator=generator, dtype=torch.float64)
    assert torch.allclose(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5), atol=1e-14)
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, reference.rms_norm(total, weight, 1e-5))
    bias = torch.randn(64, generator=generator, dtype=torch.float64)
    assert torch.allclose(
        reference.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (64,), weight, bias, 1e-5), atol=1e-14
    )
    normed, total = reference.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, reference.layer_norm(total, weight, bias, 1e-5))
    gate, up = x.chunk(2, 1)
    for output, expected in (
        (reference.silu_mul(x), F.silu(gate) * up),
        (reference.gelu_mul(x), F.gelu(gate, approximate="tanh") * up),
        (reference.apply_activation(x, Activation("gelu")), F.gelu(x)),
        (reference.apply_activation(x, Activation("gelu_tanh")), F.gelu(x, approximate="tanh")),
        (reference.sigmoid_mul(x, residual), x * residual.sigmoid()),
        (reference.sigmoid_mul(x, weight[:5, None]), x * weight[:5, None].sigmoid()),
        (reference.add_gated(x, weight[:5, None], residual), x * weight[:5, None].sigmoid() + residual),
    ):
        torch.testing.assert_close(output, expected, atol=1e-14, rtol=1e-14)


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": reference.silu_mul,
    "gated gelu": reference.gelu_mul,
    "clamped": lambda x: reference.clamp_silu_mul(x, ClampedSwiGLU(1.702, 7.0)),
    "add_gated": lambda x: reference.add_gated(x, x[:, :1].contiguous(), x),
    "sigmoid_mul": lambda x: reference.sigmoid_mul(x, x),
    "sigmoid_mul of heads": lambda x: reference.sigmoid_mul(x, x[:, : x.shape[1] // 2].contiguous()),
    "layer_norm": lambda x: reference.layer_norm(x, x.new_ones(x.shape[1]), x.new_ones(x.shape[1]), 1e-5),
    "rms_norm": lambda x: reference.rms_norm(x, x.new_ones(x.shape[1]), 1e-5),
    "sigmoid router": lambda x: choose_experts(x.float(), router(Routing(8, "sigmoid")))[1],
    "softmax router": lambda x: choose_experts(
        x.float(), router(Routing(3, num_groups=2, top_k_groups=1, group_score_top_k=2))
    )[1],
    "mixer": lambda x: choose_experts(x.float(), router(Routing(2, "mixer", jitter=0.01)))[1],
    **{
        kind: partial(reference.apply_activation, activation=Activation(kind))
        for kind in ("gelu", "gelu_tanh", "relu2")
    },
    "xielu": lambda x: reference.apply_activation(x, Activation("xielu", 0.8, 0.7, 0.5)),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_row_bits_do_not_depend_on_batch(name: str, threads: int, generator: torch.Generator) -> None:
    """Rows end within a vector, and threads' parts end within rows."""
    before, function = torch.get_num_threads(), ELEMENTWISE[name]
    torch.set_num_threads(threads)
    try:
        for dtype, shape in product((torch.float32, torch.bfloat16), ((200, 10), (80, 2502))):
            x = (2 * torch.randn(shape, generator=generator)).to(dtype)
            whole = function(x)
            for first, end in (*pairwise(range(20)), (5, 22), (17, 80)):
                assert torch.equal(function(x[first:end]), whole[first:end]), (dtype, shape, first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_row_bits_do_not_depend_on_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    weight, bias = (torch.randn(s, generator=generator).to(dtype) for s in ((96, 576), (96,)))
    linear = reference.pack_linear(weight, bias)
    x = torch.randn((70, 576), generator=generator).to(dtype)
    whole = linear(x, NO_ADAPTERS)
    assert error(whole, F.linear(x.double(), weight.double(), bias.double())) < (
        1e-5 if dtype == torch.float32 else 1e-2
    )
    for n in (1, 2, 3, 16, 33):
        assert torch.equal(linear(x[:n], NO_ADAPTERS), whole[:n]), n
