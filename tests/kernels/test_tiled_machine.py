"""Quire as a whole on a machine with matrix tiles (AMX), emulated by traps if the processor has none (trapped.py):
which instruction set is chosen and reported, streams that resume on another set, and the engine's tests of batch
invariance.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.kernels.cpu import native_library
from tests.e2e.server import Server
from tests.e2e.test_batches import SMALL
from tests.kernels import trapped
from tests.kernels.trapped import Machine

pytestmark = [pytest.mark.slow, trapped.needs_tiles]
WITHOUT = {"QUIRE_CPU_ISA": trapped.BASE}
REFUSED = "(this processor has AMX tiles, but the system refuses them: a container's rules may)"
PATIENCE = 200.0
ASKED = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": 24, "seed": 3, "temperature": 1}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return trapped.machine(tmp_path_factory.mktemp("machine"))


def backend_description(machine: Machine, **environment: str) -> str:
    """The backend's description in a process on that machine."""
    code = (
        "from quire.kernels.cpu import build; from quire.kernels.cpu.backend import CpuBackend; "
        "print(build.__file__, CpuBackend().description())"
    )
    done = machine.run("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    place, _, said = done.stdout.strip().partition(" ")
    assert Path(place).is_relative_to(machine.folder)
    return said


def test_amx_is_selected_when_system_permits_tiles(machine: Machine) -> None:
    assert backend_description(machine) == f"compiled kernels, {native_library.ISAS[trapped.AMX]}"
    assert backend_description(machine, **WITHOUT) == f"compiled kernels, {native_library.ISAS[trapped.BASE]}"
    if not trapped.has_tiles():
        assert (
            backend_description(machine, TILES="refused")
            == f"compiled kernels, {native_library.ISAS[trapped.BASE]} {REFUSED}"
        )


def test_no_tile_instruction_runs_when_system_refuses_amx(machine: Machine) -> None:
    """The first tile instruction would end the process."""
    if trapped.has_tiles():
        pytest.skip("the system has given its permission")
    code = (
        "from tests.engine.test_contract import mixed_requests, tokens\n"
        "from quire.engine.common.config import EngineConfig\n"
        "from quire.engine.engine_core import EngineCore as Core\n"
        "print(len(tokens(Core(EngineConfig(dtype='bfloat16')), mixed_requests())))"
    )
    done = machine.run("-c", code, TILES="refused")
    assert done.stdout.strip() == "24", done.stderr
    asked = (
        "from quire.kernels.cpu import native_library; "
        "native_library.load_library_or_reason(); "
        "from quire.kernels.cpu.native_library import NativeLibrary; "
        "from quire.kernels.cpu.backend import CpuBackend; "
        "import torch; "
        "from quire.kernels.backend import NO_ADAPTERS; "
        "CpuBackend(NativeLibrary('avx512_amx')).pack_linear(torch.ones(64, 64).bfloat16(), None)"
        "(torch.ones(1, 64).bfloat16(), NO_ADAPTERS)"
    )
    done = machine.run("-c", asked, TILES="refused")
    assert done.returncode == -signal.SIGILL
    assert "has not asked for tiles, or was refused them" in done.stderr


@contextmanager
def server(machine: Machine, log: Path, *flags: str, **environment: str) -> Iterator[Server]:
    started = Server(log, "--dtype", "bfloat16", *SMALL, *flags, env=machine.environment | environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def test_resumed_stream_names_both_instruction_sets(machine: Machine, tmp_path: Path) -> None:
    """A stream that began with tiles and resumes without them names both sets in their order; one that stays names
    none.
    """
    data = ("--data-dir", str(tmp_path / "data"))
    with server(machine, tmp_path / "tiles.log", *data) as first:
        whole = httpx.post(f"{first.url}/v1/completions", json=ASKED, timeout=PATIENCE).json()
        with httpx.stream(
            "POST", f"{first.url}/v1/completions", json=ASKED | {"stream": True}, timeout=PATIENCE
        ) as answer:
            name = answer.headers["X-Stream-Id"]
            began = ""
            for piece in answer.iter_text():
                began += piece
                if began.count("\n\n") > 8:
                    break
        last = re.findall(r"^id: (.*)$", began[: began.rindex("\n\n")], re.MULTILINE)[-1]
        assert native_library.ISAS[trapped.AMX] in first.log.read_text()
    for environment, log in (({}, "again"), (WITHOUT, "without")):
        with server(machine, tmp_path / f"{log}.log", *data, **environment) as other:
            headers = {"Last-Event-ID": last}
            rest = httpx.get(f"{other.url}/v1/streams/{name}", headers=headers, timeout=PATIENCE)
            assert rest.status_code == 200
            mine = httpx.post(f"{other.url}/v1/completions", json=ASKED, timeout=PATIENCE).json()
            moved = rest.headers.get("X-Computed-By")
            if not environment:
                assert moved is None
                assert mine["system_fingerprint"] == whole["system_fingerprint"]
                assert mine["choices"][0]["text"] == whole["choices"][0]["text"]
            else:
                assert moved == f"{whole['system_fingerprint']}, {mine['system_fingerprint']}"
                assert whole["system_fingerprint"] != mine["system_fingerprint"]


_LONG_CONTRACTS = "qwen3 or bloom or lfm2 or deepseek or kimi"
SUITES = {
    "contract": ["tests/engine/test_contract.py", "-k", f"bfloat16-cpu-cpu and ({_LONG_CONTRACTS})"],
    "contract, dense": ["tests/engine/test_contract.py", "-k", f"bfloat16-cpu-cpu and not ({_LONG_CONTRACTS})"],
    "few bits": ["tests/engine/test_quantization.py", "-k", "alone_together and bfloat16"],
    "8-bit KV": ["tests/engine/test_kv_cache.py", "-k", "alone_together and bfloat16"],
    "experts": ["tests/engine/models/test_moe_fields.py", "-k", "depend_on_batching and bfloat16"],
    "recorded layers": ["tests/engine/models/test_fused_layers.py", "-m", "not gpu and not slow", "-k", "bfloat16"],
    "adapters": ["tests/engine/lora/test_together.py", "-k", "quantized_model_does_not_depend"],
    "ranks": ["tests/engine/test_ranks.py", "-k", "integer_products and int8"],
    "divided tokens": [
        "tests/engine/test_divided_tokens.py",
        "-k",
        "bits_of_ranks and llama-2-bfloat16",
    ],
    "guesses and replay": ["tests/engine/test_lossless.py"],
    "towers": ["tests/engine/images/test_towers.py", "-k", "do_not_depend_on_batch"],
    "image families": ["tests/engine/images/test_families.py", "-k", "of_family_do_not_depend_on_batch"],
    "image options": ["tests/engine/images/test_families.py", "-k", "int8_or_drafts_do_not_depend_on_batch"],
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", SUITES)
def test_batch_invariance_suites_pass_with_amx(suite: str, machine: Machine) -> None:
    assert backend_description(machine) == f"compiled kernels, {native_library.ISAS[trapped.AMX]}"
    chosen = ["-p", "no:cacheprovider", "-m", "not gpu", *SUITES[suite]]
    done = machine.run("-m", "pytest", *chosen, timeout=1700, QUIRE_LOSSLESS_EXAMPLES="5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
