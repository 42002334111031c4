"""GPT-J (Wang and Komatsuzaki, 2021): attention and the MLP side by side on one LayerNorm, rotations of neighbours in a
part of each head, and a head with a bias."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.classic.layer_norm import plain_spec
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    base = plain_spec(config, bias=True).having(AttentionSpec, qkv_bias=False, out_bias=False)
    return replace(base.having(MlpSpec, parallel=True, shares_norm=True), head_bias=not config.tie_embeddings)
