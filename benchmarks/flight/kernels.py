from __future__ import annotations

import statistics
from functools import partial
from itertools import product as product_of

import torch
from torch import Tensor

from benchmarks.flight.experts import experts
from benchmarks.flight.finding import Finding, Say, tried
from benchmarks.flight.layers import layers
from benchmarks.gpu import times
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Linear
from quire.kernels.backend_selection import BACKENDS, select_backend
from quire.kernels.probes.backend_probe import PagedAttentionProbe
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight, QuantizedWeight
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import page, random_part, to_device

_SHAPES = ((32, 8, 128), (14, 2, 64), (28, 4, 128), (16, 8, 256), (24, 8, 96))
"""Llama 3 8B, Qwen2.5 0.5B and 7B (groups of 7), Gemma, Phi."""
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_DTYPES = (torch.bfloat16, torch.float16)
"""For float16 two shapes suffice."""
_KINDS = ("a decode of 32 rows behind 2,048 tokens", "a prompt of 2,048 tokens", "31 decodes beside a prompt of 512")


def attention(device: torch.device, say: Say) -> None:
    small = device.type == "cpu"
    names = ("cpu", "reference") if small else tuple(name for name in BACKENDS if name != "cpu")
    shapes, right = _SHAPES[:2] if small else _SHAPES, list[tuple[str, Backend, tuple[int, int, int]]]()
    for dtype, shape, name in (*product_of(_DTYPES[:1], shapes, names), *product_of(_DTYPES[1:], shapes[:2], names)):
        try:
            backend, _ = select_backend(device, dtype, shape[2], name)
        except ValueError:
            continue  # the machine stage reported why
        what = f"{name} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}"
        reason = PagedAttentionProbe(device, dtype, *shape, has_windows=True)(backend)
        say(Finding(what, reason or "as the reference", held=reason is None))
        if reason is None and dtype == _DTYPES[0] and name != "reference":
            right.append((what, backend, shape))
    for what, backend, shape in right:
        for kind in _KINDS:
            tried(say, f"{what}, {kind}", partial(_timed, backend, device, shape, kind, small))


def _timed(backend: Backend, device: torch.device, shape: tuple[int, int, int], kind: str, small: bool) -> str:
    heads, kv_heads, dim = shape
    past, long = (128, 128) if small else (2048, 2048)
    counts, contexts = {
        _KINDS[0]: ([1] * 32, [past] * 32),
        _KINDS[1]: ([long], [long]),
        _KINDS[2]: ([1] * 31 + [long // 4], [past] * 31 + [long // 4]),
    }[kind]
    metadata, pages = _metadata(device, counts, contexts, backend.block_size)
    cache = torch.randn((2, *backend.kv_cache_shape(pages, kv_heads, dim, torch.bfloat16)), device=device).bfloat16()
    q = torch.randn((sum(counts), heads, dim), dtype=torch.bfloat16, device=device)
    softmax = AttentionParams(dim**-0.5, None)
    seconds = statistics.median(
        times(lambda: backend.paged_attention(q, cache[0], cache[1], metadata, softmax), device)
    )
    read = sum(contexts) * kv_heads * dim * 4
    seen = sum(count * (context - (count - 1) / 2) for count, context in zip(counts, contexts, strict=True))
    work = 4 * heads * dim * seen
    return f"{seconds * 1e6:.0f} us, {read / seconds / 1e9:.0f} GB/s, {work / seconds / 1e12:.1f} TFLOP/s"


def _metadata(
    device: torch.device, counts: list[int], contexts: list[int], block: int
) -> tuple[AttentionMetadata, int]:
    """Metadata for the last counts[s] of contexts[s] tokens of each sequence s, and the number of pages."""
    paged, generator = ReferenceBackend(), torch.Generator()
    paged.block_size = block
    lengths = zip(contexts, counts, strict=True)
    parts = [random_part(context, count, 1, 1, 1, torch.float32, generator) for context, count in lengths]
    cache, _, metadata = page(paged, parts)
    return to_device(metadata, device), len(cache)


def products(device: torch.device, say: Say) -> None:
    """First correctness of all, then speed."""
    backend, why = select_backend(device, torch.bfloat16, 128)
    say(Finding("products by", why))
    if device.type != "cpu":
        by_pytorch(device, say)
    for timed in (False, True):
        for part in (_quantized, experts, layers):
            part(device, say, backend, timed)


def _quantized(device: torch.device, say: Say, backend: Backend, timed: bool) -> None:
    small = device.type == "cpu"
    outs, inner = (256, 256) if small else (14336, 4096)
    dense = torch.randn((outs, inner), device=device).bfloat16() * 0.02
    plain = backend.pack_linear(dense, None)
    for name, weight in _weights(outs, inner, device).items():
        if timed:
            linear = backend.pack_quantized([weight], None, dtype=torch.bfloat16)
            for rows in (1, 16) if small else (1, 16, 64, 256, 2048):
                x = torch.randn((rows, inner), device=device).bfloat16()
                ours, other = (_seconds(each, x) for each in (linear, plain))
                said = f"{ours * 1e6:.0f} us, bfloat16 {other * 1e6:.0f} ({other / ours:.2f})"
                say(Finding(f"{name}, {rows} rows", said))
            continue
        for rows in (5, 40) if small else (5, 40, 300):  # few rows, rounded x, dequantized weights
            tried(say, f"{name}, {outs}x{inner}, {rows} rows", partial(_right, backend, weight, device, rows))
        if not small:
            tried(say, f"{name}, deterministic", partial(_alike, weight, device))


def by_pytorch(device: torch.device, say: Say) -> None:
    try:
        from quire.kernels.gpu.quantization.torch_matmul import TorchMatmulKind, trial_failure_reason
    except ModuleNotFoundError:  # no Triton
        return
    for product, dtype in product_of(TorchMatmulKind, (torch.bfloat16, torch.float16)):
        where = torch.device(device.type, torch.cuda.current_device())
        said = trial_failure_reason(product, dtype, where) or "passes its trial"
        say(Finding(f"PyTorch's {product} for {str(dtype).removeprefix('torch.')}", said))


def _seconds(linear: Linear, x: Tensor) -> float:
    return statistics.median(times(lambda: linear(x, NO_ADAPTERS), x.device, 10))


def _weights(outs: int, inner: int, device: torch.device) -> dict[str, QuantizedWeight]:
    scales = torch.rand((outs, inner // 32), device=device) * 0.01 + 0.001
    nibbles = torch.randint(0, 256, (outs, inner // 2), dtype=torch.uint8, device=device)
    codes = torch.randint(-127, 128, (outs, inner), dtype=torch.int8, device=device)
    eights = (torch.randn((outs, inner), device=device) * 0.5).to(torch.float8_e4m3fn)
    return {
        "4 bits in groups of 32": GroupedWeight(nibbles, scales, None),
        "MXFP4": GroupedWeight(nibbles, scales, None, _E2M1),
        "8 bits": GroupedWeight(codes, scales[:, :1].contiguous(), None),
        "FP8": Float8Weight(eights, torch.full((outs, 1), 0.02, device=device), (1, inner)),
        "FP8 in squares of 128": Float8Weight(eights, scales[: outs // 128, : inner // 128].contiguous(), (128, 128)),
    }


def _right(backend: Backend, weight: QuantizedWeight, device: torch.device, rows: int) -> str:
    linear = backend.pack_quantized([weight], None, dtype=torch.bfloat16)
    x = torch.randn((rows, weight.shape[1]), device=device).bfloat16()
    wanted = x.double() @ weight.dequantize().double().T.to(device)
    error = ((linear(x, NO_ADAPTERS).double() - wanted).norm() / wanted.norm()).item()
    most = 0.04 if isinstance(weight, Float8Weight) else 0.02  # x in FP8 has 4 significant bits
    if not error < most:
        raise ValueError(f"relative error {error:.3g}, at most {most}")
    return f"relative error {error:.2g}"


def _alike(weight: QuantizedWeight, device: torch.device) -> str:
    """Compares bits of deterministic rows alone, with a split inner dimension, with their bits among many."""
    from quire.kernels.gpu.triton_backend import TritonBackend

    linear = TritonBackend(deterministic=True).pack_quantized([weight], None, dtype=torch.bfloat16)
    x = torch.randn((200, weight.shape[1]), device=device).bfloat16()
    whole = linear(x, NO_ADAPTERS)
    for begin, rows in ((0, 1), (7, 16), (100, 64)):
        if not torch.equal(linear(x[begin : begin + rows], NO_ADAPTERS), whole[begin : begin + rows]):
            raise ValueError(f"{rows} rows have other bits than among 200")
    return "a row's bits are the same in every batch"
