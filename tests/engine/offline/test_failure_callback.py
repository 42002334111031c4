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
        runner.launch = _raise_device_gone  # type: ignore[method-assign]
        return runner


def _raise_device_gone(batch: object) -> Any:
    raise RuntimeError("the device is gone")


def test_failure_callback_receives_engine_gone_error() -> None:
    llm = LLM(num_kv_blocks=64, executor_cls=f"{__name__}:Broken")
    errors: list[EngineError] = []
    llm.register_failure_callback(errors.append)
    with pytest.raises(EngineError, match="the device is gone"):
        llm.generate("Once", use_tqdm=False)
    llm.close()
    assert [type(each).__name__ for each in errors] == ["EngineGone"]


def test_close_does_not_call_failure_callback() -> None:
    llm = LLM(num_kv_blocks=64)
    errors: list[EngineError] = []
    llm.register_failure_callback(errors.append)
    llm.close()
    assert errors == []


@pytest.mark.slow
def test_killed_engine_process_is_replaced_with_same_tokens() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    with_process, in_process = LLM(num_kv_blocks=64, multiprocessing=True), LLM(num_kv_blocks=64)
    try:
        pid = with_process._client.engine_core.pid
        assert pid is not None
        assert in_process._client.engine_core.pid is None
        expected_ids = with_process.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
        assert expected_ids == in_process.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
        os.kill(pid, signal.SIGKILL)
        assert with_process.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids == expected_ids
    finally:
        with_process.close()
        in_process.close()


def test_invalid_setting_raises_value_error() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        LLM(max_num_seqs=0)
    with pytest.raises(ValueError, match="there is no directory"):
        LLM("nowhere")
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ModelError, ValueError)
