"""What a stage finds, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Finding(NamedTuple):
    what: str
    said: str
    """In words, with the figures."""
    held: bool = True
    """Whether it is as it should be; True for what is told for information."""


Say = Callable[[Finding], None]


KERNELS_ALONE = 0.01
"""Seconds of a warm-up that compiles kernels by several processes, and then captures one graph at most."""
_MOST_APART = 1e-4
"""Mean difference of log probabilities in float32, whose products are no TF32 ones: the first flight found 1e-5."""
_SHARE = 1.5
"""Of what rounding to 16 bits changes in transformers, which rounds in other places."""


def close(ours: Tensor, wide: Tensor, theirs: Tensor, kind: dtype) -> str:
    """Log probabilities of the same tokens: ours, transformers' in a wider type, and transformers' in our type. Raises
    ValueError where ours differ from the first by more than rounding explains."""
    apart, rounding = ((each.double().cpu() - wide.double().cpu()).abs().mean().item() for each in (ours, theirs))
    said, most = f"log probabilities differ by {apart:.2g} in the mean from transformers'", _MOST_APART
    if kind.itemsize == 2:
        said, most = f"{said}, its own in {kind} by {rounding:.2g}", max(most, _SHARE * rounding)
    if not apart < most:
        raise ValueError(f"{said}; at most {most:.2g}")
    return said


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
