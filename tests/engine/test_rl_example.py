"""The example of reinforcement learning: its sampler has the weights that its trainer has, step by step."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from examples.rl.grpo import parsed, reward_of, run
from quire.engine.config import DEMO_MODEL
from tests.e2e.server import Server
from tests.tree import ROOT


def test_the_reward_is_the_share_of_words() -> None:
    assert reward_of("She saw the Sun. A bird sang") == 4 / 7
    assert reward_of("") == 0


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["torch", "deepspeed"])
def test_a_few_steps_are_on_policy(trainer: str, tmp_path: Path) -> None:
    few = ["--steps=4", "--prompts=2", "--answers=4", "--tokens=12", "--threads=1", f"--log={tmp_path / 'curve.csv'}"]
    if trainer == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        few.append("--deepspeed")
    steps = run(parsed(few))
    assert [step.weights_version for step in steps] == ["1", "step-1", "step-2", "step-3"]
    assert max(step.mismatch for step in steps) < 1e-3, "old weights would be off by far more"
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 5


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_trains_on_answers_of_a_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--dtype", "float32", "--threads", "1")
    command = [sys.executable, str(ROOT / "examples/rl/grpo_trl.py"), server.url, str(tmp_path / "trained"), "--cpu"]
    few = ["--model", DEMO_MODEL, "--steps=3", "--prompts=2", "--answers=4", "--tokens=12"]
    try:
        done = subprocess.run([*command, *few], check=True, timeout=400, capture_output=True, text=True)
        steps = re.findall(r"step +(\d+)  reward [\d.]+  mismatch (\S+)", done.stdout)
        assert [number for number, _ in steps] == ["1", "2", "3"]
        assert max(float(mismatch) for _, mismatch in steps) < 1e-3, "old weights would be off by far more"
        body = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert answer["weights_version"] == "trained"
    finally:
        server.process.kill()
        server.process.wait()
