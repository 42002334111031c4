from __future__ import annotations

from collections.abc import Callable

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.families.base.layer_types import SublayerReader
from quire.engine.families.base.model_config import ModelConfig

ATTENTION_FREE_MODULES = {"embedding": "embed_tokens", "embeddings": "embed_tokens", "norm_f": "norm"}


def attention_free_builder(read_sublayer: SublayerReader) -> Callable[[ModelConfig], DecoderSpec]:
    def build(config: ModelConfig) -> DecoderSpec:
        norm = NormSpec(config.norm_eps)
        layers = ((read_sublayer(config, norm),),) * config.num_layers
        return DecoderSpec(config.vocab_size, config.hidden_size, layers, norm, tie_embeddings=config.tie_embeddings)

    return build
