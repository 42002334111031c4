"""Tests `LLM` with KV on disk through sleep, weight updates and a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.tiers.load_costs import LoadCosts
from tests.engine.tiers.fakes import Always
from tests.engine.tiers.test_engine import save_other
from tests.tiny_models import save_tiny_model

PROMPT = list(range(3, 103))


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load every block that a tier has. All stored blocks are there once an engine has ended."""
    monkeypatch.setattr(LoadCosts, "num_blocks_worth_loading", Always.num_blocks_worth_loading)


def generate_cached_and_ids(llm: LLM) -> tuple[int, list[int]]:
    """The number of cached tokens, and the generated ids."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
    return answer.num_cached_tokens or 0, list(answer.outputs[0].token_ids)


@pytest.mark.slow
def test_disk_tier_survives_sleep_weight_update_and_restart(tmp_path: Path) -> None:
    path, other_path = save_tiny_model(tmp_path / "one", "llama"), save_other(tmp_path / "two")
    options = {"kv_offload_dir": str(tmp_path / "pages"), "num_kv_blocks": 32, "skip_tokenizer_init": True}
    llm = LLM(path, **options)
    _, expected = generate_cached_and_ids(llm)
    llm.sleep()
    llm.wake_up()
    assert generate_cached_and_ids(llm) == (96, expected)
    llm.update_weights(str(other_path))
    cached, other_expected = generate_cached_and_ids(llm)
    assert cached == 0
    llm.update_weights(str(path))
    assert generate_cached_and_ids(llm) == (96, expected)
    llm.close()
    llm = LLM(path, weights=str(other_path), **options)
    assert generate_cached_and_ids(llm) == (96, other_expected)
    llm.sleep()
    llm.reset_prefix_cache()
    llm.wake_up()
    assert generate_cached_and_ids(llm) == (0, other_expected)
    llm.close()
