"""`quire bench throughput` and `quire bench latency`: vLLM's measurements, with the embedded model in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.server.cli.main import main

pytestmark = pytest.mark.slow


def test_bench_throughput_counts_prompt_and_output_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    sizes = ["--num-prompts", "3", "--random-input-len", "16", "--random-output-len", "8"]
    assert main(["bench", "throughput", *sizes, "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["num_requests"], result["prompt_tokens"], result["output_tokens"]) == (3, 48, 24)
    assert result["total_num_tokens"] == 72
    assert result["tokens_per_second"] == pytest.approx(72 / result["elapsed_time"])
    assert "Throughput:" in capsys.readouterr().out


def test_bench_latency_reports_one_latency_per_iteration(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    arguments = ["--input-len", "8", "--output-len", "4", "--batch-size", "2", "--num-iters", "3"]
    assert main(["bench", "latency", *arguments, "--num-iters-warmup", "1", "--output-json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
