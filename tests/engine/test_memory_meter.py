"""The memory and block tables that an engine view reports."""

from __future__ import annotations

import msgspec

from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.engine_builder.memory_meter import make_memory_meter
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request


def test_engine_view_reports_memory_and_block_tables() -> None:
    engine = EngineCore(EngineConfig(model=DEMO_MODEL, num_kv_blocks=32, threads=1, device="cpu"))
    engine.add_request(request("a", range(40)))
    engine.step()
    (memory,) = engine.make_engine_view().memory
    total, *parts = msgspec.structs.astuple(memory)
    assert sum(parts) == total > memory.free > 0
    assert (memory.weights, memory.kv) == (engine.info.weight_bytes, engine.info.kv_bytes)
    table = engine.get_block_table("a")
    assert table is not None
    assert (table.num_blocks, table.ref_counts, table.cached) == (3, [1, 1, 1], [True, True, False])
    assert engine.get_block_table("b") is None
    assert make_memory_meter(engine.info, world_size=2)() is None, "each process has memory of its own"
