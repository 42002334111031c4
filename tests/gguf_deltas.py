"""GGUF files of models with gated delta nets, made from transformers' checkpoints in the way of llama.cpp's converter
(Qwen3NextModel, _LinearAttentionVReorderBase and _Qwen35MtpMixin of its conversion/qwen.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_models import TypeOf, add_tensor, gguf, write_bytes_tokenizer, write_files, write_shape

ARCHS = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
_NEXTN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
_WHOLE = ("conv1d", "ffn_gate_inp", "ssm_a", "ssm_beta", "ssm_alpha", "ssm_ba", "dt")


def write_delta_gguf(folder: Path, out: Path, type_of: TypeOf = lambda _: "F32") -> Path:
    """Write the file, and into `folder` the weights that it represents."""
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("intermediate_size", 512)
    arch, layers = ARCHS[config["model_type"]], config["num_hidden_layers"]
    tensors = load_file(folder / "model.safetensors")
    config["num_nextn_predict_layers"] = int("mtp.fc.weight" in tensors)
    writer = gguf.GGUFWriter(str(out), arch)
    write_shape(writer, arch, config)
    write_sizes(writer, config)
    write_bytes_tokenizer(writer, config["vocab_size"])
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    arch_name = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_name, layers + 1)
    experts: dict[str, list[Tensor]] = {}
    behind = {_behind(name, layers): tensor for name, tensor in tensors.items()}
    for name, tensor in sorted(behind.items(), key=lambda item: _natural(item[0])):
        if ".experts." in name:
            for part, rows in _of_experts(name, tensor).items():
                experts.setdefault(f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight", []).extend(rows)
            continue
        for own, axis, order in _pieces(name, tensor, config):
            stored = _nextn(own) or names.get_name(own, try_suffixes=(".weight", ".bias"))
            rows = tensor.float().index_select(axis, order)
            rows = -rows.exp() if name.endswith("A_log") else rows.squeeze(1) if "conv1d" in name else rows
            norm = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            rows = rows.flatten() if "shared_expert_gate" in name else rows
            whole = tensor.ndim == 1 or any(each in stored for each in _WHOLE)
            back = add_tensor(writer, stored, rows + 1 if norm else rows, "F32" if whole else type_of(stored))
            if not whole:
                tensor.index_copy_(axis, order, back)
    for stored, parts in experts.items():
        for part, back in zip(parts, add_tensor(writer, stored, torch.stack(parts), type_of(stored)), strict=True):
            part.copy_(back)
    write_files(writer, tensors, folder)
    return out


def _behind(name: str, layers: int) -> str:
    """Name of an MTP tensor as part of the layer after the model's last one."""
    inside = name.removeprefix("mtp.")
    if inside == name:
        return name
    module, _, kind = inside.rpartition(".")
    inside = f"{_MTP[module]}.{kind}" if module in _MTP else inside.removeprefix("layers.0.")
    return f"model.layers.{layers}.{inside}"


def _nextn(name: str) -> str | None:
    """GGUF name of a tensor that only an MTP layer has; the package knows these names for later versions."""
    stem, _, kind = name.rpartition(".")
    inside = next((each for each in _NEXTN if stem.endswith(f".{each}")), None)
    return None if inside is None else f"blk.{name.split('.')[2]}.nextn.{inside.replace('.', '_')}.{kind}"


def write_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    every = next(i for i, kind in enumerate(config["layer_types"], 1) if kind == "full_attention")
    writer.add_full_attention_interval(every)
    if width := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)


def _of_experts(name: str, tensor: Tensor) -> dict[str, list[Tensor]]:
    """Views of a checkpoint's tensor for each expert, by projection."""
    if name.endswith("gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return {"gate": list(gate), "up": list(up)}
    if tensor.ndim == 3:
        return {"down": list(tensor)}
    return {name.split(".")[-2].removesuffix("_proj"): [tensor]}


def _pieces(name: str, tensor: Tensor, config: Mapping[str, Any]) -> list[tuple[str, int, Tensor]]:
    """Parts of a tensor in the file: the name that the package knows, and the rows (axis 0) or columns in the file's
    order.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value, each = config["linear_key_head_dim"], config["linear_value_head_dim"], values // keys
    own = name.replace(".dt_bias", ".dt_proj.bias")
    every = torch.arange(tensor.shape[0])
    if "in_proj_qkvz" in name:
        parts = every.view(keys, -1).split((key, key, each * value, each * value), dim=1)
        qkv = torch.cat([part.flatten() for part in parts[:3]])
        return [(name.replace("qkvz", "qkv"), 0, qkv), (name.replace("qkvz", "z"), 0, parts[3].flatten())]
    if config["model_type"] == "qwen3_next" or "linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return [(own, 0, every)]
    axis, begin, size = 0, 0, value
    if "in_proj_qkv" in name or "conv1d" in name:
        begin = 2 * keys * key
    elif "out_proj" in name:
        axis, every = 1, torch.arange(tensor.shape[1])
    elif "in_proj_z" not in name:
        size = 1
    tiled = every[begin:].view(keys, each, size).transpose(0, 1).flatten()
    return [(own, axis, torch.cat((every[:begin], tiled)))]


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
