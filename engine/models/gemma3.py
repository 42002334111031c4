"""Gemma 3's text models (Gemma Team, 2025): Gemma 2 with norms of queries and keys instead of capped scores. Layers
without a window, by default every sixth, have a rotation of their own."""

from dataclasses import replace

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.models import gemma2
from quire.engine.models.decoder import DecoderSpec


def spec(config: ModelConfig) -> DecoderSpec:
    raw = config.raw
    if raw.get("use_bidirectional_attention"):
        raise ModelError("model: use_bidirectional_attention is not supported: it makes an encoder")
    windows = gemma2.layer_windows(config, raw.get("sliding_window_pattern") or 6)
    ropes = raw.get("rope_parameters") or {"full_attention": raw.get("rope_scaling")}
    sliding = {"rope_type": "default", "rope_theta": raw.get("rope_local_base_freq") or 10_000.0}
    full = {"rope_type": "default", "rope_theta": raw.get("rope_theta") or 1_000_000.0}
    sliding |= ropes.get("sliding_attention") or {}
    full |= ropes.get("full_attention") or {}
    return replace(
        gemma2.spec(config),
        windows=windows,
        ropes=tuple(full if window is None else sliding for window in windows),
        qk_norm=True,
        softcap=None,
        logit_softcap=raw.get("final_logit_softcapping"),
    )
