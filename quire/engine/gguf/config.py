"""What the header of a GGUF file says of its model, as a config.json would: families, sizes, rotary positions."""

from __future__ import annotations

import os
import struct
from typing import Any

from quire.engine.errors import ModelError
from quire.engine.folder import open_file
from quire.engine.gguf import delta_nets, latents, state_spaces
from quire.engine.gguf.header import Header, StoredTensor
from quire.engine.gguf.tokenizer import end_tokens, vocabulary_size
from quire.engine.gguf.types import FLOATS

FAMILIES = {
    "arcee": "arcee",
    "cohere2": "cohere2",
    **delta_nets.FAMILIES,
    "command-r": "cohere",
    latents.ARCH: "deepseek_v2",
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
    **state_spaces.FAMILIES,
}
"""general.architecture to config.json's model_type. Mixtral's files call themselves llama, OLMo 3's olmo2."""
_PARTLY_ROTATED = (*delta_nets.FAMILIES, "glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi3", "stablelm")
"""Architectures that rotate a part of each head."""
_MAY_SLIDE = ("cohere2", "exaone4", "olmo2", "phi3", "starcoder2")
_SCALES = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
"""Granite's."""
_SPARSE = ("dots1", "ernie4_5-moe", "glm4moe", "granitemoe", "hunyuan-moe", "lfm2moe", "minimax-m2", "olmoe", "phimoe")
_WITH_EXPERTS = (*delta_nets.WITH_EXPERTS, *state_spaces.WITH_EXPERTS, "gpt-oss", "qwen3moe", "qwen2moe", *_SPARSE)
_OF_DENSE_WIDTH = ("granitemoe", "hunyuan-moe", "minimax-m2", "olmoe", "phimoe")
"""Architectures whose experts are as wide as intermediate_size says."""
PERMUTED = ("arcee", "granite", "granitemoe", "granitemoehybrid", "llama", "mixtral", "smollm3")
"""The model types whose queries and keys are stored for rotations of neighbours; see `undone` in the loader."""
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""By their number of layers: the models that scale attention by hidden_size / heads, which the format does not say."""
_NULL = ("num_key_value_heads", "q_lora_rank")
"""Fields where null is not what it is to leave them out."""
EMBEDDING, _HEAD, _FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_MOST_FACTORS = 2**16


def config_json(header: Header) -> dict[str, Any]:
    """The content of a config.json. Raises ModelError, naming the key that is wrong, or what is not served."""
    arch = header.text("general.architecture") or ""
    if arch not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise _wrong(header, "general.architecture", f"{arch[:40]!r} is not served; served: {known}")
    heads, hidden = _uniform(header, f"{arch}.attention.head_count"), header.integer(f"{arch}.embedding_length")
    even = hidden // heads if hidden and heads else 0
    head_dim = header.integer(f"{arch}.attention.key_length") or even or None
    _check_heads(header, arch, head_dim)
    config: dict[str, Any] = {
        "model_type": _family(header, arch),
        "vocab_size": _vocabulary(header),
        "hidden_size": hidden,
        "intermediate_size": _uniform(header, f"{arch}.feed_forward_length", some=arch in state_spaces.FAMILIES),
        "num_hidden_layers": _layers(header, arch),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(header, arch),
        "head_dim": head_dim,
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        "rms_norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon")
        or header.number(f"{arch}.attention.layer_norm_epsilon"),
        "tie_word_embeddings": _HEAD not in header.tensors,
        **_biases(header),
        "dtype": _dtype(header),
        "quantization_config": _quantization(header),
        **_ropes(header, arch),
        **_of_gemma(header, arch, even),
        **_of_experts(header, arch),
        **_of_others(header, arch),
        **(latents.fields(header, _family(header, arch)) if arch == latents.ARCH else {}),
        **(delta_nets.fields(header, arch) if arch in delta_nets.FAMILIES else {}),
        **(state_spaces.fields(header, arch) if arch in state_spaces.FAMILIES else {}),
    }
    kept = {key: value for key, value in config.items() if value is not None or key in _NULL}
    return kept | _windows(header, arch)


def _family(header: Header, arch: str) -> str:
    if arch == latents.ARCH:
        return latents.family(header)
    key = f"{arch}.expert_count"
    experts = header.integer(key)
    if experts and arch not in ("llama", *state_spaces.MAY_HAVE_EXPERTS, *_WITH_EXPERTS):
        raise _wrong(header, key, f"{experts}, where models of this architecture have none")
    if not experts and arch in _WITH_EXPERTS:
        raise _wrong(header, key, "missing, where models of this architecture have experts")
    if arch in state_spaces.FAMILIES:
        return state_spaces.family(header, arch)
    return "mixtral" if experts and arch == "llama" else FAMILIES[arch]


def generation_config(header: Header) -> dict[str, Any]:
    """What a generation_config.json would say: what ends an answer, and how to sample. Raises ModelError."""
    ends = {"eos_token_id": end_tokens(header)} if vocabulary_size(header) else {}
    given: dict[str, float | None] = {name: header.number(key) for name, key in _SAMPLING.items()}
    # The file has 32 bits of them, in which 0.2 is not quite 0.2.
    given = {name: float(f"{value:.6g}") for name, value in given.items() if value is not None}
    top_k = header.integer("general.sampling.top_k")
    return ends | given | ({} if top_k is None else {"top_k": top_k})


def weight_types(header: Header) -> dict[str, int]:
    """Bytes of the matrices by their type, the most first."""
    found: dict[str, int] = {}
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            found[tensor.type.name] = found.get(tensor.type.name, 0) + tensor.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _check_heads(header: Header, arch: str, head_dim: int | None) -> None:
    """Raise ModelError for what no family here computes: values of another size than keys, positions that are rotated
    into a part of a head."""
    if arch == latents.ARCH:
        return
    for key in ("attention.value_length", *(() if arch in _PARTLY_ROTATED else ("rope.dimension_count",))):
        size = header.integer(f"{arch}.{key}")
        if size is not None and size != head_dim:
            raise _wrong(header, f"{arch}.{key}", f"{size}, where heads have {head_dim}, is not served")


def _uniform(header: Header, key: str, *, some: bool = False) -> int | None:
    """One number, or one per layer that are all the same; `some`: but for 0, of layers that have none."""
    if not isinstance(header.metadata.get(key), list):
        return header.integer(key)
    values = set(header.integers(key)) - ({0} if some else set())
    if len(values) != 1:
        raise _wrong(header, key, "layers of different sizes are not served")
    return values.pop()


def _key_value_heads(header: Header, arch: str) -> int | None:
    """Layers without attention have none."""
    hybrid = arch.startswith("lfm2") or arch in delta_nets.FAMILIES or arch in state_spaces.FAMILIES
    return _uniform(header, f"{arch}.attention.head_count_kv", some=hybrid)


def _vocabulary(header: Header) -> int:
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"model: {header.name} lacks the matrix {EMBEDDING}")
    return embedding.shape[0]


_MOST_FLOATS = 0.02
"""Of the numbers of all matrices: routers and convolutions are floats in files of few bits too."""


def _dtype(header: Header) -> str:
    """Of most matrices; bfloat16 where they have few bits, for that is what models are made in."""
    most = next(iter(weight_types(header)), "")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _quantization(header: Header) -> dict[str, Any] | None:
    """As quantization_config, for people and plans: which types, and the bits of a linear's number on average."""
    linears = [
        tensor for name, tensor in header.tensors.items() if len(tensor.shape) > 1 and name not in (EMBEDDING, _HEAD)
    ]
    types = [name for name in weight_types(header) if name not in FLOATS]
    if not types or not linears:
        return None
    bits = 8 * sum(tensor.nbytes for tensor in linears) / sum(tensor.numbers for tensor in linears)
    said = {"quant_method": "gguf", "fmt": ", ".join(types), "bits": round(bits, 2), "group_size": -1}
    matrices = [each for each in header.tensors.values() if len(each.shape) > 1]
    floats = sum(each.numbers for each in matrices if each.type.name in FLOATS)
    few = floats < _MOST_FLOATS * sum(each.numbers for each in matrices)
    return said | ({"activations": "float32"} if few else {})


def _ropes(header: Header, arch: str) -> dict[str, Any]:
    """rope_parameters; Gemma 3's two kinds of layers have one each."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": header.number(f"{arch}.rope.freq_base") or 10000.0}
    kind, factor = header.text(f"{arch}.rope.scaling.type"), header.number(f"{arch}.rope.scaling.factor")
    if kind is None:  # old files scale positions without naming a kind
        factor = factor or header.number(f"{arch}.rope.scale_linear")
        kind = "none" if factor in (None, 1.0) else "linear"
    if kind not in ("none", "linear", "yarn"):
        raise _wrong(header, f"{arch}.rope.scaling.type", f"{kind[:40]!r} is not computed (none, linear, yarn)")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": factor or 1.0}
    if kind == "yarn":
        rope |= _yarn(header, arch)
    if arch in ("phi3", "phimoe") and (long := header.tensors.get("rope_factors_long.weight")) is not None:
        return {"rope_parameters": _longrope(header, rope, long, arch)}
    if (factors := header.tensors.get(_FACTORS)) is not None:
        if rope["rope_type"] != "default":
            raise _wrong(header, f"{arch}.rope.scaling.type", f"{kind!r} beside {_FACTORS} is not computed")
        rope |= {"rope_type": "factors", "factors": _numbers(header, _FACTORS, factors)}
    if arch != "gemma3":
        return {"rope_parameters": latents.yarn(header, rope) if arch == latents.ARCH else rope}
    local = {"rope_type": "default", "rope_theta": header.number("gemma3.rope.freq_base_swa") or 10000.0}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _longrope(header: Header, rope: dict[str, Any], long: StoredTensor, arch: str) -> dict[str, Any]:
    """Phi-3's, whose factors are tensors."""
    name = "rope_factors_short.weight"
    if (short := header.tensors.get(name)) is None:
        raise ModelError(f"model: {header.name} lacks {name}")
    factors = {"long_factor": _numbers(header, "rope_factors_long.weight", long)}
    factors |= {"short_factor": _numbers(header, name, short)}
    old = header.integer(f"{arch}.rope.scaling.original_context_length")
    size = header.number(f"{arch}.rope.scaling.attn_factor")
    given = {"original_max_position_embeddings": old, "attention_factor": size}
    return (
        rope | factors | {"rope_type": "longrope"} | {key: value for key, value in given.items() if value is not None}
    )


def _yarn(header: Header, arch: str) -> dict[str, Any]:
    """What rope_parameters say of YaRN beside its factor."""
    scaling = f"{arch}.rope.scaling"
    for part in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        if (value := header.number(f"{scaling}.{part}")) not in (None, 1.0):
            raise _wrong(header, f"{scaling}.{part}", f"{value:g} is not computed (1)")
    positions = header.integer(f"{scaling}.original_context_length") or header.integer(f"{arch}.context_length")
    betas = {name: header.number(f"{scaling}.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    given = {name: beta for name, beta in betas.items() if beta is not None}
    # The format does not say that gpt-oss' bounds are not rounded, the models' own config.json does.
    return {"original_max_position_embeddings": positions, "truncate": arch != "gpt-oss", **given}


def _of_experts(header: Header, arch: str) -> dict[str, Any]:
    """The fields that only families with mixtures of experts have."""
    if not (count := header.integer(f"{arch}.expert_count")):
        return {}
    fields: dict[str, Any] = {
        "num_local_experts": count,
        "num_experts_per_tok": header.integer(f"{arch}.expert_used_count"),
    }
    inner = header.integer(f"{arch}.expert_feed_forward_length")
    if arch == "qwen3moe":
        fields |= {"moe_intermediate_size": inner, "norm_topk_prob": True}
    elif arch in ("qwen2moe", *_SPARSE):
        fields |= _of_sparse(header, arch, inner)
    elif arch == "gpt-oss":
        fields |= {"intermediate_size": inner, "sliding_window": header.integer("gpt-oss.attention.sliding_window")}
    return fields


def _layers(header: Header, arch: str) -> int | None:
    """Without those that draft tokens."""
    layers, more = header.integer(f"{arch}.block_count"), header.integer(f"{arch}.nextn_predict_layers") or 0
    return None if layers is None else layers - more


def _of_sparse(header: Header, arch: str, inner: int | None) -> dict[str, Any]:
    """What keys say alike of the families with experts. inner: an expert's width."""
    shared, norm = header.integer(f"{arch}.expert_shared_count"), header.flag(f"{arch}.expert_weights_norm")
    width = header.integer(f"{arch}.expert_shared_feed_forward_length")
    groups = header.integer(f"{arch}.expert_group_count") or None
    fields: dict[str, Any] = {
        "n_shared_experts": shared or 0,
        "norm_topk_prob": bool(norm),
        "routed_scaling_factor": header.number(f"{arch}.expert_weights_scale") or None,
        "n_group": groups,
        "topk_group": header.integer(f"{arch}.expert_group_used_count") or groups,
        "first_k_dense_replace": header.integer(f"{arch}.leading_dense_block_count") or 0,
        "num_nextn_predict_layers": header.integer(f"{arch}.nextn_predict_layers"),
        "use_qk_norm": arch == "glm4moe" and "blk.0.attn_q_norm.weight" in header.tensors,
        "lm_head_bias": "output.bias" in header.tensors,
    }
    fields |= {"intermediate_size": inner} if arch in _OF_DENSE_WIDTH and inner else {}
    fields |= {} if arch in _OF_DENSE_WIDTH else {"moe_intermediate_size": inner}
    match arch:
        case "granitemoe":
            fields |= {name: header.number(f"granitemoe.{key}") for name, key in _SCALES.items()}
            fields["shared_intermediate_size"] = width
        case "qwen2moe":
            fields["shared_expert_intermediate_size"] = width
        case "lfm2moe":
            fields["norm_topk_prob"] = True
    return fields


def _of_gemma(header: Header, arch: str, head_dim: int) -> dict[str, Any]:
    """The fields that only Gemma's second and third kind have. head_dim: hidden_size / heads."""
    if arch not in _LARGEST_GEMMA:
        return {}
    largest = header.integer(f"{arch}.block_count") == _LARGEST_GEMMA[arch]
    window = header.integer(f"{arch}.attention.sliding_window")
    fields: dict[str, Any] = {
        "query_pre_attn_scalar": head_dim if largest else header.integer(f"{arch}.attention.key_length") or head_dim,
        "sliding_window": window,
        "final_logit_softcapping": header.number(f"{arch}.final_logit_softcapping"),
    }
    if arch == "gemma2":
        fields["attn_logit_softcapping"] = header.number("gemma2.attn_logit_softcapping")
    elif not window:  # as llama.cpp reads it: all layers see everything
        fields["sliding_window_pattern"] = 1
    return fields


def _biases(header: Header) -> dict[str, bool]:
    """Which linears have biases, as the families' config.json say it."""
    keys = any(f"blk.0.attn_{name}.bias" in header.tensors for name in ("q", "qkv"))
    out, mlp = (f"blk.0.{name}.bias" in header.tensors for name in ("attn_output", "ffn_up"))
    whole = {"attention_bias": keys, "use_qkv_bias": keys, "attention_out_bias": out, "mlp_bias": mlp}
    return whole | {"use_bias": keys and out}


def _of_others(header: Header, arch: str) -> dict[str, Any]:
    """The fields that only some other families have."""
    fields: dict[str, Any] = {}
    if arch in _PARTLY_ROTATED:
        fields["rotary_dim"] = header.integer(f"{arch}.rope.dimension_count")
    match arch:
        case "granite" | "granitehybrid":
            fields = {name: header.number(f"{arch}.{key}") for name, key in _SCALES.items()}
        case "command-r" | "cohere2":
            fields["logit_scale"] = header.number(f"{arch}.logit_scale")
            fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
        case "gptneox":
            fields["use_parallel_residual"] = header.flag("gptneox.use_parallel_residual")
        case "lfm2" | "lfm2moe":
            fields = {"conv_L_cache": header.integer(f"{arch}.shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
            if isinstance(header.metadata.get(key := f"{arch}.attention.head_count_kv"), list):
                fields["layer_types"] = ["full_attention" if each else "conv" for each in header.integers(key)]
        case "stablelm":
            fields["qk_layernorm"] = "blk.0.attn_q_norm.weight" in header.tensors
            fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors
    return fields


def _windows(header: Header, arch: str) -> dict[str, Any]:
    """Sliding windows of the families whose files may have none."""
    key = f"{arch}.attention.sliding_window"
    if arch not in _MAY_SLIDE:
        return {}
    if (window := header.integer(key) or None) is not None and arch == "olmo2":
        raise _wrong(header, key, f"{window}: OLMo 3 is served from safetensors alone")
    slides, kinds = header.metadata.get(f"{key}_pattern"), ("full_attention", "sliding_attention")
    types = {"layer_types": [kinds[bool(each)] for each in slides]} if isinstance(slides, list) else {}
    return {"sliding_window": window, **types}


def _numbers(header: Header, name: str, tensor: StoredTensor) -> list[float]:
    """The numbers of a small float32 tensor."""
    if tensor.type.name != "F32" or tensor.numbers > _MOST_FACTORS:
        raise ModelError(f"model: {header.name}: {name}: expected up to {_MOST_FACTORS} numbers of type F32")
    file = open_file(tensor.file)
    content = b"" if file is None else os.pread(file.fileno(), tensor.nbytes, tensor.offset)
    if file is not None:
        file.close()
    if len(content) != tensor.nbytes:
        raise ModelError(f"model: {header.name}: {name}: cannot be read")
    return list(struct.unpack(f"<{tensor.numbers}f", content))


def _wrong(header: Header, key: str, what: str) -> ModelError:
    return ModelError(f"model: {header.name}: {key}: {what}")
