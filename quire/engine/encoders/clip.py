"""The text parts of CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): the last token's hidden state, through
a linear, is the vector. CLIP's tokens see what is before them alone; SigLIP's texts are filled up to one length."""

from quire.engine.checkpoint.pooling import vector_size
from quire.engine.encoders.encoder import EncoderSpec, EncoderWeightNames, base_encoder_spec, parse_activation
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.layers.pooler_head import HeadLayerSpec

NAMES = EncoderWeightNames(
    word_embeddings="embeddings.token_embedding",
    position_embeddings="embeddings.position_embedding",
    layer_template="encoder.layers.{}",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    attention_norm="layer_norm1",
    up=("mlp.fc1",),
    down="mlp.fc2",
    mlp_norm="layer_norm2",
    final_norm="final_layer_norm",
)
_UNUSED_PREFIXES = ("logit_scale", "logit_bias", "embeddings.position_ids", "vision_model.", "visual_projection.")


def spec(config: ModelConfig) -> EncoderSpec:
    raw, clip = config.raw, config.model_type == "clip_text_model"
    eps, act = (1e-5, "quick_gelu") if clip else (1e-6, "gelu_pytorch_tanh")
    name = "text_projection" if clip else "head"
    return base_encoder_spec(
        config,
        names=NAMES,
        classifier=lambda hidden, labels: [],
        eps=raw.get("layer_norm_eps") or eps,
        activation=parse_activation(raw.get("hidden_act") or act),
        positions=config.max_position,
        pre_norm=True,
        first_norm=True,
        causal=clip,
        pads_prompts=not clip,
        projection=(HeadLayerSpec(name, config.hidden_size, vector_size(config), bias=not clip),),
        unused_prefixes=_UNUSED_PREFIXES,
    )
