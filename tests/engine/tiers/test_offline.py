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


def ask(llm: LLM) -> tuple[int, list[int]]:
    """The number of cached tokens, and the generated ids."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
    return answer.num_cached_tokens or 0, list(answer.outputs[0].token_ids)


@pytest.mark.slow
def test_sleeps_resets_updates_and_a_second_program(tmp_path: Path) -> None:
    path, other = save_tiny_model(tmp_path / "one", "llama"), save_other(tmp_path / "two")
    options = {"kv_offload_dir": str(tmp_path / "pages"), "num_kv_blocks": 32, "skip_tokenizer_init": True}
    llm = LLM(path, **options)
    _, wanted = ask(llm)
    llm.sleep()
    llm.wake_up()
    assert ask(llm) == (96, wanted)
    llm.update_weights(str(other))
    cached, others = ask(llm)
    assert cached == 0
    llm.update_weights(str(path))
    assert ask(llm) == (96, wanted)
    llm.close()
    llm = LLM(path, weights=str(other), **options)
    assert ask(llm) == (96, others)
    llm.sleep()
    llm.reset_prefix_cache()
    llm.wake_up()
    assert ask(llm) == (0, others)
    llm.close()
