"""The machinery of the first flight: deadlines, stages that die, reruns, and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.flight import __main__ as flight
from benchmarks.flight.finding import close
from benchmarks.flight.plan import CALLS, PLAN
from benchmarks.flight.process import Run, beside, in_order, is_cudas, run_stage
from benchmarks.flight.table import told
from tests.tree import ROOT


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_hanging_stage_is_killed_with_child_processes(tmp_path: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    run = run_stage(program(child), os.environ, tmp_path / "log", 3.0)
    assert run.ended == "its 3 s were over"
    assert run.late
    pid = int((tmp_path / "log").read_text())
    until = time.monotonic() + 30
    while not has_ended(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_stage_gets_time_left_over_by_earlier_stages() -> None:
    seconds_given, takes = list[float](), {"short": 2.0, "late": 13.0, "last": 1.0}

    def run(name: str, seconds: float) -> Run:
        seconds_given.append(seconds)
        return Run(name, "", "", takes[name])

    assert [each.stage for each in in_order({"short": 5.0, "late": 10.0, "last": 4.0}, run)] == list(takes)
    assert seconds_given == [5.0, 13.0, 4.0]


def test_calls_take_540_and_180_seconds_and_begin_with_a_large_model_over_http() -> None:
    assert [sum(call.values()) for call in CALLS] == [540.0, 180.0]
    assert list(CALLS[0])[:3] == ["machine", "arrivals", "everything"]
    assert len(PLAN) == sum(map(len, CALLS))


def test_table_is_written_after_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flight that is cut keeps what it found."""
    tables = list[str]()

    def run(name: str, out: Path, device: str, seconds: float, again: str = "") -> Run:
        tables.append((out / "table.txt").read_text() if (out / "table.txt").exists() else "")
        return Run(name, again, "", 1.0)

    monkeypatch.setattr(flight, "run_named_stage", run)
    monkeypatch.setattr(flight, "beside", lambda *_: nullcontext())
    monkeypatch.setattr(sys, "argv", ["flight", "--call", "2", "--out", str(tmp_path)])
    assert flight.main() == 0
    assert len(tables) == len(CALLS[1])
    assert "flash4: held" in tables[1]


def test_background_program_ends_with_stages(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with beside(program("import os, time; print(os.getpid(), flush=True); time.sleep(600)"), log):
        until = time.monotonic() + 30
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < until
            time.sleep(0.05)
    assert has_ended(int(log.read_text()))


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("print('fine')", ""),
        ("raise ValueError('no such kernel')", "exit status 1: ValueError: no such kernel"),
        ("import os; os.abort()", "killed by SIGABRT: it printed nothing"),
    ],
    ids=["well", "error", "abort"],
)
def test_run_stage_reports_how_stage_ended(text: str, ended: str, tmp_path: Path) -> None:
    assert run_stage(program(text), os.environ, tmp_path / "log", 60.0).ended == ended


@pytest.mark.parametrize(
    ("ended", "wrong", "again"),
    [
        ("killed by SIGABRT: it printed nothing", [], True),
        ("exit status 1: 2 findings do not hold", ["AcceleratorError: CUDA error: an illegal memory access"], True),
        ("exit status 1: 1 findings do not hold", ["ValueError: relative error 0.3, at most 0.02"], False),
        ("exit status 1: 1 findings do not hold", ["_norm_kernel (3)"], False),
        ("", [], False),
    ],
)
def test_only_cuda_failures_are_run_again(ended: str, wrong: list[str], again: bool) -> None:
    assert is_cudas(Run("kernels", "", ended, 1.0), wrong) == again
    assert not is_cudas(Run("kernels", "", ended, 1.0, late=True), wrong)


def test_close_compares_logprobs_with_rounding_error_of_transformers() -> None:
    wide = torch.linspace(-9.0, -1.0, 50)
    message = close(wide + 0.01, wide, wide - 0.009, torch.bfloat16)
    assert message.startswith(
        "log probabilities differ by 0.01 in the mean from transformers', its own in torch.bfloat16 by 0.009"
    )
    assert close(wide + 1e-5, wide, wide, torch.float32)
    for far, rounding, kind in ((0.02, 0.009, torch.bfloat16), (2e-4, 1.0, torch.float32)):
        with pytest.raises(ValueError, match="at most"):
            close(wide + far, wide, wide + rounding, kind)


def test_table_begins_with_first_failure(tmp_path: Path) -> None:
    finding = {"what": "attention by triton", "said": "is wrong", "held": False, "at": 7.5}
    (tmp_path / "kernels.jsonl").write_text(json.dumps(finding) + '\n{"what": "cut of')
    runs = [
        Run("machine", "", "", 1.0),
        Run("kernels", "", "exit status 1: sticky", 2.0),
        Run("models", "", "late", 3.0),
    ]
    table = told(runs, tmp_path).splitlines()
    assert table[0] == "FIRST TO FAIL: kernels: exit status 1: sticky"
    assert table[1] == "DOES NOT HOLD: kernels: attention by triton: is wrong"
    assert any(line.startswith("  NO   7.5 s  attention by triton") for line in table)
    assert told(runs[:1], tmp_path).startswith("everything holds")


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2])
def test_flight_on_cpu_holds_all_findings(call: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.flight", "--device", "cpu", "--out", str(tmp_path)]
    command += ["--call", str(call)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    table = (tmp_path / "table.txt").read_text()
    assert completed.returncode == 0, table
    assert table.startswith("everything holds")
    for stage in CALLS[call - 1]:
        assert f"\n{stage}: held" in table
    # First call: 8 of engines, 5 of families with everything on, 3 of them twice, 5 of their small steps. Second call:
    # 6 with images.
    assert table.count("the same tokens") == (6 if call == 2 else 21)
