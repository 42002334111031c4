"""Granite 4 (IBM, 2025): Granite with state spaces in most layers, with or without positions in the others; and
experts beside an MLP, or an MLP alone."""

from quire.engine.checkpoint.families import shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.models.dense import granite
from quire.engine.models.recurrent.state_space import in_place, state_space
from quire.engine.models.sparse import granitemoe
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    name, width = shared_experts(config.raw)
    if config.raw.get("num_local_experts"):
        base = granitemoe.spec(config)
    else:
        base = granite.spec(config).having(MlpSpec, name=name, intermediate_size=width)
    if config.raw.get("position_embedding_type") != "rope":
        base = base.having(AttentionSpec, rope=None)
    return base.mixing(in_place(config, state_space(config, norm=base.norm)))
