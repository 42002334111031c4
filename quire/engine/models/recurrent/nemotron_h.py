"""Nemotron-H (NVIDIA, 2025) and Nemotron 3: layers that are one part each, a state space, attention without positions,
an MLP, or experts, these also of smaller vectors; all without gates. Of limits of steps it has time_step_min alone, as
transformers reads it."""

from quire.engine.checkpoint.families import NARROW
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.attention import AttentionSpec
from quire.engine.layers.mlp import MlpSpec
from quire.engine.layers.moe import NarrowSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.part import SublayerSpec
from quire.engine.models.experts import GROUPED, expert_size, mixture, shared
from quire.engine.models.recurrent.state_space import state_space
from quire.engine.models.spec import DecoderSpec
from quire.engine.models.values import flag


def _narrow(config: ModelConfig) -> NarrowSpec | None:
    size = config.raw.get("moe_latent_size")
    return NarrowSpec(size, NARROW, bool(config.raw.get("mlp_bias"))) if size else None


_EXPERTS = mixture(
    GROUPED,
    size=expert_size,
    beside=shared(always=True, bias=flag("mlp_bias")),
    narrow=_narrow,
    shares_norm=True,
    gated=False,
    correction="gate.e_score_correction_bias",
    name="mixer",
)


def spec(config: ModelConfig) -> DecoderSpec:
    norm, kinds = NormSpec(config.norm_eps), config.raw.get("layer_types") or ()
    parts = {kind: _part(kind, config, norm) for kind in dict.fromkeys(kinds)}
    shape = (config.vocab_size, config.hidden_size, tuple((parts[kind],) for kind in kinds), norm)
    return DecoderSpec(*shape, tie_embeddings=config.tie_embeddings)


def _part(kind: str, config: ModelConfig, norm: NormSpec) -> SublayerSpec:
    bias = bool(config.raw.get("mlp_bias"))
    match kind:
        case "linear_attention":
            return state_space(config, norm, limits=(config.raw.get("time_step_min") or 0.001, float("inf")))
        case "full_attention":
            sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
            return AttentionSpec(*sizes, scale=config.head_dim**-0.5, rope=None, norm=norm)
        case "mlp":
            width = config.intermediate_size
            return MlpSpec(width, norm, bias=bias, gated=False, activation="relu2", shares_norm=True)
    return _EXPERTS(config, norm)
