"""Snippets of the documents run as they are, except for model names and the server's port.

Each line of a shell block is a command with an expectation in EXPECTED, or is in NOT_RUN with a reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from quire.engine.common.config import DEMO_MODEL
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from tests.e2e.server import Server
from tests.tree import ROOT

DOCS = sorted(
    ["README.md", "deploy/README.md", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = {
    **dict.fromkeys(
        [
            f"quire {what} MODEL {flags}"
            for what in ("serve", "plan")
            for flags in ("--tensor-parallel-size 2 --enable-expert-parallel", "--weights-on-disk")
        ],
        "it wants a model with experts; tests/engine/test_expert_parallel.py and test_experts_on_disk.py make some",
    ),
    "quire serve Qwen/Qwen3.5-4B": "downloads 9 GB",
    "quire serve nvidia/Llama-3.1-8B-Instruct-FP8": "downloads 9 GB; tests/quantized_models.py makes tiny ones",
    "quire serve Qwen/Qwen2.5-Coder": "downloads 3 GB; tests/server/routes/test_llama_cpp.py has its tokens",
    "quire serve MODEL --cpu-offload-gb": "it wants a GPU; tests/engine/test_layers_from_host.py plays one",
    "quire serve OWNER/MODEL --config gpu-": "a GPU; tests/server/cli/test_settings_flags.py reads the presets",
    "quire serve --host 0.0.0.0 --api-key-file": "keys and a certificate; tests/server/hosted.py has some",
    "sudo apt install": "the system's packages",
    "make": "it would install; tests/test_snippets.py holds that the targets are there",
    "docker": "tests/test_deploy.py reads what it would start",
    "kubectl": "tests/test_deploy.py reads what it would apply",
    "pip install -r deploy/ray": "it would install; tests/test_deploy_ray.py reads what",
    "serve ": "it wants Ray; tests/e2e/test_ray_serve.py runs it where there is one",
    "ray ": "as above",
    "export PYTHONPATH": "as above",
    "quire serve MODEL --data-parallel-size 4": "eight GPUs; tests/engine/client/test_replica_gpus.py plays them",
    "quire serve MODEL --tensor-parallel-size 2 --one-shot-sums": "several GPUs; tests/kernels/triton has their sums",
    "quire serve MODEL --tensor-parallel-size 2 --nnodes": "several machines; tests/e2e/test_nodes.py plays two",
    "pip install": "it compiles for GPUs, for hours",
    "FLASH_ATTN_CUDA_ARCHS": "as above",
    "helm": "tests/test_deploy_chart.py renders what it would install",
    "export ANTHROPIC": "a program of others; make agents tests what it asks",
    "export CLAUDE": "as above",
    "claude": "as above",
    "export OPENAI": "as above",
    "qwen ": "as above",
    "aider ": "a program of others; make agent-loop runs it",
    "quire serve MODEL --max-model-len 65536": "the embedded model's context is 2,048",
    "quire serve smollm2": "its package is not everywhere; tests/engine/gguf has what it serves",
    "quire serve model.gguf": "as above",
    "quire batch": "it wants a server with --data-dir; tests/server/cli/test_batch.py runs it with one",
    "curl -N localhost:8000/v1/streams/": "a stream that was cut; tests/server/routes/test_streams.py has some",
    "curl --retry": "it wants a server that is killed; tests/e2e/test_curl.py kills one",
    "curl -s localhost:8000/v1/requests/": "an answer's id; tests/e2e/test_prefix_misses.py asks for some",
    "curl -X POST http://localhost:8000/v1/sessions/": "a session of before; tests/e2e/test_sessions.py has one",
    "quire pull": "it wants the hub; tests/server/cli/test_models.py has a stand-in",
    "quire rm": "as above",
    "quire run qwen3:4b": "as above; tests/server/cli/test_ollama_commands.py chats with a model that is here",
    "quire show qwen3:4b": "as above",
    "quire bench throughput": "it takes minutes; tests/server/cli/test_bench_offline.py runs a small one",
    "QUIRE_MAX_MODEL_LEN=1024 uvicorn": "another program's server; tests/e2e/test_factory.py runs it",
    "quire ps": "it wants a running server; tests/server/cli/test_ollama_commands.py has one",
    "quire replay": "it wants receipts; tests/e2e/test_receipts.py has some",
    "quire plan model.gguf": "as above",
    "quire quantize MODEL OUT --format w8a8": "it wants texts; tests/server/cli/test_smooth.py has some",
    "quire serve MODEL --enable-lora": "it wants an adapter; tests/e2e/test_adapters.py serves some",
    "curl http://127.0.0.1:8000/v1/load_lora_adapter": "as above",
    "curl localhost:8000/v1/models/": "it wants models; tests/e2e/test_models.py adds one",
}
NOT_RUN_PYTHON = {
    "docs/guides/chat-and-agents.md": "its package is a client's; tests/clients/test_responses.py makes these calls",
    "docs/guides/images.md": "it wants a model that reads images; tests/e2e/test_images.py serves one",
    "docs/deploy/ray.md": "a client of a cluster; tests/e2e/test_ray_serve.py has one",
    "docs/guides/lora.md": "it wants an adapter; tests/engine/lora has some",
    "docs/guides/rl-weights.md": "parts of a program; tests/engine/test_weights.py makes these calls",
    "docs/learn.md": "tests/test_learn.py runs them, and compares what they print",
}
EXPECTED = {
    "curl -N http": r"data: \[DONE\]",
    "curl http.*/v1/chat/completions": r'"role": ?"assistant"',
    "curl http.*/v1/embeddings": r'"embedding": ?\[',
    "quire chat": r"\w+ \w+",
    "quire run": r"1 done, 0 failed, 0 left, \d+ tokens generated",
    "quire bench serve": r"output tokens/s +\d",
    "quire bench start": r"command to first token: median \d",
    "quire bench offline": r"output tokens/s +\d",
    "quire models": "qwen3:4b",
    "quire list": "OWNER/REPO|NAME",
    "quire plan": "\nKV ",
    "quire verify": "",
    "quire quantize": "",
    "quire collect-env": r"python +3\.",
    "quire trace": "open it in https://ui.perfetto.dev",
    "quire serve": "Ctrl-C ends it",
    "python -m benchmarks.perplexity": "int8",
}
"""Maps a pattern of a command's beginning to a pattern that its output must contain."""
REPLACED = {
    "OWNER/MODEL": DEMO_MODEL,
    "sentence-transformers/all-MiniLM-L6-v2": DEMO_MODEL,
    "MODEL": DEMO_MODEL,
    "FOLDER": DEMO_MODEL,
    "serve OUT": f"serve {DEMO_MODEL}",  # written by the command before it
}


@dataclass(frozen=True)
class Snippet:
    place: str
    language: str
    text: str


def snippets() -> list[Snippet]:
    found = []
    for name in DOCS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            found.append(Snippet(f"{name}:{line}", block[1], block[2]))
    return found


def is_drawing(snippet: Snippet) -> bool:
    return snippet.language == "mermaid" or (snippet.language == "" and snippet.text.startswith(" "))


def commands() -> list[tuple[str, str]]:
    """Places and commands of the shell blocks; a backslash at the end of a line continues it."""
    return [
        (snippet.place, line)
        for snippet in snippets()
        if snippet.language in ("", "sh") and not is_drawing(snippet) and not snippet.text.startswith("{")
        for line in snippet.text.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def runnable_commands() -> list[tuple[str, str]]:
    """Commands without comments. One that several documents have is here once."""
    places: dict[str, str] = {}
    for place, line in commands():
        if not line.startswith(tuple(NOT_RUN)):
            places.setdefault(line.partition("  #")[0].rstrip(), place)
    return [(place, command) for command, place in places.items()]


def snippets_in(language: str) -> list[Snippet]:
    return [
        snippet
        for snippet in snippets()
        if snippet.language == language
        and not (language == "python" and snippet.place.startswith(tuple(NOT_RUN_PYTHON)))
    ]


def with_replacements(text: str, url: str) -> str:
    names = re.compile("|".join(rf"{re.escape(old)}(?![\w/])" for old in REPLACED))
    return names.sub(lambda found: REPLACED[found[0]], text).replace("http://127.0.0.1:8000", url)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    quire = tmp_path_factory.mktemp("bin") / "quire"
    quire.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m quire "$@"\n')
    quire.chmod(0o755)
    server = Server(quire.with_name("log"), "--threads", "1", "--pooling-type", "last", quire=quire)
    yield server
    server.process.terminate()
    server.process.wait(timeout=60)


def environment() -> dict[str, str]:
    return os.environ | {"QUIRE_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def test_every_snippet_has_expectation_or_reason_not_to_run() -> None:
    assert len(snippets()) > 15
    languages = {snippet.language for snippet in snippets()}
    assert languages <= {"", "sh", "text", "python", "toml", "mermaid", "json", "yaml"}
    for place, line in commands():
        known = line.startswith(tuple(NOT_RUN)) or any(re.match(each, line) for each in EXPECTED)
        assert known, f"{place}: say in EXPECTED what `{line}` prints, or in NOT_RUN why it is not run"


def test_make_targets_in_docs_exist() -> None:
    targets = [line.split("#")[0].split()[1] for _, line in commands() if line.startswith("make ")]
    assert targets
    rules = (ROOT / "Makefile").read_text()
    assert [target for target in targets if not re.search(rf"^{target}:", rules, re.MULTILINE)] == []


@pytest.mark.parametrize("snippet", snippets_in("toml"), ids=lambda snippet: snippet.place)
def test_toml_snippets_load(snippet: Snippet, tmp_path: Path) -> None:
    text = snippet.text.replace("sha256:…", "sha256:" + hashlib.sha256(b"another").hexdigest())
    if "key = " not in text:
        assert tomllib.loads(text)
        return
    (tmp_path / "keys.toml").write_text(text)
    assert Tenants(ServerConfig(api_key_file=tmp_path / "keys.toml"))


@pytest.mark.parametrize("snippet", [*snippets_in("json"), *snippets_in("yaml")], ids=lambda snippet: snippet.place)
def test_json_and_yaml_snippets_load(snippet: Snippet) -> None:
    assert json.loads(snippet.text) if snippet.language == "json" else yaml.safe_load(snippet.text)


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets_in("python"), ids=lambda snippet: snippet.place)
def test_python_snippets_run(snippet: Snippet, server: Server, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(with_replacements(snippet.text, server.url))
    completed = subprocess.run(
        [sys.executable, program], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200
    )
    assert completed.returncode == 0, completed.stderr
    assert re.search(r"\w+ \w+", completed.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "line"), runnable_commands())
def test_shell_commands_print_expected_output(place: str, line: str, server: Server, tmp_path: Path) -> None:
    (batch,) = [snippet.text for snippet in snippets() if snippet.text.startswith("{") and not snippet.language]
    assert json.loads(batch)["custom_id"]
    (tmp_path / "requests.jsonl").write_text(batch)
    (tmp_path / "TEXT").write_text("".join((ROOT / name).read_text(encoding="utf-8") for name in DOCS))
    python = shlex.quote(sys.executable)
    command = with_replacements(line, server.url).replace("quire ", f"{python} -m quire ", 1)
    command = command.replace("python -m bench", f"{python} -m bench")
    command += f" --url {server.url}" if line.startswith("quire trace") else ""  # its default port is 8000
    serves = line.startswith("quire serve")
    expected = next(pattern for start, pattern in EXPECTED.items() if re.match(start, line))
    output = tmp_path / "output"
    with output.open("wb") as out, (tmp_path / "input").open("w+") as stdin_file:
        stdin_file.write("Hello\n")
        stdin_file.seek(0)
        shell = ["bash", "-c", f"exec {command}{' --port 0' if serves else ''}"]
        process = subprocess.Popen(shell, cwd=tmp_path, env=environment(), stdin=stdin_file, stdout=out, stderr=out)
        while serves and expected not in output.read_text() and process.poll() is None:
            time.sleep(0.1)
        if serves:
            process.send_signal(signal.SIGINT)
        status = process.wait(timeout=280)
    assert status == 0, output.read_text()
    assert re.search(expected, output.read_text()), output.read_text()
