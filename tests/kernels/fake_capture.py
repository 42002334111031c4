"""A fake of CUDA graphs that is as forgetful as the real ones.

It records every operation of the captured function with the very tensors it read and wrote, and a replay runs
these again on the same memory: it takes no other Python step, sees no new tensor, and refuses at capture what would
make the host wait or read from it. Between replays everything the recording computed is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.lift_fresh.default}
READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.nonzero}
READS |= {getattr(torch.Tensor, f"__{kind}__") for kind in ("bool", "int", "float", "index")}
POISON = 77


class Refusing(TorchFunctionMode):
    """What reads from the device, as it is written: in inference mode no dispatch shows `item` and its like."""

    depth = 0
    """Above 0 something is recorded."""

    def __enter__(self) -> Refusing:
        Refusing.depth += 1
        return super().__enter__()

    def __exit__(self, *why: Any) -> None:
        Refusing.depth -= 1
        super().__exit__(*why)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, f"{func} waits for the device or reads from the host"
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.fresh: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITS, f"{func} waits for the device or reads from the host"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {leaf.untyped_storage()._cdata for leaf in dense((args, kwargs))}
        made = [out for out in dense(result) if out.untyped_storage()._cdata not in inputs]  # others are views
        self.calls.append((func, args, kwargs, made))
        self.fresh += made
        return result

    def poison(self) -> None:
        for tensor in self.fresh:
            tensor.fill_(True if tensor.dtype == torch.bool else POISON)

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            again = dense(func(*args, **kwargs))
            if outputs:
                for out, new in zip(outputs, again, strict=True):
                    out.copy_(new)


def dense(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


class FakeCapture:
    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self.replays = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        recording = Recording()
        with recording, Refusing():
            result = function()
        recording.poison()
        self.recordings.append(recording)

        def replay() -> None:
            self.replays += 1
            for each in self.recordings:  # they share memory, as graphs of one pool do
                each.poison()
            recording.replay()

        return replay, result
