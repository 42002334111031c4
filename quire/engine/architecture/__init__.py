"""Model architectures as data. A layer is a tuple of sublayer specs."""

from __future__ import annotations

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec, LayerSpec
from quire.engine.architecture.encoder import EncoderSpec, EncoderWeightNames, parse_encoder_activation
from quire.engine.architecture.mla import IndexerSpec, MLALayerSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import LatentMoESpec, MoELayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.pooler_head import HeadLayerSpec
from quire.engine.architecture.recurrent import (
    DeltaNetSpec,
    KimiDeltaAttentionSpec,
    Mamba2LayerSpec,
    ProjectionMultipliers,
    ShortConvSpec,
)
from quire.engine.architecture.rope import QueryScaling
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.engine.architecture.stream import LayerScalarSpec, OutputNormSpec, PerLayerInputGateSpec, PerLayerInputsSpec
from quire.engine.architecture.sublayer import SublayerSpec

__all__ = [
    "AttentionLayerSpec",
    "DecoderSpec",
    "DeltaNetSpec",
    "EncoderSpec",
    "EncoderWeightNames",
    "HeadLayerSpec",
    "IndexerSpec",
    "KimiDeltaAttentionSpec",
    "LatentMoESpec",
    "LayerScalarSpec",
    "LayerSpec",
    "MLALayerSpec",
    "MLPSpec",
    "Mamba2LayerSpec",
    "MoELayerSpec",
    "NormSpec",
    "OutputNormSpec",
    "PerLayerInputGateSpec",
    "PerLayerInputsSpec",
    "ProjectionMultipliers",
    "QueryScaling",
    "SharedTransformerSpec",
    "ShortConvSpec",
    "SublayerSpec",
    "parse_encoder_activation",
]
