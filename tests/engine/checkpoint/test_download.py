"""Downloads of models from a stand-in hub: which files are fetched, what is checked, and the error messages."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.checkpoint.model_resolver import read_raw_config, resolve_model
from quire.engine.common.errors import ModelError
from quire.server.cli.main import main
from tests.stand_in_hub import Hub, Repo, stand_in_hub, tiny_gguf, used_here

CONFIG = json.dumps({"model_type": "llama", "hidden_size": 8}).encode()
GGUFS = {f"m-{tag}.gguf": tag.encode() * 50 for tag in ("Q4_K_M", "Q8_0", "F16")}
PARTS = {f"big/m-Q6_K-0000{number}-of-00002.gguf": bytes([number]) * 200 for number in (1, 2)}


@pytest.fixture(scope="module")
def running() -> Iterator[Hub]:
    with stand_in_hub() as hub:
        yield hub


@pytest.fixture
def hub(running: Hub, tmp_path: Path) -> Iterator[Hub]:
    running.repos = {
        "own/gguf": Repo({"README.md": b"# m", **GGUFS, **PARTS}),
        "own/both": Repo({"config.json": CONFIG, "model.safetensors": b"w" * 100, "m-Q8_0.gguf": b"g"}),
        "own/gated": Repo({"config.json": CONFIG, "model.safetensors": b"w"}, gated=True),
        "own/private": Repo({"config.json": CONFIG, "model.safetensors": b"w"}, private=True),
    }
    running.asked.clear()
    running.breaks, running.wrong, running.status, running.without_ranges = {}, set(), None, False
    with used_here(running, tmp_path):
        yield running


def refusal(name: str, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, revision)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_gguf_model_downloads_only_selected_file(hub: Hub) -> None:
    file = resolve_model("own/gguf")
    assert (file.name, file.read_bytes()) == ("m-Q4_K_M.gguf", GGUFS["m-Q4_K_M.gguf"])
    assert resolve_model(f"{hub.url}/own/gguf:q8_0").name == "m-Q8_0.gguf"
    assert resolve_model("own/gguf/m-F16.gguf").name == "m-F16.gguf"
    assert [len(hub.downloads(name)) for name in GGUFS] == [1, 1, 1]


def test_hf_quant_config_is_fetched_with_config_json(hub: Hub) -> None:
    beside = json.dumps({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}).encode()
    files = {"config.json": CONFIG, "hf_quant_config.json": beside, "model.safetensors": b"w"}
    hub.repos["own/modelopt"] = Repo(files)
    quantization = read_raw_config("own/modelopt")[0]["quantization_config"]
    assert quantization == {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    assert not hub.downloads("model.safetensors")
    assert "quantization_config" not in read_raw_config("own/both")[0]


def test_split_gguf_downloads_all_parts(hub: Hub) -> None:
    first = resolve_model("own/gguf:Q6_K")
    assert first.name == "m-Q6_K-00001-of-00002.gguf"
    assert [each.read_bytes()[:1] for each in sorted(first.parent.glob("*.gguf"))] == [b"\1", b"\2"]


def test_safetensors_are_preferred_unless_gguf_is_named(hub: Hub) -> None:
    folder = resolve_model("own/both")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert resolve_model("own/both:GGUF").name == "m-Q8_0.gguf", "what -hf asks for"
    assert not hub.downloads("model.safetensors")[1:]


def test_pytorch_bin_files_download_only_without_safetensors(hub: Hub) -> None:
    shards = {f"pytorch_model-0000{number}-of-00002.bin": b"w" for number in (1, 2)}
    other_files = {"training_args.bin": b"x", "flax_model.msgpack": b"x", "pytorch_model.bin.index.json": b"{}"}
    hub.repos["own/old"] = Repo({"config.json": CONFIG, **shards, **other_files})
    hub.repos["own/new"] = Repo({"config.json": CONFIG, "model.safetensors": b"w", "pytorch_model.bin": b"x"})
    expected = ["config.json", *shards, "pytorch_model.bin.index.json"]
    assert sorted(path.name for path in resolve_model("own/old").iterdir()) == expected
    assert sorted(path.name for path in resolve_model("own/new").iterdir()) == ["config.json", "model.safetensors"]
    hub.asked.clear()
    assert resolve_model("own/old").is_dir()
    assert not hub.downloads(next(iter(shards)))


def test_cached_model_resolves_without_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = resolve_model("own/gguf:Q4_K_M"), resolve_model("own/both")
    hub.asked.clear()
    assert resolve_model("own/gguf:Q4_K_M") == file
    assert not hub.asked
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("own/gguf") == file
    assert resolve_model("own/both") == folder
    assert "is not in the hub's cache on this machine, and HF_HUB_OFFLINE is set" in refusal("own/private")
    assert "own/gguf has no GGUF file Q8_0; it has Q4_K_M" in refusal("own/gguf:Q8_0")


def test_download_resumes_after_broken_connection(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 20)  # 10 MB; partial chunks are dropped
    hub.breaks["m-Q8_0.gguf"] = 60
    assert resolve_model("own/gguf:Q8_0").read_bytes() == GGUFS["m-Q8_0.gguf"]
    assert [each.rpartition(" ")[2] for each in hub.downloads("m-Q8_0.gguf")][1] == "bytes=60-"


def test_download_with_wrong_sha256_is_discarded(hub: Hub) -> None:
    hub.wrong.add("m-Q8_0.gguf")
    assert "m-Q8_0.gguf came with the SHA-256" in refusal("own/gguf:Q8_0")
    hub.wrong.clear()
    assert resolve_model("own/gguf:Q8_0").read_bytes() == GGUFS["m-Q8_0.gguf"]


def test_full_disk_is_reported_before_download(hub: Hub) -> None:
    hub.repos["own/gguf"].sizes["m-Q4_K_M.gguf"] = 2**60
    assert "too full for own/gguf: `quire list`" in refusal("own/gguf:Q4_K_M")
    assert not hub.downloads("m-")


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is too full for own/gguf"),
        (RuntimeError("Data processing error: No space left on device (os error 28)"), "is too full for own/gguf"),
        (RuntimeError("CAS service error\nmore"), "own/gguf cannot be downloaded: CAS service error"),
    ],
)
def test_download_error_reports_disk_that_fills_up(
    raised: Exception, says: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    assert says in refusal("own/gguf:Q4_K_M")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_unwritable_cache_folder_is_named_in_error(number: int, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number), "/models/hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    message = refusal("own/both")
    assert f"/models/hub cannot be written by uid {os.getuid()} ({os.strerror(number).lower()})" in message
    assert "HF_HOME" in message


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "token", "says"),
    [
        ("own/gated", None, "own/gated is gated: accept its terms at {url}/own/gated, and set HF_TOKEN"),
        ("own/gated", "stranger", "the account of HF_TOKEN has no access to it: request access at {url}/own/gated"),
        ("own/private", None, "nor found on the hub; if it is private, set HF_TOKEN"),
        ("own/private", "stranger", "nor found on the hub, or HF_TOKEN has no access to it"),
        ("own/gguf", "expired", "HF_TOKEN: the hub refuses this token for own/gguf (status 401)"),
        ("own/gguv", None, "did you mean own/gguf?"),
        ("own/gguf:Q9_K", None, "has no GGUF file Q9_K; it has Q6_K, F16, Q4_K_M, Q8_0"),
        ("own/gguf/m-Q9.gguf", None, "own/gguf has no GGUF file m-Q9.gguf"),
        ("own/missing/m.gguf", None, "'own/missing' is neither a directory nor found on the hub"),
        ("gguf", None, "it is not a hub id"),
    ],
)
def test_resolve_model_error_says_why_model_is_unavailable(
    name: str, token: str | None, says: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert says.format(url=hub.url) in refusal(name)


@pytest.mark.parametrize("name", ["own/gated", "own/private"])
def test_hf_token_opens_gated_and_private_models(name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "reader")
    assert (resolve_model(name) / "model.safetensors").read_bytes() == b"w"


def test_unknown_revision_and_hub_failures_are_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal("own/both", "v9") == "model: revision: own/both has no branch, tag or commit 'v9'"
    hub.status = 503
    assert "the hub answers 503 for own/both: try again later" in refusal("own/both")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    unreachable = refusal("own/both")
    assert (
        "the hub cannot be reached at http://127.0.0.1:1: check the network, HF_ENDPOINT and HTTPS_PROXY" in unreachable
    )
    assert "smollm2" in unreachable
    assert "plan" not in unreachable
    for command, hint in (
        ("pull", "GGUF file or smollm2 (a Python package)\n"),
        ("plan", "only the model's config.json\n"),
    ):
        assert main([command, "own/both"]) == 1
        assert capsys.readouterr().err.endswith(hint)


def test_read_raw_config_downloads_only_gguf_header(hub: Hub) -> None:
    content = tiny_gguf(size=16 * 2**20)
    hub.repos["own/real"] = Repo({"m-F32.gguf": content})
    raw, file = read_raw_config("own/real:F32")
    assert (raw["model_type"], raw["num_hidden_layers"]) == ("llama", 1)
    assert file is not None
    assert file.stat().st_size == len(content)
    assert file.stat().st_blocks * 512 < 9 * 2**20, "the rest is a hole"
    assert [each.rpartition(" ")[2] for each in hub.downloads("m-F32.gguf")] == [f"bytes=0-{8 * 2**20 - 1}"]
    hub.without_ranges = True
    with pytest.raises(ModelError, match="serves no byte ranges"):
        read_raw_config("own/real")
    raw, folder = read_raw_config("own/both")
    assert (raw["hidden_size"], folder) == (8, None)
