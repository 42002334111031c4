"""Metrics of several engines, labeled by engine number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from quire.engine.core.stats import EngineStats, TierStats
from quire.server.observe.metric_collectors import engine_metrics, refusal_metrics


def test_metrics_are_labeled_by_engine() -> None:
    tier = TierStats("host", pages=3)
    one = EngineStats(running=2, used_blocks=5, total_blocks=10, prefix_hits=7, accepted_drafts=[4, 1], tiers=[tier])
    one = msgspec.structs.replace(one, draft_tokens_by_source=[3, 4, 0], accepted_by_source=[1, 4, 0])
    two = EngineStats(running=1, waiting=3, total_blocks=10)
    states = [SimpleNamespace(stats=one, asleep=False, responsive=True)]
    states.append(SimpleNamespace(stats=two, asleep=False, responsive=False))
    link = SimpleNamespace(engines=states, deaths=1, replays=2, quarantined=0)
    client: Any = SimpleNamespace(engine_core=link, slow_readers=4)
    families = [*engine_metrics(client, "m"), *refusal_metrics(client, "m", {"asleep": 3})]
    samples = [sample for family in families for sample in family.samples]

    def values(name: str) -> dict[str, float]:
        matching = [sample for sample in samples if sample.name == name]
        return {sample.labels.get("engine", "all"): sample.value for sample in matching}

    assert values("vllm:num_requests_running") == {"0": 2, "1": 1}
    assert values("vllm:num_requests_waiting_by_reason") == {"0": 0, "1": 0}, "the last reason's"
    assert values("vllm:kv_cache_usage_perc") == {"0": 0.5, "1": 0}
    assert values("vllm:prefix_cache_hits_total") == {"0": 7, "1": 0}
    assert values("vllm:spec_decode_num_accepted_tokens_total") == {"0": 5, "1": 0}
    assert values("vllm:spec_decode_num_accepted_tokens_per_pos_total") == {"0": 1}
    for name, counts in (("draft_tokens", [3, 4, 0]), ("accepted_tokens", [1, 4, 0])):
        matching = [each for each in samples if each.name == f"quire:spec_decode_num_{name}_by_source_total"]
        assert {each.labels["source"]: each.value for each in matching if each.labels["engine"] == "0"} == dict(
            zip(("model", "lookup", "grammar"), counts, strict=True)
        )
        assert len(matching) == 3, "an engine without drafts has no sources"
    assert values("quire:kv_tier_pages") == {"0": 3}
    assert values("quire:engine_responsive") == {"0": 1, "1": 0}
    assert values("quire:engine_deaths_total") == {"all": 1}
    assert values("quire:slow_readers_total") == {"all": 4}
    assert values("vllm:admission_rejections_total") == {"0": 3}
