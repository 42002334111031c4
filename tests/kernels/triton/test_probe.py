"""The trial that chooses a backend, on the Triton kernels themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels.gpu.triton_paged import Triton
from quire.kernels.probe import Probe

SHAPES = [(4, 2, 64), (3, 3, 96), (8, 1, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_pass(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], deterministic: bool
) -> None:
    probe = Probe(device, dtype, *shape)
    assert probe(Triton(deterministic=deterministic)) is None
    assert replace(probe, softcap=30.0)(Triton(deterministic=deterministic)) is None


class LargePages(Triton):
    block_size = 256
    """As those of PyTorch's kernels, whose steps of one query each are Triton's."""


def test_pages_of_256(device: torch.device) -> None:
    assert Probe(device, torch.bfloat16, 4, 2, 64)(LargePages()) is None


def test_what_is_wrong_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Triton()
    right = backend.paged_attention
    monkeypatch.setattr(backend, "paged_attention", lambda *args: right(*args).roll(1, 1))
    assert Probe(device, torch.bfloat16, 4, 2, 64)(backend) == "computes something else than the reference for a prompt"
