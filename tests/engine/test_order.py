"""Scheduling order by --scheduling-policy and --scheduler-cls; --disable-sliding-window and --block-size."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.core.scheduler import Scheduler
from quire.engine.engine_core import EngineCore
from tests.tiny_models import save_tiny_model

ROOT = Path(__file__).parent.parent.parent
BROKEN = f"{__name__}:BrokenScheduler"
PROMPTS = {"long": [5] * 40, "short": [6] * 3, "middle": [7] * 20}


def finish_order_and_tokens(path: Path, **options: object) -> tuple[list[str], dict[str, list[int]]]:
    """The ids of requests in the order in which they ended, one running at a time, and their tokens."""
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=40, max_num_seqs=1, **options))  # type: ignore[arg-type]
    first = EngineCoreRequest(
        id="first", prompt_ids=[9] * 8, params=SamplingParams(max_tokens=3, ignore_eos=True), seed=0
    )
    outputs: list[EngineCoreOutput] = []
    engine.add_request(first)
    outputs += engine.step()
    for priority, (name, ids) in enumerate(PROMPTS.items()):
        params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0)
        engine.add_request(EngineCoreRequest(id=name, prompt_ids=ids, params=params, seed=7, priority=-priority))
    while engine.has_work:
        outputs += engine.step()
    tokens: dict[str, list[int]] = {}
    for each in outputs:
        tokens.setdefault(each.id, []).extend(each.new_ids)
    return [each.id for each in outputs if each.finish_reason], tokens


def test_scheduling_policy_changes_order_but_not_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "llama")
    monkeypatch.syspath_prepend(ROOT / "examples/scheduling")
    by_priority, tokens = finish_order_and_tokens(path)
    assert by_priority == ["middle", "short", "first", "long"], "what runs gives way to what is more urgent"
    as_they_came, same = finish_order_and_tokens(path, scheduling_policy="fcfs")
    assert (as_they_came, same) == (["first", "long", "short", "middle"], tokens)
    own = "shortest_first:ShortestFirst"
    shortest, again = finish_order_and_tokens(path, scheduling_policy="fcfs", scheduler_cls=own)
    assert (shortest, again) == (["first", "short", "middle", "long"], tokens)


class BrokenScheduler(Scheduler):
    def place(self, request: EngineCoreRequest) -> float:
        return {5: math.nan, 6: "first"}[request.prompt_ids[0]] if request.id != "first" else 0  # type: ignore[return-value]


def test_invalid_scheduler_place_fails_only_that_request(tmp_path: Path) -> None:
    engine = EngineCore(
        EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), num_kv_blocks=40, scheduler_cls=BROKEN)
    )
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for name, ids in (PROMPTS | {"first": [9]}).items():
        engine.add_request(EngineCoreRequest(id=name, prompt_ids=ids, params=params, seed=0))
    outputs: list[EngineCoreOutput] = []
    while engine.has_work or not outputs:
        outputs += engine.step()
    ended = {each.id: each.error or each.finish_reason for each in outputs if each.finish_reason}
    prefix = "scheduler_cls: BrokenScheduler.place "
    assert ended == {
        "first": "length",
        "long": f"{prefix}gave nan, which is not a number",
        "short": f"{prefix}gave 'first', which is not a number",
        "middle": f"{prefix}raised KeyError: 7",
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("no_such_module:Own", "ModuleNotFoundError"),
        ("shortest_first:Nobody", "AttributeError"),
        ("pathlib:Path", "not a subclass of"),
    ],
)
def test_invalid_scheduler_cls_raises_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples/scheduling")
    with pytest.raises(ConfigError, match=f"scheduler_cls: .*{wrong}"):
        finish_order_and_tokens(save_tiny_model(tmp_path, "llama"), scheduler_cls=name)


def test_disable_sliding_window_limits_context_to_window(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "mistral-window", sliding_window=48, max_position_embeddings=256)
    config = EngineConfig(model=str(path), num_kv_blocks=60)
    whole = EngineCore(config)
    within = EngineCore(config.model_copy(update={"disable_sliding_window": True}))
    assert (whole.info.max_model_len, within.info.max_model_len) == (256, 48)
    with pytest.raises(ConfigError, match="max_model_len: 64 exceeds the model's 48 positions"):
        EngineCore(config.model_copy(update={"disable_sliding_window": True, "max_model_len": 64}))


def test_block_size_is_applied_or_rejected(tmp_path: Path) -> None:
    config = EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), num_kv_blocks=60)
    assert EngineCore(config.model_copy(update={"block_size": 16})).info.block_size == 16
    with pytest.raises(ConfigError, match=r"its blocks have 16 tokens, not 32 \(block_size\); reference: its blocks"):
        EngineCore(config.model_copy(update={"block_size": 32}))
