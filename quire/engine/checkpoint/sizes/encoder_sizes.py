from __future__ import annotations

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.kv_cache_spec import FullAttentionSpec
from quire.engine.architecture.parameter_shapes import count_parameters
from quire.engine.checkpoint.sizes.decoder_sizes import DecoderSizes, field_values


def count_encoder_sizes(spec: EncoderSpec, *, has_kv_cache: bool = False) -> DecoderSizes:
    """Excludes heads after pooling. `has_kv_cache` is True if transformers' class turns the encoder into a decoder."""
    costs = spec.step_costs()
    kv_values = 2 * spec.num_heads * spec.head_dim if has_kv_cache else 0
    return DecoderSizes(
        **field_values(costs),
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_parameters=count_parameters(spec.parameter_shapes()),
        embedding_parameters=spec.table_parameters(),
        kv_formula=f"2 x {spec.num_heads} heads x {spec.head_dim} x {spec.num_layers} layers",
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_heads,
        head_dim=spec.head_dim,
        layer_cache_specs=((FullAttentionSpec(kv_values, spec.head_dim),),) * spec.num_layers,
    )
