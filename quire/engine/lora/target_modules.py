from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import EMBED_TOKENS, LM_HEAD, DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.checkpoint.config_reader import find_weight_names, normalize_config_fields
from quire.engine.checkpoint.family_spec import build_decoder_spec, read_decoder_spec
from quire.engine.common.errors import ConfigError
from quire.engine.families.base.model_config import ModelConfig

ModuleShapes = Mapping[str, tuple[int, int]]
"""(in_features, out_features) by name."""


def adaptable_modules(model: ModelConfig) -> ModuleShapes:
    """Returns the embedding, the LM head, and all linears except those of experts. The result is empty for the
    transformers backend, because only its engine knows the modules.
    """
    if model.transformers_config is not None:
        return {}
    shapes: dict[str, tuple[int, int]] = {}
    for name, (in_features, out_features) in target_linears(model).items():
        checkpoint_name = find_weight_names(model.model_type).module_in_checkpoint(name)
        shapes[checkpoint_name] = (
            in_features,
            out_features + (shapes[checkpoint_name][1] if checkpoint_name in shapes else 0),
        )
    return shapes


def target_linears(model: ModelConfig) -> ModuleShapes:
    return build_decoder_spec(model).adaptable_linears()


def modules_of_config(raw: Mapping[str, Any]) -> ModuleShapes:
    """For an unknown architecture, assumes attention and a gated MLP. Raises ModelError, or ConfigError if a size is
    missing.
    """
    text = normalize_config_fields(raw.get("text_config") or raw)
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = [text.get(name) for name in names]
    if missing := [name for name, size in zip(names, sizes, strict=True) if not isinstance(size, int) or size < 1]:
        raise ConfigError(f"max_loras: config.json does not say {missing[0]}", param="max_loras")
    if (spec := read_decoder_spec(raw)) is not None:
        return spec.adaptable_linears()
    layers, hidden, inner, heads, vocab = (int(size or 0) for size in sizes)
    dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    norm = NormSpec(eps=1e-6)
    attention = AttentionLayerSpec(heads, kv_heads, dim, scale=1.0, rope=None, norm=norm)
    layer = (attention, MLPSpec(inner, norm))
    return DecoderSpec(vocab, hidden, (layer,) * layers, norm, tie_embeddings=False).adaptable_linears()


def num_adapter_weights(modules: ModuleShapes, rank: int, *, head: bool = False) -> int:
    """`head`: include the LM head, for which slots on GPUs reserve memory."""
    left_out = (EMBED_TOKENS,) if head else (EMBED_TOKENS, LM_HEAD)
    return rank * sum(sum(shape) for name, shape in modules.items() if name not in left_out)


def effective_max_cpu_loras(max_loras: int, max_cpu_loras: int | None) -> int:
    return max(max_cpu_loras or 4 * max_loras, max_loras)
