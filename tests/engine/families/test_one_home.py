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


def test_engine_code_names_families_only_in_family_files() -> None:
    names = {*decoder_model_types(), *encoder_model_types(), *multimodal_model_types()}
    uses: dict[str, set[str]] = {}
    for path in sorted((ROOT / "quire/engine").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith("quire/engine/families/"):
            constants = (
                node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)
            )
            if named := {node.value for node in constants if isinstance(node.value, str)} & names:
                uses[file] = named
    assert uses == OTHER_USES, "say it in the family's file, as a field of Family or of a spec"


def test_each_model_type_is_described_in_one_file() -> None:
    """A search for a model_type finds one description."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "quire/engine/families").glob("*.py")):
        for model_type in _described_model_types(path):
            places.setdefault(model_type, []).append(path.name)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    assert {*places} == {*decoder_model_types(), *encoder_model_types()}


def _described_model_types(path: Path) -> list[str]:
    model_types: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "derive":
            model_types += [each.value for each in node.args if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.keyword) and node.arg == "model_types" and isinstance(node.value, ast.Tuple):
            model_types += [each.value for each in node.value.elts if isinstance(each, ast.Constant)]
    return model_types


def test_supported_models_document_is_up_to_date() -> None:
    assert supported_models.FILE.read_text("utf-8") == supported_models.content(), "python -m tests.supported_models"
