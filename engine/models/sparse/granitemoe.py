"""Granite's mixtures of experts (IBM, 2024 and later): Granite with experts in every layer, and a shared MLP in some
models."""

from quire.engine.checkpoint.families import shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.models.dense import granite, granite_swa
from quire.engine.models.experts import in_layers, routed
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    base = granite_swa.spec(config) if config.model_type == "granitemoe_swa" else granite.spec(config)
    name, width = shared_experts(config.raw)
    experts = ExpertsSpec(
        *routed(config),
        config.intermediate_size,
        base.norm,
        SharedSpec(width, name) if width else None,
        name="block_sparse_moe",
        router="router.layer",
    )
    return in_layers(experts, base, config)
