"""The adapters to flash-attn and to PyTorch's build of it: what they ask for, computed by fakes of the documented
functions, is what the float64 reference says; on a GPU the real ones are held to the same."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.backend import AttentionMetadata, Backend, Rope, Softmax
from quire.kernels.gpu import flash, torch_varlen
from quire.kernels.gpu.flash import Flash
from quire.kernels.gpu.paged import FlashPages
from quire.kernels.gpu.torch_varlen import TorchVarlen
from quire.kernels.reference import Reference
from quire.kernels.select import select_backend
from tests.kernels.fake_flash import FakeFlashAttn, fake_varlen_attn
from tests.kernels.ragged import Part, error, page, random_part

DECODES = ((1, 1), (5, 1), (256, 1), (257, 1), (600, 1))
MIXED = ((5, 5), (600, 1), (300, 44), (513, 257), (256, 256), (40, 1))
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttn:
    fake = FakeFlashAttn()
    monkeypatch.setattr(flash, "_load", lambda: fake)
    monkeypatch.setattr(torch_varlen, "_varlen_attn", lambda: fake_varlen_attn)
    return fake


def check(
    backend: Backend,
    device: str,
    mix: tuple[tuple[int, int], ...],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    scale: float = 0.125,
) -> None:
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in mix]
    got = attend(backend, parts, device, window, softcap, scale)
    expected = attend(Reference(), [part.to(torch.float64) for part in parts], "cpu", window, softcap, scale)
    first = 0
    for row, part in enumerate(parts):
        rows = slice(first, first := first + len(part.q))
        assert error(got[rows].cpu(), expected[rows]) < TOLERANCE[dtype], f"sequence {row}"


def attend(
    backend: Backend, parts: list[Part], device: str, window: int | None, softcap: float | None, scale: float
) -> torch.Tensor:
    k_cache, v_cache, metadata = page(backend, parts)
    q = torch.cat([part.q for part in parts]).to(device)
    there = to_device(metadata, device)
    softmax = Softmax(scale, window, softcap)
    out: torch.Tensor = backend.paged_attention(q, k_cache.to(device), v_cache.to(device), there, softmax)
    return out


def to_device(metadata: AttentionMetadata, device: str) -> AttentionMetadata:
    fields = {name: getattr(metadata, name) for name in AttentionMetadata.__slots__}
    return AttentionMetadata(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in fields.items()})


CASES = [
    *({"window": window, "softcap": cap} for window in (None, 1, 37, 256, 300, 4096) for cap in (None, 5.0)),
    {"heads": 8, "kv_heads": 1},
    {"heads": 9, "kv_heads": 3},
    {"heads": 3, "kv_heads": 3},
    {"dim": 8},
    {"dim": 96},
    {"dim": 128},
    {"dim": 256},
    {"dtype": torch.float16},
    {"scale": 0.5},
]


@pytest.mark.parametrize("mix", [DECODES, MIXED, MIXED[:1]], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("made_by", [Flash, TorchVarlen], ids=lambda made_by: made_by.name)
def test_arguments(library: FakeFlashAttn, made_by: type[FlashPages], case: dict, mix: tuple) -> None:
    backend = made_by()
    if made_by is TorchVarlen and case.get("softcap"):
        with pytest.raises(NotImplementedError, match="softcap"):
            check(backend, "cpu", mix, **case)
    else:
        check(backend, "cpu", mix, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [DECODES, MIXED, MIXED[:1]], ids=["decode", "mixed", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("made_by", [Flash, TorchVarlen], ids=lambda made_by: made_by.name)
def test_on_a_gpu(made_by: type[FlashPages], case: dict, mix: tuple) -> None:
    backend = made_by()
    reason = backend.cannot_serve(torch.device("cuda"), case.get("dtype", torch.bfloat16), case.get("dim", 64))
    if reason is not None or (made_by is TorchVarlen and case.get("softcap")):
        pytest.skip(reason or "no softcap")
    check(backend, "cuda", mix, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("made_by", [Flash, TorchVarlen], ids=lambda made_by: made_by.name)
def test_deterministic_attention_does_not_depend_on_the_batch(made_by: type[FlashPages]) -> None:
    backend = made_by(deterministic=True)
    if (reason := backend.cannot_serve(torch.device("cuda"), torch.bfloat16, 64)) is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(20)
    whole = random_part(1500, 1500, 8, 2, 64, torch.bfloat16, generator)

    def rows(begin: int, end: int, others: list[Part]) -> torch.Tensor:
        k_cache, v_cache, metadata = page(backend, [whole.rows(begin, end), *others])
        q = torch.cat([part.q for part in (whole.rows(begin, end), *others)]).cuda()
        out: torch.Tensor = backend.paged_attention(
            q, k_cache.cuda(), v_cache.cuda(), to_device(metadata, "cuda"), Softmax(0.125)
        )
        return out[: end - begin]

    others = [random_part(c, 1, 8, 2, 64, torch.bfloat16, generator) for c in (3000, 17, 900)]
    once = rows(0, 1500, [])
    assert torch.equal(torch.cat([rows(0, 700, []), rows(700, 1500, others)]), once)
    for at in (0, 300, 1499):
        assert torch.equal(rows(at, at + 1, []), once[at : at + 1])
        assert torch.equal(rows(at, at + 1, others), once[at : at + 1])


def test_decodes_use_the_split_kernel_and_all_else_the_ragged_one(library: FakeFlashAttn) -> None:
    check(Flash(), "cpu", DECODES)
    check(Flash(), "cpu", MIXED)
    assert library.calls == [("kvcache", {"num_splits": 0}), ("varlen", {"max_seqlen_q": 257, "max_seqlen_k": 600})]
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, 4, 2, 64, torch.bfloat16, generator) for c, q in DECODES]
    backend = Flash(deterministic=True)
    k_cache, v_cache, metadata = page(backend, parts)
    backend.paged_attention(torch.cat([part.q for part in parts]), k_cache, v_cache, metadata, Softmax(0.1))
    assert library.calls[-1] == ("kvcache", {"num_splits": 1})


def test_store_and_rope_on_large_pages(library: FakeFlashAttn) -> None:
    """What rope_store writes, attention finds."""
    generator = torch.Generator().manual_seed(3)
    part, backend = random_part(300, 300, 4, 2, 64, torch.bfloat16, generator), Flash()
    k_cache, v_cache, metadata = page(backend, [part])
    empty = [torch.full_like(cache, torch.nan) for cache in (k_cache, v_cache)]
    qkv = torch.cat([part.q.flatten(1), part.k.flatten(1), part.v.flatten(1)], dim=1)
    q = backend.rope_store(qkv, Rope(64, None), *empty, metadata)
    assert torch.equal(q, part.q)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(empty, (k_cache, v_cache), strict=True))


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda")


def test_the_choice_says_why(library: FakeFlashAttn, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (9, 0))
    backend, why = select_backend(device, torch.bfloat16, 128)
    assert (backend.name, why) == ("flash", "flash-attn 2.8.3")
    monkeypatch.setattr(flash, "_load", lambda: "flash-attn is not installed (pip install 'quire[flash]')")
    backend, why = select_backend(device, torch.bfloat16, 128)
    assert backend.name == "torch_varlen"
    assert "pip install 'quire[flash]'" in why
    with pytest.raises(ValueError, match=r"flash: flash-attn is not installed \(pip install 'quire\[flash\]'\)"):
        select_backend(device, torch.bfloat16, 128, "flash")
    assert select_backend(device, torch.bfloat16, 128, "torch_varlen")[1].endswith("asked for")
    assert select_backend(device, torch.bfloat16, 128, softcap=True)[0].name not in ("flash", "torch_varlen")
    with pytest.raises(ValueError, match="no softcap"):
        select_backend(device, torch.bfloat16, 128, "torch_varlen", softcap=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "message"),
    [
        (torch.float32, 64, (9, 0), "takes float16 and bfloat16, not torch.float32"),
        (torch.bfloat16, 264, (9, 0), "takes head sizes up to 256 in steps of 8, not 264"),
        (torch.bfloat16, 64, (7, 5), "needs compute capability 8.0, this GPU has 7.5"),
    ],
)
def test_what_flash_cannot_serve(
    library: FakeFlashAttn,
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = gpu(monkeypatch, capability)
    backend, why = select_backend(device, dtype, head_dim)
    assert backend.name not in ("flash", "torch_varlen")
    assert f"flash: {message}" in why
    with pytest.raises(ValueError, match=message):
        select_backend(device, dtype, head_dim, "flash")


def test_gpu_kernels_are_refused_on_a_cpu(library: FakeFlashAttn) -> None:
    for name in ("flash", "torch_varlen"):
        with pytest.raises(ValueError, match=f"{name}: runs on NVIDIA GPUs, not on cpu"):
            select_backend(torch.device("cpu"), torch.bfloat16, 64, name)
