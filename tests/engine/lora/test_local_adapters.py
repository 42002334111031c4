"""Adapters of an offline program: how long their copies are kept, and how requests name them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from quire import LoRARequest
from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.lora.local_adapters import LocalAdapters
from tests.adapters import save_adapter
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model's folder, and those of five adapters."""
    path = save_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    model = AutoModelForCausalLM.from_pretrained(path)
    return [path, *(save_adapter(path / f"step-{seed}", model, 2, seed=seed) for seed in range(5))]


@pytest.fixture
def adapters(folders: list[Path]) -> LocalAdapters:
    config = EngineConfig(model=str(folders[0]), enable_lora=True, max_cpu_loras=2)
    return LocalAdapters(config, read_model_config(folders[0]))


def test_adapter_copies_are_deleted_with_last_request(adapters: LocalAdapters, folders: list[Path]) -> None:
    """A trainer that writes an adapter at every step would otherwise fill the disk."""
    spool_folder = Path(adapters._folder.name)
    steps = [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders[1:], 1)]
    (first,) = adapters.resolve_requests(steps[0], 1)  # held as an open request holds it
    assert first is not None
    for step in steps[1:]:
        adapters.resolve_requests(step, 1)
    gc.collect()
    assert len(list(spool_folder.iterdir())) == 3
    assert Path(first.folder).is_dir(), "the open request's"
    (other,) = adapters.resolve_requests(LoRARequest("the same content", 9, str(folders[1])), 1)
    assert other is not None
    assert other.folder == first.folder
    del first
    assert Path(other.folder).is_dir()
    del other
    adapters.resolve_requests(steps[3:], 2)
    gc.collect()
    assert len(list(spool_folder.iterdir())) == 2
    assert len(adapters.resolve_requests(steps, 5)) == 5, "those that went are read again"


def test_resolve_requests_accepts_str_or_path_and_rejects_other_types(
    adapters: LocalAdapters, folders: list[Path], tmp_path: Path
) -> None:
    (text, path) = adapters.resolve_requests([LoRARequest("a", 1, str(folders[1])), LoRARequest("a", 1, folders[1])], 2)
    assert text is path
    for wrong in ("a", {"lora_name": "a"}, [folders[1]]):
        with pytest.raises(InvalidRequest, match="must be LoRARequest"):
            adapters.resolve_requests(wrong, 1)  # type: ignore[arg-type]


def test_load_inplace_reads_adapter_files_again(adapters: LocalAdapters, folders: list[Path]) -> None:
    """vLLM's load_inplace, for trainers that write each step to the same folder."""
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    folder = save_adapter(folders[0] / "own", model, 2, seed=7)
    inplace_request = LoRARequest("a", 1, str(folder), load_inplace=True)
    (before,) = adapters.resolve_requests(inplace_request, 1)
    save_adapter(folder, model, 2, seed=8)
    assert adapters.resolve_requests(LoRARequest("a", 1, str(folder)), 1) == [before]
    after = adapters.resolve_requests([inplace_request, inplace_request], 2)
    assert after[0] is after[1] is not None
    assert after[0] != before
    assert adapters.resolve_requests(LoRARequest("a", 1, str(folder)), 1) == after[:1]
