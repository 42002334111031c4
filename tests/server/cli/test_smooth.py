"""`quire quantize --smooth`: its calibration texts, and what it rejects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.common.errors import ConfigError
from quire.server.cli.quantize import main
from quire.server.cli.quantize.calibration import read_tokenized_samples
from tests.texts import byte_level_tokenizer
from tests.tiny_models import save_tiny_model

TOKENIZER = byte_level_tokenizer().tokenizer


def test_calibration_file_yields_sample_per_line_and_cut_text(tmp_path: Path) -> None:
    lines = [{"text": "A" * 600}, {"prompt": "AB"}, {"messages": [{"role": "user", "content": "A"}], "id": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second, third = read_tokenized_samples(tmp_path / "a.jsonl", TOKENIZER, 100)
    assert first == [65] * 100
    assert second == [65, 66]
    assert TOKENIZER.decode(third, skip_special_tokens=False) == "<|im_start|>user\nA<|im_end|>\n"
    (tmp_path / "a.txt").write_text("A" * 1200)
    assert [len(each) for each in read_tokenized_samples(tmp_path / "a.txt", TOKENIZER, 4096)] == [512, 512, 176]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": "A"}\n{"text": 1}', "smooth: line 2: Expected `str | null`"),
        ("a.jsonl", "{}", "smooth: line 1: has neither text, prompt nor messages"),
        ("a.jsonl", '{"messages": [{"a": 1}]}', r"smooth: line 1: messages\[0\].role: Field required"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 5}]}', r"smooth: line 1: messages\[0\].content: "),
        ("a.txt", "", "a.txt: has no text"),
        ("missing", None, "No such file"),
    ],
)
def test_invalid_calibration_file_raises_config_error(
    name: str, content: str | None, says: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says) as raised:
        read_tokenized_samples(tmp_path / name, TOKENIZER, 4096)
    assert raised.value.param == "smooth"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--format", "int4"), "smooth: int4 does not round activations to integers: --format int8"),
        (("--format", "w8a8", "--smooth-strength", "1.5"), "smooth_strength: 1.5 is not in 0 to 1"),
    ],
)
def test_quantize_rejects_smooth_flags_without_meaning(flags: tuple[str, ...], says: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    (tmp_path / "a.txt").write_text("A")
    with pytest.raises(ConfigError, match=says):
        main([str(path), str(tmp_path / "out"), "--smooth", str(tmp_path / "a.txt"), *flags], 0.0)


@pytest.mark.slow
def test_quantize_smooth_smooths_norms(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = save_tiny_model(tmp_path / "model", "llama", num_hidden_layers=1)
    TOKENIZER.backend.save(str(path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("What is read here is of no matter. " * 9)
    assert main([str(path), str(tmp_path / "out"), "--format", "w8a8", "--smooth", str(tmp_path / "a.txt")], 0.0) == 0
    assert ": 7 linears int-quantized, 2 norms smoothed; " in capfd.readouterr().out
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized"
