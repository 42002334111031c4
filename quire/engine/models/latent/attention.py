"""What config.json says of latent attention, in the names of all families."""

from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.checkpoint.families import LATENT_SIZES
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.latent_attention import LatentAttentionSpec
from quire.engine.layers.norm import NormSpec
from quire.engine.layers.part import SublayerSpec
from quire.engine.layers.rope import yarn_scale
from quire.engine.models.values import Read
from quire.kernels.latents.latent import MOST_ROTATED

LATENT_EPS = 1e-6
"""Of latents' norms in all families, whatever rms_norm_eps is."""
_PLACES = ("partial_rotary_factor", "rotary_dim")
"""What older files say of a head's rotated part, which qk_rope_head_dim is here."""


def latents(neighbours: Read = lambda config: True) -> Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]]:
    """Reads latent attention in all layers, as Family.mixing. neighbours: whether rotations turn neighbours."""

    def read(config: ModelConfig, norm: NormSpec) -> Sequence[SublayerSpec | None]:
        return [_attention(config, norm, neighbours=neighbours(config))] * config.num_layers

    return read


def _attention(config: ModelConfig, norm: NormSpec, *, neighbours: bool) -> LatentAttentionSpec:
    """Raises ModelError."""
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
    return LatentAttentionSpec(
        num_heads=config.num_heads,
        latent=latent,
        rotated=rotated,
        plain=plain,
        value=value,
        query_rank=raw.get("q_lora_rank"),
        scale=(plain + rotated) ** -0.5 * yarn_scale(rope),
        rope=rope,
        norm=norm,
        latent_eps=LATENT_EPS,
        neighbours=neighbours,
        bias=bool(raw.get("attention_bias")),
    )
