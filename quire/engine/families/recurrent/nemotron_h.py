"""Nemotron-H (NVIDIA, 2025) and Nemotron 3: layers that are one part each, a state space, attention without positions,
an MLP, or experts, these also of smaller vectors; all without gates. Of limits of steps it has time_step_min alone, as
transformers reads it."""

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.mlp import MLPSpec
from quire.engine.architecture.moe import LatentMoESpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.checkpoint.families import NARROW
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.families.config_fields import flag_reader
from quire.engine.families.moe_fields import GROUPED_ROUTING, expert_intermediate_size, moe_reader, shared_expert_reader
from quire.engine.families.recurrent.mamba2_fields import mamba2_spec


def _latent_moe_spec(config: ModelConfig) -> LatentMoESpec | None:
    size = config.raw.get("moe_latent_size")
    return LatentMoESpec(size, NARROW, bool(config.raw.get("mlp_bias"))) if size else None


_EXPERTS = moe_reader(
    GROUPED_ROUTING,
    size=expert_intermediate_size,
    shared_expert=shared_expert_reader(is_required=True, bias=flag_reader("mlp_bias")),
    latent=_latent_moe_spec,
    shares_norm=True,
    gated=False,
    correction="gate.e_score_correction_bias",
    name="mixer",
)


def spec(config: ModelConfig) -> DecoderSpec:
    norm, kinds = NormSpec(config.norm_eps), config.raw.get("layer_types") or ()
    parts = {kind: _sublayer_spec(kind, config, norm) for kind in dict.fromkeys(kinds)}
    shape = (config.vocab_size, config.hidden_size, tuple((parts[kind],) for kind in kinds), norm)
    return DecoderSpec(*shape, tie_embeddings=config.tie_embeddings)


def _sublayer_spec(kind: str, config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    bias = bool(config.raw.get("mlp_bias"))
    match kind:
        case "linear_attention":
            return mamba2_spec(config, norm, dt_limits=(config.raw.get("time_step_min") or 0.001, float("inf")))
        case "full_attention":
            sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
            return AttentionLayerSpec(*sizes, scale=config.head_dim**-0.5, rope=None, norm=norm)
        case "mlp":
            width = config.intermediate_size
            return MLPSpec(width, norm, bias=bias, gated=False, activation="relu2", shares_norm=True)
    return _EXPERTS(config, norm)
