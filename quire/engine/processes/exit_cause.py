"""Decides whether an engine process ended through its own fault: a crash, exit, hang or lack of memory."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FAULT_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals by which a process usually ends through its own fault. If another process sent them, engine/main.py notices.
"""
_RESOURCE_LIMIT_SIGNALS = frozenset({signal.SIGXCPU, signal.SIGXFSZ})

_LESS = "--quantization int4, --kv-cache-memory and a smaller --max-model-len need less memory"


@dataclass(frozen=True, slots=True)
class ExitCause:
    description: str
    """Completes the sentence "the engine …"."""
    external: bool
    """True only if the engine certainly was not the cause."""


def exit_cause(code: int, *, sender: int | None, oom_kills: int | None) -> ExitCause:
    """`code` is subprocess's return code, negative for a signal. `sender`: another process that sent a signal of
    FAULT_SIGNALS, if known. `oom_kills`: processes killed for lack of memory while this engine ran; if it is None,
    SIGKILL never counts as external.
    """
    if code >= 0:
        return ExitCause(f"exited with code {code}", external=False)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        note = " (out of memory?)" if oom_kills is None else f" because memory ran out; {_LESS}" if oom_kills else ""
        return ExitCause(f"was killed by {name}{note}", external=oom_kills == 0)
    if -code in FAULT_SIGNALS:
        note = "" if sender is None else f", sent by process {sender}"
        return ExitCause(f"was killed by {name}{note}", external=sender is not None)
    return ExitCause(f"was killed by {name}", external=-code not in _RESOURCE_LIMIT_SIGNALS)
