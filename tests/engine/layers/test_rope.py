"""YaRN and dynamic RoPE tables, and the positions that they allow, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.engine.checkpoint.config_reader import explain_unsupported_model
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.layers.rope import rope_table
from tests.tiny_models import SHAPE

PUBLISHED = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


@pytest.mark.parametrize(
    ("theta", "old", "given"),
    [
        (150000.0, 4096, PUBLISHED),
        (1e6, 32768, {"factor": 4.0}),
        (1e4, 64, {"factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25}),
        (1e4, 4096, {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}),
    ],
)
def test_yarn_rope_table_equals_transformers(theta: float, old: int, given: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": theta, "original_max_position_embeddings": old} | given
    config = AutoConfig.for_model("qwen3", head_dim=64, max_position_embeddings=old, rope_parameters=rope)
    frequencies, size = ROPE_INIT_FUNCTIONS["yarn"](config)
    angles = torch.outer(torch.arange(500.0), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), -1) * size
    assert torch.allclose(rope_table(rope, 64, 500), expected, atol=1e-4)


def test_dynamic_rope_is_unscaled_within_max_position(tmp_path: Path) -> None:
    """Contexts end at max_position, so dynamic scaling never applies."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = AutoConfig.for_model("llama", head_dim=32, max_position_embeddings=512, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=300)
    angles = torch.outer(torch.arange(512.0), frequencies)
    assert torch.allclose(rope_table(rope, 32, 512), torch.cat((angles.cos(), angles.sin()), -1), atol=1e-4)
    raw_config = SHAPE | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert not explain_unsupported_model(raw_config)
    (tmp_path / "config.json").write_text(json.dumps(raw_config))
    assert read_model_config(tmp_path).max_position == 512


def test_yarn_scaling_factor_extends_max_position(tmp_path: Path) -> None:
    """Qwen's model cards advise it: max_position_embeddings stays the trained context length."""
    added = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}
    for more, positions in ((added, 2048), (added | {"max_position_embeddings": 4096}, 4096), ({}, 512)):
        (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "qwen3"} | more))
        assert read_model_config(tmp_path).max_position == positions
