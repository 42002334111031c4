"""A device for tests that is neither CPU nor CUDA: PyTorch's PrivateUse1, with operations computed on the host.

As on Apple's GPUs there are no float64 and no 8-bit floats, no operation mixes host and device, and no NumPy array
shares memory with a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "quire_other"
_ABSENT = (torch.float64, torch.float8_e4m3fn)
_COPIES = ("aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_")
"""Operations that take tensors of both sides: copies, and indexing with indices on the host."""
_kept: list[object] = []
"""Objects registered with PyTorch for the lifetime of the process."""


class There(Tensor):
    """A tensor on the device, with its numbers on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        if held.dtype in _ABSENT:
            raise TypeError(f"{NAME} has no {held.dtype}")
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        with torch.inference_mode(False):  # PyTorch counts versions of tensors that are views of others
            made = Tensor._make_wrapper_subclass(cls, held.shape, device=torch.device(NAME, 0), **shape)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {NAME} device type tensor to numpy")


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    owners: dict[int, There] = {}
    beside: list[Tensor] = []

    def held(each: Any) -> Any:
        if isinstance(each, There):
            owners[id(each.held)] = each
            return each.held
        if isinstance(each, Tensor) and each.dim():
            beside.append(each)
        return each

    target = kwargs.get("device")
    args, kwargs = tree_map(held, (args, kwargs))
    if owners and beside and not func.name().startswith(_COPIES):
        raise RuntimeError(f"{func.name()}: expected all tensors to be on the same device")
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    found = func(*args, **kwargs)
    there = torch.device(target).type == NAME if target is not None else bool(owners)
    if func.name() == "aten::copy_":
        there = id(found) in owners

    def there_again(each: Any) -> Any:
        if not there or not isinstance(each, Tensor):
            return each
        return owners[id(each)] if id(each) in owners else There(each)

    return tree_map(there_again, found)


def other_device() -> torch.device:
    """The device; the first call registers it."""
    if not _kept:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        library = torch.library.Library("_", "IMPL")
        library.fallback(lambda op, *args, **kwargs: _computed(op, args, kwargs), "PrivateUse1")
        _kept.append(library)
    return torch.device(NAME, 0)


def tensor_in_steps(
    data: Any, *, dtype: torch.dtype | None = None, device: Any = None, _made: Any = torch.tensor
) -> Tensor:
    """torch.tensor by way of the host: its direct way to the device bypasses what Python registers."""
    made: Tensor = _made(data, dtype=dtype)
    return made if device is None else made.to(device)
