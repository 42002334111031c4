"""What unpacks weights makes no tensor on another device than theirs; the meta device refuses every other beside it."""

from __future__ import annotations

import pytest
import torch

from quire.engine.gguf.types import READ
from quire.engine.layers.schemes.gguf import GROUPED, unpacked
from quire.engine.layers.schemes.integers import from_bits, grouped

META = torch.device("meta")
SIZES = {each.name: each.size for each in READ.values()}


@pytest.mark.parametrize("kind", sorted(GROUPED))
def test_gguf_blocks_stay_where_they_are(kind: str) -> None:
    weight = unpacked(torch.empty(4, 3 * SIZES[kind], dtype=torch.uint8, device=META), kind)
    assert weight.dequantized().device == META


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_words_of_codes_stay_where_they_are(bits: int) -> None:
    codes = from_bits(torch.empty(4, 3 * bits, dtype=torch.int32, device=META), bits)
    weight = grouped(codes, torch.empty(4, 2, device=META), None, bits, 64, None)
    assert (codes.shape, weight.codes.device, weight.scales.device) == ((4, 96), META, META)
