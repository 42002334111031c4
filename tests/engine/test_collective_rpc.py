"""Collective RPC by method name and by function, in one process and on several ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.common.errors import EngineError, InvalidRequest
from quire.engine.common.executor import RPC_METHODS
from quire.engine.worker.ranks.rank_rpc import RankWorker
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed


def rank_and_width(worker: RankWorker, more: int, *, times: int = 1) -> tuple[int, int]:
    return worker.rank, (worker.model.spec.hidden_size + more) * times


def raise_on_rank(worker: RankWorker) -> None:
    raise ValueError(f"on {worker.rank}")


def exit_with_rank(worker: RankWorker) -> None:
    sys.exit(worker.rank)


def test_collective_rpc_runs_function_and_names_failing_rank() -> None:
    llm = LLM(num_kv_blocks=40)
    ((rank, result),) = llm.collective_rpc(rank_and_width, args=(1,), kwargs={"times": 2})
    assert (rank, result % 2) == (0, 0)
    (description,) = llm.collective_rpc("describe")
    assert (description["rank"], description["world_size"], description["device"]) == (0, 1, "cpu")
    (table,) = llm.collective_rpc("parameters")
    assert table["model.embed_tokens.weight"][1] == "bfloat16"
    with pytest.raises(EngineError, match="rank 0: ValueError: on 0"):
        llm.collective_rpc(raise_on_rank)
    with pytest.raises(EngineError, match="rank 0: SystemExit: 0"):
        llm.collective_rpc(exit_with_rank)
    with pytest.raises(InvalidRequest, match=r"method: there is no 'model', but describe and parameters"):
        llm.collective_rpc("model")
    assert {name for name in vars(RankWorker) if callable(getattr(RankWorker, name)) and name[0] != "_"} == set(
        RPC_METHODS
    )
    with pytest.raises(InvalidRequest, match="a function must be importable from a module"):
        llm.collective_rpc(lambda worker: None)
    llm.sleep()
    with pytest.raises(EngineError, match="is asleep"):
        llm.collective_rpc("describe")


@pytest.mark.slow
def test_collective_rpc_returns_results_of_all_ranks_and_replicas() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone = LLM(num_kv_blocks=40).generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids
    ranks = LLM(num_kv_blocks=40, tensor_parallel_size=2)
    assert [each[0] for each in ranks.collective_rpc(rank_and_width, args=(0,))] == [0, 1]
    assert [each["rank"] for each in ranks.collective_rpc("describe")] == [0, 1]
    with pytest.raises(EngineError, match="rank 0: ValueError: on 0; rank 1: ValueError: on 1"):
        ranks.collective_rpc(raise_on_rank)
    again = ranks.generate("abc", params, use_tqdm=False)[0].outputs[0].token_ids
    assert len(again) == len(alone)
    ranks.close()
    replicas = LLM(num_kv_blocks=40, data_parallel_size=2)
    assert [each["world_size"] for each in replicas.collective_rpc("describe")] == [1, 1]
    replicas.close()
    with pytest.raises(InvalidRequest, match=r"stages .* take no calls"):
        LLM(num_kv_blocks=40, pipeline_parallel_size=2).collective_rpc("describe")


def test_generate_requires_one_priority_per_prompt() -> None:
    llm = LLM(num_kv_blocks=40, max_num_seqs=1, threads=1)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    plain = [each.outputs[0].token_ids for each in llm.generate(["a", "b"], params, use_tqdm=False)]
    urgent = llm.generate(["a", "b"], params, use_tqdm=False, priority=[1, 0])
    assert [each.outputs[0].token_ids for each in urgent] == plain
    for wrong in ([1], ["a", "b"], 5):
        with pytest.raises(InvalidRequest, match="priority: 2 prompts need a list of as many integers"):
            llm.generate(["a", "b"], params, priority=wrong)  # type: ignore[arg-type]


async def test_collective_rpc_endpoint_requires_dev_endpoints_and_admin_key() -> None:
    body: dict[str, Any] = {"method": "describe"}
    async with open_api(FakeEngine(hashed(b"a"))) as api:
        refused = await api.http.post("/collective_rpc", json=body)
        assert (refused.status_code, "--dev-endpoints" in refused.text) == (400, True)
    async with open_api(FakeEngine(hashed(b"a")), dev_endpoints=True) as api:
        assert await api.post("/collective_rpc", body) == {"results": [["describe", {}]]}
        for field, value in (("method", 5), ("args", [1]), ("kwargs", {"a": 2})):
            wrong = await api.http.post("/collective_rpc", json=body | {field: value})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
    keys = {"api_key": ["sk-user"], "admin_api_key": ["sk-admin"]}
    async with open_api(FakeEngine(hashed(b"a")), dev_endpoints=True, **keys) as api:
        for key, status in (("sk-user", 403), ("sk-admin", 200)):
            answer = await api.http.post("/collective_rpc", json=body, headers={"x-api-key": key})
            assert answer.status_code == status
