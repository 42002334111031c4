"""Tests checkpoints whose config.json ties the output head to the embedding while the files hold two different
matrices: the files win, as in transformers (issue 58).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.checkpoint.model_resolver import read_model_config, read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.errors import ModelError
from quire.engine.layers.parameters import LoadableParameter
from quire.engine.worker.loading.weight_loader import load_weights
from tests.engine.parity import edit_json, largest_difference, random_prompt
from tests.every_class import outcome
from tests.tiny_classes import save_tiny_class
from tests.tiny_models import FAMILIES, VOCAB, save_tiny_model

PROMPT = random_prompt(20)
ALONE = ("llama", "qwen3", "gpt2", "gpt_neox", "gpt_bigcode", "bloom", "mpt", "falcon", "opt", "cohere2")


def rename_tensors(folder: Path, **changes: str | None) -> None:
    """Rename tensors; None removes them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {changes.get(name, name): tensor for name, tensor in tensors.items()}
    save_file({name: each for name, each in renamed.items() if name is not None}, file, metadata={"format": "pt"})


def save_untied_model(folder: Path, family: str) -> Path:
    """A model whose files hold two matrices, and whose config.json says that they are one."""
    path = save_tiny_model(folder, family, tie_word_embeddings=False)
    edit_json(path / "config.json", tie_word_embeddings=True)
    return path


ONE_PER_CLASS = {fields["model_type"]: name for name, fields in reversed(FAMILIES.items()) if "zamba2" not in name}


@pytest.mark.few(4)
@pytest.mark.parametrize("family", sorted(ONE_PER_CLASS.values()))
def test_untied_output_head_is_used_despite_tied_config(family: str, tmp_path: Path) -> None:
    path = save_untied_model(tmp_path, family)
    assert largest_difference(path, PROMPT) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [{"model_impl": "transformers"}, {"quantize_embedding": False}, {"tensor_parallel_size": 2}]
)
def test_untied_output_head_is_used_with_other_settings(settings: dict[str, object], tmp_path: Path) -> None:
    assert largest_difference(save_untied_model(tmp_path, "llama"), PROMPT, **settings) < 1e-4


def test_output_head_equal_to_embedding_stays_tied(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama-tied-biased")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert read_model_config(path).tie_embeddings
    assert largest_difference(path, PROMPT) < 1e-4


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ALONE)
def test_tied_embedding_loads_from_head_name(family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, tie_word_embeddings=True)
    names = [name for name in load_file(path / "model.safetensors") if "layers" not in name and "wpe" not in name]
    table = (
        next(name for name in names if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")))
        if (not family.startswith(("bloom", "falcon")))
        else "transformer.word_embeddings.weight"
    )
    rename_tensors(path, **{table: "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"})
    assert largest_difference(path, PROMPT) < 1e-4


def test_model_sizes_count_untied_head(tmp_path: Path) -> None:
    both = read_model_sizes(read_raw_config(str(save_untied_model(tmp_path / "both", "llama")))[0])
    one = read_model_sizes(
        read_raw_config(str(save_tiny_model(tmp_path / "one", "llama", tie_word_embeddings=True)))[0]
    )
    assert both.num_parameters - one.num_parameters == VOCAB * 64


def test_untied_weights_cannot_replace_tied_weights(tmp_path: Path) -> None:
    from quire.engine.worker.loading.weight_check import check_same_model

    one = save_tiny_model(tmp_path / "one", "llama", tie_word_embeddings=True)
    with pytest.raises(ModelError, match="tie_embeddings"):
        check_same_model(read_model_config(one), save_untied_model(tmp_path / "both", "llama"), one)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("order", [(HEAD, EMBEDDING), (EMBEDDING, HEAD), (HEAD,), (EMBEDDING,)])
def test_tied_embedding_loads_from_either_name(order: tuple[str, ...]) -> None:
    taken: list[torch.Tensor] = []
    table = {EMBEDDING: LoadableParameter((2, 2), torch.float32, taken.append)}
    load_weights(table, [(name, torch.ones(2, 2)) for name in order], device=torch.device("cpu"))
    assert [tensor.tolist() for tensor in taken] == [[[1.0, 1.0], [1.0, 1.0]]]


@pytest.mark.parametrize("order", [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
def test_tied_embedding_rejects_different_head(order: tuple[str, ...]) -> None:
    table = {EMBEDDING: LoadableParameter((2, 2), torch.float32, lambda _: None)}
    stream = [(name, torch.full((2, 2), float(index))) for index, name in enumerate(order)]
    with pytest.raises(ModelError, match="differs from the embedding"):
        load_weights(table, stream, device=torch.device("cpu"))


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["xmod", "bert-generation"])
def test_output_head_bias_alone_does_not_untie(kind: str, tmp_path: Path) -> None:
    save_tiny_class(tmp_path, kind)
    assert {name for name in load_file(tmp_path / "model.safetensors") if "lm_head" in name} >= {"lm_head.bias"}
    assert outcome(kind).by == "transformers"
