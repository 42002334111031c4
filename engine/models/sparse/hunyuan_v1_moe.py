"""Hunyuan's mixtures of experts (Tencent, 2025): its dense models with experts in every layer, and a shared one."""

from quire.engine.checkpoint.families import shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.dense import hunyuan_v1_dense
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    name, width = shared_experts(config.raw)
    shared, norm = SharedSpec(width, name), NormSpec(config.norm_eps)
    experts = ExpertsSpec(*routed(config), config.intermediate_size, norm, shared, float_router=True, router="gate.wg")
    return in_layers(experts, hunyuan_v1_dense.spec(config), config)
