"""What ended an engine: its own doing, or somebody from outside. Pure: decisions about facts that others gather.

It matters to whom the death is held against. A crash, an exit, a hang and running out of memory speak against the
requests that were being computed; a kill from outside speaks against nobody, however often it comes.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

FAULTS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process earns by what it does. Sent by another one they mean nothing; engine/main.py tells which."""
_LIMITS = frozenset({signal.SIGXCPU, signal.SIGXFSZ})


@dataclass(frozen=True, slots=True)
class ExitCause:
    how: str
    """Goes on after "the engine"."""
    outside: bool
    """Certainly not the engine's own doing."""


def exit_cause(code: int, *, sender: int | None, oom_kills: int | None) -> ExitCause:
    """From a wait status (as subprocess gives it: minus the signal, or the exit code) and what else is known.

    sender: the process that sent the engine one of FAULTS, if one did. oom_kills: processes that the kernel has killed
    for want of memory during this life; None where it does not say, and then no SIGKILL is certainly from outside.
    """
    if code >= 0:
        return ExitCause(f"exited with code {code}", outside=False)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        note = " (out of memory?)" if oom_kills is None else " for want of memory" if oom_kills else ""
        return ExitCause(f"was killed by {name}{note}", outside=oom_kills == 0)
    if -code in FAULTS:
        note = "" if sender is None else f", sent by process {sender}"
        return ExitCause(f"was killed by {name}{note}", outside=sender is not None)
    return ExitCause(f"was killed by {name}", outside=-code not in _LIMITS)
