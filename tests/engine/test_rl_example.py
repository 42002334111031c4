"""The reinforcement learning examples: sampler and trainer have the same weights at every step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from quire import LLM
from quire.engine.common.config import DEMO_MODEL
from tests.e2e.server import Server
from tests.tree import ROOT


@pytest.fixture
def grpo() -> Any:
    """The example, whose import of transformers' models takes a second."""
    return import_module("examples.rl.grpo")


def import_path() -> str:
    """This process's import path, for child processes."""
    return os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, sys.path)]))


def test_reward_is_share_of_words(grpo: Any) -> None:
    assert grpo.reward_of("She saw the Sun. A bird sang") == 4 / 7
    assert grpo.reward_of("") == 0


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["torch", "deepspeed"])
def test_grpo_steps_are_on_policy(trainer: str, grpo: Any, tmp_path: Path) -> None:
    few = ["--steps=4", "--prompts=2", "--answers=4", "--tokens=12", "--threads=1", f"--curve={tmp_path / 'curve.csv'}"]
    if trainer == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        few.append("--deepspeed")
    steps = grpo.run(grpo.parsed(few))
    assert [step.weights_version for step in steps] == ["1", "step-1", "step-2", "step-3"]
    assert max(step.mismatch for step in steps) < 1e-3, "old weights would be off by far more"
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 5


@pytest.mark.slow
def test_reward_model_scores_equal_transformers(grpo: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(DEMO_MODEL, num_labels=1, num_hidden_layers=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    starts, texts = ["Once upon a time", "One day"], [", a fox", " the sun sang"]
    judge = LLM(tmp_path, dtype="float32", kv_cache_memory=0.05, threads=1)
    scores = grpo.by_model(judge)(starts, texts)
    judge.close()
    with torch.inference_mode():
        stories = [start + text for start, text in zip(starts, texts, strict=True)]
        expected = [model(torch.tensor([tokenizer.encode(story)])).logits.item() for story in stories]
    assert scores == pytest.approx(expected, abs=1e-4)
    assert not all(0 <= each <= 1 for each in scores) or abs(scores[0] - scores[1]) > 1e-6
    few = ["--steps=2", "--prompts=2", "--answers=2", "--tokens=4", "--threads=1", f"--reward-model={tmp_path}"]
    assert max(step.mismatch for step in grpo.run(grpo.parsed(few))) < 1e-3


@pytest.mark.slow
def test_deepspeed_on_two_ranks_trains_like_one(grpo: Any, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    few = ["--steps=3", "--prompts=2", "--answers=4", "--tokens=12", "--threads=1"]
    alone = grpo.run(grpo.parsed(few))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "examples/rl/grpo.py"), "--deepspeed", *few]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    done = subprocess.run(
        command, check=True, timeout=400, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    steps = re.findall(r"step +\d+  reward ([\d.]+)  mismatch (\S+)  weights (\S+)", done.stdout)
    assert [version for *_, version in steps] == ["1", "step-1", "step-2"]
    assert max(float(mismatch) for _, mismatch, _ in steps) < 1e-3, (
        "weights of before, or of one rank, would be far off"
    )
    assert [float(reward) for reward, *_ in steps[:2]] == pytest.approx([step.reward for step in alone[:2]], abs=0.02)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_trains_on_server_answers(tmp_path: Path) -> None:
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
