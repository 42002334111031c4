"""Gemma 3's text models (Gemma Team, 2025): Gemma 2 with norms of queries and keys instead of capped scores. Layers
without a window, by default every sixth, have a rotation of their own."""

from dataclasses import replace
from typing import Any

from quire.engine.checkpoint.families import layer_windows
from quire.engine.checkpoint.fields import OneRope
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.layers.attention import AttentionSpec
from quire.engine.models import gemma2
from quire.engine.models.spec import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if raw.get("use_bidirectional_attention"):
        raise ModelError("model: use_bidirectional_attention is not supported: it makes an encoder")
    if not isinstance(every := raw.get("sliding_window_pattern") or 6, int):
        raise ModelError(f"model: config.json: sliding_window_pattern: expected int, got {every!r}")
    base = replace(gemma2.spec(config), logit_softcap=raw.get("final_logit_softcapping"))
    base = base.having(AttentionSpec, qk_norm="heads", softcap=None)
    full, sliding = raw.get("rope_theta") or 1_000_000.0, raw.get("rope_local_base_freq") or 10_000.0
    return with_two_ropes(base, config, full=full, sliding=sliding)


def with_two_ropes(spec: DecoderSpec, config: ModelConfig, *, full: float, sliding: float) -> DecoderSpec:
    """With the family's windows, and rotations of layers without one that scalings are of alone. full, sliding: the
    defaults of rope_theta."""
    raw, windows = config.raw, layer_windows(config.raw, config.num_layers)
    given = raw.get("rope_parameters") or {}
    full_given = given.get("full_attention") if given else raw.get("rope_scaling")
    short, long = _rope(given.get("sliding_attention"), sliding), _rope(full_given, full)
    return spec.having(AttentionSpec, window=windows, rope=[long if each is None else short for each in windows])


def _rope(given: OneRope | None, theta: float) -> dict[str, Any]:
    """As ModelConfig.rope; `theta` is the default of rope_theta."""
    rope = {key: value for key, value in (given or {}).items() if value is not None}
    return {"rope_type": "default", "rope_theta": theta} | rope
