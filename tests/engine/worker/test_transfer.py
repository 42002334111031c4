"""Arrays laid into one piece of memory come out as they went in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.engine.worker.transfer import Download, fill, split, upload

ARRAYS = [
    np.arange(5, dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, :2],  # not contiguous
    np.empty(0, dtype=np.int64),
    np.array([True, False, True]),
    np.linspace(0, 1, 7),
    np.empty((0, 3), dtype=np.int32),
]


def test_packed_and_unpacked() -> None:
    staged = torch.full((1000,), 77, dtype=torch.uint8)
    fill(staged, ARRAYS)
    for tensor, array in zip(split(staged, ARRAYS), ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))
        assert tensor.data_ptr() % 16 == staged.data_ptr() % 16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_there_and_back(device: str) -> None:
    there = upload(ARRAYS, torch.device(device))
    assert all(tensor.device.type == device for tensor in there)
    back = Download(there, torch.cuda.Stream() if device == "cuda" else None).wait()
    for tensor, array in zip(back, ARRAYS, strict=True):
        assert tensor.device.type == "cpu"
        assert np.array_equal(tensor.numpy(), array)
