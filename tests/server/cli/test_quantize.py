"""`quire quantize` writes a checkpoint, or prints in one line why it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_model
from tests.tree import ROOT


def quantize(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "quantize", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_quantize_writes_checkpoint_once(tmp_path: Path) -> None:
    path, out = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1), tmp_path / "out"
    out.mkdir()
    done = quantize(path, out, "--format", "int8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: 7 linears int-quantized; ")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "out"]
    again = quantize(path, out, "--format", "int8")
    assert (again.returncode, again.stderr) == (1, f"quire quantize: OUT: {out} exists and is not empty\n")
    twice = quantize(out, tmp_path / "twice", "--format", "int8")
    assert twice.stderr == "quire quantize: model: its weights are quantized already (compressed-tensors)\n"
    assert not (tmp_path / "twice").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("out", "says"),
    [
        ("file", "exists and is not a directory"),
        ("missing/out", "there is no directory"),
        ("file/out", "OUT: "),
    ],
)
def test_unusable_output_path_prints_one_line(out: str, says: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    (tmp_path / "file").write_text("")
    done = quantize(path, tmp_path / out, "--format", "int4")
    assert done.returncode == 1
    assert done.stderr.startswith("quire quantize: OUT: ")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("rwkv", "config.json: model_type: Quire does not serve rwkv"),
        ("bert", "'bert' does not belong to a family"),
        ("gpt_oss", "'gpt_oss' stores its experts as no compressed-tensors"),
    ],
)
def test_quantize_rejects_unsupported_models(kind: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": kind, "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 8, "num_hidden_layers": 1}))
    done = quantize(folder, tmp_path / "out", "--format", "fp8")
    assert done.returncode == 1
    assert done.stderr.startswith(f"quire quantize: model: {says}")
