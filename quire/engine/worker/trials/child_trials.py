"""Trials of libraries' attention, and of Quire's kernels that never ran on such a GPU, in a child process, because one
that aborts, hangs or breaks its CUDA context must not end the engine.
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
from quire.engine.worker.trials.trial_request import READY, ChildProbe, TrialRequest, TrialVerdict
from quire.engine.worker.trials.trial_verdicts import VerdictKey, read_verdict, verdict_path, write_verdict
from quire.kernels.backend import Backend
from quire.kernels.gpu.libraries.flash_backend import FlashPagedBackend
from quire.kernels.probes.backend_probe import find_first_failure

log = logging.getLogger("quire.engine")

TRIAL_WORKER = module("quire.engine.worker.trials.trial_worker")
_TIMEOUT_SECONDS = 300.0
"""flash-attn 4 compiles up to 24 kernels, in some 10 s each."""
_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
"""A process that waits for a broken driver may ignore its kill for a long time."""
_EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The library is not at fault."""


@dataclass(frozen=True, slots=True)
class ChildTrials:
    verdict_folder: Path
    describe_machine: Callable[[], dict[str, str]]
    progress: Callable[[], None]
    retry_failures: bool = False
    timeout_seconds: float = _TIMEOUT_SECONDS
    worker: Sequence[str] = TRIAL_WORKER

    def find_failure(self, backend: Backend, probes: Sequence[ChildProbe]) -> str | None:
        """If no child process can use the GPU, a library is tried in this process. Kernels of recurrent layers are then
        not tried, because the engine can do without them.
        """
        is_library = isinstance(backend, FlashPagedBackend)
        library = backend.name if is_library else None
        key = VerdictKey(self.describe_machine(), TrialRequest.from_probes(backend, probes))
        path = verdict_path(self.verdict_folder, key)
        verdict = read_verdict(path, key)
        if verdict is not None and (verdict.failure is None or not (self.retry_failures and is_library)):
            return _with_retry_hint(verdict.failure, library, path)
        log.info("%s is tried in a child process", library or "a kernel for recurrent layers")
        outcome = self._run_child(key.request)
        if outcome is None and not is_library:
            return "no child process can use the GPU to try them"
        if outcome is None:
            log.warning("no child process can use the GPU, so %s is tried in the engine process", backend.name)
            return find_first_failure(probes, backend)
        is_saved = outcome.is_lasting and write_verdict(path, key, outcome.verdict)
        return _with_retry_hint(outcome.verdict.failure, library, path if is_saved else None)

    def _run_child(self, request: TrialRequest) -> _TrialOutcome | None:
        """Returns None if the child could not start or could not use the GPU."""
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
                log.warning("cannot start a trial's child process: %s", error)
                return None
            with _kill_at_exit(child):
                while child.returncode is None and time.monotonic() - began < self.timeout_seconds:
                    self.progress()
                    time.sleep(_POLL_SECONDS)
                code = child.returncode
            answers.seek(0)
            answer = answers.read()
            if code is not None and not answer.startswith(READY):
                log.warning("a child process ended before its trial: %s", _last_line(errors))
                return None
            verdict = _decode_verdict(answer) if code == 0 else None
            if verdict is not None:
                return _TrialOutcome(verdict, is_lasting="out of memory" not in (verdict.failure or ""))
            failure = _describe_exit(code, self.timeout_seconds, _last_line(errors))
            is_lasting = answer.startswith(READY) and -(code or 0) not in _EXTERNAL_SIGNALS
            return _TrialOutcome(TrialVerdict(failure, round(time.monotonic() - began, 3)), is_lasting)


@dataclass(frozen=True, slots=True)
class _TrialOutcome:
    verdict: TrialVerdict
    is_lasting: bool
    """False if the same trial may end differently next time."""


def _decode_verdict(answer: bytes) -> TrialVerdict | None:
    """Returns None if a library ended the process before it wrote the verdict."""
    try:
        return msgspec.json.decode(answer.removeprefix(READY), type=TrialVerdict)
    except msgspec.MsgspecError:
        return None


def _describe_exit(code: int | None, seconds: float, last_line: str) -> str:
    if code is None:
        return f"its trial did not end within {seconds:g} s"
    cause = exit_cause(code, sender=None, oom_kills=None).description
    return f"its trial {cause}: {last_line}" if last_line else f"its trial {cause}"


@contextmanager
def _kill_at_exit(child: Child) -> Iterator[None]:
    try:
        yield
    finally:
        deadline = time.monotonic() + _KILL_SECONDS
        if child.returncode is None:
            child.kill()
        while child.returncode is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        child.end()


def _with_retry_hint(failure: str | None, library: str | None, verdict_file: Path | None) -> str | None:
    """`library`: the backend whose name --attention-backend takes; None for Quire's own kernels."""
    if failure is None:
        return None
    if verdict_file is None:
        return f"{failure} (the next start tries again)"
    otherwise = "" if library is None else f" or pass --attention-backend {library}"
    return f"{failure} (to try again, delete {verdict_file}{otherwise})"


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
