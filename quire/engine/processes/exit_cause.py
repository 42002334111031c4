"""Why an engine process ended: through its own doing, or through something outside of it.

The answer decides whether its requests are suspected. A crash, an exit, a hang or running out of memory may have been
caused by one of the requests that were being computed. A kill from outside never counts against a request, however
often it happens. This module only decides; its callers gather the facts.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

FAULT_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that normally mean that a process itself went wrong. Another process can send them too; engine/main.py tells
the two cases apart."""
_RESOURCE_LIMIT_SIGNALS = frozenset({signal.SIGXCPU, signal.SIGXFSZ})
"""Signals that the kernel sends to a process that exceeds one of its resource limits."""

_LESS = "--quantization int4, --kv-cache-memory and a smaller --max-model-len take less"


@dataclass(frozen=True, slots=True)
class ExitCause:
    """Why an engine process ended."""

    description: str
    """Completes the sentence "the engine ...", for logs and error messages."""
    external: bool
    """True only when the engine itself was certainly not the cause."""


def exit_cause(code: int, *, sender: int | None, oom_kills: int | None) -> ExitCause:
    """Find the cause from the process's return code and from what else is known.

    code: as subprocess reports it: the exit code, or minus the number of the signal that ended the process.
    sender: id of the process that sent the engine one of FAULT_SIGNALS; None when none did.
    oom_kills: number of processes that the kernel killed for lack of memory while this engine ran; None when the system
        does not report it. A SIGKILL then never counts as external.
    """
    if code >= 0:
        return ExitCause(f"exited with code {code}", external=False)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        note = " (out of memory?)" if oom_kills is None else f" for want of memory; {_LESS}" if oom_kills else ""
        return ExitCause(f"was killed by {name}{note}", external=oom_kills == 0)
    if -code in FAULT_SIGNALS:
        note = "" if sender is None else f", sent by process {sender}"
        return ExitCause(f"was killed by {name}{note}", external=sender is not None)
    return ExitCause(f"was killed by {name}", external=-code not in _RESOURCE_LIMIT_SIGNALS)
