"""VaultGemma (Google, 2025): Gemma 2 without post-norms."""

from quire.engine.families.base import WeightNames
from quire.engine.families.gemma2 import GEMMA2

VAULTGEMMA = GEMMA2.derive(
    "vaultgemma",
    attention={"output_norm": False},
    mlp={"output_norm": False},
    weight_names=WeightNames(layer_modules={"pre_feedforward_layernorm": "post_attention_layernorm"}),
)
