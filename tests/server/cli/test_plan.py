"""`quire plan`: its arithmetic by hand, its word against what the engine then does, and what it says."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.checkpoint.kv_plan import GIB
from quire.engine.checkpoint.sizes import read_sizes
from quire.engine.config import DEMO_MODEL, EngineConfig
from quire.engine.errors import ConfigError
from quire.engine.loop import Engine
from quire.kernels.cpu.backend import Cpu
from quire.kernels.cpu.native import ISAS
from quire.server.cli import main as cli
from quire.server.cli.plan.estimate import BLOCK_SIZE, Wishes, estimate, predicted_tokens
from quire.server.cli.plan.machine import ENGINE_HOST_BYTES, Machine, find_card, read_cards

DEEPSEEK_CODER = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
    "vocab_size": 32256,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = DEEPSEEK_CODER | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def coder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_CODER))
    return str(tmp_path)


def plan(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    assert cli.main(["plan", *args, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_deepseek_coder_by_hand(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, coder, "--gpu", "H100", "--context", "16384", "--concurrency", "1")
    assert found["kv"]["page_bytes_per_layer"] == 256 * 1024
    assert found["kv"]["bytes_per_token"] * 16384 == 8 * GIB
    assert found["parameters"] == 6_740_512_768, "what its authors' index file adds up to, at two bytes each"
    assert found["weight_bytes"] == 2 * found["parameters"]
    assert found["fits"]


def test_limits_are_the_roofline(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = (coder, "--memory", "80", "--bandwidth", "1000", "--tflops", "100", "--context", "1024")
    found = plan(capsys, *args)
    read = found["active_parameters"] * 2 + 1024 * 524288
    assert found["limits"]["decode_tokens_per_second_alone"] == pytest.approx(1e12 / read)
    head = 32256 * 4096
    work = 2 * (found["active_parameters"] - head) * 1024 + 2 * head + 2 * 32 * 4096 * 1024**2
    assert found["limits"]["prefill_seconds"] == pytest.approx(work / 100e12)
    assert plan(capsys, coder, "--memory", "80")["limits"] is None


def test_two_devices_share_weights_and_cache() -> None:
    one = estimate(read_sizes(LLAMA_70B), find_card("h100"), Wishes())
    assert "nothing is left" in one.reasons[0]
    two = estimate(read_sizes(LLAMA_70B), replace(find_card("h100"), count=4), Wishes())
    assert two.fits
    assert two.kv_token_bytes == 2 * 8 * 128 * 80 * 2 // 4
    assert two.kv_budget > 30 * GIB


def test_what_does_not_fit_says_why_and_what_does(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, coder, "--gpu", "rtx 4090", "--context", "16384", "--concurrency", "4", status=1)
    assert "4 x 16,384 tokens need 32.00 GiB" in found["reasons"][0]
    best = int(found["reasons"][0].split("; 4 x ")[1].split()[0].replace(",", ""))
    assert plan(capsys, coder, "--gpu", "rtx 4090", "--context", str(best), "--concurrency", "4")["fits"]
    more = str(best + BLOCK_SIZE)
    assert not plan(capsys, coder, "--gpu", "rtx 4090", "--context", more, "--concurrency", "4", status=1)["fits"]
    assert find_card(found["fits_on"]["name"]).memory > find_card("rtx 4090").memory
    found = plan(capsys, coder, "--gpu", "t4", "--dtype", "bfloat16", status=1)
    assert "float16" in found["reasons"][0]
    found = plan(capsys, coder, "--gpu", "h100", "--context", "99999", status=1)
    assert "16,384 positions" in found["reasons"][0]


def test_flags_are_the_servers_and_mean_the_plan(coder: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, coder, "--gpu", "v100-32gb", "--concurrency", "300", "--gpu-memory-utilization", "0.97")
    flags = dict(zip(found["flags"][::2], found["flags"][1::2], strict=True))
    names = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    config = EngineConfig(model=coder, **names)
    assert (config.dtype, config.max_model_len, config.max_num_seqs) == ("float16", found["context"], 300)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("nvidia a10g", "A10G"),
    ],
)
def test_a_driver_s_name_finds_its_card(driver: str, name: str) -> None:
    assert find_card(driver).name == name


def test_a_card_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="A100-40GB or A100-80GB"):
        find_card("a100")
    with pytest.raises(ConfigError, match="RTX-4090"):
        find_card("voodoo 2")


def test_the_table_is_sound() -> None:
    for card in read_cards().values():
        assert 8 * GIB < card.memory < 300 * GIB
        assert card.bandwidth is not None
        assert card.flops is not None
        assert 20 < card.flops / card.bandwidth < 500, f"{card.name}: so many operations per byte has none"


def resident_bytes() -> int:
    """Of this process, without what it has freed."""
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


SHAPES: dict[str, dict[str, Any]] = {
    "embedded": {"model": DEMO_MODEL},
    "135 M, tied": {"hidden_size": 576, "num_hidden_layers": 6, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"vocab_size": 49152, "intermediate_size": 1536, "tie_word_embeddings": True, "max_position_embeddings": 65536},
    "wide heads": {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    | {"head_dim": 128, "vocab_size": 32000, "intermediate_size": 2048, "max_position_embeddings": 32768},
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux to tell its memory")
@pytest.mark.parametrize("options", [{}, {"kv_cache_memory": 0.25}, {"max_model_len": 640, "max_num_seqs": 4}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_gets_what_was_planned(
    shape: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of 1 GiB beside what this process took before: what it takes to load counts as it would there."""
    path = SHAPES[shape].get("model")
    if path is None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SHAPES[shape]))
        path = str(tmp_path)
    before = resident_bytes()
    monkeypatch.setattr("quire.engine.worker.memory.available_host_bytes", lambda: GIB - (resident_bytes() - before))
    config = EngineConfig(model=path, load_format="dummy", dtype="bfloat16", **options)
    cpu = Cpu()
    compresses = cpu.missing is None and cpu.isa == ISAS["avx512_bf16"]
    planned = predicted_tokens(
        config, Machine("test", memory=GIB + ENGINE_HOST_BYTES, gpu=False, compresses=compresses)
    )
    info = Engine(config).info
    assert planned == pytest.approx(info.num_blocks * info.block_size, rel=0.03)


def test_text_table_and_picture(coder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", coder, "--gpu", "h100", "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for part in ("6.74 B parameters", "512 KiB a token", "256 KiB per layer", "7 x 16,384", "quire serve"):
        assert part in text
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag.endswith("svg")
    words = " ".join(root.itertext())
    assert "weights 12.56 GiB" in words
    assert "16,384" in words
    assert cli.main(["plan", coder, "--memory", "8", "--picture", str(picture)]) == 1
    assert "does not fit" in " ".join(ElementTree.fromstring(picture.read_text()).itertext())
    capsys.readouterr()
    assert cli.main(["plan", coder, "--gpu", "all"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in read_cards())


def test_it_needs_no_torch(coder: str) -> None:
    code = (
        "import sys; from quire.server.cli import main as cli; cli.main(['plan', sys.argv[1], '--gpu', 'h100']);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, coder], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["/no/such/config.json"], "config.json"),
        (["--gpu", "voodoo"], "voodoo"),
        (["--memory", "8", "--tflops", "3"], "--bandwidth"),
    ],
)
def test_mistakes_are_named(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *args]) == 1
    assert named in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_failure_of_ours() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "quire", "plan", "--gpu", "all"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
