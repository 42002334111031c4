"""Zamba 2 (Zyphra, 2024): state spaces in all layers, and in some of them, before that, one of a few blocks of
attention and MLP whose weights these layers share."""

from dataclasses import replace

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.parts.shared_blocks import MOST_USES, Use, uses_of
from quire.engine.errors import ModelError
from quire.engine.families.activations import hidden_activation
from quire.engine.families.recurrent.mamba2_fields import mamba2_spec
from quire.kernels.parameters.activation import GELU, Activation

_GATE_ACTIVATIONS: dict[str, Activation] = {
    each.kind: each for each in (GELU, Activation("gelu_tanh"), Activation("relu"), Activation("relu2"))
}


def spec(config: ModelConfig) -> DecoderSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    least = raw.get("time_step_min")
    limits = (0.001 if least is None else least, float("inf"))
    space = mamba2_spec(config, norm, dt_limits=limits, result_eps=1e-5, conv_bias=True)
    uses = uses_of(raw)
    if not config.tie_embeddings:
        raise ModelError("model: config.json: tie_word_embeddings: where it is false, transformers shares no blocks")
    if len(uses) > MOST_USES:
        raise ModelError(f"model: config.json: {len(uses)} layers share blocks, more than {MOST_USES}")
    blocks = {use.layer: _shared_transformer_spec(config, use, number) for number, use in enumerate(uses)}
    mixer_after_shared = replace(space, joins_input_only=True, parent_module="mamba_decoder")
    layers = tuple(
        (blocks[each], mixer_after_shared) if each in blocks else (space,) for each in range(config.num_layers)
    )
    shape = (config.vocab_size, config.hidden_size, layers, norm)
    return DecoderSpec(*shape, tie_embeddings=config.tie_embeddings, reads_embeddings=bool(blocks))


def _shared_transformer_spec(config: ModelConfig, use: Use, number: int) -> SharedTransformerSpec:
    raw, norm = config.raw, NormSpec(config.norm_eps)
    if (activation := _GATE_ACTIVATIONS.get(hidden_activation(config) or "gelu")) is None:
        raise ModelError(f"model: hidden_act {raw.get('hidden_act')!r} is not supported in blocks that layers share")
    attention = AttentionLayerSpec(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=(config.head_dim / 2) ** -0.5,
        rope=config.rope if raw.get("use_mem_rope") else None,
        norm=norm,
        input_norm=False,
        output_norm=True,
        input_size=2 * config.hidden_size,
    )
    return SharedTransformerSpec(
        attention,
        intermediate_size=config.intermediate_size,
        bias=bool(raw.get("mamba_proj_bias")),
        activation=activation,
        norm=norm,
        weights_layer=use.home,
        use_index=number,
        adapter_rank=raw.get("adapter_rank") or 128,
        adapts_attention=bool(raw.get("use_shared_attention_adapter")),
    )
