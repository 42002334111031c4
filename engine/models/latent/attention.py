"""What config.json says of latent attention, in the names of all families."""

from collections.abc import Callable
from typing import Any

from quire.engine.checkpoint.families import LATENT_SIZES, sparse_layers
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.latent_attention import LatentAttentionSpec
from quire.engine.layers.moe import ExpertsSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.rope import yarn_scale
from quire.engine.models.experts import in_layers
from quire.engine.models.spec import DecoderSpec
from quire.kernels.latents.latent import MOST_ROTATED

LATENT_EPS = 1e-6
"""Of latents' norms in all families, whatever rms_norm_eps is."""
_PLACES = ("partial_rotary_factor", "rotary_dim")
"""What older files say of a head's rotated part, which qk_rope_head_dim is here."""


def in_latents(spec: DecoderSpec, config: ModelConfig, *, neighbours: bool = True) -> DecoderSpec:
    """With latent attention in all layers. Raises ModelError."""
    raw = config.raw
    given: dict[str, Any] = {name: raw.get(name) for name in LATENT_SIZES}
    for name, size in given.items():
        if not size:
            raise ModelError(f"model: config.json of a {config.model_type!r} lacks {name}, needed for its attention")
        if size % 2:
            raise ModelError(f"model: config.json: {name}: must be even, got {size}")
    latent, rotated, plain, value = given.values()
    if rotated > MOST_ROTATED:
        raise ModelError(f"model: config.json: qk_rope_head_dim: up to {MOST_ROTATED} are served, got {rotated}")
    rope = {name: each for name, each in config.rope.items() if name not in _PLACES}
    attention = LatentAttentionSpec(
        num_heads=config.num_heads,
        latent=latent,
        rotated=rotated,
        plain=plain,
        value=value,
        query_rank=raw.get("q_lora_rank"),
        scale=(plain + rotated) ** -0.5 * yarn_scale(rope),
        rope=rope,
        norm=NormSpec(config.norm_eps),
        latent_eps=LATENT_EPS,
        neighbours=neighbours,
        bias=bool(raw.get("attention_bias")),
    )
    return spec.mixing([attention] * config.num_layers)


def with_experts(experts: Callable[[ModelConfig], ExpertsSpec], spec: DecoderSpec, config: ModelConfig) -> DecoderSpec:
    """With experts where the model has some: in a small one all layers may be dense."""
    return in_layers(experts(config), spec, config) if any(sparse_layers(config.raw, config.num_layers)) else spec
