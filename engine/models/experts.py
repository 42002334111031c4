"""What config.json says of experts, in the names of all families."""

from dataclasses import replace

from quire.engine.checkpoint.families import sparse_layers
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.models.decoder import DecoderSpec

_MOST = 2**16
"""Experts of all layers together: far more than any real model's, and few enough to be made without their weights."""


def expert_numbers(config: ModelConfig) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token. Raises ModelError."""
    raw = config.raw
    count, per_token = raw.get("num_local_experts") or raw.get("num_experts"), raw.get("num_experts_per_tok")
    if not count or not per_token:
        missing = "num_experts_per_tok" if count else "num_local_experts"
        raise ModelError(f"model: config.json of a {config.model_type!r} lacks {missing}, needed to build its experts")
    if per_token > count:
        raise ModelError(f"model: config.json: num_experts_per_tok: {per_token} of {count} experts")
    if count * config.num_layers > _MOST:
        raise ModelError(f"model: config.json: {count} experts in each of {config.num_layers} layers are too many")
    return count, per_token


def in_layers(experts: ExpertsSpec, spec: DecoderSpec, config: ModelConfig) -> DecoderSpec:
    """With these experts in the MLP's place, in the layers that have some."""
    sparse = zip(spec.layers, sparse_layers(config.raw, config.num_layers), strict=True)
    return replace(spec, layers=tuple((*layer[:-1], experts) if has else layer for layer, has in sparse))
