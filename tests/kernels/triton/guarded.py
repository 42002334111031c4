"""Triton's interpreter with guards: a kernel fails if it reads or writes a byte outside of its tensors, and the
programs of a grid run in a random order.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime import interpreter


class Memory:
    """What kernels may touch: the bytes of their tensor arguments, and of the tensors in `others`, which they find by
    address.
    """

    def __init__(self, others: Sequence[Tensor]) -> None:
        self.others, self.given = list(others), list[Tensor]()
        self.reads = self.writes = 0

    def check(self, pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle, what: str) -> None:
        width = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        addresses, wanted = np.broadcast_arrays(pointers.data.astype(np.int64), mask.data.astype(bool))
        touched = np.unique(addresses[wanted])
        inside = np.zeros(len(touched), dtype=bool)
        for tensor in (*self.given, *self.others):
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
            inside |= (touched >= begin) & (touched + width <= begin + storage.nbytes())
        assert inside.all(), f"{what} outside of every tensor"


@contextlib.contextmanager
def guarded(seed: int, others: Sequence[Tensor] = ()) -> Iterator[Memory]:
    """Within the block, kernels are guarded and their programs run in an order that `seed` decides."""
    memory, builder = Memory(others), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    call, order = interpreter.GridExecutor.__call__, random.Random(seed)

    def guarded_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.reads += 1
        memory.check(pointers, mask, "a read")
        return load(self, pointers, mask, *rest)

    def guarded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.writes += 1
        memory.check(pointers, mask, "a write")
        return store(self, pointers, value, mask, *rest)

    def launched(self: Any, *args: Any, **named: Any) -> Any:
        memory.given = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        return call(self, *args, **named)

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        sizes = self.grid_dim
        if (x, y, z) == (0, 0, 0):
            self.places = list(np.ndindex(*sizes))
            order.shuffle(self.places)
        self.grid_idx = self.places[(x * sizes[1] + y) * sizes[2] + z]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", guarded_load)
        patch.setattr(builder, "create_masked_store", guarded_store)
        patch.setattr(builder, "set_grid_idx", set_grid_idx)
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        yield memory
