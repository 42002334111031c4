"""Falcon (Almazrouei et al., 2023): attention and the MLP side by side, on one LayerNorm or on two; some models have
ALiBi instead of rotations."""

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    base = plain_spec(config, bias=bool(raw.get("use_bias")))
    if raw.get("alibi"):  # added to the scores before these are scaled
        base = base.having(AttentionSpec, rope=None, alibi=config.head_dim**-0.5)
    newer = bool(raw.get("new_decoder_architecture"))
    parallel, norms = bool(newer or raw.get("parallel_attn")), raw.get("num_ln_in_parallel_attn") or (2 if newer else 1)
    return base.having(MlpSpec, parallel=parallel, shares_norm=parallel and norms == 1)
