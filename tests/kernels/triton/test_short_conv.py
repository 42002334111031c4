"""Short convolutions in Triton: against float64, with any chunking, and with drafts as separate rows."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.gpu.triton_backend import TritonBackend
from tests.kernels.ragged import error
from tests.kernels.test_short_conv import TOLERANCE, Kept, cut_at_random, expected, made, on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("channels", "width", "bias"), [(64, 3, False), (70, 4, True)])
def test_short_conv_prefill_matches_float64(
    device: torch.device, channels: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    conv = made(channels, width, bias=bias, generator=generator)
    prompts = [torch.randn((length, 3 * channels), generator=generator).to(dtype) for length in (1, 2, 19, 16)]
    kept = Kept(TritonBackend(), on(conv, device), dtype, device)
    outputs = kept.step([(each, 0, kept.pages(len(each)), at) for at, each in enumerate(prompts)])
    for got, prompt in zip(outputs, prompts, strict=True):
        assert error(got, expected(prompt, conv)) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [2, 3])
def test_short_conv_bits_do_not_depend_on_chunking(device: torch.device, width: int) -> None:
    conv = on(made(33, width, bias=width == 3, generator=torch.Generator().manual_seed(width)), device)
    for seed in range(3):
        cut_at_random(TritonBackend(), conv, torch.bfloat16, seed, pieces=1 + seed % 2, device=device)


def test_drafts_as_separate_rows_give_same_short_conv_output(device: torch.device) -> None:
    """In a CUDA graph each token is a row."""
    generator = torch.Generator().manual_seed(8)
    conv = on(made(40, 3, bias=False, generator=generator), device)
    numbers = torch.randn((40, 120), generator=generator)
    kept, own = (Kept(TritonBackend(), conv, torch.float32, device, drafts=4) for _ in range(2))
    pages = kept.pages(50)
    (whole,) = own.step([(numbers, 0, own.pages(40), 0)])
    done, outputs = 0, []
    while done < len(numbers):
        end = min(done + 3, len(numbers))
        wrong = torch.cat([numbers[:end], torch.randn((2, 120), generator=generator)])
        rows = [(wrong[: at + 1], at, pages, 2) for at in range(done, end + 2)]
        outputs += kept.step(rows)[: end - done]
        done = end
    assert torch.equal(torch.cat(outputs), whole)
