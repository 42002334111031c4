"""RoPE fields of config.json in all their forms mean what transformers normalizes them to (issue 58)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.checkpoint.family_spec import read_encoder_spec
from tests.engine.parity import edit_json, largest_difference, random_prompt
from tests.tiny_models import SHAPE, save_tiny_model

PROMPT = random_prompt(100)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("llama", {}),
    "theta alone": ("llama", {"rope_theta": 500.0}),
    "null": ("llama", {"rope_theta": 500.0, "rope_scaling": None}),
    "null parameters": ("llama", {"rope_theta": 500.0, "rope_parameters": None}),
    "empty parameters": ("llama", {"rope_theta": 500.0, "rope_parameters": {}}),
    "theta inside and outside": ("llama", {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 50.0}}),
    "type without theta": ("llama", {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}}),
    "linear as type": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "integer factor": ("llama", {"rope_scaling": {"type": "linear", "factor": 4}}),
    "type and rope_type": ("llama", {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}}),
    "types that differ": ("llama", {"rope_scaling": {"type": "linear", **YARN}}),
    "scaling beside parameters": (
        "llama",
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "scaling and theta beside parameters": (
        "llama",
        {"rope_scaling": YARN, "rope_theta": 300.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ),
    "empty scaling beside parameters": (
        "llama",
        {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 500.0}},
    ),
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "yarn without original": ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "yarn with original": ("llama", {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}}),
    "yarn with original outside": ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 64}),
    "yarn with both originals": (
        "llama",
        {
            "rope_scaling": {**YARN, "original_max_position_embeddings": 128},
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn without truncation": ("llama", {"rope_scaling": {**YARN, "truncate": False}}),
    "yarn with betas": ("llama", {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2}}),
    "yarn with attention_factor": ("llama", {"rope_scaling": {**YARN, "attention_factor": 0.7}}),
    "yarn with mscale": ("llama", {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "yarn with mscale alone": ("llama", {"rope_scaling": {**YARN, "mscale": 0.7}}),
    "yarn with mscale of 0": ("llama", {"rope_scaling": {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}}),
    "yarn with factor null": (
        "llama",
        {"rope_scaling": {**YARN, "factor": None}, "original_max_position_embeddings": 64},
    ),
    "llama3 without original": ("llama", {"rope_scaling": LLAMA3}),
    "llama3 with original": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama3 with original outside": ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}),
    "llama3 in parameters": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}}),
    "partial factor of a family that has none": ("llama", {"partial_rotary_factor": 0.5}),
    "partial factor inside, of a family that has none": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "phi": ("phi", {}),
    "phi partial outside": ("phi", {"partial_rotary_factor": 0.25}),
    "phi partial inside": (
        "phi",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}},
    ),
    "phi partial inside and outside": (
        "phi",
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        },
    ),
    "phi linear": ("phi", {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "phi yarn": ("phi", {"partial_rotary_factor": 0.5, "rope_scaling": YARN}),
    "stablelm": ("stablelm", {}),
    "stablelm partial outside": ("stablelm", {"partial_rotary_factor": 0.5}),
    "glm": ("glm", {}),
    "glm partial 1": ("glm", {"partial_rotary_factor": 1.0}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {}),
    "nemotron": ("nemotron", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox pct": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    "qwen3-next": ("qwen3-next", {}),
    "phi3": ("phi3", {}),
    "phi3 partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "qwen2 yarn": ("qwen2", {"rope_theta": 500.0, "rope_scaling": {**YARN, "original_max_position_embeddings": 64}}),
    "gemma3": ("gemma3", {}),
    "gemma3 scaled": (
        "gemma3",
        {
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 nested": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            },
        },
    ),
    "gemma3 nested yarn": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"type": "yarn", "factor": 4.0, "rope_theta": 5000.0},
            },
        },
    ),
    "gemma3 nested yarn with original outside": (
        "gemma3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {**YARN, "rope_theta": 5000.0},
            },
        },
    ),
}
CASES |= {
    f"{family}, {case}": (family, CASES[case][1])
    for family in ("qwen3", "falcon-newer", "granite", "cohere", "smollm3", "gpt_oss", "deepseek_v3")
    for case in ("yarn without original", "llama3 with original outside", "scaling beside parameters")
}
OLD = ("rope_parameters", "partial_rotary_factor", "rope_theta", "rope_scaling")


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES)
def test_rope_config_logprobs_equal_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    path = save_tiny_model(tmp_path, family)
    edit_json(path / "config.json", OLD, **changes)
    assert largest_difference(path, PROMPT) < 1e-4


def test_modernbert_ropes_accept_legacy_type_field() -> None:
    rope = {"full_attention": {"type": "linear", "factor": 2.0}, "sliding_attention": None}
    config = {"model_type": "modernbert", **SHAPE, "rope_parameters": rope}
    spec = read_encoder_spec(config)
    assert spec is not None
    assert spec.ropes[0] == {"rope_type": "linear", "rope_theta": 160_000.0, "factor": 2.0}
    assert spec.ropes[1] == {"rope_type": "default", "rope_theta": 10_000.0}
