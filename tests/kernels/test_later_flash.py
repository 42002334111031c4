"""Backends on flash-attn 3 and 4, with fakes of their documented functions: results, the GPUs that they serve, and
their order of preference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.kernels.backend import Backend
from quire.kernels.backend_selection import select_backend
from quire.kernels.gpu.libraries import flash3, flash4
from quire.kernels.gpu.libraries.flash3 import Flash3Backend
from quire.kernels.gpu.libraries.flash4 import Flash4Backend
from quire.kernels.gpu.libraries.flash_backend import import_library
from quire.kernels.probes.backend_probe import PagedAttentionProbe
from tests.kernels.fake_capture import FakeCapture
from tests.kernels.fake_flash import FakeFlashAttn, fake_varlen_attn
from tests.kernels.fake_later_flash import FakeFlash3, FakeFlash4
from tests.kernels.installed import install_flash, install_flash3, install_flash4, install_varlen
from tests.kernels.test_flash import BOTH, CASES, DECODES, MIXED, WHOLE, Spy, check, gpu
from tests.tree import ROOT

Made = tuple[Backend, FakeFlash3 | FakeFlash4]
KINDS = {"flash3": 9, "flash4": 9, "flash4 on Blackwell": 10}


class OnBlackwell(Flash4Backend):
    def can_split_keys(self, device: torch.device) -> bool:
        return True


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Made]:
    def made(kind: str) -> Made:
        major = KINDS[kind]
        three, four = FakeFlash3(), FakeFlash4(major)
        install_flash3(monkeypatch, three)
        install_flash4(monkeypatch, four.flash_attn_varlen_func)
        if kind == "flash3":
            return Flash3Backend(), three
        return (OnBlackwell() if major == 10 else Flash4Backend()), four

    return made


@pytest.mark.few(10)
@pytest.mark.parametrize("mix", [DECODES, BOTH, MIXED, WHOLE], ids=["decode", "both", "mixed", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_flash3_and_flash4_match_reference_on_fake_libraries(
    make: Callable[[str], Made], kind: str, case: dict, mix: tuple
) -> None:
    if KINDS[kind] == 10 and case.get("dim", 0) > 128:
        pytest.skip("refused there")
    check(make(kind)[0], "cpu", mix, **case)


def test_decode_key_splits_follow_library_support(make: Callable[[str], Made]) -> None:
    """A batch of decodes uses as many splits as fill the GPU if the library supports them, else one."""
    for kind, splits in (("flash3", 0), ("flash4", 1), ("flash4 on Blackwell", 0)):
        backend, library = make(kind)
        check(backend, "cpu", DECODES)
        check(backend, "cpu", MIXED, window=700)
        none = (None, None) if kind.startswith("flash4") else (-1, -1)
        assert library.calls == [
            {"q": 4, "num_splits": splits, "window_size": none},
            {"q": 3, "num_splits": 1, "window_size": none},
        ]


@pytest.mark.parametrize("kind", ["flash4", "flash4 on Blackwell"])
def test_flash4_without_splits_leaves_decode_batches_to_triton(make: Callable[[str], Made], kind: str) -> None:
    backend, library = make(kind)
    assert isinstance(backend, Flash4Backend)
    backend.reference = spy = Spy()
    check(backend, "cpu", DECODES)
    check(backend, "cpu", MIXED)
    assert spy.queries == ([1] if kind == "flash4" else [])
    assert len(library.calls) == 2 - len(spy.queries)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_probe_passes_flash3_and_flash4(make: Callable[[str], Made], kind: str) -> None:
    probe = PagedAttentionProbe(torch.device("cpu"), torch.bfloat16, 8, 2, 64, 30.0)
    assert probe(make(kind)[0]) is None
    assert replace(probe, capture=FakeCapture())(make(kind)[0]) is None
    assert replace(probe, capture=FakeCapture(), only_prefill_graph=True, has_windows=True)(make(kind)[0]) is None


@pytest.mark.parametrize(
    ("capability", "order"),
    [
        ((8, 0), ["flash", "torch_varlen"]),
        ((8, 9), ["flash", "torch_varlen"]),
        ((9, 0), ["flash3", "flash4", "flash", "torch_varlen"]),
        ((10, 0), ["flash4", "flash", "torch_varlen"]),
        ((10, 3), ["flash4", "flash", "torch_varlen"]),
        ((12, 0), ["flash", "torch_varlen"]),
    ],
)
def test_backend_preference_follows_gpu_architecture(
    make: Callable[[str], Made], capability: tuple[int, int], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All libraries are installed. Each is chosen if those before it fail their probe, and the reason names these."""
    make("flash3")
    install_flash(monkeypatch, FakeFlashAttn())
    install_varlen(monkeypatch, fake_varlen_attn)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [])
    device = gpu(monkeypatch, capability)
    for index, name in enumerate(order):
        failing = set(order[:index])
        backend, why = select_backend(device, torch.bfloat16, 64, trials=[partial(fails, failing)])
        assert backend.name == name
        assert [part for part in why.split("; ") if part.endswith(": fails")] == [
            f"{each}: fails" for each in order[:index]
        ]


def fails(names: set[str], backend: Backend) -> str | None:
    return "fails" if backend.name in names else None


@pytest.mark.parametrize(
    ("name", "capability", "head_dim", "message"),
    [
        ("flash3", (8, 0), 64, "needs compute capability 9.x, this GPU has 8.0"),
        ("flash3", (10, 0), 64, "needs compute capability 9.x, this GPU has 10.0"),
        ("flash4", (8, 9), 64, "needs compute capability 9.x or 10.x, this GPU has 8.9"),
        ("flash4", (12, 0), 64, "needs compute capability 9.x or 10.x, this GPU has 12.0"),
        ("flash4", (10, 0), 256, "takes heads up to 128 on this GPU, not 256"),
    ],
)
def test_flash3_and_flash4_reject_unsupported_gpu_or_head_dim(
    make: Callable[[str], Made],
    name: str,
    capability: tuple[int, int],
    head_dim: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make("flash4 on Blackwell" if capability[0] == 10 else "flash4")
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        select_backend(gpu(monkeypatch, capability), torch.bfloat16, head_dim, name)


@pytest.mark.parametrize("name", ["flash3", "flash4"])
def test_flash3_and_flash4_are_rejected_when_deterministic(
    make: Callable[[str], Made], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(name)
    install_flash(monkeypatch, FakeFlashAttn())
    device = gpu(monkeypatch, (9, 0))
    assert select_backend(device, torch.bfloat16, 64, deterministic=True)[0].name == "flash"
    with pytest.raises(ValueError, match="--deterministic takes another backend"):
        select_backend(device, torch.bfloat16, 64, name, deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "processors"), [("sm_90a", "132"), ("sm_100a", "148")])
def test_installed_flash_attn_4_compiles_backend_calls(architecture: str, processors: str, tmp_path: Path) -> None:
    """Its compiler needs no GPU, except for few queries on Blackwell, where it asks the driver for one."""
    if isinstance(reason := import_library("flash_attn.cute", "flash-attn 4", flash4.INSTALL), str):
        pytest.skip(reason)
    environment = {
        "FLASH_ATTENTION_ARCH": architecture,
        "CUTE_DSL_ARCH": architecture,
        "FLASH_ATTENTION_NUM_SMS": processors,
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_flash4", str(tmp_path)],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 24
    for each in cases:
        assert each["error"] is None or "NVIDIA driver library" in each["error"], each
    assert sum(each["error"] is None for each in cases) >= 18


def test_missing_library_error_gives_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    for module in ("flash_attn_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, module, None)  # Python treats the module as missing
    for name, advice in (("flash3", flash3.INSTALL), ("flash4", flash4.INSTALL)):
        assert selection_error(monkeypatch, name) == f"{name}: flash-attn {name[-1]} is not installed ({advice})"


def selection_error(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """The error of selecting this backend on Hopper."""
    with pytest.raises(ValueError, match=name) as raised:
        select_backend(gpu(monkeypatch, (9, 0)), torch.bfloat16, 64, name)
    return str(raised.value)


def test_partial_flash_attn_install_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2 has the folder flash_attn too, and flash-attn 3 needs a library built for this PyTorch."""
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    install_flash(monkeypatch, ModuleType("flash_attn"))
    for module in ("flash_attn.cute", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert selection_error(monkeypatch, "flash4") == f"flash4: flash-attn 4 is not installed ({flash4.INSTALL})"
    broken: Any = type("Broken", (), {"find_spec": staticmethod(raise_import)})
    monkeypatch.setattr(sys, "meta_path", [broken, *sys.meta_path])
    broken_symbol = "flash-attn 3 cannot be loaded, install it for this PyTorch (undefined symbol: _ZN3c10)"
    assert selection_error(monkeypatch, "flash3") == f"flash3: {broken_symbol}"


def raise_import(name: str, path: object = None, target: object = None) -> None:
    if name == "flash_attn_interface":
        raise ImportError("undefined symbol: _ZN3c10")
