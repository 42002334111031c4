"""--executor-cls runs batches on a user's executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.executor import PendingOutput
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import SchedulerOutput
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.worker.model_runner import ModelRunner
from quire.engine.worker.ranks.single_process import SingleProcess
from tests.tiny_models import save_tiny_model

launched: list[int] = []


class NotedRunner(ModelRunner):
    def launch(self, batch: SchedulerOutput) -> PendingOutput:
        launched.append(len(batch.scheduled_requests))
        return super().launch(batch)


class NotedExecutor(SingleProcess):
    def runner(self, *parts: Any) -> ModelRunner:
        return NotedRunner(*parts)


def engine_of(path: Path, name: str) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), num_kv_blocks=40, executor_cls=name))


def test_custom_executor_cls_runs_batches(tmp_path: Path) -> None:
    engine = engine_of(save_tiny_model(tmp_path, "llama"), f"{__name__}:NotedExecutor")
    launched.clear()
    engine.add_request(
        EngineCoreRequest(id="a", prompt_ids=[5] * 8, params=SamplingParams(max_tokens=3, ignore_eos=True), seed=0)
    )
    while engine.has_work:
        engine.step()
    assert launched == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("nowhere:Executor", "No module named"), ("json:JSONDecoder", "it is not a subclass of .*SingleProcess")],
)
def test_invalid_executor_cls_raises_config_error(name: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"executor_cls: '{name}' is no executor: .*{wrong}"):
        engine_of(save_tiny_model(tmp_path, "llama"), name)
