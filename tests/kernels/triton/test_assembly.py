"""The PTX that decodes 4-bit and 8-bit codes, run instruction by instruction: Triton's interpreter runs no PTX."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.gpu.quantization.ptx_decode import byte_decode_asm, nibble_decode_asm
from tests.kernels.triton.few_bits import E2M1

TYPES = {True: torch.bfloat16, False: torch.float16}
Words = np.ndarray
"""Registers of 32 bits, as uint64."""


def run_ptx(code: str, given: Words, wide: bool) -> list[Tensor]:
    """The lower and the upper half of $0 after the code, in float64; $1 holds the given words."""
    registers, found = {"$1": given.astype(np.uint64)}, list[Tensor]()

    def value(name: str) -> Words:
        return np.full_like(registers["$1"], int(name, 0)) if name[0].isdigit() else registers[name]

    for line in re.sub(r"^\{\.reg[^;]*;|\}$", "", code).split(";"):
        if not line.strip():
            continue
        operation, rest = line.split(maxsplit=1)
        to, *names = (each.strip() for each in rest.split(","))
        if operation.startswith("fma"):
            assert operation == ("fma.rn.bf16x2" if wide else "fma.rn.f16x2")
            assert to == "$0"
            for shift in (0, 16):
                a, b, c = (number(value(name) >> np.uint64(shift), wide) for name in names)
                found.append((a * b + c).to(TYPES[wide]).double())
        else:
            registers[to] = run_instruction(operation, [value(name) for name in names])
    return found


def run_instruction(operation: str, values: list[Words]) -> Words:
    first, *others = values
    if operation == "mov.b32":
        return first
    if operation == "cvt.u32.u16":
        return first & np.uint64(0xFFFF)
    if operation == "shr.u32":
        return first >> others[0]
    if operation == "shl.b32":
        return (first << others[0]) & np.uint64(0xFFFFFFFF)
    if operation == "lop3.b32":
        assert others[2][0] == 0xEA
        return (first & others[0]) | others[1]
    if operation == "prmt.b32":
        both, chosen = first | others[0] << np.uint64(32), int(others[1][0])
        bytes_ = [(both >> np.uint64(8 * (chosen >> 4 * at & 7))) & np.uint64(255) for at in range(4)]
        return sum((byte << np.uint64(8 * at) for at, byte in enumerate(bytes_)), np.zeros_like(first))
    return {"and.b32": np.bitwise_and, "or.b32": np.bitwise_or, "xor.b32": np.bitwise_xor}[operation](first, others[0])


def number(words: Words, wide: bool) -> Tensor:
    halves = torch.from_numpy((words & np.uint64(0xFFFF)).astype(np.uint16).view(np.int16).copy())
    return halves.view(TYPES[wide]).double()


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("floats", [True, False])
def test_ptx_decodes_every_4_and_8_bit_code(floats: bool, wide: bool) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 2**14, dtype=np.uint32)  # every byte in every place
    values = torch.tensor(E2M1 if floats else range(-8, 8)).double()
    for part in range(4):
        for half, got in enumerate(run_ptx(nibble_decode_asm(floats, wide, part), words, wide)):
            assert torch.equal(got, values[(words >> (16 * half + 4 * part)) & 15])
    for part in range(2):
        for half, got in enumerate(run_ptx(byte_decode_asm(floats, wide, part), words, wide)):
            codes = torch.from_numpy(((words >> (16 * half + 8 * part)) & 255).astype(np.uint8))
            wanted = codes.view(torch.float8_e4m3fn if floats else torch.int8).double()
            known = ~wanted.isnan()  # a NaN code becomes some number: the weight's factors hold the NaN
            assert torch.equal(got[known], wanted[known])
