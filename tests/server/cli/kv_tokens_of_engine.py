"""Print [planned, allocated] KV tokens of a model: `python -m tests.server.cli.kv_tokens_of_engine PATH OPTIONS`.

The engine sees a machine with 1 GiB more than this process used before: memory used for loading counts too. Another
engine starts and ends first, because a process's first engine also allocates what later ones use again.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from unittest import mock

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.engine_core import EngineCore
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.native_library import ISAS
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine
from quire.server.cli.plan.model_plan import predict_kv_tokens


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed does not count
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(path: str, options: str) -> None:
    config = EngineConfig(model=path, load_format="dummy", dtype="bfloat16", **json.loads(options))
    cpu = CpuBackend()
    compresses = cpu.missing_reason is None and cpu.isa in (ISAS["avx512_bf16"], ISAS["avx512_amx"])
    machine = Machine("test", memory=GIB + ENGINE_HOST_BYTES, gpu=False, compresses_weights=compresses)
    planned = predict_kv_tokens(config, machine)
    EngineCore(EngineConfig(model=DEMO_MODEL, num_kv_blocks=8, max_num_seqs=2, dtype="bfloat16"))
    gc.collect()
    before = resident_bytes()
    free = "quire.engine.worker.device_memory.available_host_bytes"
    with mock.patch(free, side_effect=lambda: GIB - (resident_bytes() - before)):
        info = EngineCore(config).info
    print(json.dumps([planned, info.num_blocks * info.block_size]))


main(*sys.argv[1:])
