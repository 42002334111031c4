"""GGUF files of models with state spaces and selective scans, made from transformers' checkpoints in the way of
llama.cpp's converter (mamba.py, granite.py, nemotron.py, jamba.py and falcon_h1.py of its conversion/).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.gguf_models import TypeOf, add_tensor, gguf, permuted, stacked_experts, write_bytes_tokenizer, write_files

ARCHS = {"falcon_mamba": "mamba", "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1"}
_WHOLE = ("conv1d", "ffn_gate_inp", "ssm_a", "ssm_d", "ssm_norm", "ssm_dt")
_SHARED = "shared_mlp.input_linear"
_NEMOTRON_EXPERT = re.compile(r"backbone\.layers\.(\d+)\.mixer\.experts\.(\d+)\.(up|down)_proj\.weight")


def write_space_gguf(folder: Path, out: Path, type_of: TypeOf = lambda _: "F32") -> Path:
    """Write the file, and into `folder` the weights that it represents."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    arch = "nemotron_h_moe" if kind == "nemotron_h" and "moe" in config["layers_block_type"] else ARCHS.get(kind, kind)
    writer = gguf.GGUFWriter(str(out), arch)
    write_sizes(writer, arch, config)
    write_bytes_tokenizer(writer, config["vocab_size"])
    tensors = load_file(folder / "model.safetensors")
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    names = gguf.get_tensor_name_map(next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), 8)
    experts = stacked_experts({name: each for name, each in tensors.items() if "backbone" not in name})
    for name, tensor in sorted(tensors.items(), key=lambda item: _number(item[0])):
        if match := _NEMOTRON_EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1]}.ffn_{match[3]}_exps.weight", []).append((name, tensor))
    for stored, parts in experts.items():
        rows = torch.stack([part.float() for _, part in parts])
        for (_, part), own in zip(parts, add_tensor(writer, stored, rows, type_of(stored)), strict=True):
            part.copy_(own)
    apart = {name for parts in experts.values() for name, _ in parts}
    for name, tensor in tensors.items():
        if name in apart:
            continue
        if _SHARED in name:
            suffix = "shexp" if config.get("num_local_experts") else ""
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                own = f"blk.{name.split('.')[2]}.ffn_{part}{suffix and '_' + suffix}.weight"
                rows.copy_(add_tensor(writer, own, rows.float(), type_of(own)))
            continue
        _write(writer, names, name, tensor, config, type_of)
    write_files(writer, tensors, folder)
    return out


def _write(writer: Any, names: Any, name: str, tensor: Tensor, config: Mapping[str, Any], type_of: TypeOf) -> None:
    kind, heads = config["model_type"], None
    stored = _stored(names, name, config)
    rows = tensor.float()
    if kind == "granitemoehybrid" and ".q_proj" in name:
        heads = config["num_attention_heads"]
    elif kind == "granitemoehybrid" and ".k_proj" in name:
        heads = config["num_key_value_heads"]
    if heads is not None:
        rows = permuted(rows, heads)
    rows = rows * _factor(name, config) if kind == "falcon_h1" else rows
    if name.endswith("A_log"):
        rows = -rows.exp()
    if kind not in ("mamba", "falcon_mamba", "jamba") and name.endswith((".A_log", ".D")):
        rows = rows.reshape(-1, 1)
    rows = rows.squeeze(1) if "conv1d.weight" in name else rows
    if stored.endswith("ssm_norm.weight"):
        rows = rows.reshape(config.get("mamba_n_groups") or config.get("n_groups") or 1, -1)
    whole = tensor.ndim == 1 or any(f"{each}." in f"{stored}." for each in _WHOLE)
    back = add_tensor(writer, stored, rows, "F32" if whole else type_of(stored))
    if not whole and kind != "falcon_h1":
        tensor.copy_(back if heads is None else back.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2))


def _stored(names: Any, name: str, config: Mapping[str, Any]) -> str:
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("e_score_correction_bias"):
        return f"blk.{layer}.exp_probs_b.bias"
    if "shared_mlp.output_linear" in name:
        return f"blk.{layer}.ffn_down{'_shexp' if config.get('num_local_experts') else ''}.weight"
    moe = config["model_type"] == "nemotron_h" and "moe" in config["layers_block_type"]
    own = name.replace(".dt_bias", ".dt.bias" if moe else ".dt_proj.bias")
    found: str = names.get_name(own, try_suffixes=(".weight", ".bias"))
    return found


def _factor(name: str, config: Mapping[str, Any]) -> Any:
    """Multiplier of Falcon-H1's weights."""
    read = config["attention_in_multiplier"]
    by_name = {
        "q_proj": read,
        "k_proj": read * config["key_multiplier"],
        "v_proj": read,
        "self_attn.o_proj": config["attention_out_multiplier"],
        "gate_proj": config["mlp_multipliers"][0],
        "down_proj": config["mlp_multipliers"][1],
        "mamba.out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    if "mamba.in_proj" in name:
        keys, inner = config["mamba_n_groups"] * config["mamba_d_state"], config["mamba_d_ssm"]
        sizes = torch.tensor([inner, inner, keys, keys, config["mamba_n_heads"]])
        factors = torch.tensor(config["ssm_multipliers"]) * config["ssm_in_multiplier"]
        return factors.repeat_interleave(sizes)[:, None]
    return next((factor for part, factor in by_name.items() if part in name), 1.0)


def write_sizes(writer: Any, arch: str, config: Mapping[str, Any]) -> None:
    """Write the metadata that the converter derives from config.json."""
    scan, alone = arch in ("mamba", "jamba"), arch in ("mamba", "mamba2")
    hidden, layers = config["hidden_size"], config.get("num_hidden_layers") or len(config["layers_block_type"])
    writer.add_context_length(2**20 if alone or arch == "granitehybrid" else config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv") or config["conv_kernel"])
    writer.add_ssm_state_size(_first(config, "mamba_d_state", "state_size", "ssm_state_size"))
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "num_heads")
    if scan:
        inner = config["mamba_expand"] * hidden if arch == "jamba" else config["intermediate_size"]
        writer.add_ssm_time_step_rank(_first(config, "mamba_dt_rank", "time_step_rank"))
    else:
        inner = heads * _first(config, "mamba_d_head", "mamba_head_dim", "head_dim")
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(_first(config, "mamba_n_groups", "n_groups"))
    writer.add_ssm_inner_size(inner)
    if alone:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        if arch == "mamba":
            writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")
        return
    writer.add_head_count(config["num_attention_heads"])
    if arch != "jamba":
        writer.add_key_length(size := config.get("head_dim") or hidden // config["num_attention_heads"])
        writer.add_value_length(size)
    write_layers(writer, arch, config)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def write_layers(writer: Any, arch: str, config: Mapping[str, Any]) -> None:
    """Write metadata of sublayers other than the recurrent ones."""
    kinds, heads = _kinds(arch, config), config["num_key_value_heads"]
    attends = [kind in ("full_attention", "hybrid") for kind in kinds]
    writer.add_head_count_kv(heads if all(attends) else [heads * each for each in attends])
    wide = config["moe_intermediate_size"] if arch == "nemotron_h_moe" else config["intermediate_size"]
    nemotron = arch.startswith("nemotron")
    writer.add_feed_forward_length([wide * (kind in ("mlp", "moe")) for kind in kinds] if nemotron else wide)
    if arch == "falcon-h1":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    count = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts")
    if count and arch != "nemotron_h":
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    if arch == "nemotron_h_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])


def _kinds(arch: str, config: Mapping[str, Any]) -> list[str]:
    if listed := config.get("layer_types") or config.get("layers_block_type"):
        return list(listed)
    layers = range(config["num_hidden_layers"])
    if arch != "jamba":
        return ["hybrid" for _ in layers]
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    return ["full_attention" if layer % period == offset else "linear_attention" for layer in layers]


def _number(name: str) -> tuple[int, int]:
    match = _NEMOTRON_EXPERT.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else (0, 0)
