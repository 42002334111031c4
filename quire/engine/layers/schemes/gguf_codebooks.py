"""Converts GGUF types to grouped weights of exactly the same values. The weights of these types are entries of a
codebook, or ternary. Source: ggml-common.h and ggml-quants.c, https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

import functools
import zlib
from base64 import b64decode

import torch
from torch import Tensor

from quire.engine.layers.schemes.gguf_bits import (
    make_nested_weight,
    pack_nibbles,
    read_float16,
    read_uint16,
    read_uint32,
    shift_and_mask,
    unpack_code_planes,
    unpack_single_bits,
)
from quire.kernels.quantized_tensors import GroupedWeight, NestedScales

_CODEBOOK_SIZES = {"IQ2_XXS": 256, "IQ2_XS": 512, "IQ2_S": 1024, "IQ3_XXS": 256, "IQ3_S": 512, "IQ1": 2048}
_CODEBOOKS = (
    "eNqdWV2MXVUVXvvcs+/vuT8znZk7d+Z27kw7tCMUHCEVJIiiiCIpJjVlaDtyWyTtUCg2+NNqmiBE33w0BENAgiYkxgQxPmAIpNFofPBB3n3RV0JC"
    "9MHEkOi31l57n33uz3QgN/eec/Zee+31+621zyVKqIRPQhX8ZriW8e3KfZVquPbxXKVFGsqYpZvoXpqjHYyu0hl6xvDojNKVQbcmdHO0rc+H6CD4"
    "zdAV7LCJtau0bazS9HTPT9NVuov+QLP0vnX8BqBbl/2ekN03qQ5OvwT3tww/W8zeTi/QV+llWqD3RIpNuoeewcyL9Aa9blnqO2k/OCX0Gn7fxPV/"
    "SrdAvwLtQTpirphF+g79xrw9H2tcpRb2c5pcgiT3YL2FjG26AzOz9ILIcAbyfx9PfyeTOL6W3qKHwWON/kgP0CXL/KrQ+wx+r9Ld9Ci9DxkS2OI/"
    "9HX6tZnB+ANY/xf60PL6DWh0Amu/Qq/ARg1QPk3vJO90WZfbIcVzsNkGvUsfGO+LVXqF7qMH6buYX6VXTWKa5t+Wbdunsxi9QH+CxQ7QAWqazdLP"
    "6Z/lB+ko/Qj7LyZ3pL+jDx+K/c/3FY2I3sizjwV/bzFzdoTGcYmp2KY9tWM8uhaiqU6Xze47JZEvxnlwrDwrdwu0hPkv0FVTjGkLbk6SDdioTlvk"
    "o6VKlzFSpacwetbuLkUGmu5UKTZh8QSx6qTdZL+YUSq2GPvlWV1xDU9H6U3jcuAWPN1KPwDVWXoPUbRli1r4fVbF6nxXRXS/CM8+Ar1OCpceJLwG"
    "vWboy8jQHv2ETiFSE1jmKN0G6/wZlFcQuY9Kll+en67xqO0m62whwVBzuMt7m2J85La5qBnfp1N0Dha6E09vGM+ljax6GVLfJjq8iGyYFEGbajmO"
    "moTeAZacoy2T48UavkNQX8H3Z7DAZ2ho5uhmcL8fKw9hzRfNVeslagFBDiIW1s0h5NtTZoH+K7IM6RvJ48jjfyCrINX8pAjYBC/mtxX8zZn8miBi"
    "Qiu4P6leLUmOfgJxdi/89m06Ts8b9ttRWX8IvuubRwRvZumk9eh0C9DiACL5X7DIZSDB58QK79J5rHmdOskJ+gX9FcjxinV4vQAZvgfUq9Ix2JfH"
    "DtBDEoMn6G/mNnoa2vEoW2abfoj7V/E9D7s+dOKj5D/fdQuRYPHZouvlL89Z5emskuG7PSG7PO1NwrkOuwzN7nKMSt4v7FiL9okp7R4QLovwzUlU"
    "jP9LZlxHG2kRc+UYX1Dk8eODAsc2cozraEs8eggxu2Mnab40ZtnYX/Vdtd4bsl/U7LXipb5eb56q80ez5DQKj/B2DGVulCyPfToYW3l1Aq8eEOBR"
    "X+/tNF85f7QhTR2f2EeZ7pMV5KsDP8vihwzdAGf7STMacXvTjOuVrwU9es3Edr4T2esk+TGq+CKwYH0CYnvfLu2SC9lYRNSm5MtuvvNRm0k8FCxv"
    "Pm6c7SUqdq+5N6CXdLE6bf361LULUq2lDtvdMmr3PPl4Mc11+lmz19WTpM87nmtmfJ575bzL6NGTqHQnrcOHIipd30492MnZ6wFgsZ0iCffnK8jU"
    "p+indFFq3wnUrh2MLJohDeeLfYHvKmIkzCLkmWyRm9V2W5K7lTDyxpglB3u2I7rP4JFrhQw8Lp3NXYixt3E+SaR3HNpYvmyqt3MudXQFbqdz6MV2"
    "j0M+OQzRza/QS8Z793Foez/G7zaXrK+IVc2J47h7HvK9JCckxqSH5XdFu49NrFxG1vfoDvN7s4Le8rfoMJ+TfoG7gTPcJaD+J+CbUEpGcrgGen5y"
    "oxXcudxuSA/iqCsywlR18GnhWpbVDcTZPvRWVqgTGd9HHURCF6PMcx7UncDbXXmdgQY8wmOfDPMVSMgatSBVE+sa4HEQnkjRLe3DDscwsxpxSoP3"
    "E5W6AguwZlV5clI28duEPKzbEXzXwGURz3XQfkmk6cKzXsd50NogRQPXZdmtiZkO6sYsfRa/+0BRhkTL2H0WMxv4zoG6BdoMexzDUxv7dkA1Aw8N"
    "4LeG7DyPuZJwv1V66CooOrgORLcqesf9qjf7/WuQmCk7smI/KFbAaR1r7gO3G+hT2Jnn2QIGknRAX0cWLkPiBcjM+61hlG00i5505wMDupJQG7GO"
    "W8mes2rFJPiDo9fTpULFI6k8VcA9FUsZGTEyVxIa5uY5NXHHOvq44j3KsqKpHmzIU0ksyr9tQS0XT1Zp2xJjzm4zeKoIb0/DksxFcnqtfI1qCf+a"
    "xkNJV1Vkt4rMlwUrS8EWLEldvt4KTj4jK2dw11ArNTVrmOd8xLNNh0W7ZoggpuPY4NXVgpRJkMqojdxzU31VkvwtBfu7PRblqR4ytC75WVJrptDX"
    "78o528BvTVCT53rav9RkjwZ+q0JdRyakkrtNyQwLTKoECSshNlxtKStCVNQSHZHBzTgf9sQ2Hm9qihEtiQgrUTQjHm4K74ZIUMfTPnxW1bqMMs4n"
    "Tn/O8o50volqZ3V2TqSzYgfuwEuSozbCtoOSB4w/PYkeftPQgwxz8o6pIVbqCS+Hcw73y7qXFbxcFUvWZdcmctSCW1tQI9PI4Trgauw+rLpdNGnh"
    "6mOWkaQDXvuRo7MSS1ZsmYnUR0HLJ2TuSOZAuwxMSDDq0M5xyAQ1GKXbeOqHnGN79iQyWuDtsnoReNCBDF1E5Oc/yLu3VGK4LPGZyVhbIrUsNvdz"
    "p6BdplHIkZJ3EVazK4Eefv3psfXLUkca0n27Ed45FX/z03njVvZV/zp2OSL324o+beXdFd+WJScciuV9cRcapqErdbNPgHoj6js456z0GJlIf95M"
    "ktVOtMJpXcOR0xdkT3VkQ22TTdW9CtrlIGk+e86aiGfcuTP3DaVOxQ6jnaMVP5QV87w1rFSRUuitnEfLusb3g4PgLfdmtqEWrWL9csDP3I5ubV/8"
    "nQbrV1TOkyESxn3ixhqRjCai7Cr+OXTLvWrEOqXI/yagzFK0pqKysuSlsJ7xqyonPEs7xkpkxec1v1cSImEGkZKoFiliOQla5/JYsW1Vq1xNOJ2R"
    "+sr9V9E7PsYYh87ZOCacXYpRMTrrIy0TSaz6ylttIAhVkuyoTMhiq33q6Nxp0w5n3NiriYy4HVmix3CfSecRx6KjXQv+z89+27JDRfbknG2IN5Yl"
    "0up0bmKGscW95gt6HYrPrPbJNY1h5yOnMXM+PbIq13hCxs67XF4PmjqZbxFNreBaSfuCUhRh/oRcifzfCPHsT1QNmftmyKS+vMuxUhVWMTuD3OIq"
    "2hnh1tAIStTClcCtim7ejOWSf2vhn32U51FvpE6Mx6yTeUuwthF5zYY3adVA66OhJ7W6HhB/aDIZaSAWK9H7jjx3Eo3FVPumNHDjtxTu3BYjVKIR"
    "1Y/s7jlehG+S4Pm6vIODHW2MQzboYAv68poVvXqc3y4glZOiItU6idDJWdXLmBRW+DeYRX9saVY6WVZGfMYyrWo+szXqdMaYwMP5LS3go0OY2LOm"
    "YLWunmY8tfM7yxFb1kxF2aJ249qO7t1VH43O5PG2VTg75Og7ynsxILQp1KqkUEF6GgduLJX89COnTW55tm0NmR7nk9PIybFfz5MOhSflUyZxd32v"
    "L0rWVKM9MiBUqidDKzR9rZlew1rI61qQn+V8zObIm4Xo8/i5iP6uHSq8wz13znJ1LFW5eWxJekTfJ+zI72GJBFchqzgPOsx70hi1rbNb8d15scoO"
    "lC4JtvA4sR1VWf5fYxSDSlFE7Ff/p6GXcBY4JbWhIXsZzdrYe4nYsyRvAxx+JupTd6J60jivzagnq4I7FdTd02qJLPw/YNQXtZF8XZRdGpqDqVgu"
    "QU/t3005tDFS+1uyb0an5kcrTSPUi2xqf5iEGLMB6xLB4kQ92pjaKx7W+jfO+4JxXWYznFrdvxM7+v+1s0FX46ZYA3Ksi3uUlvTGuaxGT2MOH1Op"
    "q3zC2R6r393Q93Jl6E6wg6887ZE3zU7yNfHktF6Z6W8c52ndGc6Et9G+6pqwqqTnhbjPq4TIsKHH9Qg9EC/Hb4G3g16DEVuVpONPcJZ72OT/ubSQ"
    "j/URHHL8B3pGM4pDW4W+02dOKvbu7hmPmFeM8OWQ01uaCamchXNk8rWd9VqSXtK9FzPkEGnbzIQ3/PVQmTkTVkNfNRz5/8H3zksTEMV3i/m/LC6/"
    "hnLaHRT+M1kPFfGCnRYJjG7j8eVw2Ul7RC3p5VgTOn5+XKjLUjGu1yl+y2R6/krHThbu3/s4FoodQVboz1wNuBi8kYrWaUBDtv66xI9Hz0TeEsdI"
    "c3gX3dvapfflzqPXYcxeoElcxnPp/xaeTRw="
)
"""The codebooks of ggml-common.h, one after another. An entry has 8 levels of 2 bits, or in IQ3 4 levels of 3 bits; the
first level is in the lowest bits. This is base64 of zlib of little-endian 16-bit differences between entries.
"""
_SIGN_OF_IQ2, _SIGN_OF_IQ3 = 2, 3
"""Index of the bit that makes a code's value negative."""
_IQ2_VALUES = (8, 25, 43, 0, -8, -25, -43, 0)
_IQ3_XXS_VALUES = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_IQ3_S_VALUES = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_IQ1_VALUES = (-7, 1, 9, 0, -9, -1, 7, 0)
"""8 times the levels -1, 0 and 1, shifted by +1 in the first four and by -1 in the others."""
_TERNARY_VALUES = (-1, 0, 1, 2)


@functools.cache
def _read_codebook(name: str) -> Tensor:
    """Returns [entries, levels] uint8."""
    differences = torch.frombuffer(bytearray(zlib.decompress(b64decode("".join(_CODEBOOKS)))), dtype=torch.int16)
    parts = (differences.cumsum(0) & 0xFFFF).split(list(_CODEBOOK_SIZES.values()))
    entries = parts[list(_CODEBOOK_SIZES).index(name)].unsqueeze(1)
    if name.startswith("IQ3"):
        return (entries >> torch.arange(0, 12, 3) & 7).to(torch.uint8)
    return (entries >> torch.arange(0, 16, 2) & 3).to(torch.uint8)


def _look_up_levels(name: str, indices: Tensor) -> Tensor:
    """Maps indices [out, ...] to levels [out, in] uint8."""
    return _read_codebook(name).to(indices.device)[indices.long()].flatten(1)


def _unpack_seven_signs(words: Tensor) -> Tensor:
    """Returns [out, in] uint8. The lowest 28 bits of `words` [out, ...] are four groups of 7 signs. An eighth sign
    makes each group's number of negative signs even.
    """
    return _complete_signs(shift_and_mask(words, (0, 7, 14, 21), 127))


def _complete_signs(signs: Tensor) -> Tensor:
    signs = signs.to(torch.uint8)
    parity = signs ^ signs >> 4
    parity = parity ^ parity >> 2
    return unpack_single_bits(signs | ((parity ^ parity >> 1) & 1) << 7)


def _make_codebook_weight(codes: Tensor, values: tuple[int, ...], d: Tensor, multiples: Tensor) -> GroupedWeight:
    """`codes` [out, in]. `d` [out, blocks, 1] is ggml's name of a block's scale. A group's scale is `d` times its entry
    of `multiples` [out, blocks, groups].
    """
    nested = NestedScales(d.squeeze(2), multiples.to(torch.int8).flatten(1))
    return make_nested_weight(codes, values, nested)


def iq2_xxs_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    groups = blocks[..., 2:].unflatten(-1, (8, 8))
    words = read_uint32(groups[..., 4:]).squeeze(-1)
    codes = _look_up_levels("IQ2_XXS", groups[..., :4]) | _unpack_seven_signs(words) << _SIGN_OF_IQ2
    return _make_codebook_weight(
        codes, _IQ2_VALUES, read_float16(blocks[..., :2], keepdim=True) / 8, 2 * (words >> 28) + 1
    )


def iq2_xs_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    words = read_uint16(blocks[..., 2:66])
    codes = _look_up_levels("IQ2_XS", words & 511) | _complete_signs(words >> 9) << _SIGN_OF_IQ2
    multiples = 2 * shift_and_mask(blocks[..., 66:], (0, 4), 15) + 1
    return _make_codebook_weight(codes, _IQ2_VALUES, read_float16(blocks[..., :2], keepdim=True) / 8, multiples)


def iq2_s_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    indices = blocks[..., 2:34].int() | shift_and_mask(blocks[..., 66:74].int(), (0, 2, 4, 6), 3) << 8
    codes = _look_up_levels("IQ2_S", indices) | unpack_single_bits(blocks[..., 34:66]) << _SIGN_OF_IQ2
    multiples = 2 * shift_and_mask(blocks[..., 74:], (0, 4), 15) + 1
    return _make_codebook_weight(codes, _IQ2_VALUES, read_float16(blocks[..., :2], keepdim=True) / 8, multiples)


def iq3_xxs_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    words = read_uint32(blocks[..., 66:])
    codes = _look_up_levels("IQ3_XXS", blocks[..., 2:66]) | _unpack_seven_signs(words) << _SIGN_OF_IQ3
    return _make_codebook_weight(
        codes, _IQ3_XXS_VALUES, read_float16(blocks[..., :2], keepdim=True) / 4, 2 * (words >> 28) + 1
    )


def iq3_s_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    indices = blocks[..., 2:66].int() | shift_and_mask(blocks[..., 66:74].int(), range(8), 1) << 8
    codes = _look_up_levels("IQ3_S", indices) | unpack_single_bits(blocks[..., 74:106]) << _SIGN_OF_IQ3
    multiples = 2 * shift_and_mask(blocks[..., 106:], (0, 4), 15) + 1
    return _make_codebook_weight(codes, _IQ3_S_VALUES, read_float16(blocks[..., :2], keepdim=True), multiples)


def iq1_s_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    words = read_uint16(blocks[..., 34:])
    indices = blocks[..., 2:34].int() | shift_and_mask(words, (0, 3, 6, 9), 7) << 8
    negative = (words >> 15).to(torch.uint8).repeat_interleave(32, -1).flatten(1)
    codes = _look_up_levels("IQ1", indices) | negative << _SIGN_OF_IQ2
    return _make_codebook_weight(
        codes, _IQ1_VALUES, read_float16(blocks[..., :2], keepdim=True) / 8, 2 * (words >> 12 & 7) + 1
    )


def iq1_m_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    """Each group of 8 weights has one sign for its shift. The highest 4 bits of a block's four words together are its
    scale.
    """
    high, words = shift_and_mask(blocks[..., 32:48].int(), (0, 4), 15), read_uint16(blocks[..., 48:])
    indices = blocks[..., :32].int() | (high & 7) << 8
    codes = _look_up_levels("IQ1", indices) | ((high >> 3) << _SIGN_OF_IQ2).to(torch.uint8).repeat_interleave(
        8, -1
    ).flatten(1)
    nibbles = words >> 12
    halves = torch.stack((nibbles[..., 0] | nibbles[..., 1] << 4, nibbles[..., 2] | nibbles[..., 3] << 4), -1)
    multiples = 2 * shift_and_mask(words, (0, 3, 6, 9), 7) + 1
    return _make_codebook_weight(codes, _IQ1_VALUES, read_float16(halves.to(torch.uint8), keepdim=True) / 8, multiples)


def tq1_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    """A byte / 256 is a fraction whose digits in base 3 are the codes. Multiplying by 3 moves a digit to the front."""
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8, device=blocks.device).view(-1, 1)
    parts = [
        (blocks[..., begin:end].unsqueeze(-2) * powers[:digits]).flatten(2)
        for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    codes = (torch.cat(parts, -1).int() * 3 >> 8).to(torch.uint8).flatten(1)
    return GroupedWeight(pack_nibbles(codes), read_float16(blocks[..., 52:]), None, _TERNARY_VALUES)


def tq2_0_to_grouped_weight(blocks: Tensor) -> GroupedWeight:
    codes = unpack_code_planes(blocks[..., :64], (0, 2, 4, 6), 3)
    return GroupedWeight(pack_nibbles(codes), read_float16(blocks[..., 64:]), None, _TERNARY_VALUES)
