"""`quire verify` passes on the real engine and detects a batch-dependent sampler and batch-dependent kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.types import EngineInfo
from quire.engine.offline.in_process_client import InProcessClient
from quire.engine.worker.sampling import device_sampler
from quire.server.cli import main as cli
from quire.server.cli import verify as verify_command
from quire.server.cli.verify import CheckResult, Verification, print_check_results
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> str:
    torch.set_num_threads(1)
    return str(save_tiny_model(tmp_path, "llama"))


async def verify(model: str) -> tuple[EngineInfo, dict[str, CheckResult]]:
    info, checks = await Verification(EngineConfig(model=model, threads=1), 12, InProcessClient).run_checks()
    return info, {check.name: check for check in checks}


def test_verify_passes_on_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--requests", "8", "--json", "--threads", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["mode"], report["passed"]) == ("deterministic", True)
    names = [check["name"] for check in report["checks"]]
    assert names == ["batched", "prefix-hit", "respawned", "chunked", "preempted"]
    assert all(check["tokens"] > 200 and check["exercised"] for check in report["checks"])
    whats = {check["name"]: check["what"] for check in report["checks"]}
    assert re.fullmatch(r"engine deaths: 1, requests replayed: [1-8]", whats["respawned"])


async def test_in_process_verify_exercises_all_checks_but_respawn(model: str) -> None:
    info, checks = await verify(model)
    assert info.deterministic
    assert {name: check.has_passed for name, check in checks.items()} == {
        "batched": True,
        "prefix-hit": True,
        "respawned": False,
        "chunked": True,
        "preempted": True,
    }
    assert checks["respawned"].differing == 0


async def test_verify_detects_batch_dependent_sampler(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., torch.Tensor] = device_sampler.sample_token_ids

    def broken(logits: torch.Tensor, rows: Any, *rest: Any, **named: Any) -> torch.Tensor:
        picks = honest(logits, rows, *rest, **named)
        return (picks + 1) % logits.shape[-1] if len(rows) > 8 else picks

    monkeypatch.setattr(device_sampler, "sample_token_ids", broken)
    _, checks = await verify(model)
    assert checks["batched"].differing > 0
    assert not checks["batched"].has_passed


async def test_verify_detects_batch_dependent_kernel(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.models.decoder import Decoder

    honest = Decoder.compute_logits

    def broken(self: Decoder, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return honest(self, hidden + 0.02 * len(hidden), *rest)

    monkeypatch.setattr(Decoder, "compute_logits", broken)
    _, checks = await verify(model)
    assert checks["batched"].differing > 0
    assert checks["chunked"].differing > 0


def test_verify_rejects_data_parallel_size() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size: verify runs one engine"):
        verify_command.main(["--data-parallel-size", "2"], 0.0)


def test_results_table_marks_failed_and_unexercised_checks(capsys: pytest.CaptureFixture[str]) -> None:
    info = EngineInfo("m", "float32", "cpu", "b", 1, 1, 1, 1, 1, 0.0, "a")
    print_check_results(
        info, [CheckResult("batched", "all at once", 8, 99, 3, True), CheckResult("preempted", "no", 8, 99, 0, False)]
    )
    text = capsys.readouterr().out
    for part in ("batch-dependent", "DIFFERENT", "not exercised"):
        assert part in text
    assert all(line == line.rstrip() for line in text.splitlines())
