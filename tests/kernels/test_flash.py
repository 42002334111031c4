"""Backends on flash-attn 2 and PyTorch's varlen attention: with fakes of the documented functions, and on a GPU with
the real ones, their results must match the float64 reference.
"""

from __future__ import annotations

import inspect
import tomllib
from functools import wraps
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import AttentionRequirements, select_backend
from quire.kernels.gpu.libraries import flash2
from quire.kernels.gpu.libraries.flash2 import Flash2Backend
from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend, has_code_for
from quire.kernels.gpu.libraries.torch_varlen import TorchVarlenBackend
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.fake_flash import FakeFlashAttn, fake_varlen_attn
from tests.kernels.installed import PAGED, install_flash, install_varlen
from tests.kernels.ragged import Part, error, page, random_part, to_device
from tests.tree import ROOT

WHOLE = ((5, 5), (600, 600), (1, 1), (257, 257))
DECODES = ((1, 1), (5, 1), (256, 1), (257, 1), (600, 1))
BOTH = ((600, 1), (1, 1), (300, 1), (5, 5), (300, 44), (40, 1))
"""Decodes followed by prompts, in the scheduler's order."""
MIXED = ((5, 5), (600, 1), (300, 44), (513, 257), (256, 256), (40, 1))
TOLERANCE = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeFlashAttn:
    fake = FakeFlashAttn()
    install_flash(monkeypatch, fake)
    install_varlen(monkeypatch, fake_varlen_attn)
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
    expected = attend(ReferenceBackend(), [part.to(torch.float64) for part in parts], "cpu", window, softcap, scale)
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
    softmax = AttentionParams(scale, window, softcap)
    out: torch.Tensor = backend.paged_attention(q, k_cache.to(device), v_cache.to(device), there, softmax)
    return out


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


@pytest.mark.few(6)
@pytest.mark.parametrize("mix", [DECODES, BOTH, MIXED, WHOLE], ids=["decode", "both", "mixed", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("made_by", [Flash2Backend, TorchVarlenBackend], ids=lambda made_by: made_by.name)
def test_flash_backends_match_reference_on_fake_libraries(
    library: FakeFlashAttn, made_by: type[FlashPagedBackend], case: dict, mix: tuple
) -> None:
    backend = made_by()
    if made_by is TorchVarlenBackend and case.get("softcap"):
        with pytest.raises(NotImplementedError, match="softcap"):
            check(backend, "cpu", mix, **case)
    else:
        check(backend, "cpu", mix, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("mix", [DECODES, BOTH, MIXED, WHOLE], ids=["decode", "both", "mixed", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("made_by", [Flash2Backend, TorchVarlenBackend], ids=lambda made_by: made_by.name)
def test_flash_backends_match_reference_on_gpu(made_by: type[FlashPagedBackend], case: dict, mix: tuple) -> None:
    backend = made_by()
    reason = backend.unsupported_reason(torch.device("cuda"), case.get("dtype", torch.bfloat16), case.get("dim", 64))
    if reason is not None or (made_by is TorchVarlenBackend and case.get("softcap")):
        pytest.skip(reason or "no softcap")
    check(backend, "cuda", mix, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("made_by", [Flash2Backend, TorchVarlenBackend], ids=lambda made_by: made_by.name)
def test_deterministic_flash_attention_does_not_depend_on_batch(made_by: type[FlashPagedBackend]) -> None:
    backend = made_by(deterministic=True)
    if (reason := backend.unsupported_reason(torch.device("cuda"), torch.bfloat16, 64)) is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(20)
    whole = random_part(1500, 1500, 8, 2, 64, torch.bfloat16, generator)

    def rows(begin: int, end: int, others: list[Part]) -> torch.Tensor:
        k_cache, v_cache, metadata = page(backend, [whole.rows(begin, end), *others])
        q = torch.cat([part.q for part in (whole.rows(begin, end), *others)]).cuda()
        out: torch.Tensor = backend.paged_attention(
            q, k_cache.cuda(), v_cache.cuda(), to_device(metadata, "cuda"), AttentionParams(0.125)
        )
        return out[: end - begin]

    others = [random_part(c, 1, 8, 2, 64, torch.bfloat16, generator) for c in (3000, 17, 900)]
    once = rows(0, 1500, [])
    assert torch.equal(torch.cat([rows(0, 700, []), rows(700, 1500, others)]), once)
    for at in (0, 300, 1499):
        assert torch.equal(rows(at, at + 1, []), once[at : at + 1])
        assert torch.equal(rows(at, at + 1, others), once[at : at + 1])


def test_decodes_use_kvcache_kernel_and_mixed_batches_use_varlen(library: FakeFlashAttn) -> None:
    check(Flash2Backend(), "cpu", DECODES)
    check(Flash2Backend(), "cpu", MIXED)
    everything = {"window_size": (-1, -1)}
    assert library.calls == [
        ("kvcache", {"num_splits": 0} | everything),
        ("varlen", {"max_seqlen_q": 257, "max_seqlen_k": 600, "paged": True}),
    ]
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, 4, 2, 64, torch.bfloat16, generator) for c, q in DECODES]
    backend = Flash2Backend(deterministic=True)
    k_cache, v_cache, metadata = page(backend, parts)
    backend.paged_attention(torch.cat([part.q for part in parts]), k_cache, v_cache, metadata, AttentionParams(0.1))
    assert library.calls[-1] == ("kvcache", {"num_splits": 1} | everything)


@pytest.mark.parametrize("deterministic", [False, True])
def test_leading_decodes_of_mixed_batch_use_separate_call(library: FakeFlashAttn, deterministic: bool) -> None:
    check(Flash2Backend(deterministic=deterministic), "cpu", BOTH[:4])
    assert library.calls == [
        ("kvcache", {"num_splits": int(deterministic), "window_size": (-1, -1)}),
        ("varlen", {"max_seqlen_q": 5, "max_seqlen_k": 5, "paged": deterministic}),
    ]


@pytest.mark.parametrize("deterministic", [False, True])
def test_whole_prompts_skip_block_table_unless_deterministic(library: FakeFlashAttn, deterministic: bool) -> None:
    """The kernel without a block table is faster, but a chunked prompt would have other bits."""
    check(Flash2Backend(deterministic=deterministic), "cpu", WHOLE)
    check(Flash2Backend(deterministic=deterministic), "cpu", (*WHOLE, (300, 299)))
    assert [asked["paged"] for _, asked in library.calls] == [deterministic, True]


@pytest.mark.parametrize(("window", "deterministic", "asked"), [(599, False, 598), (600, False, -1), (600, True, 599)])
def test_window_covering_all_keys_is_dropped_unless_deterministic(
    library: FakeFlashAttn, window: int, deterministic: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn packs the heads of a group only without a window. A deterministic backend keeps the window, so that
    bits do not depend on the batch.
    """
    backend = Flash2Backend(deterministic=deterministic)
    check(backend, "cpu", DECODES, window=window)
    assert library.calls[-1][1]["window_size"][0] == asked


def test_rope_and_store_kv_writes_256_token_pages(library: FakeFlashAttn) -> None:
    """Attention must find what rope_and_store_kv writes."""
    generator = torch.Generator().manual_seed(3)
    part, backend = random_part(300, 300, 4, 2, 64, torch.bfloat16, generator), Flash2Backend()
    k_cache, v_cache, metadata = page(backend, [part])
    empty = [torch.full_like(cache, torch.nan) for cache in (k_cache, v_cache)]
    qkv = torch.cat([part.q.flatten(1), part.k.flatten(1), part.v.flatten(1)], dim=1)
    q = backend.rope_and_store_kv(qkv, QKNormRopeParams(64, None), *empty, metadata)
    assert torch.equal(q, part.q)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(empty, (k_cache, v_cache), strict=True))


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda")


def test_selection_explains_chosen_backend(library: FakeFlashAttn, monkeypatch: pytest.MonkeyPatch) -> None:
    device = gpu(monkeypatch, (8, 0))
    backend, why = select_backend(device, torch.bfloat16, 128)
    assert (backend.name, why) == ("flash", "flash-attn 2.8.3")
    install_flash(monkeypatch, None)
    backend, why = select_backend(device, torch.bfloat16, 128)
    assert backend.name == "torch_varlen"
    assert f"flash: flash-attn is not installed ({flash2.INSTALL})" in why
    with pytest.raises(ValueError, match=r"flash: flash-attn is not installed \(pip install --no-build-isolation"):
        select_backend(device, torch.bfloat16, 128, "flash")
    assert select_backend(device, torch.bfloat16, 128, "torch_varlen")[1].endswith("asked for")
    assert select_backend(device, torch.bfloat16, 128, attention=AttentionRequirements(softcap=True))[0].name not in (
        "flash",
        "torch_varlen",
    )
    divided, why = select_backend(device, torch.bfloat16, 128, attention=AttentionRequirements(ranks=2))
    assert divided.name not in ("flash", "torch_varlen")
    assert "merge" in why
    with pytest.raises(ValueError, match="no softcap"):
        select_backend(device, torch.bfloat16, 128, "torch_varlen", AttentionRequirements(softcap=True))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "message"),
    [
        (torch.float32, 64, (9, 0), "takes float16 and bfloat16, not torch.float32"),
        (torch.bfloat16, 264, (9, 0), "takes head sizes up to 256 in steps of 8, not 264"),
        (torch.bfloat16, 64, (7, 5), "needs compute capability 8.0, this GPU has 7.5"),
    ],
)
def test_flash_is_rejected_for_unsupported_dtype_head_dim_or_gpu(
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


def test_gpu_backends_are_rejected_on_cpu(library: FakeFlashAttn) -> None:
    for name in ("flash", "torch_varlen"):
        with pytest.raises(ValueError, match=f"{name}: runs on NVIDIA GPUs, not on cpu"):
            select_backend(torch.device("cpu"), torch.bfloat16, 64, name)


@pytest.mark.parametrize(
    ("version", "serves"),
    [
        ("2.7.4.post1", False),
        ("2.8.0", True),
        ("2.8.3", True),
        ("2.8.3.post1", True),
        ("2.8.4", False),
        ("3.0.0b1", False),
    ],
)
def test_flash_requires_supported_flash_attn_version(
    version: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeFlashAttn()
    monkeypatch.setattr(library, "__version__", version, raising=False)
    install_flash(monkeypatch, library)
    backend, why = select_backend(gpu(monkeypatch, (8, 0)), torch.bfloat16, 64)
    assert (backend.name == "flash") == serves
    assert serves or f"flash: flash-attn {version} is not one of 2.8 to 2.8.3" in why


def test_flash_attn_4_is_not_mistaken_for_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 4 installs flash_attn.cute, so that flash_attn is a namespace without functions or a version."""
    install_flash(monkeypatch, ModuleType("flash_attn"))
    backend, why = select_backend(gpu(monkeypatch, (8, 0)), torch.bfloat16, 64)
    assert backend.name != "flash"
    assert "the installed package flash_attn is not flash-attn 2" in why


def test_flash_extra_and_install_advice_name_same_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["flash"] == [flash2.REQUIREMENT]
    assert flash2.REQUIREMENT in flash2.INSTALL
    assert "--no-build-isolation" in flash2.INSTALL


INSTALLED = tuple(int(number) for number in torch.__version__.split(".")[:2])


def test_installed_varlen_attn_accepts_backend_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has paged attention with these arguments from 2.13 on. `make torch-matrix` tests other versions."""
    device = gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [])
    reason = TorchVarlenBackend().unsupported_reason(device, torch.bfloat16, 64)
    assert (reason is None) == (INSTALLED >= PAGED), reason
    if reason is not None:
        return
    from torch.nn.attention.varlen import varlen_attn

    signature, calls = inspect.signature(varlen_attn), list[inspect.BoundArguments]()

    @wraps(varlen_attn)
    def bound(*args: Any, **named: Any) -> torch.Tensor:
        calls.append(signature.bind(*args, **named))
        return args[0]

    install_varlen(monkeypatch, bound)
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, 4, 2, 64, torch.bfloat16, generator) for c, q in MIXED]
    attend(TorchVarlenBackend(deterministic=True), parts, "cpu", 37, None, 0.1)
    assert calls


@pytest.mark.skipif(INSTALLED < (2, 12), reason="the signature that is installed has no block_table")
@pytest.mark.parametrize(("version", "paged"), [("2.11.0", False), ("2.12.1+cu130", False), ("2.13.0+cu130", True)])
def test_torch_varlen_requires_pytorch_2_13(version: str, paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signature of 2.12 has block_table already, so the version alone decides."""
    monkeypatch.setattr(torch, "__version__", version)
    device = gpu(monkeypatch, (9, 0))
    reason = TorchVarlenBackend().unsupported_reason(device, torch.bfloat16, 64)
    assert reason == (None if paged else f"PyTorch {version} has no paged attention, 2.13 has")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 0), ["sm_80"], True),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90", "sm_100"], False),
        ((12, 0), ["sm_75", "sm_120", "compute_120"], True),
        ((12, 1), ["sm_120"], True),
        ((12, 1), ["sm_120a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["compute_100f"], False),
    ],
)
def test_has_code_for_follows_cuda_compatibility_rules(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    """See binary and PTX compatibility in CUDA's programming guide."""
    assert has_code_for(capability, architectures) == runs


def test_torch_varlen_is_rejected_without_kernels_for_gpu(
    library: FakeFlashAttn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    device = gpu(monkeypatch, (12, 0))
    reason = TorchVarlenBackend().unsupported_reason(device, torch.bfloat16, 64)
    assert reason == "this build of PyTorch has no kernels for compute capability 12.0"
    assert TorchVarlenBackend().unsupported_reason(gpu(monkeypatch, (9, 0)), torch.bfloat16, 64) is None


class Spy(ReferenceBackend):
    name = "triton"

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def paged_attention(self, q, k_cache, v_cache, metadata, softmax):  # type: ignore[no-untyped-def]
        self.queries.append(metadata.max_query_len)
        return super().paged_attention(q, k_cache, v_cache, metadata, softmax)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 37])
def test_torch_varlen_leaves_decode_batches_to_triton(
    library: FakeFlashAttn, deterministic: bool, window: int | None
) -> None:
    """PyTorch's kernels neither pack grouped heads under a causal window nor split keys."""
    backend = TorchVarlenBackend(deterministic=deterministic)
    backend.reference = spy = Spy()
    check(backend, "cpu", DECODES, window=window)
    check(backend, "cpu", MIXED, window=window)
    assert spy.queries == ([] if deterministic else [1])
