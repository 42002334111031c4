"""Probes of attention backends, on fakes with faults that real libraries have had."""

from __future__ import annotations

import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.backend_selection import select_backend
from quire.kernels.device import error_messages
from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu.libraries.flash2 import Flash2Backend
from quire.kernels.gpu.libraries.torch_varlen import TorchVarlenBackend
from quire.kernels.probes.backend_probe import PagedAttentionProbe
from quire.kernels.probes.recurrence_probe import RecurrenceProbe
from quire.kernels.recurrent.state_space import StateSpace
from quire.kernels.reference import ReferenceBackend
from tests.kernels.fake_capture import FakeCapture
from tests.kernels.fake_flash import FakeFlashAttn, fake_varlen_attn
from tests.kernels.installed import install_flash, install_varlen

CPU = torch.device("cpu")
PROBE = PagedAttentionProbe(CPU, torch.bfloat16, 8, 2, 64)
EMPTY_OF_KERNELS = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"


class FaultyFlashAttn(FakeFlashAttn):
    """A flash-attn whose functions change what they return."""

    def __init__(self, prompt: Any = None, decode: Any = None) -> None:
        super().__init__()
        self.changes = {"prompt": prompt, "decode": decode}

    def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.changed("prompt", super().flash_attn_varlen_func(*args, **kwargs))

    def flash_attn_with_kvcache(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.changed("decode", super().flash_attn_with_kvcache(*args, **kwargs))

    def changed(self, kind: str, out: Tensor) -> Tensor:
        change = self.changes[kind]
        return out if change is None else change(out)


def raise_no_kernel_image(out: Tensor) -> Tensor:
    raise RuntimeError(EMPTY_OF_KERNELS)


def sync_with_host(out: Tensor) -> Tensor:
    """flash-attn after 2.8.3 reads the longest context on the host."""
    out.float().max().item()
    return out


def leave_rows_unwritten(out: Tensor) -> Tensor:
    """PyTorch leaves the rows after the first unwritten when it splits paged keys."""
    out[1:] = torch.nan
    return out


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    return make_flash_backend(monkeypatch, FakeFlashAttn())


def make_flash_backend(monkeypatch: pytest.MonkeyPatch, library: FakeFlashAttn) -> Backend:
    install_flash(monkeypatch, library)
    return Flash2Backend()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(8, 2, 64), (3, 3, 128), (4, 1, 256), (9, 3, 96)], ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_probe_passes_correct_backend(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int, int], softcap: float | None
) -> None:
    probe = PagedAttentionProbe(CPU, dtype, *shape, softcap, FakeCapture())
    assert probe(backend) is None
    assert PagedAttentionProbe(CPU, dtype, *shape, softcap)(ReferenceBackend()) is None


class MisscaledBackend(ReferenceBackend):
    """Its scores are 3 % too large."""

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Any) -> Tensor:
        return super().paged_attention(q * 1.03, k_cache, v_cache, metadata, softmax)


class MixedUpBackend(ReferenceBackend):
    """Computes a decode that is batched with a prefill chunk as if it were the chunk's first token."""

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Any) -> Tensor:
        out = super().paged_attention(q, k_cache, v_cache, metadata, softmax)
        counts = metadata.query_start.diff()
        if counts.max() > 1 and counts.min() == 1:
            out[-1] = out[0]
        return out


class WrongForShortPrompts(ReferenceBackend):
    """Computes wrong results for prompts whose queries fit one tile of 128 rows."""

    def paged_attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: Any, softmax: Any) -> Tensor:
        out = super().paged_attention(q, k_cache, v_cache, metadata, softmax)
        group = q.shape[1] // k_cache.shape[2]
        return out.roll(1, 1) if 1 < metadata.max_query_len * group <= 128 else out


@pytest.mark.parametrize(("heads", "tokens"), [((8, 2), 20), ((64, 8), 16), ((14, 1), 9)])
def test_probe_tries_prompts_that_fit_one_tile(heads: tuple[int, int], tokens: int) -> None:
    failure = PagedAttentionProbe(CPU, torch.bfloat16, *heads, 64)(WrongForShortPrompts())
    assert failure == f"differs from the reference for a prompt of {tokens} tokens"


@pytest.mark.parametrize("shape", [(8, 2, 64), (7, 1, 128), (9, 3, 96)], ids=str)
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [(MisscaledBackend, "a prompt"), (MixedUpBackend, "a decode batched with a chunk of a prompt")],
    ids=["scale", "mixed"],
)
def test_probe_detects_small_attention_error(
    wrong: type[ReferenceBackend], kind: str, shape: tuple[int, int, int]
) -> None:
    assert PagedAttentionProbe(CPU, torch.bfloat16, *shape)(wrong()) == f"differs from the reference for {kind}"


def test_probe_passes_torch_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    install_varlen(monkeypatch, fake_varlen_attn)
    assert PROBE(TorchVarlenBackend()) is None


@pytest.mark.parametrize(
    ("prompt", "decode", "reason"),
    [
        (raise_no_kernel_image, None, "was not built for this GPU (CUDA error: no kernel image is available"),
        (None, raise_no_kernel_image, "was not built for this GPU (CUDA error: no kernel image is available"),
        (leave_rows_unwritten, None, "differs from the reference for a prompt"),
        (torch.zeros_like, None, "differs from the reference for a prompt"),
        (None, leave_rows_unwritten, "differs from the reference for a decode"),
        (None, lambda out: out.roll(1, 2), "differs from the reference for a decode"),
    ],
)
def test_probe_returns_failure_reason_in_one_line(
    prompt: Any, decode: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = PROBE(make_flash_backend(monkeypatch, FaultyFlashAttn(prompt, decode)))
    assert failure is not None
    assert failure.startswith(reason)
    assert "\n" not in failure


def test_windowed_probe_fails_library_built_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unwindowed(FakeFlashAttn):
        def flash_attn_varlen_func(self, *args: Any, **kwargs: Any) -> Tensor:
            if kwargs["window_size"] != (-1, -1):
                raise RuntimeError("This flash attention build does not support local attention.")
            return super().flash_attn_varlen_func(*args, **kwargs)

    backend = make_flash_backend(monkeypatch, Unwindowed())
    assert PROBE(backend) is None
    failure = replace(PROBE, has_windows=True)(backend)
    assert failure == "RuntimeError: This flash attention build does not support local attention."
    assert (
        replace(PROBE, has_windows=True, capture=FakeCapture())(make_flash_backend(monkeypatch, FakeFlashAttn()))
        is None
    )


def test_probe_reports_decode_that_cuda_graph_cannot_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = make_flash_backend(monkeypatch, FaultyFlashAttn(decode=sync_with_host))
    assert PROBE(waiting) is None
    failure = replace(PROBE, capture=FakeCapture())(waiting)
    assert failure is not None
    assert failure.startswith("a CUDA graph cannot hold its decodes; --enforce-eager does without (")


def test_prefill_graph_probe_detects_capture_and_replay_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is captured for other sequences than those of the replay."""
    probe = replace(PROBE, capture=FakeCapture(), only_prefill_graph=True)
    assert probe(make_flash_backend(monkeypatch, FakeFlashAttn())) is None
    failure = probe(make_flash_backend(monkeypatch, FaultyFlashAttn(prompt=sync_with_host)))
    assert failure is not None
    assert failure.startswith("a CUDA graph cannot hold its parts of prompts; --enforce-eager does without (")
    otherwise = "differs from the reference in a CUDA graph; --enforce-eager does without"
    assert probe(make_flash_backend(monkeypatch, FaultyFlashAttn(prompt=lambda out: out.roll(1, 0)))) == otherwise
    assert replace(probe, capture=capture_without_replay)(make_flash_backend(monkeypatch, FakeFlashAttn())) == otherwise


def capture_without_replay(function: Any) -> Any:
    """Its replays never compute anything."""
    result = function()
    return lambda: None, result


def test_selection_falls_back_and_names_probe_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FaultyFlashAttn(prompt=raise_no_kernel_image)
    make_flash_backend(monkeypatch, library)
    install_varlen(monkeypatch, fake_varlen_attn)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    device = torch.device("cuda")
    backend, why = select_backend(device, torch.bfloat16, 64, trials=[PROBE])
    assert backend.name == "torch_varlen"
    assert "flash: was not built for this GPU (CUDA error: no kernel image" in why
    with pytest.raises(ValueError, match=r"flash: was not built for this GPU .* install a build for it"):
        select_backend(device, torch.bfloat16, 64, "flash", trials=[PROBE])


def test_selection_picks_fastest_backend_when_no_graph_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a driver that captures nothing, the reference must not be chosen: its steps take a hundred times as long."""
    make_flash_backend(monkeypatch, FakeFlashAttn())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def refused(function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    trials = [replace(PROBE, capture=refused), PROBE]
    backend, why = select_backend(torch.device("cuda"), torch.bfloat16, 64, trials=trials)
    assert backend.name == "flash"
    assert "flash: a CUDA graph cannot hold its decodes" in why
    with pytest.raises(ValueError, match="--enforce-eager"):
        select_backend(torch.device("cuda"), torch.bfloat16, 64, "flash", trials=trials)


def test_selection_raises_when_all_backends_fail_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_flash_backend(monkeypatch, FakeFlashAttn())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"nothing computes here; flash: lost; .*reference: lost"):
        select_backend(torch.device("cuda"), torch.bfloat16, 64, trials=[lambda backend: "lost"])


def test_cpu_backend_is_not_probed() -> None:
    from quire.engine.common.config import EngineConfig
    from quire.engine.worker.device_plan import choose_trials

    assert choose_trials(EngineConfig(), CPU, torch.bfloat16, None) == []  # type: ignore[arg-type]


@pytest.mark.slow
def test_recurrence_probe_passes_bfloat16_granite4_state_space() -> None:
    """One number of 33,792 was too far from the result of unrounded inputs, so that no backend passed on any GPU."""
    some = [torch.linspace(0.1, 1.0, size) for size in (48, 48, 48, 48 * 64)]
    rule = StateSpace(-some[0], *some[1:], 1e-6, 1, 128, 64)
    assert RecurrenceProbe(CPU, torch.bfloat16, rule, 64)(ReferenceBackend()) is None


def triton_build_error(monkeypatch: pytest.MonkeyPatch, folder: Path) -> BaseException:
    """The error that Triton raises when it builds a launcher here."""
    triton_build = pytest.importorskip("triton.runtime.build", reason="there is no Triton for this platform")
    if hasattr(triton_build, "_find_compiler"):  # from 3.8 on Triton looks for one only once
        triton_build._find_compiler.cache_clear()
    source = folder / "launcher.c"
    source.write_text("#include <Python.h>\n#error no\n")
    with pytest.raises((RuntimeError, OSError, subprocess.SubprocessError)) as raised:
        triton_build._build("launcher", str(source), str(folder), [], [], [], [])
    return raised.value


def test_triton_error_names_missing_c_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = describe_kernel_error(triton_build_error(monkeypatch, tmp_path))
    assert message.startswith("Triton needs a C compiler to start its kernels and finds none: install gcc")
    monkeypatch.setenv("CC", "not-a-compiler")
    message = describe_kernel_error(triton_build_error(monkeypatch, tmp_path))
    assert message == "Triton needs a C compiler, and 'not-a-compiler', which CC names, is not there"


def test_triton_error_names_missing_python_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    error = triton_build_error(monkeypatch, tmp_path)
    monkeypatch.setattr(error_messages.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert describe_kernel_error(error).startswith(
        f"Triton compiles against Python.h, which is not in {tmp_path}: install"
    )
    (tmp_path / "Python.h").touch()
    assert describe_kernel_error(error).startswith(f"the compiler that Triton called failed with status 3: {compiler} ")
    assert sysconfig.get_paths()["include"] == str(tmp_path)
