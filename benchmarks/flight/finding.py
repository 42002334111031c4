from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype


class Finding(NamedTuple):
    what: str
    said: str
    """The result, with figures."""
    held: bool = True
    """Also true for purely informative findings."""


Say = Callable[[Finding], None]


KERNELS_ALONE = 0.01
"""Warm-up seconds for compiling kernels in several processes and capturing at most one graph."""
_MOST_APART = 1e-4
"""Maximum mean difference of log probabilities in float32 without TF32. The first flight had 1e-5."""
_SHARE = 1.5
"""Maximum difference, relative to the change by 16-bit rounding in transformers, which rounds elsewhere."""


def close(ours: Tensor, wide: Tensor, theirs: Tensor, kind: dtype) -> str:
    """Compare log probabilities: ours, transformers' in a wider type, transformers' in ours. Raises ValueError if ours
    differ by more than rounding explains.
    """
    apart, rounding = ((each.double().cpu() - wide.double().cpu()).abs().mean().item() for each in (ours, theirs))
    said, most = f"log probabilities differ by {apart:.2g} in the mean from transformers'", _MOST_APART
    if kind.itemsize == 2:
        said, most = f"{said}, its own in {kind} by {rounding:.2g}", max(most, _SHARE * rounding)
    if not apart < most:
        raise ValueError(f"{said}; at most {most:.2g}")
    return said


def tried(say: Say, what: str, work: Callable[[], str]) -> None:
    """Report what `work` returns, or its exception."""
    try:
        said = work()
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        say(Finding(what, f"{type(error).__name__}: {text}"[:400], held=False))
        with suppress(Exception):
            import torch

            torch.cuda.synchronize()  # raise a pending CUDA error here, not in the next try
    else:
        say(Finding(what, said))
