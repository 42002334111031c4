"""Trials of libraries' attention in a child process: one that aborts, hangs or breaks its CUDA context must not end the
engine.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import IO

import msgspec

from quire.engine.processes.child import Child, module
from quire.engine.processes.exit_cause import exit_cause
from quire.engine.worker.trials.trial_request import READY, TrialRequest, TrialVerdict
from quire.engine.worker.trials.trial_verdicts import VerdictKey, read_verdict, verdict_path, write_verdict
from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend
from quire.kernels.probes.backend_probe import PagedAttentionProbe

log = logging.getLogger("quire.engine")

TRIAL_WORKER = module("quire.engine.worker.trials.trial_worker")
_TIMEOUT_SECONDS = 300.0
"""flash-attn 4 compiles up to 24 kernels of some 10 s each."""
_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
"""A process that waits for a broken driver may not end."""
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Perhaps not the library's fault."""


@dataclass(frozen=True, slots=True)
class ChildTrials:
    folder: Path
    """For verdicts."""
    describe_machine: Callable[[], dict[str, str]]
    """See trial_verdicts.py."""
    progress: Callable[[], None]
    """Called during the wait."""
    retry_failures: bool = False
    """Ignore kept failures."""
    timeout_seconds: float = _TIMEOUT_SECONDS
    worker: Sequence[str] = TRIAL_WORKER
    """Python arguments."""

    def failure_reason(self, backend: FlashPagedBackend, probes: Sequence[PagedAttentionProbe]) -> str | None:
        """None if all probes pass, now or in an earlier start."""
        key = VerdictKey(self.describe_machine(), TrialRequest.from_probes(backend, probes))
        path = verdict_path(self.folder, key)
        verdict = read_verdict(path, key)
        if verdict is not None and (verdict.failure is None or not self.retry_failures):
            return _with_retry_hint(verdict.failure, backend.name, path)
        log.info("%s is tried in a process of its own", backend.name)
        outcome = self._run_child(key.request)
        if outcome is None:
            log.warning("no other process can use the GPU, so %s is tried in the engine's", backend.name)
            return next((why for each in probes if (why := each(backend)) is not None), None)
        is_kept = outcome.is_lasting and write_verdict(path, key, outcome.verdict)
        return _with_retry_hint(outcome.verdict.failure, backend.name, path if is_kept else None)

    def _run_child(self, request: TrialRequest) -> _TrialOutcome | None:
        """None if the child could not start, or not use the GPU at all."""
        with tempfile.TemporaryFile() as answers, tempfile.TemporaryFile() as errors:
            began = time.monotonic()
            arguments = [*self.worker, str(answers.fileno())]
            try:
                child = Child(
                    arguments,
                    msgspec.json.encode(request),
                    descriptors=(answers.fileno(),),
                    stdout=DEVNULL,
                    stderr=errors.fileno(),
                )
            except OSError as error:
                log.warning("no process for a trial: %s", error)
                return None
            with _killed_at_the_end(child):
                while child.returncode is None and time.monotonic() - began < self.timeout_seconds:
                    self.progress()
                    time.sleep(_POLL_SECONDS)
                code = child.returncode
            answers.seek(0)
            answer = answers.read()
            if code is not None and not answer.startswith(READY):
                log.warning("a process for a trial ended before its trial: %s", _last_line(errors))
                return None
            verdict = _decode_verdict(answer) if code == 0 else None
            if verdict is not None:
                return _TrialOutcome(verdict, is_lasting="out of memory" not in (verdict.failure or ""))
            failure = _ending(code, self.timeout_seconds, _last_line(errors))
            is_lasting = answer.startswith(READY) and -(code or 0) not in _OUTSIDE_SIGNALS
            return _TrialOutcome(TrialVerdict(failure, round(time.monotonic() - began, 3)), is_lasting)


@dataclass(frozen=True, slots=True)
class _TrialOutcome:
    verdict: TrialVerdict
    is_lasting: bool
    """False if the same trial may end otherwise another time."""


def _decode_verdict(answer: bytes) -> TrialVerdict | None:
    """None if a library ended the process before."""
    try:
        return msgspec.json.decode(answer.removeprefix(READY), type=TrialVerdict)
    except msgspec.MsgspecError:
        return None


def _ending(code: int | None, seconds: float, last_line: str) -> str:
    """code: None if the process did not end in time."""
    if code is None:
        return f"its trial did not end within {seconds:g} s"
    ended = exit_cause(code, sender=None, oom_kills=None).description
    return f"its trial {ended}: {last_line}" if last_line else f"its trial {ended}"


@contextmanager
def _killed_at_the_end(child: Child) -> Iterator[None]:
    try:
        yield
    finally:
        deadline = time.monotonic() + _KILL_SECONDS
        if child.returncode is None:
            child.kill()
        while child.returncode is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        child.end()


def _with_retry_hint(failure: str | None, name: str, kept: Path | None) -> str | None:
    if failure is None:
        return None
    if kept is None:
        return f"{failure} (the next start tries again)"
    return f"{failure} (to try again, delete {kept} or pass --attention-backend {name})"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
