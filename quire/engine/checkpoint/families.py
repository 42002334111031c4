"""The model families that Quire serves. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.checkpoint.adapted import class_not_served
from quire.engine.checkpoint.quantization import why_not

FAMILIES = {
    "apertus": "dense",
    "arcee": "dense",
    "bamba": "recurrent",
    "bloom": "classic",
    "cohere": "classic",
    "cohere2": "classic",
    "deepseek_v2": "latent",
    "deepseek_v3": "latent",
    "dots1": "sparse",
    "ernie4_5": "dense",
    "ernie4_5_moe": "sparse",
    "exaone4": "dense",
    "exaone_moe": "sparse",
    "falcon": "classic",
    "falcon_h1": "recurrent",
    "falcon_mamba": "recurrent",
    "flex_olmo": "sparse",
    "gemma": "dense",
    "gemma2": "dense",
    "gemma3_text": "dense",
    "gemma4_text": "gemma4",
    "glm": "dense",
    "glm4": "dense",
    "glm4_moe": "sparse",
    "glm4_moe_lite": "latent",
    "gpt2": "classic",
    "gpt_bigcode": "classic",
    "gpt_neox": "classic",
    "gpt_oss": "sparse",
    "gptj": "classic",
    "granite": "dense",
    "granite_swa": "dense",
    "granitemoe": "sparse",
    "granitemoe_swa": "sparse",
    "granitemoehybrid": "recurrent",
    "granitemoeshared": "sparse",
    "helium": "dense",
    "hunyuan_v1_dense": "dense",
    "hunyuan_v1_moe": "sparse",
    "jamba": "recurrent",
    "kimi_k2": "latent",
    "lfm2": "recurrent",
    "lfm2_moe": "sparse",
    "lfm3": "recurrent",
    "llama": "dense",
    "llama4_text": "sparse",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "mellum": "sparse",
    "minicpm3": "latent",
    "minimax_m2": "sparse",
    "ministral3": "dense",
    "mistral": "dense",
    "mixtral": "sparse",
    "mpt": "classic",
    "nemotron": "classic",
    "nemotron_h": "recurrent.nemotron_h",
    "olmo2": "dense",
    "olmo3": "dense",
    "olmoe": "sparse",
    "opt": "classic",
    "phi": "classic",
    "phi3": "dense",
    "phimoe": "sparse",
    "qwen2": "dense",
    "qwen2_5_vl_text": "dense",
    "qwen2_moe": "sparse",
    "qwen2_vl_text": "dense",
    "qwen3": "dense",
    "qwen3_5_moe_text": "sparse",
    "qwen3_5_text": "recurrent",
    "qwen3_moe": "sparse",
    "qwen3_next": "sparse",
    "qwen3_vl_moe_text": "sparse",
    "qwen3_vl_text": "dense",
    "seed_oss": "dense",
    "smollm3": "dense",
    "solar_open": "sparse",
    "stablelm": "classic",
    "starcoder2": "classic",
    "youtu": "latent",
    "zamba2": "recurrent.zamba2",
}
"""config.json's model_type to the module of engine/models that reads such a file: by a row of its TABLE, or by its
function `spec`."""
LATENT_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""What config.json calls the sizes of latent attention."""
WITH_EXPERTS = (
    *(kind for kind, module in FAMILIES.items() if module == "sparse"),
    "deepseek_v2",
    "deepseek_v3",
    "gemma4_text",
    "glm4_moe_lite",
    "granitemoehybrid",
    "jamba",
    "kimi_k2",
    "nemotron_h",
)
"""Families with mixtures of experts."""
DELTA_NETS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Families with gated delta nets in most layers."""
STATE_SPACES = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
"""Families with selective state spaces."""
SELECTIVE_SCANS = ("falcon_mamba", "jamba", "mamba")
"""Families with selective scans."""
STATES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*DELTA_NETS, *STATE_SPACES, *SELECTIVE_SCANS), ("linear_attention",)),
    "falcon_h1": ("hybrid",),
    "lfm2": ("conv",),
    "lfm2_moe": ("conv",),
    "lfm3": ("conv",),
    "zamba2": ("linear_attention", "hybrid"),
}
"""By family, what layer_types calls the layers that keep a state: in attention's place, hybrid ones beside it."""
WITHOUT_STATES = {"nemotron_h": ("mlp", "moe")}
"""By such a family, what layer_types calls the layers that are an MLP, or experts."""
_SHARED = {
    "hunyuan_v1_moe": "mlp.shared_mlp",
    "llama4_text": "feed_forward.shared_expert",
    "nemotron_h": "mixer.shared_experts",
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"), "mlp.shared_expert"),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), "shared_mlp"),
}
NARROW = ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")
"""In a layer whose experts read and give smaller vectors (moe_latent_size): what makes these of the layer's, and the
layer's of them."""
STACKED = (
    "gemma4_text",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "llama4_text",
    "qwen3_5_moe_text",
    "qwen3_vl_moe_text",
)
"""Families whose checkpoints have all experts of a layer in one tensor."""
ENCODERS = {
    "bert": "bert",
    "camembert": "roberta",
    "clip_text_model": "clip",
    "distilbert": "distilbert",
    "gte": "gte",
    "modernbert": "modernbert",
    "mpnet": "mpnet",
    "new": "gte",
    "nomic_bert": "nomic_bert",
    "roberta": "roberta",
    "siglip_text_model": "clip",
    "xlm-roberta": "roberta",
}
"""The model_type of models that only read, to the module of engine/encoders that makes such a model."""
PAIRED = ("clip_text_model", "siglip_text_model")
"""Those of them beside which an image has a vector too."""
WITH_IMAGES = {
    "clip": "clip_text_model",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "siglip": "siglip_text_model",
    "smolvlm": "llama",
}
"""Families with image input whose text part, in text_config, is served; and what that is where it does not say. Those
of engine/images/vision_config.py read images too."""
_LLAMA_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_PAIRED_SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT_SIZES: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    "clip_text_model": {
        **_PAIRED_SIZES,
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
    },
    "siglip_text_model": {**_PAIRED_SIZES, "vocab_size": 32000, "max_position_embeddings": 64},
    "llama": {**_LLAMA_SIZES, "vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {**_LLAMA_SIZES, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8},
}
"""What text_config leaves out, in files that say only what differs from transformers' defaults; by its model_type."""
AXES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("qwen2_5_vl_text", "qwen2_vl_text"), ()),
    **dict.fromkeys(("qwen3_vl_moe_text", "qwen3_vl_text"), (24, 20, 20)),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text"), (11, 11, 10)),
}
"""Those whose rotations tell rows and columns of an image apart. Not (): the frequencies of these take turns, and so
many are theirs where mrope_section does not say it."""
PHI = ("phi3", "phimoe")
"""Those whose LongRoPE is computed."""
ROPE_TYPES = ("default", "dynamic", "factors", "linear", "llama3", "longrope", "ntk", "proportional", "yarn")
"""The scalings of rotary positions that engine/layers/rope.py computes."""

_SLIDING = dict.fromkeys(("cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "mistral", "olmo3"), 4096) | {
    "dots1": 4096,
    "mellum": 1024,
    **dict.fromkeys(("gpt_oss", "granite_swa", "granitemoe_swa"), 128),
}
"""By family, the tokens of a sliding window where config.json does not say them."""
_FULL_EVERY = {"cohere2": 4, "exaone4": 4, "exaone_moe": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "olmo3": 4}
"""By family: one layer of so many has no window, where config.json does not say which."""


def wide_activations(text: Mapping[str, Any]) -> bool:
    """Whether nearly all matrices have few bits, whose kernels take activations of any type: then a CPU computes in
    float32 with keys and values of bfloat16, in the same memory. docs/quantization.md has what it gains and costs."""
    return (text.get("quantization_config") or {}).get("activations") == "float32"


def stored_dtype(text: Mapping[str, Any]) -> str:
    """The type of a checkpoint's numbers. Where config.json names none it is float32, but of weights in few bits
    bfloat16, which gpt-oss leaves unsaid."""
    return str(
        text.get("dtype") or text.get("torch_dtype") or ("bfloat16" if text.get("quantization_config") else "float32")
    )


def sparse_layers(text: Mapping[str, Any], layers: int) -> list[bool]:
    """Per layer, whether it has experts in the place of an MLP, where a config.json has experts at all."""
    if str(text.get("model_type")) == "nemotron_h":
        kinds = text.get("layer_types") or ()
        return [layer < len(kinds) and kinds[layer] == "moe" for layer in range(layers)]
    if kinds := text.get("mlp_layer_types"):
        return [layer < len(kinds) and kinds[layer] == "sparse" for layer in range(layers)]
    if (chosen := text.get("moe_layers")) is not None:
        return [layer in chosen for layer in range(layers)]
    every = int(text.get("decoder_sparse_step") or text.get("interleave_moe_layer_step") or 1)
    dense = {*(text.get("mlp_only_layers") or ()), *range(int(text.get("first_k_dense_replace") or 0))}
    end = text.get("moe_layer_end_index")
    last = layers - 1 if end in (None, -1) else int(end)
    return [(layer + 1) % every == 0 and layer not in dense and layer <= last for layer in range(layers)]


def _attends(kind: str) -> bool:
    """Whether a layer attends, by its entry in layer_types."""
    return kind == "hybrid" or ("attention" in kind and "linear" not in kind)


def shared_experts(text: Mapping[str, Any]) -> tuple[str, int]:
    """What the MLP beside a layer's experts is called there, and how wide it is; 0: there is none."""
    kind = str(text.get("model_type"))
    name, count = _SHARED.get(kind, "mlp.shared_experts"), int(text.get("n_shared_experts") or 0)
    each = text.get("moe_intermediate_size") or text.get("intermediate_size")
    if kind in ("hunyuan_v1_moe", "llama4_text"):
        return name, int(text.get("intermediate_size") or 0)
    given = text.get("shared_expert_intermediate_size") or text.get("shared_intermediate_size")
    return name, int(given or (count * each if isinstance(each, int) else 0))


def layer_windows(text: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """By layer that has attention, in the families that have windows: tokens that a token sees at most; None: all."""
    kind = str(text.get("model_type"))
    window = text.get("attention_chunk_size" if kind == "llama4_text" else "sliding_window", _SLIDING.get(kind))
    if not text.get("use_sliding_window", not kind.startswith(("qwen", "smollm"))) or not window:
        window = None
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if kinds:
        attend = [each for each in kinds if _attends(each)]
        return tuple(window if "sliding" in each or "chunked" in each else None for each in attend)
    every = text.get("sliding_window_pattern") or _FULL_EVERY.get(kind)
    if isinstance(every, str):
        return tuple(window if every[layer % len(every)] == "L" else None for layer in range(layers))
    if isinstance(every, int):
        return tuple(window if layer % every else None for layer in range(1, layers + 1))
    first = text.get("max_window_layers") if kind.startswith(("qwen", "smollm", "dots")) else 0
    first = layers if first is None else int(first)
    return tuple(window if layer >= first else None for layer in range(layers))


def has_file(raw: Mapping[str, Any]) -> bool:
    """Whether a file of ours serves such a model, rather than transformers' class. An encoder's config.json may be of a
    decoder."""
    kind, part = str(raw.get("model_type") or ""), raw.get("text_config")
    inner = str(part.get("model_type") or "") if isinstance(part, Mapping) else ""
    if kind in ENCODERS:
        return not raw.get("is_decoder")
    return kind in FAMILIES or (kind in WITH_IMAGES and (not inner or inner in FAMILIES or inner in ENCODERS))


def family_not_served(raw: Mapping[str, Any]) -> str | None:
    """Why Quire does not serve a model's family; None where a file of ours or transformers' class serves it."""
    if has_file(raw) or (reason := class_not_served(raw)) is None:
        return None
    kind, part = str(raw.get("model_type") or ""), raw.get("text_config")
    inner = str(part.get("model_type") or "") if isinstance(part, Mapping) else ""
    shown = f"{kind} models, whose text part is {inner}" if inner else f"{kind or 'such'} models"
    return f"Quire does not serve {shown}: transformers' class: {reason}"


def why_not_served(raw: Mapping[str, Any]) -> list[str]:
    """What in a config.json keeps Quire from serving such a model, in lines that say it to people; [] for nothing."""
    family = family_not_served(raw)
    found = [] if family is None else [family]
    if (reason := why_not(raw.get("quantization_config") or {})) is not None:
        found.append(reason)
    if not has_file(raw):
        return found
    rope = raw.get("rope_scaling") or raw.get("rope_parameters")
    parts = (rope, *rope.values()) if isinstance(rope, Mapping) else ()  # or one for each kind of layer
    kinds = {_unserved_rope(raw, part) for part in parts if isinstance(part, Mapping)}
    return found + [f"Quire does not compute the rope_type {each} yet" for each in sorted(kinds - {""})]


def _unserved_rope(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> str:
    """A rope_type that is not computed; "" where it is."""
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    of_phi = raw.get("model_type") in PHI
    served = {"mrope": True, "longrope": of_phi, "su": of_phi}.get(kind, kind in ROPE_TYPES)
    return "" if served else kind
