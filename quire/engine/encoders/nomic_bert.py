"""Nomic Embed (Nussbaum et al., 2024): a BERT with rotated positions and a gated MLP."""

from quire.engine.encoders import bert
from quire.engine.encoders.encoder import EncoderSpec, EncoderWeightNames, base_encoder_spec
from quire.engine.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig

NAMES = EncoderWeightNames(
    word_embeddings="embeddings.word_embeddings",
    token_type_embeddings="embeddings.token_type_embeddings",
    embedding_norm="emb_ln",
    layer_template="encoder.layers.{}",
    qkv=("attn.Wqkv",),
    out="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)


def spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    if raw.get("prenorm") or raw.get("qkv_proj_bias") or raw.get("mlp_fc1_bias") or raw.get("rotary_scaling_factor"):
        unsupported = "prenorm, biases of linears and rotary_scaling_factor"
        raise ModelError(f"model: config.json: {unsupported} are not supported in a Nomic BERT")
    theta = raw.get("rotary_emb_base") or (raw.get("rope_parameters") or {}).get("rope_theta") or 1000.0
    return base_encoder_spec(
        config,
        names=NAMES,
        classifier=bert.CLASSIFIER,
        eps=raw.get("layer_norm_epsilon") or raw.get("layer_norm_eps") or 1e-12,
        activation="silu",
        ropes=({"rope_type": "default", "rope_theta": theta},) * config.num_layers,
        segments=raw.get("type_vocab_size") or 0,
        bias=False,
        gated=True,
        unused_prefixes=bert.UNUSED_PREFIXES,
    )
