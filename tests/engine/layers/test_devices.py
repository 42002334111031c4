"""Unpacking weights creates no tensor on another device: the meta device rejects tensors of others."""

from __future__ import annotations

import pytest
import torch

from quire.engine.gguf.tensor_types import SUPPORTED_TYPES
from quire.engine.layers.schemes.gguf import SUPPORTED_QUANT_TYPES, blocks_to_grouped_weight
from quire.engine.layers.schemes.integers import make_grouped_weight, unpack_bits

META = torch.device("meta")
SIZES = {each.name: each.type_size for each in SUPPORTED_TYPES.values()}


@pytest.mark.parametrize("kind", sorted(SUPPORTED_QUANT_TYPES))
def test_gguf_dequantization_stays_on_device(kind: str) -> None:
    weight = blocks_to_grouped_weight(torch.empty(4, 3 * SIZES[kind], dtype=torch.uint8, device=META), kind)
    assert weight.dequantize().device == META


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_packed_integer_unpacking_stays_on_device(bits: int) -> None:
    codes = unpack_bits(torch.empty(4, 3 * bits, dtype=torch.int32, device=META), bits)
    weight = make_grouped_weight(codes, torch.empty(4, 2, device=META), None, bits, 64, None)
    assert (codes.shape, weight.codes.device, weight.scales.device) == ((4, 96), META, META)
