from __future__ import annotations

from functools import singledispatch

from quire.engine.architecture import (
    AttentionLayerSpec,
    LayerScalarSpec,
    MLALayerSpec,
    MLPSpec,
    MoELayerSpec,
    OutputNormSpec,
    PerLayerInputGateSpec,
    SharedTransformerSpec,
    SublayerSpec,
)
from quire.engine.architecture.recurrent import (
    DeltaNetSpec,
    KimiDeltaAttentionSpec,
    Mamba2LayerSpec,
    MambaLayerSpec,
    ShortConvSpec,
)
from quire.engine.layers.attention import Attention
from quire.engine.layers.mla import MLAttention
from quire.engine.layers.mlp import MLP
from quire.engine.layers.moe import SparseMoE
from quire.engine.layers.recurrent.delta_net import DeltaNet
from quire.engine.layers.recurrent.kimi_delta_attention import KimiDeltaAttention
from quire.engine.layers.recurrent.mamba import MambaMixer
from quire.engine.layers.recurrent.mamba2 import Mamba2Mixer
from quire.engine.layers.recurrent.short_conv import ShortConvolution
from quire.engine.layers.stream.layer_output import LayerScalar, OutputNorm
from quire.engine.layers.stream.per_layer_inputs import PerLayerInputGate
from quire.engine.layers.stream.shared_transformer import SharedTransformer
from quire.engine.layers.sublayer import BuildContext, Sublayer


@singledispatch
def build_sublayer(spec: SublayerSpec, build_context: BuildContext, layer: str) -> Sublayer:
    raise NotImplementedError(f"no module is registered for {type(spec).__name__}")


build_sublayer.register(AttentionLayerSpec, Attention)
build_sublayer.register(MLALayerSpec, MLAttention)
build_sublayer.register(MLPSpec, MLP)
build_sublayer.register(MoELayerSpec, SparseMoE)
build_sublayer.register(DeltaNetSpec, DeltaNet)
build_sublayer.register(KimiDeltaAttentionSpec, KimiDeltaAttention)
build_sublayer.register(Mamba2LayerSpec, Mamba2Mixer)
build_sublayer.register(MambaLayerSpec, MambaMixer)
build_sublayer.register(ShortConvSpec, ShortConvolution)
build_sublayer.register(SharedTransformerSpec, SharedTransformer)
build_sublayer.register(OutputNormSpec, OutputNorm)
build_sublayer.register(LayerScalarSpec, LayerScalar)
build_sublayer.register(PerLayerInputGateSpec, PerLayerInputGate)
