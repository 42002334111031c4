"""DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): latent attention, and experts behind dense layers, of groups that are
chosen by their best one."""

from quire.engine.checkpoint.families import shared_experts
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.layers.moe import ExpertsSpec, SharedSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.models.experts import expert_size, routed
from quire.engine.models.latent.attention import in_latents, with_experts
from quire.engine.models.spec import DecoderSpec, base_spec


def spec(config: ModelConfig) -> DecoderSpec:
    return with_experts(_experts, in_latents(base_spec(config), config), config)


def _experts(config: ModelConfig) -> ExpertsSpec:
    raw = config.raw
    groups = raw.get("n_group") or 1 if raw.get("topk_method") == "group_limited_greedy" else 1
    kept = min(raw.get("topk_group") or groups, groups)
    scale = raw.get("routed_scaling_factor") or 1.0
    experts = routed(config, normalized=False, scale=scale, groups=groups, groups_kept=kept)
    name, width = shared_experts(raw)
    shared = SharedSpec(width, name) if width else None
    return ExpertsSpec(*experts, expert_size(config), NormSpec(config.norm_eps), shared)
