"""StarCoder2 (Lozhkov et al., 2024): a sliding window in every layer."""

from __future__ import annotations

from quire.engine.families.base import GGUFFormat, WeightNames, field_reader, flag_reader, layer_norm_family

STARCODER2 = layer_norm_family(
    model_types=("starcoder2",),
    field_names={"norm_epsilon": "rms_norm_eps"},
    defaults={
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-05,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "max_position_embeddings": 4096,
    },
    missing_defaults={"num_key_value_heads": 2},
    bias=flag_reader("use_bias"),
    attention={"window": field_reader("sliding_window")},
    weight_names=WeightNames(layer_modules={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    gguf=GGUFFormat(
        architectures=("starcoder2",),
        has_optional_window=True,
    ),
)
