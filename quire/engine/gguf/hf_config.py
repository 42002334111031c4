"""What the header of a GGUF file says of its model, as a config.json would: families, sizes, rotary positions."""

from __future__ import annotations

import os
import struct
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.folder_reader import open_if_present
from quire.engine.gguf import deepseek_config, delta_net_config, mamba_config
from quire.engine.gguf.header import GGUFHeader, GGUFTensor
from quire.engine.gguf.hf_tokenizer import eos_token_ids, tokenizer_vocab_size
from quire.engine.gguf.tensor_types import FLOAT_TYPES

MODEL_TYPES = {
    "arcee": "arcee",
    "cohere2": "cohere2",
    **delta_net_config.MODEL_TYPES,
    "command-r": "cohere",
    deepseek_config.DEEPSEEK2_ARCH: "deepseek_v2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "hunyuan-dense": "hunyuan_v1_dense",
    "hunyuan-moe": "hunyuan_v1_moe",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "llama": "llama",
    "minimax-m2": "minimax_m2",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    **mamba_config.MODEL_TYPES,
}
"""general.architecture to config.json's model_type. Mixtral's files call themselves llama, OLMo 3's olmo2."""
_PARTIAL_ROTARY_ARCHS = (
    *delta_net_config.MODEL_TYPES,
    "glm4",
    "glm4moe",
    "gptneox",
    "minimax-m2",
    "nemotron",
    "phi3",
    "stablelm",
)
"""Architectures that rotate a part of each head."""
_SLIDING_WINDOW_ARCHS = ("cohere2", "exaone4", "olmo2", "phi3", "starcoder2")
_GRANITE_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Granite's."""
_COMMON_MOE_ARCHS = (
    "dots1",
    "ernie4_5-moe",
    "glm4moe",
    "granitemoe",
    "hunyuan-moe",
    "lfm2moe",
    "minimax-m2",
    "olmoe",
    "phimoe",
)
_MOE_ARCHS = (
    *delta_net_config.MOE_ARCHS,
    *mamba_config.MOE_ARCHS,
    "gpt-oss",
    "qwen3moe",
    "qwen2moe",
    *_COMMON_MOE_ARCHS,
)
_DENSE_WIDTH_MOE_ARCHS = ("granitemoe", "hunyuan-moe", "minimax-m2", "olmoe", "phimoe")
"""Architectures whose experts are as wide as intermediate_size says."""
PERMUTED_QK_MODEL_TYPES = ("arcee", "granite", "granitemoe", "granitemoehybrid", "llama", "mixtral", "smollm3")
"""The model types whose queries and keys are stored for rotations of neighbours; see `undone` in the loader."""
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}
"""By their number of layers: the models that scale attention by hidden_size / heads, which the format does not say."""
_NULLABLE_FIELDS = ("num_key_value_heads", "q_lora_rank")
"""Fields where null is not what it is to leave them out."""
EMBEDDING_TENSOR = "token_embd.weight"
_LM_HEAD_TENSOR = "output.weight"
_ROPE_FACTORS_TENSOR = "rope_freqs.weight"
_MAX_ROPE_FACTORS = 2**16


def config_json(header: GGUFHeader) -> dict[str, Any]:
    """The content of a config.json. Raises ModelError, naming the key that is wrong, or what is not served."""
    arch = header.get_string("general.architecture") or ""
    if arch not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise _key_error(header, "general.architecture", f"{arch[:40]!r} is not served; served: {known}")
    heads, hidden = (
        _uniform_integer(header, f"{arch}.attention.head_count"),
        header.get_integer(f"{arch}.embedding_length"),
    )
    even = hidden // heads if hidden and heads else 0
    head_dim = header.get_integer(f"{arch}.attention.key_length") or even or None
    _check_head_dims(header, arch, head_dim)
    config: dict[str, Any] = {
        "model_type": _model_type(header, arch),
        "vocab_size": _vocab_size(header),
        "hidden_size": hidden,
        "intermediate_size": _uniform_integer(
            header, f"{arch}.feed_forward_length", ignore_zeros=arch in mamba_config.MODEL_TYPES
        ),
        "num_hidden_layers": _num_layers(header, arch),
        "num_attention_heads": heads,
        "num_key_value_heads": _num_key_value_heads(header, arch),
        "head_dim": head_dim,
        "max_position_embeddings": header.get_integer(f"{arch}.context_length"),
        "rms_norm_eps": header.get_float(f"{arch}.attention.layer_norm_rms_epsilon")
        or header.get_float(f"{arch}.attention.layer_norm_epsilon"),
        "tie_word_embeddings": _LM_HEAD_TENSOR not in header.tensors,
        **_bias_fields(header),
        "dtype": _dtype(header),
        "quantization_config": _quantization_config(header),
        **_rope_parameters(header, arch),
        **_gemma_fields(header, arch, even),
        **_moe_fields(header, arch),
        **_family_fields(header, arch),
        **(
            deepseek_config.deepseek_fields(header, _model_type(header, arch))
            if arch == deepseek_config.DEEPSEEK2_ARCH
            else {}
        ),
        **(delta_net_config.delta_net_fields(header, arch) if arch in delta_net_config.MODEL_TYPES else {}),
        **(mamba_config.mamba_fields(header, arch) if arch in mamba_config.MODEL_TYPES else {}),
    }
    fields = {key: value for key, value in config.items() if value is not None or key in _NULLABLE_FIELDS}
    return fields | _sliding_window_fields(header, arch)


def _model_type(header: GGUFHeader, arch: str) -> str:
    if arch == deepseek_config.DEEPSEEK2_ARCH:
        return deepseek_config.deepseek_model_type(header)
    key = f"{arch}.expert_count"
    experts = header.get_integer(key)
    if experts and arch not in ("llama", *mamba_config.OPTIONAL_MOE_ARCHS, *_MOE_ARCHS):
        raise _key_error(header, key, f"{experts}, where models of this architecture have none")
    if not experts and arch in _MOE_ARCHS:
        raise _key_error(header, key, "missing, where models of this architecture have experts")
    if arch in mamba_config.MODEL_TYPES:
        return mamba_config.mamba_model_type(header, arch)
    return "mixtral" if experts and arch == "llama" else MODEL_TYPES[arch]


def generation_config_json(header: GGUFHeader) -> dict[str, Any]:
    """What a generation_config.json would say: what ends an answer, and how to sample. Raises ModelError."""
    ends = {"eos_token_id": eos_token_ids(header)} if tokenizer_vocab_size(header) else {}
    sampling: dict[str, float | None] = {name: header.get_float(key) for name, key in _SAMPLING_KEYS.items()}
    # The file has 32 bits of them, in which 0.2 is not quite 0.2.
    sampling = {name: float(f"{value:.6g}") for name, value in sampling.items() if value is not None}
    top_k = header.get_integer("general.sampling.top_k")
    return ends | sampling | ({} if top_k is None else {"top_k": top_k})


def bytes_by_weight_type(header: GGUFHeader) -> dict[str, int]:
    """Bytes of the matrices by their type, the most first."""
    bytes_by_type: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            bytes_by_type[tensor.type.name] = bytes_by_type.get(tensor.type.name, 0) + tensor.nbytes
    return dict(sorted(bytes_by_type.items(), key=lambda item: -item[1]))


def _check_head_dims(header: GGUFHeader, arch: str, head_dim: int | None) -> None:
    """Raise ModelError for what no family here computes: values of another size than keys, positions that are rotated
    into a part of a head."""
    if arch == deepseek_config.DEEPSEEK2_ARCH:
        return
    for key in ("attention.value_length", *(() if arch in _PARTIAL_ROTARY_ARCHS else ("rope.dimension_count",))):
        size = header.get_integer(f"{arch}.{key}")
        if size is not None and size != head_dim:
            raise _key_error(header, f"{arch}.{key}", f"{size}, where heads have {head_dim}, is not served")


def _uniform_integer(header: GGUFHeader, key: str, *, ignore_zeros: bool = False) -> int | None:
    """One number, or one per layer that are all the same; `ignore_zeros`: but for 0, of layers that have none."""
    if not isinstance(header.metadata.get(key), list):
        return header.get_integer(key)
    values = set(header.get_integers(key)) - ({0} if ignore_zeros else set())
    if len(values) != 1:
        raise _key_error(header, key, "layers of different sizes are not served")
    return values.pop()


def _num_key_value_heads(header: GGUFHeader, arch: str) -> int | None:
    """Layers without attention have none."""
    hybrid = arch.startswith("lfm2") or arch in delta_net_config.MODEL_TYPES or arch in mamba_config.MODEL_TYPES
    return _uniform_integer(header, f"{arch}.attention.head_count_kv", ignore_zeros=hybrid)


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get(EMBEDDING_TENSOR)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"model: {header.name} lacks the matrix {EMBEDDING_TENSOR}")
    return embedding.shape[0]


_MAX_FLOAT_FRACTION = 0.02
"""Of the numbers of all matrices: routers and convolutions are floats in files of few bits too."""


def _dtype(header: GGUFHeader) -> str:
    """Of most matrices; bfloat16 where they have few bits, for that is what models are made in."""
    most = next(iter(bytes_by_weight_type(header)), "")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _quantization_config(header: GGUFHeader) -> dict[str, Any] | None:
    """As quantization_config, for people and plans: which types, and the bits of a linear's number on average."""
    linears = [
        tensor
        for name, tensor in header.tensors.items()
        if len(tensor.shape) > 1 and name not in (EMBEDDING_TENSOR, _LM_HEAD_TENSOR)
    ]
    types = [name for name in bytes_by_weight_type(header) if name not in FLOAT_TYPES]
    if not types or not linears:
        return None
    bits = 8 * sum(tensor.nbytes for tensor in linears) / sum(tensor.num_elements for tensor in linears)
    quantization = {"quant_method": "gguf", "fmt": ", ".join(types), "bits": round(bits, 2), "group_size": -1}
    matrices = [each for each in header.tensors.values() if len(each.shape) > 1]
    floats = sum(each.num_elements for each in matrices if each.type.name in FLOAT_TYPES)
    few = floats < _MAX_FLOAT_FRACTION * sum(each.num_elements for each in matrices)
    return quantization | ({"activations": "float32"} if few else {})


def _rope_parameters(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """rope_parameters; Gemma 3's two kinds of layers have one each."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": header.get_float(f"{arch}.rope.freq_base") or 10000.0}
    kind, factor = header.get_string(f"{arch}.rope.scaling.type"), header.get_float(f"{arch}.rope.scaling.factor")
    if kind is None:  # old files scale positions without naming a kind
        factor = factor or header.get_float(f"{arch}.rope.scale_linear")
        kind = "none" if factor in (None, 1.0) else "linear"
    if kind not in ("none", "linear", "yarn"):
        raise _key_error(header, f"{arch}.rope.scaling.type", f"{kind[:40]!r} is not computed (none, linear, yarn)")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": factor or 1.0}
    if kind == "yarn":
        rope |= _yarn_parameters(header, arch)
    if arch in ("phi3", "phimoe") and (long := header.tensors.get("rope_factors_long.weight")) is not None:
        return {"rope_parameters": _longrope_parameters(header, rope, long, arch)}
    if (factors := header.tensors.get(_ROPE_FACTORS_TENSOR)) is not None:
        if rope["rope_type"] != "default":
            raise _key_error(
                header, f"{arch}.rope.scaling.type", f"{kind!r} beside {_ROPE_FACTORS_TENSOR} is not computed"
            )
        rope |= {"rope_type": "factors", "factors": _read_floats(header, _ROPE_FACTORS_TENSOR, factors)}
    if arch != "gemma3":
        return {
            "rope_parameters": deepseek_config.with_yarn_mscale(header, rope)
            if arch == deepseek_config.DEEPSEEK2_ARCH
            else rope
        }
    local = {"rope_type": "default", "rope_theta": header.get_float("gemma3.rope.freq_base_swa") or 10000.0}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _longrope_parameters(header: GGUFHeader, rope: dict[str, Any], long: GGUFTensor, arch: str) -> dict[str, Any]:
    """Phi-3's, whose factors are tensors."""
    name = "rope_factors_short.weight"
    if (short := header.tensors.get(name)) is None:
        raise ModelError(f"model: {header.name} lacks {name}")
    factors = {"long_factor": _read_floats(header, "rope_factors_long.weight", long)}
    factors |= {"short_factor": _read_floats(header, name, short)}
    old = header.get_integer(f"{arch}.rope.scaling.original_context_length")
    size = header.get_float(f"{arch}.rope.scaling.attn_factor")
    optional_fields = {"original_max_position_embeddings": old, "attention_factor": size}
    return (
        rope
        | factors
        | {"rope_type": "longrope"}
        | {key: value for key, value in optional_fields.items() if value is not None}
    )


def _yarn_parameters(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """What rope_parameters say of YaRN beside its factor."""
    scaling = f"{arch}.rope.scaling"
    for part in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        if (value := header.get_float(f"{scaling}.{part}")) not in (None, 1.0):
            raise _key_error(header, f"{scaling}.{part}", f"{value:g} is not computed (1)")
    positions = header.get_integer(f"{scaling}.original_context_length") or header.get_integer(f"{arch}.context_length")
    betas = {name: header.get_float(f"{scaling}.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    betas_in_file = {name: beta for name, beta in betas.items() if beta is not None}
    # The format does not say that gpt-oss' bounds are not rounded, the models' own config.json does.
    return {"original_max_position_embeddings": positions, "truncate": arch != "gpt-oss", **betas_in_file}


def _moe_fields(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """The fields that only families with mixtures of experts have."""
    if not (count := header.get_integer(f"{arch}.expert_count")):
        return {}
    fields: dict[str, Any] = {
        "num_local_experts": count,
        "num_experts_per_tok": header.get_integer(f"{arch}.expert_used_count"),
    }
    inner = header.get_integer(f"{arch}.expert_feed_forward_length")
    if arch == "qwen3moe":
        fields |= {"moe_intermediate_size": inner, "norm_topk_prob": True}
    elif arch in ("qwen2moe", *_COMMON_MOE_ARCHS):
        fields |= _common_moe_fields(header, arch, inner)
    elif arch == "gpt-oss":
        fields |= {"intermediate_size": inner, "sliding_window": header.get_integer("gpt-oss.attention.sliding_window")}
    return fields


def _num_layers(header: GGUFHeader, arch: str) -> int | None:
    """Without those that draft tokens."""
    layers, more = header.get_integer(f"{arch}.block_count"), header.get_integer(f"{arch}.nextn_predict_layers") or 0
    return None if layers is None else layers - more


def _common_moe_fields(header: GGUFHeader, arch: str, inner: int | None) -> dict[str, Any]:
    """What keys say alike of the families with experts. inner: an expert's width."""
    shared, norm = header.get_integer(f"{arch}.expert_shared_count"), header.get_bool(f"{arch}.expert_weights_norm")
    width = header.get_integer(f"{arch}.expert_shared_feed_forward_length")
    groups = header.get_integer(f"{arch}.expert_group_count") or None
    fields: dict[str, Any] = {
        "n_shared_experts": shared or 0,
        "norm_topk_prob": bool(norm),
        "routed_scaling_factor": header.get_float(f"{arch}.expert_weights_scale") or None,
        "n_group": groups,
        "topk_group": header.get_integer(f"{arch}.expert_group_used_count") or groups,
        "first_k_dense_replace": header.get_integer(f"{arch}.leading_dense_block_count") or 0,
        "num_nextn_predict_layers": header.get_integer(f"{arch}.nextn_predict_layers"),
        "use_qk_norm": arch == "glm4moe" and "blk.0.attn_q_norm.weight" in header.tensors,
        "lm_head_bias": "output.bias" in header.tensors,
    }
    fields |= {"intermediate_size": inner} if arch in _DENSE_WIDTH_MOE_ARCHS and inner else {}
    fields |= {} if arch in _DENSE_WIDTH_MOE_ARCHS else {"moe_intermediate_size": inner}
    match arch:
        case "granitemoe":
            fields |= {name: header.get_float(f"granitemoe.{key}") for name, key in _GRANITE_SCALES.items()}
            fields["shared_intermediate_size"] = width
        case "qwen2moe":
            fields["shared_expert_intermediate_size"] = width
        case "lfm2moe":
            fields["norm_topk_prob"] = True
    return fields


def _gemma_fields(header: GGUFHeader, arch: str, head_dim: int) -> dict[str, Any]:
    """The fields that only Gemma's second and third kind have. head_dim: hidden_size / heads."""
    if arch not in _LARGEST_GEMMA_LAYERS:
        return {}
    largest = header.get_integer(f"{arch}.block_count") == _LARGEST_GEMMA_LAYERS[arch]
    window = header.get_integer(f"{arch}.attention.sliding_window")
    fields: dict[str, Any] = {
        "query_pre_attn_scalar": head_dim
        if largest
        else header.get_integer(f"{arch}.attention.key_length") or head_dim,
        "sliding_window": window,
        "final_logit_softcapping": header.get_float(f"{arch}.final_logit_softcapping"),
    }
    if arch == "gemma2":
        fields["attn_logit_softcapping"] = header.get_float("gemma2.attn_logit_softcapping")
    elif not window:  # as llama.cpp reads it: all layers see everything
        fields["sliding_window_pattern"] = 1
    return fields


def _bias_fields(header: GGUFHeader) -> dict[str, bool]:
    """Which linears have biases, as the families' config.json say it."""
    keys = any(f"blk.0.attn_{name}.bias" in header.tensors for name in ("q", "qkv"))
    out, mlp = (f"blk.0.{name}.bias" in header.tensors for name in ("attn_output", "ffn_up"))
    biases = {"attention_bias": keys, "use_qkv_bias": keys, "attention_out_bias": out, "mlp_bias": mlp}
    return biases | {"use_bias": keys and out}


def _family_fields(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """The fields that only some other families have."""
    fields: dict[str, Any] = {}
    if arch in _PARTIAL_ROTARY_ARCHS:
        fields["rotary_dim"] = header.get_integer(f"{arch}.rope.dimension_count")
    match arch:
        case "granite" | "granitehybrid":
            fields = {name: header.get_float(f"{arch}.{key}") for name, key in _GRANITE_SCALES.items()}
        case "command-r" | "cohere2":
            fields["logit_scale"] = header.get_float(f"{arch}.logit_scale")
            fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
        case "gptneox":
            fields["use_parallel_residual"] = header.get_bool("gptneox.use_parallel_residual")
        case "lfm2" | "lfm2moe":
            fields = {
                "conv_L_cache": header.get_integer(f"{arch}.shortconv.l_cache"),
                "block_auto_adjust_ff_dim": False,
            }
            if isinstance(header.metadata.get(key := f"{arch}.attention.head_count_kv"), list):
                fields["layer_types"] = ["full_attention" if each else "conv" for each in header.get_integers(key)]
        case "stablelm":
            fields["qk_layernorm"] = "blk.0.attn_q_norm.weight" in header.tensors
            fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors
    return fields


def _sliding_window_fields(header: GGUFHeader, arch: str) -> dict[str, Any]:
    """Sliding windows of the families whose files may have none."""
    key = f"{arch}.attention.sliding_window"
    if arch not in _SLIDING_WINDOW_ARCHS:
        return {}
    if (window := header.get_integer(key) or None) is not None and arch == "olmo2":
        raise _key_error(header, key, f"{window}: OLMo 3 is served from safetensors alone")
    slides, kinds = header.metadata.get(f"{key}_pattern"), ("full_attention", "sliding_attention")
    types = {"layer_types": [kinds[bool(each)] for each in slides]} if isinstance(slides, list) else {}
    return {"sliding_window": window, **types}


def _read_floats(header: GGUFHeader, name: str, tensor: GGUFTensor) -> list[float]:
    """The numbers of a small float32 tensor."""
    if tensor.type.name != "F32" or tensor.num_elements > _MAX_ROPE_FACTORS:
        raise ModelError(f"model: {header.name}: {name}: expected up to {_MAX_ROPE_FACTORS} numbers of type F32")
    file = open_if_present(tensor.file)
    content = b"" if file is None else os.pread(file.fileno(), tensor.nbytes, tensor.offset)
    if file is not None:
        file.close()
    if len(content) != tensor.nbytes:
        raise ModelError(f"model: {header.name}: {name}: cannot be read")
    return list(struct.unpack(f"<{tensor.num_elements}f", content))


def _key_error(header: GGUFHeader, key: str, what: str) -> ModelError:
    return ModelError(f"model: {header.name}: {key}: {what}")
