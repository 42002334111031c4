"""Sizes in config.json that contradict the weights or each other are rejected, in families that derive other sizes from
them first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ModelError
from quire.engine.engine_core import EngineCore
from tests.tiny_models import save_tiny_model


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("glm4_moe", {"head_dim": 10**6}, "has shape"),
        ("deepseek_v3", {"n_group": 5}, "num_experts_per_tok, n_group, topk_group: 12 experts in 5 groups"),
        ("lfm2", {"layer_types": 3 * ["conv"]}, "layer_types: no layer has attention or a state space"),
        ("mamba2", {"n_groups": 3}, "n_groups: 3 do not divide 8 heads"),
        ("mamba2", {"head_dim": 32}, "head_dim: 8 heads of 32 are 256 numbers, where expand says"),
        ("granite-hybrid", {"mamba_d_head": 48}, "mamba_d_head: .* where mamba_expand says"),
        ("falcon_h1", {"mamba_d_ssm": 192}, "mamba_d_head: .* where mamba_d_ssm says 192"),
        ("nemotron_h", {"moe_latent_size": 8}, "config.json means"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings: where it is false"),
        ("mamba", {"state_size": 7}, "state_size: expected an even number, got 7"),
        ("mamba", {"intermediate_size": 120}, "intermediate_size: expected a multiple of 16 channels, got 120"),
    ],
)
def test_contradictory_config_sizes_raise_model_error(
    family: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_tiny_model(tmp_path, family)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelError, match=said):
        EngineCore(EngineConfig(model=str(tmp_path), num_kv_blocks=8, threads=1))
