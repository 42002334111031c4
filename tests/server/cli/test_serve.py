"""`quire serve` as a user sees it: a process, its output, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.engine.client.engine_process import _KERNELS
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError
from quire.server.cli.announcement import listen_url
from quire.server.cli.main import main
from quire.server.http.listener import bind_tcp_socket
from tests.e2e.server import children
from tests.server.cli.processes import engines, needs_proc, wait_until_gone

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
}
SMALL = ["--max-model-len", "2048", "--num-kv-blocks", "256", "--max-num-seqs", "8", "--threads", "1"]


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "quire", *argv]


def test_memory_error_at_start_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As happens under `ulimit -v`."""

    def read(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("quire.server.observe.log_setup.set_up_logging", read)
    monkeypatch.setattr("quire.server.cli.main.exit_on_sigterm_or_sighup", lambda: None)  # these would be ours
    assert main(["serve", "--port", "0"]) == 1
    assert capsys.readouterr().err == "quire serve: too little memory (ulimit -v, the container's limit)\n"


@contextmanager
def serving(*flags: str, ignored: Sequence[signal.Signals] = ()) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server process on a free port, its URL, and its output until it was ready."""

    def dispose() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    argv = command("serve", "--port", "0", *SMALL, *flags)
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, preexec_fn=dispose)
    assert process.stdout is not None
    assert process.stderr is not None
    printed = ""
    try:
        for line in process.stdout:
            printed += line
            if line.startswith("curl"):
                break
        url_match = re.search(r"http://\S+:\d+", printed)
        assert url_match, printed + process.stderr.read()
        yield process, url_match.group(), printed
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_serve_logs_line_per_request() -> None:
    with serving() as (process, base, _):
        httpx.get(f"{base}/v1/models")
        assert process.stderr is not None
        assert re.search(r"INFO GET /v1/models 200 in \d+ ms\n", process.stderr.readline())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_drains_open_stream_and_exits_0(number: signal.Signals) -> None:
    """After the signal an open stream continues to its [DONE]; new connections are refused."""
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with serving() as (process, base, _), httpx.stream("POST", f"{base}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        process.send_signal(number)
        events = [first, *(line for line in lines if line)]  # on a busy machine the first may be all of it
        assert events[0].startswith("data: {")
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2].replace(" ", "")
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{base}/health")
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert re.search(rf"INFO the server has ended after [\d.]+ s, by {number.name}, with status 0$", last)


@pytest.mark.slow
def test_closed_terminal_drains_open_stream() -> None:
    """A terminal that closes takes the server's output with it and sends SIGHUP more than once."""
    controller_fd, terminal_fd = os.openpty()
    hang_up = (
        "import fcntl, os, signal, sys, termios; signal.signal(signal.SIGHUP, signal.SIG_DFL);"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    argv = [sys.executable, "-c", hang_up, *command("serve", "--port", "0", *SMALL)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        argv, stdin=terminal_fd, stdout=terminal_fd, stderr=terminal_fd, start_new_session=True, env=buffered
    )
    os.close(terminal_fd)
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True}
    try:
        printed = b""
        while b"curl -N" not in printed:
            printed += os.read(controller_fd, 4096)
        base = re.search(r"http://\S+:\d+", printed.decode())
        assert base
        with httpx.stream("POST", f"{base.group()}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            os.close(controller_fd)
            assert next(line for line in lines if line).startswith("data: {")
            process.send_signal(signal.SIGHUP)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_serve_keeps_sighup_ignored_and_handles_ignored_sigint() -> None:
    """A server started by nohup outlives its terminal. A script's background server, which ignores SIGINT at its start,
    still ends on Ctrl-C.
    """
    with serving(ignored=[signal.SIGHUP, signal.SIGINT]) as (process, base, _):
        process.send_signal(signal.SIGHUP)
        for _ in range(3):  # a signal is handled within the loop's next iterations
            assert httpx.get(f"{base}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.slow
@needs_proc
def test_engine_process_gets_openmp_and_malloc_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    monkeypatch.delenv("OMP_WAIT_POLICY")  # tests/conftest.py sets it
    with serving() as (process, _, _):
        (engine,) = engines(process.pid)
        environment = Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
    assert (b"OMP_WAIT_POLICY=passive" in environment) is any(_KERNELS.glob("*.so")), "only beside threads of our own"
    assert b"MALLOC_TRIM_THRESHOLD_=%d" % 2**29 in environment
    assert b"MALLOC_MMAP_THRESHOLD_=1000000" in environment, "the user's own settings stay"


@pytest.mark.slow
@needs_proc
def test_niceness_applies_to_engine_process_only() -> None:
    own_niceness = os.getpriority(os.PRIO_PROCESS, 0)
    with serving("--niceness", "3") as (process, _, _):
        (engine,) = engines(process.pid)
        threads = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{engine}/task").glob("*/stat")]
        niceness = [int(fields[16]) for fields in threads]
        assert os.getpriority(os.PRIO_PROCESS, engine) == min(own_niceness + 3, 19)
        assert sum(each == min(own_niceness + 3, 19) for each in niceness) >= len(niceness) // 2
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == own_niceness


@pytest.mark.slow
@needs_proc
def test_engine_process_ends_with_killed_server() -> None:
    with serving() as (process, _, _):
        started = children(process.pid)
        assert started
        process.kill()
        process.wait(10)
        for pid in started:
            wait_until_gone(pid)


@pytest.mark.slow
@needs_proc
def test_server_exits_1_when_killed_engine_cannot_restart(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    with serving("--model", str(model), "--max-engine-starts", "2") as (process, _, _):
        (engine,) = engines(process.pid)
        (model / "config.json").unlink()
        os.kill(engine, signal.SIGKILL)
        assert process.wait(60) == 1
        assert process.stderr is not None
        log = process.stderr.read()
        assert "engine start 1 of 2 failed: model: model has no config.json" in log
        assert "the engine could not be restarted: model: model has no config.json" in log
        assert "quire serve: the engine ended" in log


@pytest.mark.slow
@needs_proc
def test_ctrl_c_during_model_load_exits_0() -> None:
    process = subprocess.Popen(command("serve", "--port", "0", *SMALL), stderr=subprocess.PIPE, text=True)
    while not engines(process.pid):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


def test_port_in_use_is_reported_before_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        done = subprocess.run(
            command("serve", "--port", str(port), "--model", "nowhere"), capture_output=True, text=True
        )
    assert done.returncode == 1
    taken_port = f"cannot listen on 127.0.0.1:{port}: Address already in use"
    taken_port += "; choose another --port or --host (make: PORT, HOST)"
    assert done.stderr.startswith(f"quire serve: {taken_port}; model: there is no directory 'nowhere'"), "both at once"
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["./nowhere"], "model: there is no directory './nowhere'"),
        (["README.md"], "model: 'README.md' is a file"),
        (["tests"], "model: tests has no config.json"),
        (["--max-model-len", "4096", "--num-kv-blocks", "16"], "max_model_len"),
        (["--attention-backend", "magic"], "attention_backend"),
    ],
)
def test_engine_start_error_prints_one_line_and_exits_1(flags: list[str], message: str) -> None:
    done = subprocess.run(command("serve", "--port", "0", *flags), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("quire serve: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_invalid_setting_prints_one_line_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", "--max-num-seqs", "0"])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == (
        "quire serve: max_num_seqs: input should be greater than or equal to 1, got '0' (flag --max-num-seqs)\n"
    )


def test_help_and_version_print_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--version"], ["--help"], ["serve", "--help"], ["chat", "--help"], ["run", "--help"]):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert re.match(r"quire \d+\.\d+", out)
    assert "--kv-offload-memory" not in out
    assert "more flags: quire serve --help=all" in out
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    assert "--kv-offload-memory" in capsys.readouterr().out
    assert "OUT.jsonl" in out
    assert main([]) == 0


def test_unknown_command_is_answered_with_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["serv"], "quire: no command 'serv'; did you mean serve?"),
        (["zzz"], "quire: no command 'zzz'; quire --help lists them"),
        (["bench", "serv"], "quire bench: no 'serv'; did you mean serve?"),
        (["--port", "80"], "quire: flags follow a command: quire serve --port 80"),
    ):
        assert main(argv) == 2
        assert capsys.readouterr().err == message + "\n"


def test_binding_to_unknown_host_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no\.such\.host\.invalid:1: "):
        bind_tcp_socket("no.such.host.invalid", 1)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("10.0.0.5", "http://10.0.0.5:80")],
)
def test_listen_url_is_usable_by_client(host: str, shown: str) -> None:
    assert listen_url(host, 80) == shown


@pytest.mark.slow
def test_serve_reports_missing_memory_with_figures_of_plan(tmp_path: Path) -> None:
    """The model is a sparse file of 600 * 2**30 float32 values and the config.json of an 8 B model."""
    config = LLAMA_8B | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    count = 600 * 2**30
    header = json.dumps({"weight": {"dtype": "F32", "shape": [count], "data_offsets": [0, count * 4]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count * 4)
    shutil.copy(Path(DEMO_MODEL) / "tokenizer.json", tmp_path)
    argv = [str(tmp_path), "--device", "cpu", "--dtype", "float32"]
    served = subprocess.run(command("serve", *argv, "--port", "0"), capture_output=True, text=True, timeout=120)
    planned = subprocess.run(command("plan", str(tmp_path)), capture_output=True, text=True, timeout=120)
    assert (served.returncode, planned.returncode) == (1, 1)
    figure = re.search(r"weights take [\d.,]+ GiB and this machine's CPU has", planned.stdout)
    assert figure, planned.stdout
    assert figure.group() in served.stderr
    assert "quire plan" in served.stderr
    assert served.stderr.count("\n") == 1
