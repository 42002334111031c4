"""Why an engine ended: the decision itself, and the facts that it is based on, taken from real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.engine.client.exit_cause import FAULTS, exit_cause
from quire.engine.heartbeat import Beat, FaultSignal, RequestsBegan, decode_heartbeat
from quire.engine.procfs import RunnableClock, is_stopped, oom_kills, state

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    ("code", "sender", "oom", "how", "outside"),
    [
        (1, None, 0, "exited with code 1", False),
        (0, None, None, "exited with code 0", False),
        (-signal.SIGKILL, None, 0, "was killed by SIGKILL", True),
        (-signal.SIGKILL, None, 1, "was killed by SIGKILL for want of memory", False),
        (-signal.SIGKILL, None, None, "was killed by SIGKILL (out of memory?)", False),
        (-signal.SIGSEGV, None, 0, "was killed by SIGSEGV", False),
        (-signal.SIGSEGV, 7, 0, "was killed by SIGSEGV, sent by process 7", True),
        (-signal.SIGABRT, None, 0, "was killed by SIGABRT", False),
        (-signal.SIGTERM, None, None, "was killed by SIGTERM", True),
        (-signal.SIGXCPU, None, 0, "was killed by SIGXCPU", False),
        (-63, None, 0, "was killed by signal 63", True),
    ],
)
def test_the_cause_of_an_exit(code: int, sender: int | None, oom: int | None, how: str, outside: bool) -> None:
    death = exit_cause(code, sender=sender, oom_kills=oom)
    assert (death.how, death.outside) == (how, outside)


SENTRY = """
import ctypes, os, sys, time
from quire.engine.main import block_fault_signals, report_fault_signals
from quire.engine.heartbeat import Heartbeat
block_fault_signals()
heartbeat = Heartbeat(int(sys.argv[1]))
report_fault_signals(heartbeat)
heartbeat.begin_step(["up"])
{act}
time.sleep(60)
os._exit(3)
"""


def die(act: str, number: int | None = None) -> tuple[int, list[object]]:
    """A process that does `act` and, if asked, is sent a signal: its wait status, and what signs but beats it gave."""
    signs, theirs = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", SENTRY.format(act=act), str(theirs)], pass_fds=(theirs,))
    os.close(theirs)
    with os.fdopen(signs, "rb") as pipe:
        found: list[object] = []
        for line in pipe:
            sign = decode_heartbeat(line)
            if isinstance(sign, RequestsBegan) and number is not None:
                process.send_signal(number)
            if not isinstance(sign, Beat):
                found.append(sign)
    return process.wait(), found


@LINUX
@pytest.mark.parametrize("number", sorted(FAULTS), ids=lambda number: signal.Signals(number).name)
def test_a_fault_signal_from_outside_names_its_sender(number: int) -> None:
    assert die("", number) == (-number, [RequestsBegan(["up"]), FaultSignal(os.getpid())])


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
def test_a_fault_of_its_own_ends_a_process_as_ever(act: str, number: int) -> None:
    assert die(act) == (-number, [RequestsBegan(["up"])])


IDLE = """
import os
from quire.engine.heartbeat import Heartbeat, FaultSignal, decode_heartbeat
signs, theirs = os.pipe()
heartbeat = Heartbeat(theirs)
heartbeat.begin_step([])
heartbeat.end_step()
heartbeat.progress()
heartbeat.report_fault_signal(0)
signs = map(decode_heartbeat, os.fdopen(signs, "rb"))
while next(signs) != FaultSignal(0): pass
next(signs)  # may have been on its way
print(next(signs).stuck_ms, flush=True)
os._exit(0)
"""


def test_what_is_computed_outside_steps_is_no_step_that_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def fake_proc(root: Path, *threads: tuple[float, str]) -> Path:
    """/proc of process 1: per thread, the seconds it has waited for a processor and its state."""
    for index, (waited, letter) in enumerate(threads):
        task = root / "1" / "task" / str(index)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"5 {int(waited * 1e9)} 7\n")
        (task / "stat").write_text(f"{index} (a) b ({letter}) {letter} 1 2\n")
    return root


def test_time_in_which_a_process_could_not_compute_does_not_count(tmp_path: Path) -> None:
    clock = RunnableClock(1, fake_proc(tmp_path, (100.0, "R"), (50.0, "S")))
    clock.advance(4.0, closely=False)
    clock.advance(1.0, closely=True)
    assert clock.seconds == 5.0, "what was waited before is not of this time"
    fake_proc(tmp_path, (100.75, "R"), (50.5, "S"))
    clock.advance(1.0, closely=True)
    assert clock.seconds == 5.25, "the longest wait, not the sum"
    clock.advance(3.0, closely=True)
    assert clock.seconds == 8.25
    fake_proc(tmp_path, (103.5, "R"), (50.5, "S"))
    clock.advance(1.0, closely=True)
    assert clock.seconds == 6.5, "told of when it was over"
    fake_proc(tmp_path, (103.5, "D"), (51.5, "S"))
    clock.advance(1.0, closely=True)
    assert clock.seconds == 6.5, "a disk"
    clock.advance(1.0, closely=False)
    fake_proc(tmp_path, (190.0, "R"), (60.0, "D"), (33.0, "R"))
    clock.advance(1.0, closely=True)
    assert clock.seconds == 8.5, "nothing to compare with"


def test_without_such_files_it_is_the_walls_clock(tmp_path: Path) -> None:
    clock = RunnableClock(1, tmp_path)
    clock.advance(2.0, closely=True)
    clock.advance(2.0, closely=True)
    assert clock.seconds == 4.0
    assert oom_kills(tmp_path) is None
    assert state(tmp_path / "1") == ""


@LINUX
def test_a_starved_process_is_told_from_a_hung_one() -> None:
    """The clock of one that others keep from the processor falls behind; that of one that waits for ever does not."""
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
        while clocks[waiting].seconds - clocks[starved].seconds < 1.0:  # bounded by pytest's own limit
            time.sleep(0.05)
            now = time.monotonic()
            for clock in clocks.values():
                clock.advance(now - last, closely=True)
            last = now
    finally:
        for process in (*busy, starved, waiting):
            process.kill()
            process.wait()


@LINUX
def test_a_stopped_process_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        for _ in range(200):
            if is_stopped(process.pid):
                return
            time.sleep(0.05)
        pytest.fail("it was sent SIGSTOP")
    finally:
        process.kill()
        process.wait()


def test_kills_for_want_of_memory_are_read_where_they_are_told(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 3\noom_kill 5\n")
    assert oom_kills(tmp_path) == 5
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n0::/a/b\n")
    assert oom_kills(tmp_path) == 5
    (group / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    assert oom_kills(tmp_path) == 1
