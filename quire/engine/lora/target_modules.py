"""The modules of a model that can have adapters, by their names in a checkpoint, and the memory that adapters take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.decoder import EMBED_TOKENS, LM_HEAD
from quire.engine.architecture.kv_cache_spec import MatrixState
from quire.engine.checkpoint.alike.fields import named_alike
from quire.engine.checkpoint.families import (
    DELTA_NETS,
    GATED,
    HEAD_GATED,
    LATENT,
    LATENT_SIZES,
    NARROW,
    SELECTIVE_SCANS,
    STATE_SPACES,
    WITH_EXPERTS,
    WITHOUT_GATES,
    layer_parts,
    shared_experts,
)
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.layouts import layout_of, stored_module
from quire.engine.checkpoint.parts import shared_blocks, unequal
from quire.engine.checkpoint.parts.states import state_of
from quire.engine.errors import ConfigError

ModuleShapes = Mapping[str, tuple[int, int]]
"""(in_features, out_features) by name."""


def adaptable_modules(model: ModelConfig) -> ModuleShapes:
    """The embedding, the head, and all linears of the layers except those of experts, with their names in the model's
    checkpoint. Several linears may be one module there. For a model that transformers' class computes, the result is
    empty: only its engine knows the modules."""
    if model.given is not None:
        return {}
    shapes: dict[str, tuple[int, int]] = {}
    for name, (in_features, out_features) in target_linears(model).items():
        checkpoint_name = stored_module(layout_of(model.model_type), name)
        shapes[checkpoint_name] = (
            in_features,
            out_features + (shapes[checkpoint_name][1] if checkpoint_name in shapes else 0),
        )
    return shapes


def target_linears(model: ModelConfig) -> ModuleShapes:
    """The same with the model's own names."""
    sizes = (model.num_layers, model.hidden_size, model.intermediate_size, model.num_heads, model.vocab_size)
    return _model_linears(model.raw, model.model_type, sizes, model.num_kv_heads, model.head_dim)


def modules_of_config(raw: Mapping[str, Any]) -> ModuleShapes:
    """The same for a config.json alone. The model need not be served. Raises ConfigError if a size is missing."""
    raw = named_alike(raw.get("text_config") or raw)
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = [raw.get(name) for name in names]
    if missing := [name for name, size in zip(names, sizes, strict=True) if not isinstance(size, int) or size < 1]:
        raise ConfigError(f"max_loras: config.json does not say {missing[0]}", param="max_loras")
    layers, hidden, inner, heads, vocab = (int(size or 0) for size in sizes)
    dim, kv_heads = int(raw.get("head_dim") or hidden // heads), int(raw.get("num_key_value_heads") or heads)
    return _model_linears(raw, str(raw.get("model_type")), (layers, hidden, inner, heads, vocab), kv_heads, dim)


def _model_linears(
    raw: Mapping[str, Any], kind: str, sizes: tuple[int, int, int, int, int], kv_heads: int, dim: int
) -> ModuleShapes:
    """The modules of a model. `sizes`: layers, hidden size, width of MLPs, heads, vocabulary."""
    layers, hidden, inner, heads, vocab = sizes
    if kind in unequal.KINDS:
        return unequal.unequal_modules(raw, hidden) | _embedding_and_head(hidden, vocab)
    if kind in shared_blocks.KINDS:
        return _shared_block_model_linears(raw, hidden) | _embedding_and_head(hidden, vocab)
    attention = _attention_linears(raw, hidden, heads, kv_heads, dim)
    with_state, shared = _state_linears(raw, hidden), _shared_expert_linears(raw, hidden)
    mlp = _mlp_linears("mlp", hidden, int(raw.get("intermediate_size_mlp") or inner))
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index, parts in enumerate(layer_parts(raw, layers))
        for is_present, modules in zip(parts, (attention, with_state, mlp, shared), strict=True)
        if is_present
        for name, shape in modules.items()
        if kind not in WITHOUT_GATES or not name.endswith(("mlp.gate_proj", "shared_experts.gate_proj"))
    }
    return shapes | _embedding_and_head(hidden, vocab)


def _shared_expert_linears(raw: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, int]]:
    """The linears of the MLP beside a layer's experts, and of those around smaller experts, by their names."""
    name, width = shared_experts(raw)
    size = int(raw.get("moe_latent_size") or 0)
    projections = dict(zip(NARROW, ((hidden, size), (size, hidden)), strict=True)) if size else {}
    return projections | (
        _mlp_linears(name, hidden, width) if str(raw.get("model_type")) in WITH_EXPERTS and width else {}
    )


def _mlp_linears(name: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    shapes = {f"{name}.{each}_proj": (hidden, inner) for each in ("gate", "up")}
    return shapes | {f"{name}.down_proj": (inner, hidden)}


def _attention_linears(raw: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, dim: int) -> ModuleShapes:
    """The linears of a layer's attention. The one that expands latents to keys and values is left out, because the
    engine replaces it by others."""
    kind = raw.get("model_type")
    if kind not in LATENT:
        queries, keys = heads * dim, kv_heads * dim
        shapes = {"q": (hidden, queries), "k": (hidden, keys), "v": (hidden, keys), "o": (queries, hidden)}
        shapes |= {"gate": (hidden, queries)} if kind in GATED else {}
        shapes |= {"gate": (hidden, heads)} if kind in HEAD_GATED and raw.get("use_attention_gate") is not False else {}
        return {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    latent_dim, rope_dim, nope_dim, value_dim = (int(raw.get(name) or 0) for name in LATENT_SIZES)
    q_rank, queries = raw.get("q_lora_rank"), heads * (nope_dim + rope_dim)
    shapes = {"q_a_proj": (hidden, q_rank), "q_b_proj": (q_rank, queries)} if q_rank else {"q_proj": (hidden, queries)}
    shapes |= {"kv_a_proj_with_mqa": (hidden, latent_dim + rope_dim), "o_proj": (heads * value_dim, hidden)}
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _state_linears(raw: Mapping[str, Any], hidden: int) -> ModuleShapes:
    """The linears of the part that keeps a state, by their names in a layer."""
    kind, state = str(raw.get("model_type")), state_of(raw, hidden)
    if not isinstance(state, MatrixState):
        return {f"conv.{name}_proj": (hidden, hidden) for name in ("b", "c", "x", "out")}
    heads, values = state.heads, state.heads * state.value
    if kind in SELECTIVE_SCANS:
        rank = int(raw.get("mamba_dt_rank") or 1)
        shapes = {f"in_proj_{name}": (hidden, values) for name in "xz"} | {"x_proj_dt": (values, rank)}
        shapes |= {f"x_proj_{name}": (values, state.key) for name in "bc"} | {"dt_proj": (rank, values)}
        return {f"mamba.{name}": shape for name, shape in (shapes | {"out_proj": (values, hidden)}).items()}
    keys, prefix = (state.channels - values) // 2, "mamba" if kind in STATE_SPACES else "linear_attn"
    out_features = {"z": values, "x": values, "b": keys, "c": keys, "dt": heads}
    if kind in DELTA_NETS:
        out_features = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    shapes = {f"{prefix}.in_proj_{name}": (hidden, size) for name, size in out_features.items()}
    return shapes | {f"{prefix}.out_proj": (values, hidden)}


def _shared_block_model_linears(raw: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, int]]:
    """The modules of a model whose layers share blocks. Each use of a block can have its own adapters."""
    uses = {use.layer for use in shared_blocks.uses_of(raw)}
    state_linears, block_linears = _state_linears(raw, hidden), shared_blocks.use_modules(raw, hidden)
    layer_linears = block_linears | {f"mamba_decoder.{name}": shape for name, shape in state_linears.items()}
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(len(raw.get("layer_types") or ()))
        for name, shape in (layer_linears if layer in uses else state_linears).items()
    }


def _embedding_and_head(hidden: int, vocab: int) -> dict[str, tuple[int, int]]:
    return {EMBED_TOKENS: (vocab, hidden), LM_HEAD: (hidden, vocab)}


def num_adapter_weights(modules: ModuleShapes, rank: int, *, head: bool = False) -> int:
    """How many numbers an adapter of this rank has on all linears of the layers, as most do. `head`: include the
    head, for which each slot of a GPU has room."""
    left_out = (EMBED_TOKENS,) if head else (EMBED_TOKENS, LM_HEAD)
    return rank * sum(sum(shape) for name, shape in modules.items() if name not in left_out)


def effective_max_cpu_loras(max_loras: int, max_cpu_loras: int | None) -> int:
    """How many adapters stay in the host's memory, including those in slots."""
    return max(max_cpu_loras or 4 * max_loras, max_loras)
