"""`quire quantize` writes a checkpoint, or prints in one line why it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.common.config import DEMO_MODEL
from quire.server.cli.main import main
from tests.tiny_models import save_tiny_model

Quantize = Callable[..., tuple[int, str, str]]


@pytest.fixture
def quantize(capfd: pytest.CaptureFixture[str]) -> Quantize:
    """`quire quantize` with these arguments; returns the status, stdout and stderr."""

    def run(*args: object) -> tuple[int, str, str]:
        capfd.readouterr()  # drop the output of making the model
        status = main(["quantize", *map(str, args)])
        return status, *capfd.readouterr()

    return run


@pytest.mark.slow
def test_quantize_writes_checkpoint_once(quantize: Quantize, tmp_path: Path) -> None:
    path, out = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1), tmp_path / "out"
    out.mkdir()
    status, printed, error = quantize(path, out, "--format", "int8")
    assert (status, error) == (0, "")
    assert printed.startswith(f"{out}: 7 linears int-quantized; ")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "out"]
    again = quantize(path, out, "--format", "int8")
    assert again == (1, "", f"quire quantize: OUT: {out} exists and is not empty\n")
    _, _, error = quantize(out, tmp_path / "twice", "--format", "int8")
    assert error == "quire quantize: model: its weights are quantized already (compressed-tensors)\n"
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("out", "says"),
    [("file", "exists and is not a directory"), ("missing/out", "there is no directory"), ("file/out", "OUT: ")],
)
def test_unusable_output_path_prints_one_line(out: str, says: str, quantize: Quantize, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, _, error = quantize(DEMO_MODEL, tmp_path / out, "--format", "int4")
    assert status == 1
    assert error.startswith("quire quantize: OUT: ")
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("rwkv", "config.json: model_type: Quire does not serve rwkv"),
        ("bert", "'bert' does not belong to a family"),
        ("gpt_oss", "'gpt_oss' stores its experts as no compressed-tensors"),
    ],
)
def test_quantize_rejects_unsupported_models(kind: str, says: str, quantize: Quantize, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": kind, "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 8, "num_hidden_layers": 1}))
    status, _, error = quantize(folder, tmp_path / "out", "--format", "fp8")
    assert status == 1
    assert error.startswith(f"quire quantize: model: {says}")
