"""Tiny checkpoints in published quantization formats, packed from the formats' descriptions, each with a float32 model
of the same values.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""Tensors of a linear by name suffix, and the weights, [out, in] float32, that they represent."""
Packer = Callable[[Tensor], Packed]


def quantize_checkpoint(
    folder: Path, out: Path, pack: Packer, config: Mapping[str, Any], leave: tuple[str, ...] = ("lm_head",)
) -> Path:
    """Write the model of `folder` with packed linears, and change `folder` to the weights that they represent."""
    quantize_linears(folder, out, lambda linear: None if any(part in f"{linear}.weight" for part in leave) else pack)
    content = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(content | {"quantization_config": dict(config)}))
    return out


def quantize_linears(folder: Path, out: Path, pack_of: Callable[[str], Packer | None]) -> None:
    """Like quantize_checkpoint, but config.json stays. `pack_of` returns None for a linear to leave."""
    shutil.copytree(folder, out)
    tensors, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        linear, _, kind = name.rpartition(".")
        is_linear = tensor.ndim == 2 and kind == "weight" and "embed" not in name
        if not is_linear or (pack := pack_of(linear)) is None:
            tensors[name] = dense[name] = tensor.float()
            continue
        packed, dense[name] = pack(tensor.float())
        tensors |= {f"{linear}.{each}": content.contiguous() for each, content in packed.items()}
    save_file(tensors, out / "model.safetensors")
    dense = {name: tensor.contiguous() for name, tensor in dense.items()}
    save_file(dense, folder / "model.safetensors", {"format": "pt"})


def rounded(
    weight: Tensor, bits: int, group: int, *, symmetric: bool, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0, float16 scales and zero points per group, and the weights that they represent. `groups`: group of
    each input.
    """
    outs, inner = weight.shape
    groups = torch.arange(inner) // group if groups is None else groups
    count, most = int(groups.max()) + 1, 2**bits - 1
    codes, dense = torch.zeros(outs, inner, dtype=torch.int64), torch.zeros(outs, inner)
    scales, zeros = torch.zeros(outs, count, dtype=torch.float16), torch.zeros(outs, count, dtype=torch.int64)
    for index in range(count):
        part = weight[:, groups == index]
        if symmetric:
            scale = (part.abs().amax(1) / (most / 2)).half()
            zero = torch.full((outs,), 2 ** (bits - 1))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / most).half()
            zero = (-low / scale.float()).round().clamp(0, most).long()
        code = ((part / scale.float()[:, None]).round() + zero[:, None]).clamp(0, most).long()
        codes[:, groups == index], scales[:, index], zeros[:, index] = code, scale, zero
        dense[:, groups == index] = scale.float()[:, None] * (code - zero[:, None]).float()
    return codes, scales, zeros, dense


def stream_of(columns: Tensor, bits: int) -> Tensor:
    """[n, m] codes as [n * bits / 32, m] int32: each column is one number of n * bits bits, cut into words."""
    rows = []
    for column in columns.T.tolist():
        whole = sum(int(code) << (bits * at) for at, code in enumerate(column))
        rows.append(list(whole.to_bytes(len(column) * bits // 8, "little")))
    return torch.from_numpy(np.array(rows, dtype=np.uint8).view(np.int32).T.copy())


def words_of(rows: Tensor, bits: int) -> Tensor:
    """[n, m] codes as [n, ceil(m * bits / 32)] int32: the rows of `stream_of`, padded with zeros."""
    padded = torch.zeros(-(-rows.shape[1] // 32) * 32, rows.shape[0], dtype=torch.int64)
    padded[: rows.shape[1]] = rows.T
    return stream_of(padded, bits).T[:, : -(-rows.shape[1] * bits // 32)]


def gptq(bits: int, group: int, *, symmetric: bool, ordered: bool = False, version: int = 1) -> Packer:
    def pack(weight: Tensor) -> Packed:
        inner = weight.shape[1]
        size = inner if group == -1 else group
        groups = torch.arange(inner) // size
        if ordered:
            groups = groups[torch.randperm(inner, generator=torch.Generator().manual_seed(inner))]
        codes, scales, zeros, dense = rounded(weight, bits, size, symmetric=symmetric, groups=groups)
        stored = zeros - 1 & 2**bits - 1 if version == 1 else zeros
        tensors = {"qweight": stream_of(codes.T, bits), "qzeros": stream_of(stored, bits).T, "scales": scales.T}
        return tensors | {"g_idx": groups.to(torch.int32)}, dense

    return pack


def awq(group: int) -> Packer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def words(rows: Tensor) -> Tensor:
        """Nibble i of a word holds output order[i] of its eight."""
        found = torch.zeros(rows.shape[0], rows.shape[1] // 8, dtype=torch.int64)
        for at, which in enumerate(order):
            found |= rows[:, which::8] << (4 * at)
        return torch.from_numpy(found.numpy().astype(np.uint32).view(np.int32))

    def pack(weight: Tensor) -> Packed:
        codes, scales, zeros, dense = rounded(weight, 4, weight.shape[1] if group == -1 else group, symmetric=False)
        return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}, dense

    return pack


def compressed(bits: int, group: int, *, symmetric: bool, ordered: bool = False) -> Packer:
    def pack(weight: Tensor) -> Packed:
        outs, inner = weight.shape
        size = group or inner
        groups = torch.arange(inner) // size
        if ordered:
            groups = groups[torch.randperm(inner, generator=torch.Generator().manual_seed(inner))]
        codes, scales, zeros, dense = rounded(weight, bits, size, symmetric=symmetric, groups=groups)
        tensors = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outs, inner]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zeros.T, bits).T
        return tensors | ({"weight_g_idx": groups.to(torch.int32)} if ordered else {}), dense

    return pack


def int8(strategy: str, *, symmetric: bool = True) -> Packer:
    def pack(weight: Tensor) -> Packed:
        codes, scales, zeros, dense = rounded(weight, 8, weight.shape[1], symmetric=symmetric)
        if strategy == "tensor":
            scale = (weight.abs().max() / 127).half()
            plain = (weight / scale.float()).round().clamp(-128, 127)
            return {"weight": plain.to(torch.int8), "weight_scale": scale.reshape(1)}, plain * scale.float()
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales, "input_scale": torch.ones(1)}
        return tensors | ({} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}), dense

    return pack


def float8(strategy: str, name: str = "weight_scale", block: tuple[int, int] = (128, 128)) -> Packer:
    def pack(weight: Tensor) -> Packed:
        outs, inner = weight.shape
        sides = {"tensor": (outs, inner), "channel": (1, inner), "block": block}[strategy]
        shape = (-(-outs // sides[0]), -(-inner // sides[1]))
        scales, codes, dense = torch.zeros(shape), torch.zeros_like(weight), torch.zeros_like(weight)
        for row in range(shape[0]):
            for column in range(shape[1]):
                part = (slice(row * sides[0], (row + 1) * sides[0]), slice(column * sides[1], (column + 1) * sides[1]))
                scales[row, column] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn).float()
                dense[part] = codes[part] * scales[row, column]
        stored = scales.reshape(()) if strategy == "tensor" else scales
        return {"weight": codes.to(torch.float8_e4m3fn), name: stored, "input_scale": torch.tensor(0.5)}, dense

    return pack


FLOATS_OF_4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def float4(group: int) -> Packer:
    """Group size 32: MXFP4; 16: NVFP4."""

    def pack(weight: Tensor) -> Packed:
        outs, inner = weight.shape
        table = torch.tensor([*FLOATS_OF_4, *(-each for each in FLOATS_OF_4)])
        parts = weight.view(outs, -1, group)
        largest = parts.abs().amax(2) / 6
        if group == 32:
            exponents = largest.log2().ceil()
            scales = 2**exponents
            stored = {"weight_scale": (exponents + 127).to(torch.uint8)}
        else:
            shared = 448 / largest.max()
            codes = (largest * shared).to(torch.float8_e4m3fn)
            scales = codes.float() / shared
            stored = {"weight_scale": codes, "weight_global_scale": shared.reshape(1)}
        found = ((parts / scales[:, :, None])[..., None] - table).abs().argmin(-1)
        dense, flat = (table[found] * scales[:, :, None]).view(outs, inner), found.view(outs, inner)
        return stored | {"weight_packed": (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)}, dense

    return pack


def modelopt_nvfp4(weight: Tensor) -> Packed:
    """weight = code * weight_scale * weight_scale_2; the global scale makes the largest group's scale 448."""
    outs, inner = weight.shape
    groups = weight.view(outs, -1, 16)
    shared = groups.abs().max() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / shared).to(torch.float8_e4m3fn)
    steps = (scales.float() * shared)[:, :, None]
    table = torch.tensor([*FLOATS_OF_4, *(-each for each in FLOATS_OF_4)])
    codes = ((groups / steps)[..., None] - table).abs().argmin(-1)
    flat, dense = codes.view(outs, inner).to(torch.uint8), (table[codes] * steps).view(outs, inner)
    tensors = {"weight": flat[:, ::2] | flat[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": shared}
    return tensors | {"input_scale": torch.tensor(0.5)}, dense


def modelopt_float8(algo: str) -> Packer:
    """A scale per tensor (FP8), per output (FP8_PER_CHANNEL_PER_TOKEN), or per 128 x 128 (FP8_PB_WO)."""

    def pack(weight: Tensor) -> Packed:
        strategy = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel", "FP8_PB_WO": "block"}[algo]
        tensors, dense = float8(strategy)(weight)
        if strategy == "channel":
            tensors["weight_scale"] = tensors["weight_scale"].flatten()
        if strategy == "block":
            tensors["weight_scale"] = tensors["weight_scale"][:, None, :, None]
        return tensors, dense

    return pack


def mxfp8(weight: Tensor) -> Packed:
    """e4m3 times a power of two per 32 inputs, which is stored as its exponent plus 127."""
    groups = weight.view(weight.shape[0], -1, 32)
    exponents = (groups.abs().amax(2) / 448).log2().ceil()
    steps = 2 ** exponents[:, :, None]
    codes = (groups / steps).to(torch.float8_e4m3fn)
    tensors = {"weight": codes.view(weight.shape), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (codes.float() * steps).view(weight.shape)


def stack_mxfp4(folder: Path, out: Path) -> Path:
    """Write the gpt-oss model of `folder` with its experts in MXFP4, and change `folder` to the weights that they
    represent.
    """
    shutil.copytree(folder, out)
    tensors, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = dense[name] = tensor
            continue
        packed = [float4(32)(expert.T.float().contiguous()) for expert in tensor]
        tensors[f"{name}_blocks"] = torch.stack([each["weight_packed"].unflatten(1, (-1, 16)) for each, _ in packed])
        tensors[f"{name}_scales"] = torch.stack([each["weight_scale"] for each, _ in packed])
        dense[name] = torch.stack([weight.T for _, weight in packed]).to(tensor.dtype).contiguous()
    save_file(tensors, out / "model.safetensors")
    save_file(dense, folder / "model.safetensors", {"format": "pt"})
    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    content = json.loads((out / "config.json").read_text())
    config = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    (out / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return out


def bnb8(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * (largest / 127)[:, None]


NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


def nf4(blocksize: int, *, nested: bool) -> Packer:
    def pack(weight: Tensor) -> Packed:
        flat, table = weight.flatten(), torch.tensor(NF4)
        absmax = torch.stack([part.abs().max() for part in flat.split(blocksize)])
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "float32"}
        state["shape"] = list(weight.shape)
        tensors = {"weight.quant_map": table}
        if nested:
            offset, map_ = absmax.mean(), torch.linspace(-1, 1, 256)
            largest = torch.stack([(part - offset).abs().max() for part in absmax.split(256)])
            each = largest.repeat_interleave(256)[: len(absmax)]
            codes = (((absmax - offset) / each)[:, None] - map_).abs().argmin(1)
            absmax = map_[codes] * each + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": largest}
            tensors["weight.nested_quant_map"] = map_
        else:
            tensors["weight.absmax"] = absmax
        scales = absmax.repeat_interleave(blocksize)[: len(flat)]
        codes = ((flat / scales)[:, None] - table).abs().argmin(1)
        tensors["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        text = json.dumps(state).encode()
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return tensors, (table[codes] * scales).view(weight.shape)

    return pack


def compressed_config(
    stored: str, bits: int, group: int, *, kind: str = "int", strategy: str = "group", **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more
    weights["group_size"] = group or None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8}}}
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return {
        **{"quant_method": "compressed-tensors", "format": stored, "config_groups": groups},
        **{"ignore": ["lm_head", "re:.*nothing$"], "kv_cache_scheme": kv, "quantization_status": "compressed"},
    }
