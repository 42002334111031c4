"""The sizes of an encoder, counted from its spec."""

from __future__ import annotations

from quire.engine.architecture.encoder import EncoderSpec
from quire.engine.architecture.kv_cache_spec import PagedState
from quire.engine.architecture.parameter_shapes import count_parameters
from quire.engine.checkpoint.sizes.decoder_sizes import DecoderSizes


def count_encoder(spec: EncoderSpec, *, caches: bool = False) -> DecoderSizes:
    """Without heads behind the pooling. `caches`: transformers' class makes a decoder of it, which keeps keys and
    values; an encoder keeps nothing of a token."""
    words, hidden = spec.vocab_size * spec.hidden_size, spec.hidden_size
    kv = 2 * spec.num_heads * spec.head_dim if caches else 0
    return DecoderSizes(
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        parameters=count_parameters(spec.parameter_shapes()),
        embeddings=words + (spec.positions + spec.segments) * hidden,
        experts=0,
        experts_per_token=0,
        expert_parameters=0,
        head_parameters=words,
        kv_formula=f"2 x {spec.num_heads} heads x {spec.head_dim} x {spec.num_layers} layers",
        heads=spec.num_heads,
        kv_heads=spec.num_heads,
        head_dim=spec.head_dim,
        attention_width=spec.num_heads * spec.head_dim * spec.num_layers,
        layer_states=((PagedState(kv, None, spec.head_dim),),) * spec.num_layers,
    )
