"""Libraries are tried in a child process. A short program replaces the real worker, which the last test runs."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.models import decoder_spec
from quire.engine.worker.kernel_compilation.kernel_cache import compile_lock
from quire.engine.worker.trials import backend_trials, trial_verdicts
from quire.engine.worker.trials.backend_trials import choose_trials, make_child_trials, try_attention
from quire.engine.worker.trials.child_trials import ChildTrials
from quire.engine.worker.trials.chunk_trial import enable_chunks_after_trial
from quire.engine.worker.trials.trial_request import ProbeSettings
from quire.engine.worker.trials.trial_verdicts import describe_machine
from quire.kernels.backend_selection import select_backend
from quire.kernels.gpu.libraries.flash2 import Flash2Backend
from quire.kernels.probes.backend_probe import PagedAttentionProbe
from quire.kernels.probes.chunked_recurrence_probe import ChunkedRecurrenceProbe
from quire.kernels.reference import ReferenceBackend
from tests.kernels.fake_capture import FakeCapture
from tests.kernels.fake_flash import FakeFlashAttn, fake_varlen_attn
from tests.kernels.fake_later_flash import FakeFlash3, FakeFlash4
from tests.kernels.installed import install_flash, install_flash3, install_flash4, install_varlen
from tests.tiny_models import FAMILIES, SHAPE

CPU = torch.device("cpu")
PROBE = PagedAttentionProbe(CPU, torch.bfloat16, 4, 2, 64, capture=FakeCapture())
CHILD = """
import os, signal, sys, time
os.read(0, 65536)
answer, runs = int(sys.argv[2]), sys.argv[1]
open(runs, "a").write("run ")
os.write(answer, b"ready\\n")
"""
PASSES = """os.write(answer, b'{"failure":null,"seconds":1.5}')"""
FAILS = """os.write(answer, b'{"failure":"differs from the reference for a prompt","seconds":1.5}')"""
LACKS_MEMORY = """os.write(answer, b'{"failure":"out of memory (CUDA)","seconds":1.5}')"""
MACHINE = {"card": "H100", "driver": "580.1", "torch": "2.13"}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash2Backend:
    install_flash(monkeypatch, FakeFlashAttn())
    install_varlen(monkeypatch, fake_varlen_attn)
    return Flash2Backend()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def make_trials(runs: Path, body: str, machine: dict[str, str] | None = None, **fields: Any) -> ChildTrials:
    worker = ("-c", CHILD + body, str(runs))
    described = MACHINE if machine is None else machine
    return ChildTrials(runs.parent / "verdicts", lambda: described, lambda: None, worker=worker, **fields)


def count(runs: Path) -> int:
    return len(runs.read_text().split()) if runs.exists() else 0


def only_verdict(runs: Path) -> Path:
    (path,) = (runs.parent / "verdicts").iterdir()
    return path


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "sys.stderr.write('terminate called\\n'); sys.stderr.flush(); os.abort()",
            "was killed by SIGABRT: terminate called",
        ),
        ("sys.exit('no such symbol')", "exited with code 1: no such symbol"),
        ("os._exit(0)", "exited with code 0"),
        ("time.sleep(60)", "did not end within 0.6 s"),
    ],
    ids=["abort", "error", "silent", "hang"],
)
def test_child_that_ends_without_verdict_rules_out_only_its_backend(
    flash: Flash2Backend, runs: Path, body: str, reason: str
) -> None:
    trials = make_trials(runs, body, timeout_seconds=0.6)
    failure = trials.find_failure(flash, [PROBE])
    path = only_verdict(runs)
    assert failure == f"its trial {reason} (to try again, delete {path} or pass --attention-backend flash)"
    assert trials.find_failure(flash, [PROBE]) == failure
    assert count(runs) == 1
    path.unlink()
    assert make_trials(runs, PASSES).find_failure(flash, [PROBE]) is None
    assert count(runs) == 2


@pytest.mark.parametrize(("body", "failure"), [(PASSES, None), (FAILS, "differs from the reference for a prompt")])
def test_second_start_reads_saved_verdict_without_a_child(
    flash: Flash2Backend, runs: Path, body: str, failure: str | None
) -> None:
    for _ in range(2):
        reason = make_trials(runs, body).find_failure(flash, [PROBE])
        assert (reason or "").startswith(failure or "")
        assert (reason is None) == (failure is None)
    assert count(runs) == 1
    file = json.loads(only_verdict(runs).read_text())
    assert file["verdict"] == {"failure": failure, "seconds": 1.5}
    assert file["key"]["machine"] == MACHINE


def test_trial_runs_again_on_other_machine_shape_or_mode(flash: Flash2Backend, runs: Path) -> None:
    assert make_trials(runs, FAILS).find_failure(flash, [PROBE]) is not None
    passing = make_trials(runs, PASSES)
    assert make_trials(runs, PASSES, MACHINE | {"driver": "590"}).find_failure(flash, [PROBE]) is None
    assert passing.find_failure(flash, [replace(PROBE, head_dim=128)]) is None
    assert passing.find_failure(flash, [replace(PROBE, capture=None)]) is None
    assert passing.find_failure(Flash2Backend(deterministic=True), [PROBE]) is None
    assert count(runs) == 5


def test_named_backend_is_tried_again_only_after_a_failure(flash: Flash2Backend, runs: Path) -> None:
    assert make_trials(runs, FAILS).find_failure(flash, [PROBE]) is not None
    named = make_trials(runs, PASSES, retry_failures=True)
    assert named.find_failure(flash, [PROBE]) is None
    assert named.find_failure(flash, [PROBE]) is None
    assert make_trials(runs, PASSES).find_failure(flash, [PROBE]) is None
    assert count(runs) == 2


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"key": 1}', b"[]"])
def test_corrupt_verdict_is_ignored_and_logged(
    flash: Flash2Backend, runs: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    make_trials(runs, FAILS).find_failure(flash, [PROBE])
    only_verdict(runs).write_bytes(content)
    assert make_trials(runs, PASSES).find_failure(flash, [PROBE]) is None
    assert f"{only_verdict(runs)} is not the verdict of a trial" in caplog.text
    assert count(runs) == 2
    assert make_trials(runs, PASSES).find_failure(flash, [PROBE]) is None
    assert count(runs) == 2


def test_verdict_of_another_card_under_this_name_is_ignored(
    flash: Flash2Backend, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trials(runs, FAILS).find_failure(flash, [PROBE])
    path = only_verdict(runs)
    path.write_text(path.read_text().replace("H100", "B200"))
    assert make_trials(runs, PASSES).find_failure(flash, [PROBE]) is None
    assert f"{path} is the verdict of another trial" in caplog.text


@pytest.mark.parametrize("body", [LACKS_MEMORY, "os.kill(os.getpid(), signal.SIGKILL)"], ids=["memory", "killed"])
def test_failure_that_may_pass_is_not_saved(flash: Flash2Backend, runs: Path, body: str) -> None:
    failure = make_trials(runs, body).find_failure(flash, [PROBE])
    assert failure is not None
    assert failure.endswith("(the next start tries again)")
    assert not (runs.parent / "verdicts").exists()


def test_verdicts_that_cannot_be_saved_do_not_end_the_start(flash: Flash2Backend, runs: Path) -> None:
    (runs.parent / "verdicts").write_text("a file in the folder's place")
    assert make_trials(runs, PASSES).find_failure(flash, [PROBE]) is None
    assert make_trials(runs, FAILS).find_failure(flash, [PROBE]) == (
        "differs from the reference for a prompt (the next start tries again)"
    )


def test_backend_is_tried_in_process_if_no_child_can_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU in exclusive mode."""
    refused = ChildTrials(
        runs.parent, lambda: MACHINE, lambda: None, worker=("-c", "raise SystemExit('device is busy')")
    )
    library = FakeFlashAttn()
    install_flash(monkeypatch, library)
    assert refused.find_failure(Flash2Backend(), [replace(PROBE, capture=None)]) is None
    assert "ended before its trial: device is busy" in caplog.text
    assert library.calls


def test_trial_reports_progress_and_kills_its_child_if_the_start_ends(flash: Flash2Backend, runs: Path) -> None:
    pids = runs.parent / "pid"
    seen = list[int]()

    def progress() -> None:
        seen.append(1)
        if pids.exists() and pids.read_text():
            raise KeyboardInterrupt

    body = f"open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        replace(make_trials(runs, body), progress=progress).find_failure(flash, [PROBE])
    assert seen
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)


def test_selection_takes_next_backend_and_names_file_to_delete(
    flash: Flash2Backend, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    trials = make_trials(runs, "os.abort() if b'\"flash\"' in line else None;" + PASSES)
    worker = [each.replace("os.read(0, 65536)", "line = os.read(0, 65536)") for each in trials.worker]
    trials = replace(trials, worker=worker)
    device = torch.device("cuda")

    def trial(backend: Any) -> str | None:
        return try_attention([PROBE], trials, backend)

    backend, why = select_backend(device, torch.bfloat16, 64, trials=[trial])
    assert backend.name == "torch_varlen"
    assert "flash: its trial was killed by SIGABRT (to try again, delete " in why


def test_probe_equals_itself_after_encoding_for_a_child() -> None:
    probe = replace(PROBE, kv_dtype=torch.float8_e4m3fn, softcap=30.0, has_sinks=True)
    sent = msgspec.json.decode(msgspec.json.encode(ProbeSettings.from_probe(probe)), type=ProbeSettings)
    assert sent.uses_graph
    assert sent.make_probe(probe.capture) == probe


def test_chunk_probe_equals_itself_after_encoding_for_a_child() -> None:
    probe = ChunkedRecurrenceProbe(CPU, torch.bfloat16, True, 32, 16, 128, 128)
    sent = msgspec.json.decode(msgspec.json.encode(ProbeSettings.from_probe(probe)), type=ProbeSettings)
    assert sent.make_probe(None) == probe


def recurrent_spec(tmp_path: Path, family: str) -> DecoderSpec:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    return decoder_spec(read_model_config(tmp_path))


@pytest.fixture
def untested_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = pytest.importorskip("quire.kernels.gpu.recurrent.chunked_recurrence")
    monkeypatch.setattr(chunked, "needs_chunk_trial", lambda device: True)


@pytest.mark.usefixtures("untested_gpu")
@pytest.mark.parametrize("body", [PASSES, FAILS, "os.abort()", "sys.exit()"], ids=["passes", "fails", "abort", "exit"])
def test_chunks_are_enabled_only_if_their_trial_passes(
    flash: Flash2Backend, runs: Path, tmp_path: Path, body: str
) -> None:
    spec = recurrent_spec(tmp_path, "qwen3_5")
    reasons = [
        enable_chunks_after_trial(flash, torch.device("cuda"), torch.bfloat16, spec, make_trials(runs, body))
        for _ in range(2)
    ]
    assert count(runs) == 1, "the second start reads the verdict"
    assert flash.fused_ops.passed_chunk_trial == (body == PASSES)
    assert reasons[0] == reasons[1]
    if body == PASSES:
        assert reasons[0] is None
    else:
        assert str(reasons[0]).endswith(f" (to try again, delete {only_verdict(runs)})")


@pytest.mark.usefixtures("untested_gpu")
def test_chunks_are_never_tried_in_the_engine_process(flash: Flash2Backend, runs: Path, tmp_path: Path) -> None:
    trials = ChildTrials(runs, lambda: MACHINE, lambda: None, worker=("-c", "raise SystemExit('device is busy')"))
    spec = recurrent_spec(tmp_path, "qwen3_5")
    reason = enable_chunks_after_trial(flash, torch.device("cuda"), torch.bfloat16, spec, trials)
    assert reason == "no child process can use the GPU to try them"
    assert not flash.fused_ops.passed_chunk_trial


@pytest.mark.usefixtures("untested_gpu")
@pytest.mark.parametrize(
    ("family", "deterministic", "dtype"),
    [
        ("qwen3_5", True, torch.bfloat16),
        ("qwen3_5", False, torch.float16),
        ("kimi_linear", False, torch.bfloat16),
        ("jamba", False, torch.bfloat16),
        ("llama", False, torch.bfloat16),
    ],
)
def test_models_and_modes_without_chunks_have_no_trial(
    flash: Flash2Backend, runs: Path, tmp_path: Path, family: str, deterministic: bool, dtype: torch.dtype
) -> None:
    backend = Flash2Backend(deterministic=deterministic)
    spec = recurrent_spec(tmp_path, family)
    assert enable_chunks_after_trial(backend, torch.device("cuda"), dtype, spec, make_trials(runs, PASSES)) is None
    assert count(runs) == 0
    assert not backend.fused_ops.passed_chunk_trial


@pytest.mark.parametrize(
    ("capability", "is_tried"),
    [(75, False), (80, True), (86, True), (89, True), (90, False), (100, True), (120, True), (None, False)],
)
def test_chunks_are_tried_from_ampere_on_except_on_hopper(
    capability: int | None, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from quire.kernels.gpu import triton_launch_sizes
    from quire.kernels.gpu.recurrent.chunked_recurrence import needs_chunk_trial

    monkeypatch.setattr(triton_launch_sizes, "cuda_capability", lambda device: capability)
    assert needs_chunk_trial(0) == is_tried


def test_replicas_that_start_together_run_one_trial(
    flash: Flash2Backend, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(runs.parent))
    trials = make_trials(runs, "time.sleep(0.2);" + PASSES)

    def start(_: int) -> str | None:
        with compile_lock(lambda: None):
            return trials.find_failure(flash, [PROBE])

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(start, range(3))) == [None] * 3
    assert count(runs) == 1


def test_start_tries_libraries_in_a_child_and_own_kernels_in_process(
    flash: Flash2Backend, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_trials, "PagedAttentionProbe", lambda *_, **__: replace(PROBE, capture=None))
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES["llama"]))
    spec, types = decoder_spec(read_model_config(tmp_path)), (torch.bfloat16, torch.bfloat16)
    config = EngineConfig(enforce_eager=True)
    (trial,) = choose_trials(config, torch.device("cuda"), types, spec, make_trials(runs, FAILS))
    assert "differs from the reference" in str(trial(flash))
    assert count(runs) == 1
    assert trial(ReferenceBackend()) is None
    assert count(runs) == 1


def test_named_backend_ignores_saved_failures_and_cpus_have_no_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cuda = torch.device("cuda")
    automatic, named = (
        make_child_trials(EngineConfig(attention_backend=name), cuda, lambda: "580", lambda: None)
        for name in ("auto", "flash4")
    )
    assert automatic is not None
    assert named is not None
    assert (automatic.retry_failures, named.retry_failures) == (False, True)
    assert automatic.verdict_folder == tmp_path / "quire-trials"
    assert make_child_trials(EngineConfig(), CPU, lambda: None, lambda: None) is None


def test_machine_is_described_by_card_driver_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    machine = describe_machine(torch.device("cuda"), "580.95")
    assert machine["card"] == "NVIDIA H100 80GB HBM3"
    assert (machine["compute capability"], machine["driver"]) == ("9.0", "580.95")
    assert machine["torch"] == torch.__version__
    assert "flash-attn-4" not in machine, "it is not installed here"
    monkeypatch.setattr(trial_verdicts, "version", lambda name: "4.0.0b37" if name == "flash-attn-4" else version(name))
    assert describe_machine(torch.device("cuda"), "580.95") == machine | {"flash-attn-4": "4.0.0b37"}


REAL_CHILD = """
import os, sys
from types import SimpleNamespace
import torch
from quire.engine.worker.trials import trial_worker
from tests.kernels.fake_capture import FakeCapture
from tests.kernels.fake_flash import FakeFlashAttn
from tests.kernels.fake_later_flash import FakeFlash3, FakeFlash4

def abort(*args, **named):
    os.write(2, b"terminate called after throwing an instance of 'c10::Error'\\n")
    os.abort()

four = FakeFlash4(9).flash_attn_varlen_func
sys.modules["flash_attn_interface"] = SimpleNamespace(flash_attn_with_kvcache=abort)
sys.modules["flash_attn.cute"] = SimpleNamespace(
    flash_attn_varlen_func=lambda q, *args, **named: four(1.05 * q, *args, **named)
)
sys.modules["flash_attn"] = FakeFlashAttn()
trial_worker.CudaGraphCapture = lambda device: FakeCapture()
trial_worker.main()
"""


@pytest.mark.slow
def test_selection_takes_next_library_after_one_aborts_and_one_is_wrong(
    flash: Flash2Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_flash3(monkeypatch, FakeFlash3())
    install_flash4(monkeypatch, FakeFlash4(9).flash_attn_varlen_func)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    trials = ChildTrials(tmp_path, lambda: MACHINE, lambda: None, worker=("-c", REAL_CHILD))

    def choose() -> tuple[str, list[str]]:
        trial = partial(try_attention, [PROBE], trials)
        backend, why = select_backend(torch.device("cuda"), torch.bfloat16, 64, trials=[trial])
        return backend.name, why.split("; ")

    name, notes = choose()
    assert name == "flash"
    assert notes[1].startswith("flash3: its trial was killed by SIGABRT: terminate called after throwing an instance")
    assert notes[2].startswith("flash4: differs from the reference for a prompt (to try again, delete ")
    trials = replace(trials, worker=("-c", "raise AssertionError"))
    assert choose() == (name, notes)
