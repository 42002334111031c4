"""Each model family is described in one file of engine/families, and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

from quire.engine.families import decoder_model_types, encoder_model_types, multimodal_model_types
from tests import supported_models
from tests.tree import ROOT

OTHER_USES = {
    "quire/engine/checkpoint/transformers_classes/__init__.py": {
        "camembert",
        "data2vec-text",
        "roberta",
        "xlm-roberta",
    },  # transformers' classes
    "quire/engine/encoders/vision/llava.py": {"clip"},  # a tower, as vision_config calls it
    "quire/engine/encoders/vision/tower_factory.py": {"clip"},
    "quire/engine/gguf/hf_tokenizer.py": {"gpt2", "llama"},  # tokenizers, as GGUF files call them
    "quire/engine/gguf/pre_tokenizers.py": {"falcon", "lfm2", "llama4", "mpt", "qwen2"},
    "quire/engine/layers/recurrent/mamba.py": {"mamba"},  # a module, as checkpoints call it
    "quire/engine/layers/recurrent/mamba2.py": {"mamba"},
}
"""By file: words that equal a family's name but mean something else there."""


def test_no_family_is_named_outside_of_its_file() -> None:
    names = {*decoder_model_types(), *encoder_model_types(), *multimodal_model_types()}
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "quire/engine").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith("quire/engine/families/"):
            constants = (
                node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)
            )
            if named := {node.value for node in constants if isinstance(node.value, str)} & names:
                found[file] = named
    assert found == OTHER_USES, "say it in the family's file, as a field of Family or of a spec"


def test_a_family_has_one_file() -> None:
    """A search for a model_type finds one description."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "quire/engine/families").glob("*.py")):
        for model_type in _described(path):
            places.setdefault(model_type, []).append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    assert {*places} == {*decoder_model_types(), *encoder_model_types()}


def _described(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "derive":
            found += [each.value for each in node.args if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.keyword) and node.arg == "model_types" and isinstance(node.value, ast.Tuple):
            found += [each.value for each in node.value.elts if isinstance(each, ast.Constant)]
    return found


def test_the_list_of_models_is_that_of_the_files() -> None:
    assert supported_models.FILE.read_text("utf-8") == supported_models.content(), "python -m tests.supported_models"
