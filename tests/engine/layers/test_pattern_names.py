"""Patterns in quantization_config match the names in the checkpoint's files, not Quire's names (issue 58)."""

from __future__ import annotations

import pytest

from quire.engine.checkpoint.quantization import WeightFormatRules, parse_quantization_config
from quire.engine.worker.loading.weight_mapper import make_stored_module_name_lookup

ARGS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
ROOTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "transformer.", "")


def formats(ignore: list[str], targets: list[str]) -> WeightFormatRules:
    group = {"targets": targets, "weights": ARGS, "format": "int-quantized"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore}
    return parse_quantization_config(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ROOTS)
def test_stored_module_name_has_prefix_of_checkpoint(root: str) -> None:
    stored = [f"{root}layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qk"]
    name_of = make_stored_module_name_lookup([*stored, "lm_head.weight", "model.visual.blocks.0.attn.q_proj.weight"])
    assert name_of(Q) == f"{root}layers.0.self_attn.q_proj"
    assert name_of("model.layers.1.mlp.experts.3.up_proj") == f"{root}layers.1.mlp.experts.3.up_proj"
    assert name_of("lm_head") == "lm_head"


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r"re:model\.language_model\.layers\.0\..*", True),
        (r"re:.*language_model.*q_proj", True),
        (r"re:.*layers\.0\.self_attn\.q_proj$", True),
        (r"re:model\.layers\.0\..*", False),
        (r"re:language_model\..*", False),
        ("model.language_model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn.q_proj", True),
        ("q_proj", True),
        ("k_proj", False),
    ],
)
def test_quantization_patterns_match_names_in_checkpoint_or_module(pattern: str, matches: bool) -> None:
    name_of = make_stored_module_name_lookup(["model.language_model.layers.0.self_attn.q_proj.weight"])
    assert (formats([pattern], ["Linear"]).find_format(name_of(Q)) is None) is matches
    assert (formats([], [pattern]).find_format(name_of(Q)) is not None) is matches
