"""Tests the failure callback of `LLM`, its errors for invalid settings, and an engine that runs in its own process."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.common.errors import ConfigError, EngineError, ModelError
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.single_process import SingleProcess


class Broken(SingleProcess):
    def runner(self, *parts: Any) -> ModelRunner:
        runner = super().runner(*parts)
        runner.launch = _fail  # type: ignore[method-assign]
        return runner


def _fail(batch: object) -> Any:
    raise RuntimeError("the device is gone")


def test_a_callback_is_told_that_the_engine_is_gone() -> None:
    llm = LLM(num_kv_blocks=64, executor_cls=f"{__name__}:Broken")
    heard: list[EngineError] = []
    llm.register_failure_callback(heard.append)
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate("Once", use_tqdm=False)
    llm.close()
    assert [type(each).__name__ for each in heard] == ["EngineGone"]


def test_closing_is_no_failure() -> None:
    llm = LLM(num_kv_blocks=64)
    heard: list[EngineError] = []
    llm.register_failure_callback(heard.append)
    llm.close()
    assert heard == []


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_is_replaced() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    with_process, here = LLM(num_kv_blocks=64, multiprocessing=True), LLM(num_kv_blocks=64)
    try:
        pid = with_process._client.engine_core.pid
        assert pid is not None
        assert here._client.engine_core.pid is None
        first = with_process.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
        assert first == here.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
        os.kill(pid, signal.SIGKILL)
        assert with_process.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids == first
    finally:
        with_process.close()
        here.close()


def test_a_wrong_setting_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(max_num_seqs=0)
    with pytest.raises(ValueError, match="there is no directory"):
        LLM("nowhere")
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ModelError, ValueError)
