"""Tiles of Triton's attention fit in what a GPU has for a block."""

from __future__ import annotations

from itertools import product

import pytest
import torch

triton_paged = pytest.importorskip("quire.kernels.gpu.triton_paged", reason="Triton is not installed")


@pytest.mark.parametrize("shared", [64 * 1024, 99 * 1024, 227 * 1024], ids=["T4", "consumer", "H100"])
def test_tiles_fit(shared: int) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for group, length, dim, dtype, fixed in product((1, 7, 8), (1, 21, 4096), (64, 128, 256), dtypes, (False, True)):
        tiles = triton_paged.choose_tiles(group, length, dim, dtype, fixed=fixed, shared=shared)
        held = tiles.num_stages * 2 * tiles.block_n * dim * dtype.itemsize
        assert held <= shared, (group, length, dim, dtype, fixed, tiles)
        assert tiles.num_stages >= 1


def test_a_prompt_on_a_t4_has_fewer_stages_and_the_same_tiles() -> None:
    large = triton_paged.choose_tiles(4, 21, 128, torch.float16, fixed=False, shared=99 * 1024)
    small = triton_paged.choose_tiles(4, 21, 128, torch.float16, fixed=False, shared=64 * 1024)
    assert (large.num_stages, small.num_stages) == (3, 1)
    assert small[:3] == large[:3]
