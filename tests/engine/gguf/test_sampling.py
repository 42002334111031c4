"""A GGUF file's sampling metadata acts like a folder's generation_config.json."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from quire.engine.checkpoint.model_resolver import read_generation_defaults
from quire.engine.common.errors import ModelError


def written(path: Path, **keys: float) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_files_own_advice_is_the_default(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", temp=0.2, top_p=0.9, top_k=40, min_p=0.05, penalty_repeat=1.1)
    assert read_generation_defaults(path) == {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert read_generation_defaults(written(tmp_path / "silent.gguf")) == {}


def test_the_packaged_model_samples_as_its_makers_do(tmp_path: Path) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert read_generation_defaults(written(tmp_path / name)) == {"temperature": 0.2, "top_p": 0.9}
    assert read_generation_defaults(written(tmp_path / name, temp=0.5)) == {"temperature": 0.5, "top_p": 0.9}


def test_a_value_that_no_request_could_have_names_its_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"bad\.gguf, read as generation_config\.json: top_p: "):
        read_generation_defaults(written(tmp_path / "bad.gguf", top_p=7.0))
