"""What a stage finds, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class Finding(NamedTuple):
    what: str
    said: str
    """In words, with the figures."""
    held: bool = True
    """Whether it is as it should be; True for what is told for information."""


Say = Callable[[Finding], None]


def tried(say: Say, what: str, work: Callable[[], str]) -> None:
    """Say what `work` returns; what it raises does not hold, and what comes after is tried all the same."""
    try:
        said = work()
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        say(Finding(what, f"{type(error).__name__}: {text}"[:400], held=False))
        with suppress(Exception):
            import torch

            torch.cuda.synchronize()  # an error that stays in the context is this one's, not the next one's
    else:
        say(Finding(what, said))
