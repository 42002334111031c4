"""Commands that Ollama's and vLLM's users know: run MODEL, ps, stop, show, run-batch, collect-env, and unknown ones."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from quire.engine.checkpoint.model_resolver import resolve_model
from quire.engine.client.engine_client import EngineClient
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError
from quire.server.app import create_app
from quire.server.cli.main import main
from quire.server.cli.models.model_names import equivalent_names
from quire.server.cli.models.show import describe_stored
from quire.server.cli.run import vllm
from quire.server.config import ServerConfig
from quire.server.runtime.model_spec_loader import load_served_model_spec
from tests.server.api import open_http
from tests.server.cli.scripted_server import ScriptedHandler, run_in_thread
from tests.server.fake import FakeEngine, hashed
from tests.server.forked import FORKED

SEVERAL = [{"id": "owner/one", "state": "awake"}, {"id": "qwen3:4b", "state": "unloaded"}]


class Handler(ScriptedHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        held = [{"name": "owner/one", "size_vram": 3 << 30, "context_length": 2048}]
        self.reply({"models": held} if self.path == "/api/ps" else {"object": "list", "data": self.server.cards})

    def do_POST(self) -> None:
        body = self.read_json()
        self.server.keys.append(self.headers["Authorization"])
        self.server.asked.append((self.path, body))
        if self.path.endswith("/chat/completions"):
            self.send_response(200)
            self.end_headers()
            for chunk in (
                {"choices": [{"index": 0, "delta": {"content": "Because."}}]},
                {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
            ):
                self.send_event(chunk)
            self.wfile.write(b"data: [DONE]\n\n")
            return
        info = {"general.architecture": "llama", "llama.context_length": 2048}
        self.reply({"model_info": info, "capabilities": ["completion"], "template": "{{ x }}", "parameters": "top_p 1"})


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cards: list[dict[str, Any]] = SEVERAL
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    with run_in_thread(server):
        yield server


def set_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(text))


def test_run_prints_answer_to_prompt_and_sends_flags(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, "")
    argv = ["run", "owner/one", "Why", "so?", "--url", server.url, "--verbose", "--think=false", "--format", "json"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert printed.out == "Because.\n"
    assert "eval count:           2 token(s)" in printed.err
    assert re.search(r"^eval rate: +\d+\.\d\d tokens/s \(eval count / total duration\)$", printed.err, re.MULTILINE)
    ((_, body),) = server.asked
    assert body["messages"] == [{"role": "user", "content": "Why so?"}]
    assert (body["model"], body["response_format"]) == ("owner/one", {"type": "json_object"})
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    "line",
    [
        "owner/one --format json --verbose Why so?",
        "--verbose owner/one --format json Why so?",
        "owner/one Why --verbose so? --format json",
        "--format=json --think owner/one --verbose Why so?",
        "owner/one --verbose --think Why --format json -- so?",
    ],
)
def test_run_accepts_flags_anywhere(
    line: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, "")
    assert main(["run", "--url", server.url, *line.split()]) == 0
    printed = capsys.readouterr()
    assert (printed.out, "eval count" in printed.err) == ("Because.\n", True)
    ((_, body),) = server.asked
    assert (body["model"], body["response_format"]) == ("owner/one", {"type": "json_object"})
    assert body["messages"] == [{"role": "user", "content": "Why so?"}]
    assert body.get("chat_template_kwargs") == ({"enable_thinking": True} if "--think" in line else None)


def test_piped_text_precedes_prompt(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "A long\ntext.\n")
    assert main(["run", "owner/one", "Sum it up", "--url", server.url]) == 0
    set_stdin(monkeypatch, "Only this\nof two lines\n")
    assert main(["run", "owner/one", "--url", server.url, "--system", "Be brief."]) == 0
    bodies = [body["messages"] for _, body in server.asked]
    assert bodies[0][-1]["content"] == "A long\ntext.\nSum it up"
    assert bodies[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Only this\nof two lines"},
    ]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give a model"),
        (["requests.jsonl"], "a file of requests needs -o OUT.jsonl"),
        (["-"], "a file of requests needs -o OUT.jsonl"),
    ],
)
def test_run_without_required_arguments_exits_with_message(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, "")
    with pytest.raises(SystemExit):
        main(["run", *argv])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--format", "yaml"], ["--think=hard"]])
def test_run_rejects_unknown_flag_value_in_one_line(
    argv: list[str], server: ScriptedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, "")
    assert main(["run", "owner/one", "Hi", "--url", server.url, *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quire run: {argv[0].partition('=')[0]}: ")
    assert error.count("\n") == 1


def test_run_sends_no_environment_key_to_default_server(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("QUIRE_PORT", str(server.server_address[1]))
    set_stdin(monkeypatch, "")
    assert main(["run", "owner/one", "Hi"]) == 0
    assert capsys.readouterr().out == "Because.\n"
    assert set(server.keys) == {None}
    assert main(["run", "owner/one", "Hi", "--api-key", "mine"]) == 0
    assert "Bearer mine" in server.keys


def test_ps_lists_models_in_memory(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", server.url]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "CONTEXT", "STATE"]
    assert row.split() == ["owner/one", "3.00", "GiB", "2048", "awake"]


def test_stop_unloads_model_by_any_equivalent_name(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stop", "owner/one", "Qwen/Qwen3-4B-GGUF:Q4_K_M", "--url", server.url]) == 0
    assert [body["model"] for _, body in server.asked] == ["owner/one", "qwen3:4b"]
    assert main(["stop", "owner/two", "--url", server.url]) == 1
    assert "no model owner/two; did you mean owner/one?" in capsys.readouterr().err
    server.cards = [{"id": "owner/one"}]
    assert main(["stop", "owner/one", "--url", server.url]) == 1
    assert "the server's only model" in capsys.readouterr().err


def test_show_prints_details_from_server(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "owner/one", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    assert "context length    2048" in printed
    assert "completion" in printed
    assert main(["show", "owner/one", "--template", "--url", server.url]) == 0
    assert capsys.readouterr().out == "{{ x }}\n"


def test_show_reads_local_model_offline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: ScriptedServer
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["show", DEMO_MODEL, "--url", server.url]) == 0
    assert "embedding length  256" in capsys.readouterr().out
    assert main(["show", DEMO_MODEL, "--parameters", "--url", server.url]) == 0
    assert "temperature 0.7" in capsys.readouterr().out
    assert main(["show", "nothing-of-this-name", "--url", server.url]) == 1


@pytest.mark.parametrize("has_template", [True, False])
async def test_show_agrees_with_server_about_the_same_model(has_template: bool, tmp_path: Path) -> None:
    config = ServerConfig(model=str(shutil.copytree(resolve_model(DEMO_MODEL), tmp_path / "model")))
    if not has_template:
        file = tmp_path / "model/tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": None}))
    app = create_app(EngineClient(FakeEngine(hashed(b"x"))), load_served_model_spec(config)[0], launch_process=FORKED)
    async with open_http(app) as http:
        served = (await http.post("/api/show", json={"model": config.model_names[0]})).json()
    stored = describe_stored(config.model)
    assert stored["Model"]["architecture"] == served["model_info"]["general.architecture"] == "llama"
    assert stored["Capabilities"] == served["capabilities"] == ["completion", "tools"]


def test_ps_and_stop_without_server_print_one_line_with_hint(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["ps"], ["stop", "x"]):
        assert main([*argv, "--url", "http://127.0.0.1:9"]) == 1
        error = capsys.readouterr().err
        assert "is it started? quire serve starts one" in error
        assert error.count("\n") == 1


def test_equivalent_names_include_catalog_and_hub_name() -> None:
    assert equivalent_names("owner/one") == ["owner/one"]
    assert "qwen3:4b" in equivalent_names("Qwen/Qwen3-4B-GGUF:Q4_K_M")
    assert "Qwen/Qwen3-4B-GGUF:Q4_K_M" in equivalent_names("qwen3:4b")


@pytest.mark.parametrize(
    "line",
    [
        "-i in.jsonl --output-file=out.jsonl --model m --enable-metrics --port 9 --url=x",
        "--input_file in.jsonl -o out.jsonl --response-role assistant --model m",
        "in.jsonl --output out.jsonl --model m",
    ],
)
def test_run_batch_accepts_vllm_flags(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[Path, Path, str]] = []

    def record(parser: object, args: argparse.Namespace, config: ServerConfig, started: float) -> int:
        runs.append((args.file, args.output, config.model))
        return 0

    monkeypatch.setattr(vllm, "run_request_file", record)
    assert main(["run-batch", *line.split()]) == 0
    assert runs == [(Path("in.jsonl"), Path("out.jsonl"), "m")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "required: -i/--input-file"),
        ("-i in.jsonl", "required: -o/--output"),
        ("-i", "argument -i/--input-file: expected one argument"),
        ("-i https://example.com/in.jsonl -o out", "https://example.com/in.jsonl is not a local file"),
        ("-i in.jsonl -o s3://bucket/out", "s3://bucket/out is not a local file"),
        ("-i in.jsonl -o out --concurrency 0", "argument --concurrency: must be at least 1"),
    ],
)
def test_run_batch_names_itself_and_its_flags_in_errors(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["run-batch", *line.split()])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: quire run-batch -i FILE.jsonl -o OUT.jsonl ")
    assert error.splitlines()[-1].startswith("quire run-batch: error: ")
    assert said in error


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("run", ("-o OUT.jsonl", "--resume", "--retry-refused", "--concurrency N", "--served-model-name TEXT")),
        ("run -o x", ("FILE.jsonl", "-o OUT.jsonl", "--resume", "--retry-refused", "--served-model-name TEXT")),
        ("run-batch", ("-i FILE.jsonl", "--output-file OUT.jsonl", "--resume", "--served-model-name TEXT")),
    ],
)
def test_help_lists_flags_of_request_files(
    command: str, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    for shown in ("--help", "--help=all"):
        with pytest.raises(SystemExit):
            main([*command.split(), shown])
        usage, _, options = capsys.readouterr().out.partition("\n\n")
        assert usage.startswith(f"usage: quire {command.split()[0]} ")
        for flag in flags:
            assert flag in options
        if shown == "--help":
            assert options.endswith(f" more flags: quire {command.split()[0]} --help=all\n")


@pytest.mark.parametrize("flag", ["--resume", "--retry-refused", "--concurrency=2", "--served-model-name=x"])
def test_run_refuses_flags_of_request_files_with_a_prompt(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "owner/one", "Hi", flag])
    name = flag.partition("=")[0]
    assert f"{name} is for a file of requests: quire run FILE.jsonl -o OUT.jsonl" in capsys.readouterr().err


def test_collect_env_prints_versions_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sk-secret")
    monkeypatch.setenv("QUIRE_MAX_MODEL_LEN", "4096")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["collect-env"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("quire ", "python ", "torch ", "cpu ", "QUIRE_MAX_MODEL_LEN"))
    assert "secret" not in printed


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ls", "use quire list"),
        ("create", "system message and defaults"),
        ("complete", "use quire run MODEL PROMPT"),
        ("llama-server", "use quire serve"),
        ("signin", "hf auth login"),
        ("serv", "did you mean serve?"),
        ("zzz", "quire --help lists them"),
    ],
)
def test_unknown_command_prints_hint(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "x"]) == 2
    assert said in capsys.readouterr().err


def write_cached_repository(hub: Path, name: str, **files: str) -> None:
    """Write what the hub's client would have downloaded."""
    folder = hub / f"models--{name.replace('/', '--')}"
    commit = "a" * 40
    for part in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    for path, content in files.items():
        blob = folder / "blobs" / path
        blob.write_text(content)
        (folder / "snapshots" / commit / path).symlink_to(Path("../../blobs") / path)


def test_cached_models_are_served_generators_first_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    from quire.server.cli.models.cached_models import build_cached_models_config

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="nothing is downloaded that could be served"):
        build_cached_models_config({"device": "cpu"})
    config = (Path(DEMO_MODEL) / "config.json").read_text()
    other = json.dumps(json.loads(config) | {"model_type": "no_such_family"})
    write_cached_repository(tmp_path, "owner/large", **{"config.json": config, "model.safetensors": "x" * 900})
    write_cached_repository(tmp_path, "owner/small", **{"config.json": config, "model.safetensors": "x"})
    write_cached_repository(tmp_path, "owner/embedder", **{"config.json": config, "model.safetensors": ""})
    write_cached_repository(tmp_path, "owner/other", **{"config.json": other, "model.safetensors": "x"})
    write_cached_repository(tmp_path, "owner/config-alone", **{"config.json": config})
    multi_model_config = build_cached_models_config({"device": "cpu", "kv_cache_memory": 0.5})
    assert [entry.name for entry in multi_model_config.entries] == ["owner/small", "owner/large", "owner/embedder"]
    assert multi_model_config.entries[0].config.kv_cache_memory == 0.5
    assert multi_model_config.memory_limit_bytes is not None
    assert multi_model_config.memory_limit_bytes > 0
    assert "owner/other is not served" in caplog.text
