"""A decoder runs on GPUs unless one of its sublayers says why not."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec

NORM = NormSpec(1e-6)
LAYER = (AttentionLayerSpec(4, 2, 16, scale=1.0, rope=None, norm=NORM), MLPSpec(160, NORM))


class UncompiledSpec(SublayerSpec):
    @property
    def gpu_error(self) -> str:
        return "this layer is served only on CPUs so far"


def decoder(*layers: tuple[SublayerSpec, ...]) -> DecoderSpec:
    return DecoderSpec(300, 64, layers, NORM, tie_embeddings=False)


def test_gpu_error_is_none_if_all_sublayers_run_on_gpus() -> None:
    assert decoder(LAYER, LAYER).gpu_error is None


def test_gpu_error_is_first_of_any_sublayer() -> None:
    attention, mlp = LAYER
    with_alibi = (replace(attention, alibi=1.0), mlp)
    assert decoder(LAYER, (UncompiledSpec(), mlp), with_alibi).gpu_error == "this layer is served only on CPUs so far"
    assert decoder(LAYER, with_alibi).gpu_error == "ALiBi of attention is served only on CPUs so far"
