"""Parameter shapes of draft-head specs equal the tensors of published heads."""

from __future__ import annotations

import json
from pathlib import Path

from quire.engine.architecture.draft_heads import MedusaSpec
from quire.engine.checkpoint.config_reader import parse_family_config
from quire.engine.checkpoint.family_spec import build_eagle_spec
from quire.engine.common.config import SpeculativeConfig
from quire.server.cli.plan.draft_plan import plan_draft
from tests import tiny_heads
from tests.tiny_models import SHAPE

HIDDEN, VOCAB, LAYERS = 64, 384, 8


def count_head_parameters(tensors: tiny_heads.Tensors) -> int:
    """The embedding belongs to the decoder, and d2t and t2d are token maps, so neither counts."""
    return sum(each.numel() for name, each in tensors.items() if name not in ("embed_tokens.weight", "d2t", "t2d"))


def test_eagle_spec_parameter_shapes_equal_head_tensors() -> None:
    model = parse_family_config(tiny_heads.eagle_config(HIDDEN, VOCAB), "config.json")
    tensors = tiny_heads.eagle_tensors(HIDDEN, VOCAB)
    shapes = build_eagle_spec(model, LAYERS, tensors, is_eagle3=False).parameter_shapes()
    assert shapes == {name: tuple(each.shape) for name, each in tensors.items() if name != "embed_tokens.weight"}


def test_eagle3_spec_parameter_shapes_equal_head_tensors() -> None:
    config = tiny_heads.eagle_config(HIDDEN, VOCAB, draft_vocab_size=VOCAB // 2)
    model = parse_family_config(config, "config.json")
    tensors = tiny_heads.eagle3_tensors(HIDDEN, VOCAB, taps=3)
    shapes = build_eagle_spec(model, LAYERS, tensors, is_eagle3=True).parameter_shapes()
    stored = {name.replace("midlayer", "layers.0"): tuple(each.shape) for name, each in tensors.items()}
    assert shapes == {name: shape for name, shape in stored.items() if name not in ("d2t", "t2d")}


def test_medusa_spec_parameter_shapes_equal_head_tensors() -> None:
    tensors = tiny_heads.medusa_tensors(HIDDEN, VOCAB, heads=3)
    shapes = MedusaSpec(3, 1, HIDDEN, VOCAB).parameter_shapes()
    assert shapes == {name: tuple(each.shape) for name, each in tensors.items()}


def test_draft_plan_from_config_alone_excludes_embedding(tmp_path: Path) -> None:
    config = tiny_heads.eagle_config(SHAPE["hidden_size"], SHAPE["vocab_size"], draft_vocab_size=100)
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = {"model_type": "llama", **SHAPE, "num_hidden_layers": LAYERS}
    speculative = SpeculativeConfig(method="eagle3", model=str(tmp_path / "config.json"), num_speculative_tokens=2)
    plan = plan_draft(speculative, served, None)
    tensors = tiny_heads.eagle3_tensors(SHAPE["hidden_size"], SHAPE["vocab_size"], taps=3, said=100)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:100]
    assert plan is not None
    assert plan.stored.num_floats == count_head_parameters(tensors)
