"""The bytes read and FLOPs that specs report for a step equal the roofline's arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.kv_cache_spec import FullAttentionSpec, KVElementSizes, ShortConvStateSpec
from quire.engine.architecture.mla import MLALayerSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import MoELayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.shared_transformer import SharedTransformerSpec
from quire.kernels.parameters.activation import Activation
from quire.kernels.parameters.routing import Routing

HIDDEN, INNER, VOCAB = 64, 160, 300
NORM = NormSpec(1e-6)
ATTENTION = AttentionLayerSpec(4, 2, 16, scale=1.0, rope=None, norm=NORM)
MLP = MLPSpec(INNER, NORM)
ATTENTION_PARAMETERS = 2 * HIDDEN * 64 + 2 * HIDDEN * 32 + HIDDEN
MLP_PARAMETERS = 3 * HIDDEN * INNER + HIDDEN


def decoder(*layers: tuple[object, ...], tied: bool = False) -> DecoderSpec:
    return DecoderSpec(VOCAB, HIDDEN, layers, NORM, tie_embeddings=tied)  # type: ignore[arg-type]


def test_step_costs_count_all_parameters_except_embedding() -> None:
    for tied in (False, True):
        costs = decoder((ATTENTION, MLP), (ATTENTION, MLP), tied=tied).step_costs()
        body = 2 * (ATTENTION_PARAMETERS + MLP_PARAMETERS) + HIDDEN
        assert costs.active_parameters == costs.parameters_read(99) == body + VOCAB * HIDDEN
        assert costs.flops_per_token(100) == 2 * (body + VOCAB * HIDDEN) + 4 * 2 * 64 * 100
        assert costs.prefill_flops(10) == 2 * 10 * body + 2 * VOCAB * HIDDEN + 2 * 2 * 64 * 10**2


def test_step_costs_count_only_routed_experts() -> None:
    experts = MoELayerSpec(8, Routing(2), INNER, NORM)
    costs = experts.step_costs("", HIDDEN)
    each = 3 * HIDDEN * INNER
    assert (costs.dense_parameters, costs.expert_parameters) == (8 * HIDDEN + HIDDEN, 8 * each)
    assert costs.active_parameters == 9 * HIDDEN + 2 * each
    assert costs.parameters_read(2) == round(9 * HIDDEN + 8 * each * (1 - 0.75**2))


def test_step_costs_count_shared_norm_once() -> None:
    parallel = replace(MLP, parallel=True, shares_norm=True)
    alone = decoder((parallel,)).step_costs()
    both = decoder((ATTENTION, parallel)).step_costs()
    assert both.dense_parameters - alone.dense_parameters == ATTENTION_PARAMETERS - HIDDEN


def test_step_costs_count_shared_transformer_weights_per_use() -> None:
    block = SharedTransformerSpec(
        attention=replace(ATTENTION, input_size=2 * HIDDEN, input_norm=False),
        intermediate_size=INNER,
        bias=False,
        activation=Activation("gelu"),
        norm=NORM,
        weights_layer=0,
        use_index=0,
        adapter_rank=4,
        adapts_attention=False,
    )
    first, second = (each.step_costs(f"model.layers.{index}", HIDDEN) for index, each in enumerate((block, block)))
    assert first == second
    assert second.attention_width == 64


def test_mla_spec_attends_over_keys_and_values_but_caches_latents() -> None:
    attention = MLALayerSpec(4, 32, 8, 16, 12, None, scale=1.0, rope={}, norm=NORM, latent_eps=1e-6)
    assert attention.attention_width == 4 * (8 + 16 + 12) // 2
    assert attention.kv_cache_spec.bytes_per_token(KVElementSizes(2, 4)) == 2 * (32 + 8)


def test_quantized_kv_state_adds_head_scales_except_for_columns() -> None:
    assert FullAttentionSpec(128, 16).bytes_per_token(KVElementSizes(1, 2, 2)) == 128 + 8 * 2
    assert ShortConvStateSpec(64, 4).bytes_per_token(KVElementSizes(1, 2, 2)) == 2 * (4 * 64 // 16)
