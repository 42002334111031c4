"""Tensor types of ggml: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from __future__ import annotations

from typing import NamedTuple

_MIN_GPU_CODE_BITS = 4
_NESTED_INPUTS = 256


class HeldForm(NamedTuple):
    """How backends store a quantized type in memory."""

    code_bits: int
    group_size: int
    numbers_per_group: int = 1
    """1 for a scale, 2 for a scale and an offset."""
    is_nested: bool = False
    """If True, CPU kernels store a byte per group, and 16-bit numbers per 256 inputs. GPUs always store 16 bits per
    number.
    """

    def bits_per_weight(self, *, gpu: bool) -> float:
        if self.is_nested and not gpu:
            return self.code_bits + 8 / self.group_size + 16 * self.numbers_per_group / _NESTED_INPUTS
        code_bits = max(self.code_bits, _MIN_GPU_CODE_BITS) if gpu else self.code_bits
        return code_bits + 16 * self.numbers_per_group / self.group_size


class GGMLType(NamedTuple):
    """A block stores `block_size` numbers in `type_size` bytes."""

    name: str
    block_size: int
    type_size: int
    held_form: HeldForm | None = None
    """None for floats."""

    @property
    def bits_per_weight(self) -> float:
        """Includes scales."""
        return 8 * self.type_size / self.block_size


SUPPORTED_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18, HeldForm(4, 32)),
    3: GGMLType("Q4_1", 32, 20, HeldForm(4, 32, 2)),
    6: GGMLType("Q5_0", 32, 22, HeldForm(8, 32)),
    7: GGMLType("Q5_1", 32, 24, HeldForm(8, 32, 2)),
    8: GGMLType("Q8_0", 32, 34, HeldForm(8, 32)),
    10: GGMLType("Q2_K", 256, 84, HeldForm(2, 16, 2, True)),
    11: GGMLType("Q3_K", 256, 110, HeldForm(3, 16, 1, True)),
    12: GGMLType("Q4_K", 256, 144, HeldForm(4, 32, 2)),
    13: GGMLType("Q5_K", 256, 176, HeldForm(8, 32, 2)),
    14: GGMLType("Q6_K", 256, 210, HeldForm(8, 16)),
    16: GGMLType("IQ2_XXS", 256, 66, HeldForm(3, 32, 1, True)),
    17: GGMLType("IQ2_XS", 256, 74, HeldForm(3, 16, 1, True)),
    18: GGMLType("IQ3_XXS", 256, 98, HeldForm(4, 32, 1, True)),
    19: GGMLType("IQ1_S", 256, 50, HeldForm(3, 32, 1, True)),
    20: GGMLType("IQ4_NL", 32, 18, HeldForm(4, 32)),
    21: GGMLType("IQ3_S", 256, 110, HeldForm(4, 32, 1, True)),
    22: GGMLType("IQ2_S", 256, 82, HeldForm(3, 16, 1, True)),
    23: GGMLType("IQ4_XS", 256, 136, HeldForm(4, 32, 1, True)),
    29: GGMLType("IQ1_M", 256, 56, HeldForm(3, 16, 1, True)),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54, HeldForm(2, 256)),
    35: GGMLType("TQ2_0", 256, 66, HeldForm(2, 256)),
    39: GGMLType("MXFP4", 32, 17, HeldForm(4, 32)),
    40: GGMLType("NVFP4", 64, 36, HeldForm(4, 16)),
}
"""Keyed by type number in GGUF files."""
UNSUPPORTED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    41: "Q1_0",
}
FLOAT_TYPES = ("F32", "F16", "BF16")
