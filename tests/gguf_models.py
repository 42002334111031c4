"""GGUF files made from transformers' checkpoints with llama.cpp's package, as a reference for Quire's reader."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.texts import BYTES, CHATML

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_ARCHS = {
    "cohere": "command-r",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "hunyuan_v1_dense": "hunyuan-dense",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "lfm2_moe": "lfm2moe",
    "minimax_m2": "minimax-m2",
    "qwen2_moe": "qwen2moe",
}
_SPARSE = {
    *("dots1", "ernie4_5-moe", "glm4moe", "granitemoe", "hunyuan-moe", "lfm2moe", "minimax-m2", "olmoe", "phimoe"),
    "qwen2moe",
}
_PERMUTED = ("arcee", "granite", "granitemoe", "llama", "smollm3")
_PARTLY_ROTATED = ("glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi3", "stablelm")
_GPT2 = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_GPT2 |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+)\.weight")
_JOINED = "shared_mlp.input_linear"
_BY_PACKAGE = {
    *("arcee", "cohere2", "command-r", "ernie4_5", "exaone4", "glm4", "gpt2", "gptneox", "granite", "hunyuan-dense"),
    *("deepseek2", "lfm2", "nemotron", "olmo2", "phi3", "seed_oss", "stablelm", "starcoder2"),
    *_SPARSE,
}
"""Architectures whose tensors are named by the package's own table."""
_EXPERTS = {
    **{"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"},
    **{"gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps", "up_proj": "ffn_up_exps"},
}
TypeOf = Callable[[str], str]
"""Storage type of a matrix by its GGUF name."""


def stored_name(name: str, model_type: str) -> str:
    """GGUF name of a checkpoint's tensor; the package's own table is the fallback."""
    stem, _, kind = name.rpartition(".")
    arch = _ARCHS.get(model_type, model_type)
    if arch in _BY_PACKAGE:
        table = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), 8)
        if name.endswith(("_correction_bias", "expert_bias")):  # the converter calls it .bias
            return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
        return table.get_name(name, try_suffixes=(".weight", ".bias"))
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    if name.endswith("self_attn.sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    _, _, layer, part = stem.split(".", 3)
    own = dict(_INSIDE) | dict.fromkeys(("mlp.gate", "mlp.router", "block_sparse_moe.gate"), "ffn_gate_inp")
    if model_type in ("gemma2", "gemma3_text"):
        own |= {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm"}
        own |= {"post_feedforward_layernorm": "post_ffw_norm"}
    else:
        own["post_attention_layernorm"] = "post_attention_norm" if model_type == "gpt_oss" else "ffn_norm"
    return f"blk.{layer}.{own[part]}.{kind}"


def permuted(weights: Tensor, heads: int) -> Tensor:
    """Reorder the rows of queries and keys like llama.cpp's converter."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """By GGUF name of a stacked tensor: each expert's name in the checkpoint and its part, a view of the checkpoint's
    tensor.
    """
    found: dict[str, list[tuple[str, Tensor]]] = {}
    by_number = {name: int(match[2]) if (match := _EXPERT.fullmatch(name)) else 0 for name in tensors}
    for name, tensor in sorted(tensors.items(), key=lambda each: by_number[each[0]]):
        if match := _EXPERT.fullmatch(name):
            found.setdefault(f"blk.{match[1]}.{_EXPERTS[match[3]]}.weight", []).append((name, tensor))
        elif match := re.search(r"(\d+)\.block_sparse_moe\.(in|out)put_linear", name):  # Granite: halves
            halves = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
            parts = dict(halves) if match[2] == "in" else {"down": tensor}
            found |= {
                f"blk.{match[1]}.ffn_{part}_exps.weight": [(name, e) for e in each] for part, each in parts.items()
            }
        elif ".experts." in name:  # gpt-oss: gate and up are interleaved
            prefix, kind = f"blk.{name.split('.')[2]}.ffn", "bias" if name.endswith("_bias") else "weight"
            rows = tensor if kind == "bias" else tensor.transpose(1, 2)
            parts = {"down": rows} if "down" in name else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            found |= {f"{prefix}_{part}_exps.{kind}": [(name, own) for own in each] for part, each in parts.items()}
    return found


def quantized(weights: np.ndarray, kind: str) -> np.ndarray:
    """Quantize to rows of blocks. Types that the package cannot make become random blocks, with scales that keep
    numbers small.
    """
    type_ = gguf.GGMLQuantizationType[kind]
    try:
        return gguf.quants.quantize(weights.astype(np.float32), type_)
    except NotImplementedError:
        return random_blocks(kind, weights.shape, np.random.default_rng(weights.shape[0]))


_HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **{"IQ1_M": (), "NVFP4": ()},
}
"""Byte offsets of a block's float16 numbers."""


def random_blocks(kind: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = generator.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scales = generator.uniform(0.2, 1, (*blocks.shape[:2], 1)) * 2e-4
        blocks[:, :, at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = generator.integers(115, 122, blocks.shape[:2])
    if kind == "NVFP4":
        blocks[:, :, :4] = generator.integers(0, 9, (*blocks.shape[:2], 4))
    if kind == "IQ1_M":  # the highest bits of four words are a number from 2^-10 to 2^-9
        blocks[:, :, 49::2] = blocks[:, :, 49::2] & 15 | np.array([0, 0, 0x40, 0x10], dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(folder: Path, out: Path, type_of: TypeOf = lambda _: "F32", **changed: Any) -> Path:
    """Write a transformers checkpoint as a GGUF file, and into `folder` the weights that the file represents.
    `changed`: overrides of fields in config.json.
    """
    config = json.loads((folder / "config.json").read_text())
    config |= changed
    config |= {name: config[other] for other, name in _GPT2.items() if other in config}
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    kind = config["model_type"]
    arch = _ARCHS.get(kind, kind)
    writer = gguf.GGUFWriter(str(out), arch)
    write_shape(writer, arch, config)
    write_bytes_tokenizer(writer, config["vocab_size"])
    tensors = load_file(folder / "model.safetensors")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config.get("tie_word_embeddings", True):
        tensors.pop("lm_head.weight", None)
    halves: dict[str, list[str]] = {}  # Granite's shared gate and up, separate in files
    for name in [name for name in tensors if _JOINED in name]:
        halves[name] = [name.replace(_JOINED, f"mlp.shared_experts.{part}_proj") for part in ("gate", "up")]
        tensors |= dict(zip(halves[name], tensors.pop(name).chunk(2), strict=True))
    experts = stacked_experts(tensors)
    for stored, parts in experts.items():
        rows = torch.stack([part.float() for _, part in parts])
        for (_, part), own in zip(parts, add_tensor(writer, stored, rows, type_of(stored)), strict=True):
            part.copy_(own)
    split = {name: tensors[name] for name in tensors if name.endswith("kv_b_proj.weight") and not config.get("joined")}
    for name, tensor in split.items():
        tensor.copy_(write_expansion(writer, name, tensor, config, type_of))
    apart = {*split} | {name for parts in experts.values() for name, _ in parts}
    for name, tensor in tensors.items():
        if name in apart:
            continue
        stored = stored_name(name, kind)
        count = heads.get(stored.split(".")[-2]) if arch in _PERMUTED else None
        rows = tensor.float() if count is None else permuted(tensor.float(), count)
        if arch == "gptneox" and "attn_qkv" in stored:
            rows = rows.unflatten(0, (config["num_attention_heads"], 3, -1)).transpose(0, 1).flatten(0, 2)
        elif arch == "gpt2" and tensor.ndim == 2 and "embd" not in stored:
            rows = rows.t().contiguous()
        rows = rows.squeeze(1) if stored.endswith("shortconv.conv.weight") else rows
        rows = rows + 1 if arch.startswith(("gemma", "nemotron")) and stored.endswith("norm.weight") else rows
        rows = rows.flatten() if stored.endswith(("exp_probs_b.bias", "inp_shexp.weight")) else rows
        small = ("ffn_gate_inp", "shortconv.conv", "exp_probs_b")
        whole = tensor.ndim == 1 or any(each in stored for each in small)
        back = add_tensor(writer, stored, rows, "F32" if whole else type_of(stored))
        if not whole and arch not in ("gptneox", "gpt2"):
            tensor.copy_(back if count is None else back.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2))
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_tensor("rope_freqs.weight", llama3_factors(config["rope_parameters"], size))
    tensors |= {name: torch.cat([tensors.pop(each) for each in parts]) for name, parts in halves.items()}
    write_files(writer, tensors, folder)
    return out


def write_files(writer: Any, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the GGUF file, and into `folder` the numbers that it represents."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: Any, stored: str, rows: Tensor, wanted: str) -> Tensor:
    """Add a tensor; return the numbers that the file then represents."""
    if wanted == "F32" or stored.endswith("bias"):
        writer.add_tensor(stored, rows.contiguous().numpy())
        return rows
    type_ = gguf.GGMLQuantizationType[wanted]
    blocks = quantized(rows.flatten(0, -2).numpy(), wanted)
    shaped = blocks.reshape(*rows.shape[:-1], -1)
    writer.add_tensor(stored, shaped, raw_dtype=type_)
    factor = 1.0
    if wanted == "NVFP4":
        factor = 1.5
        scales = np.full(rows.shape[:-2] or 1, factor, dtype=np.float32)
        writer.add_tensor(stored.replace(".weight", ".scale"), scales)
        writer.add_tensor(stored.replace(".weight", ".input_scale"), scales)
    return factor * torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(blocks, type_))).view(rows.shape)


def write_shape(writer: Any, arch: str, config: Mapping[str, Any]) -> None:
    """Write the metadata that llama.cpp's converter derives from config.json."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention") or rope
    writer.add_block_count(config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0))
    writer.add_nextn_predict_layers(config.get("num_nextn_predict_layers") or 0)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    inner = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):
        unit = config["block_multiple_of"]
        inner = -(-int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) // unit) * unit
    writer.add_feed_forward_length(inner)
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if experts := next((config[name] for name in names if config.get(name)), None):
        writer.add_expert_count(experts)
        chosen = ("num_experts_per_tok", "moe_topk", "moe_k")
        writer.add_expert_used_count(next(config[name] for name in chosen if config.get(name)))
        if arch != "llama":
            writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    heads = config["num_key_value_heads"]
    attends = [kind != "conv" for kind in config.get("layer_types") or ()]
    writer.add_head_count_kv(heads if all(attends) else [heads * each for each in attends])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(next(config[name] for name in _EPS if name in config))
    if not full.get("alpha"):
        writer.add_rope_freq_base(full.get("rope_theta", 10000.0))
    if arch == "deepseek2":
        write_latents(writer, config, full)
    elif config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    write_own(writer, arch, config, full)
    if arch in _SPARSE:
        write_sparse(writer, config)
    if config.get("sliding_window") and arch.startswith(
        ("gemma", "gpt-oss", "cohere2", "exaone4", "starcoder2", "phi3")
    ):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "sliding_attention" in rope:
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])


def write_own(writer: Any, arch: str, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Write metadata that only some architectures have."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if arch in _PARTLY_ROTATED:
        writer.add_rope_dimension_count(config.get("rotary_dim") or int(size * rope.get("partial_rotary_factor", 1.0)))
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        old = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(old)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(rope["factor"]) / math.log(old)))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))
    if arch in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if arch == "gptneox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if arch == "exaone4" and config["sliding_window"]:
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if rope.get("alpha"):  # HunYuan's RoPE base is scaled in the file
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (size / (size - 2)))


def write_latents(writer: Any, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Write MLA metadata like llama.cpp's converter since files have two matrices instead of kv_b_proj, or if config
    has `joined`, as before that.
    """
    key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if config.get("joined"):
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config.get("n_routed_experts"):
        sigmoid = config["model_type"] != "deepseek_v2"
        func = gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
        writer.add_expert_gating_func(func)
        greedy = config["model_type"] == "deepseek_v2" and config.get("topk_method") != "group_limited_greedy"
        write_sparse(writer, {**config, "n_group": None} if greedy else config)


def write_expansion(writer: Any, name: str, weight: Tensor, config: Mapping[str, Any], type_of: TypeOf) -> Tensor:
    """Write kv_b_proj as two matrices. Returns what the file then represents."""
    nope, value, heads = config["qk_nope_head_dim"], config["v_head_dim"], config["num_attention_heads"]
    keys, values = weight.float().view(heads, nope + value, -1).split((nope, value), dim=1)
    prefix = f"blk.{name.split('.')[2]}"
    made = [
        add_tensor(writer, f"{prefix}.attn_{kind}_b.weight", rows.contiguous(), type_of(f"{prefix}.attn_{kind}_b"))
        for kind, rows in (("k", keys.transpose(1, 2)), ("v", values))
    ]
    return torch.cat((made[0].transpose(1, 2), made[1]), dim=1).reshape(weight.shape)


def write_sparse(writer: Any, config: Mapping[str, Any]) -> None:
    """Write metadata of experts."""
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if config.get("routed_scaling_factor"):
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config.get("norm_topk_prob")))
    if (shared := config.get("n_shared_experts") or config.get("moe_num_shared_experts")) is not None:
        writer.add_expert_shared_count(shared)
    if width := config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(width)
    dense = next((config[name] for name in _DENSE if name in config), None)
    if dense is not None:
        writer.add_leading_dense_block_count(dense)


_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def write_bytes_tokenizer(writer: Any, vocab_size: int, **roles: int) -> None:
    """Write a tokenizer with three special tokens and one token per byte after them; the rest of the vocabulary is
    unused.
    """
    tokens = ["<pad>", "<bos>", "<|im_end|>", *BYTES]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), vocab_size)]
    types = [3, 3, 3, *[1] * 256, *[5] * (vocab_size - 259)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)


def llama3_factors(rope: Mapping[str, float], head_dim: int) -> np.ndarray:
    """Divisor of each frequency, which llama.cpp's converter stores for Llama 3.1's RoPE scaling."""
    found = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        old, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < old / high:
            found.append(1.0)
        elif wavelength > old / low:
            found.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)
