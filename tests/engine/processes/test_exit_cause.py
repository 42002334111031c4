"""Tests why an engine ended: the decision itself, and the facts behind it, taken from real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.engine.processes.exit_cause import FAULT_SIGNALS, exit_cause
from quire.engine.processes.heartbeat import Alive, FaultSignal, RequestsBegan, decode_heartbeat
from quire.engine.processes.procfs import RunnableClock, Standstill, is_stopped, oom_kills, state

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LESS = "--quantization int4, --kv-cache-memory and a smaller --max-model-len need less memory"


@pytest.mark.parametrize(
    ("code", "sender", "oom", "description", "external"),
    [
        (1, None, 0, "exited with code 1", False),
        (0, None, None, "exited with code 0", False),
        (-signal.SIGKILL, None, 0, "was killed by SIGKILL", True),
        (-signal.SIGKILL, None, 1, f"was killed by SIGKILL because memory ran out; {LESS}", False),
        (-signal.SIGKILL, None, None, "was killed by SIGKILL (out of memory?)", False),
        (-signal.SIGSEGV, None, 0, "was killed by SIGSEGV", False),
        (-signal.SIGSEGV, 7, 0, "was killed by SIGSEGV, sent by process 7", True),
        (-signal.SIGABRT, None, 0, "was killed by SIGABRT", False),
        (-signal.SIGTERM, None, None, "was killed by SIGTERM", True),
        (-signal.SIGXCPU, None, 0, "was killed by SIGXCPU", False),
        (-63, None, 0, "was killed by signal 63", True),
    ],
)
def test_exit_cause_describes_exit_code_and_signal(
    code: int, sender: int | None, oom: int | None, description: str, external: bool
) -> None:
    cause = exit_cause(code, sender=sender, oom_kills=oom)
    assert (cause.description, cause.external) == (description, external)


PROGRAM = """
import ctypes, os, sys, time
from quire.engine.main import block_fault_signals, start_fault_signal_reporter
from quire.engine.processes.heartbeat import PipeHeartbeat
block_fault_signals()
heartbeat = PipeHeartbeat(int(sys.argv[1]))
start_fault_signal_reporter(heartbeat)
heartbeat.begin_step(["up"])
{act}
time.sleep(60)
os._exit(3)
"""


def run_until_dead(act: str, number: int | None = None) -> tuple[int, list[object]]:
    """Run a process that executes the statement `act`, and send it the signal `number` if one is given.

    Returns its return code and all messages of its heartbeat pipe except the heartbeats themselves.
    """
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(act=act), str(writer)], pass_fds=(writer,))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        messages: list[object] = []
        for line in pipe:
            message = decode_heartbeat(line)
            if isinstance(message, RequestsBegan) and number is not None:
                process.send_signal(number)
            if not isinstance(message, Alive):
                messages.append(message)
    return process.wait(), messages


@LINUX
@pytest.mark.parametrize("number", sorted(FAULT_SIGNALS), ids=lambda number: signal.Signals(number).name)
def test_heartbeat_reports_sender_of_fault_signal(number: int) -> None:
    assert run_until_dead("", number) == (-number, [RequestsBegan(["up"]), FaultSignal(os.getpid())])


@LINUX
@pytest.mark.parametrize(
    ("act", "number"),
    [
        ("ctypes.string_at(0)", signal.SIGSEGV),
        ("os.abort()", signal.SIGABRT),
        ("os.kill(os.getpid(), 11)", signal.SIGSEGV),
        ("import threading; threading.Thread(target=ctypes.string_at, args=(0,)).start()", signal.SIGSEGV),
    ],
)
def test_own_fault_ends_process_without_report(act: str, number: int) -> None:
    assert run_until_dead(act) == (-number, [RequestsBegan(["up"])])


PROGRESS_OUTSIDE_A_STEP = """
import os
from quire.engine.processes.heartbeat import PipeHeartbeat, FaultSignal, decode_heartbeat
reader, writer = os.pipe()
heartbeat = PipeHeartbeat(writer)
heartbeat.begin_step([])
heartbeat.end_step()
heartbeat.progress()
heartbeat.report_fault_signal(0)
messages = map(decode_heartbeat, os.fdopen(reader, "rb"))
while next(messages) != FaultSignal(0): pass
next(messages)  # this heartbeat may have been prepared before the calls above
print(next(messages).stuck_ms, flush=True)
os._exit(0)
"""


def test_progress_outside_steps_is_not_reported_as_stuck() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRESS_OUTSIDE_A_STEP], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "0\n"


def write_fake_proc(root: Path, *threads: tuple[float, str]) -> Path:
    """Write a fake /proc of process 1 below `root`; `threads` are (seconds waited for a CPU, state letter)."""
    for index, (waited, letter) in enumerate(threads):
        task = root / "1" / "task" / str(index)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"5 {int(waited * 1e9)} 7\n")
        (task / "stat").write_text(f"{index} (a) b ({letter}) {letter} 1 2\n")
    return root


def test_runnable_clock_excludes_cpu_and_disk_waits(tmp_path: Path) -> None:
    clock = RunnableClock(1, write_fake_proc(tmp_path, (100.0, "R"), (50.0, "S")))
    clock.advance(4.0, inspect=False)
    clock.advance(1.0, inspect=True)
    assert clock.seconds == 5.0, "waits before the first inspection do not count"
    write_fake_proc(tmp_path, (100.75, "R"), (50.5, "S"))
    clock.advance(1.0, inspect=True)
    assert clock.seconds == 5.25, "the longest wait counts, not the sum"
    clock.advance(3.0, inspect=True)
    assert clock.seconds == 8.25
    write_fake_proc(tmp_path, (103.5, "R"), (50.5, "S"))
    clock.advance(1.0, inspect=True)
    assert clock.seconds == 6.5, "the kernel reported the wait only when it was over"
    write_fake_proc(tmp_path, (103.5, "D"), (51.5, "S"))
    clock.advance(1.0, inspect=True)
    assert clock.seconds == 6.5, "the thread waits for a disk"
    clock.advance(1.0, inspect=False)
    write_fake_proc(tmp_path, (190.0, "R"), (60.0, "D"), (33.0, "R"))
    clock.advance(1.0, inspect=True)
    assert clock.seconds == 8.5, "the first inspection has nothing to compare with"


def test_standstill_counts_only_idle_runnable_time(tmp_path: Path) -> None:
    def write_cpu_ticks(ticks: int) -> None:
        fields = ["S", *map(str, range(10)), str(ticks), "3"]
        (tmp_path / "1" / "stat").write_text(f"1 (a) b ({' '.join(fields)}".replace("(S", ") S", 1))

    write_fake_proc(tmp_path, (0.0, "S"))
    write_cpu_ticks(5)
    standstill = Standstill(1, tmp_path)
    assert standstill.advance(1.0) == 1.0
    assert standstill.advance(1.0) == 2.0
    write_fake_proc(tmp_path, (0.75, "R"))
    assert standstill.advance(1.0) == 2.25, "it waited for a processor"
    write_cpu_ticks(6)
    assert standstill.advance(1.0) == 0.0
    assert standstill.advance(1.0) == 1.0
    (tmp_path / "1" / "stat").unlink()
    assert standstill.advance(1.0) == 0.0, "of one that has ended nothing is known"


def test_runnable_clock_without_proc_equals_wall_clock(tmp_path: Path) -> None:
    clock = RunnableClock(1, tmp_path)
    clock.advance(2.0, inspect=True)
    clock.advance(2.0, inspect=True)
    assert clock.seconds == 4.0
    assert oom_kills(tmp_path) is None
    assert state(tmp_path / "1") == ""


@LINUX
def test_runnable_clock_distinguishes_starved_from_hung_process() -> None:
    """Compare a process that gets almost no CPU time, because two others use it up, with one that waits forever.

    Wall-clock time cannot distinguish the two; the clock must.
    """
    cpu = min(os.sched_getaffinity(0))
    spin = "import os; os.sched_setaffinity(0, {%d}); os.nice(%d)\nwhile True: pass"
    hung = [sys.executable, "-c", "import threading; print(flush=True); threading.Event().wait()"]
    busy = [subprocess.Popen([sys.executable, "-c", spin % (cpu, 0)]) for _ in range(2)]
    starved = subprocess.Popen([sys.executable, "-c", spin % (cpu, 19)])
    waiting = subprocess.Popen(hung, stdout=subprocess.PIPE)
    try:
        assert waiting.stdout is not None
        waiting.stdout.readline()
        while state(Path(f"/proc/{starved.pid}")) != "R" or state(Path(f"/proc/{waiting.pid}")) != "S":
            time.sleep(0.05)
        if not Path(f"/proc/{starved.pid}/schedstat").exists():
            pytest.skip("the kernel keeps no such statistics")
        clocks = {starved: RunnableClock(starved.pid), waiting: RunnableClock(waiting.pid)}
        last = time.monotonic()
        while clocks[waiting].seconds - clocks[starved].seconds < 1.0:  # bounded by pytest's timeout
            time.sleep(0.05)
            now = time.monotonic()
            for clock in clocks.values():
                clock.advance(now - last, inspect=True)
            last = now
    finally:
        for process in (*busy, starved, waiting):
            process.kill()
            process.wait()


@LINUX
def test_is_stopped_detects_sigstop() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        for _ in range(200):
            if is_stopped(process.pid):
                return
            time.sleep(0.05)
        pytest.fail("the process was sent SIGSTOP but does not count as stopped")
    finally:
        process.kill()
        process.wait()


def test_oom_kills_reads_cgroup_before_vmstat(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 3\noom_kill 5\n")
    assert oom_kills(tmp_path) == 5
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n0::/a/b\n")
    assert oom_kills(tmp_path) == 5
    (group / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert oom_kills(tmp_path) == 1
