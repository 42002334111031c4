"""A GGUF file's sampling metadata acts like a folder's generation_config.json."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from quire.engine.checkpoint.model_resolver import read_generation_defaults
from quire.engine.common.errors import ModelError


def write_sampling_gguf(path: Path, **keys: float) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in keys.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_sampling_metadata_becomes_generation_defaults(tmp_path: Path) -> None:
    path = write_sampling_gguf(tmp_path / "m.gguf", temp=0.2, top_p=0.9, top_k=40, min_p=0.05, penalty_repeat=1.1)
    assert read_generation_defaults(path) == {
        "temperature": 0.2,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
    }
    assert read_generation_defaults(write_sampling_gguf(tmp_path / "silent.gguf")) == {}


def test_packaged_smollm2_has_sampling_defaults_of_its_authors(tmp_path: Path) -> None:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert read_generation_defaults(write_sampling_gguf(tmp_path / name)) == {"temperature": 0.2, "top_p": 0.9}
    assert read_generation_defaults(write_sampling_gguf(tmp_path / name, temp=0.5)) == {
        "temperature": 0.5,
        "top_p": 0.9,
    }


def test_invalid_gguf_sampling_value_names_field_in_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"bad\.gguf, read as generation_config\.json: top_p: "):
        read_generation_defaults(write_sampling_gguf(tmp_path / "bad.gguf", top_p=7.0))
