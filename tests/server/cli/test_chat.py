"""`quire chat` against a scripted OpenAI server: requests, output, errors and Ctrl-C."""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quire.server.cli.main import main
from tests.server.cli.scripted_server import ScriptedHandler, run_in_thread

Chat = Callable[..., tuple[int, str, str]]


class ScriptedServer(ThreadingHTTPServer):
    """Repeats each user message in two chunks. "hold" stops after the first chunk, "cut" ends at max tokens, "break"
    and "refuse" fail.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.hung_up = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(ScriptedHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "echo"}]})

    def do_POST(self) -> None:
        body = self.read_json()
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers["Authorization"])
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        if text == "refuse":
            self.reply({"error": {"message": "too long a prompt", "type": "x", "param": None, "code": None}}, 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.send_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        self.send_event({"choices": [{"index": 0, "delta": {"content": "you said "}}]})
        if text == "break":
            self.send_event({"error": {"message": "the engine died", "type": "server_error"}})
            return
        if text == "hold":
            self._wait_for_hang_up()
            return
        self.send_event({"choices": [{"index": 0, "delta": {"content": text + "\u00e9"}}]})
        reason = "length" if text == "cut" else "stop"
        self.send_event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self.send_event({"choices": [], "usage": {}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _wait_for_hang_up(self) -> None:
        self.connection.settimeout(30)
        if self.connection.recv(1) == b"":
            self.server.hung_up.set()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    with run_in_thread(server):
        yield server


@pytest.fixture
def chat(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """`quire chat` with lines as its input and further flags; returns the status, stdout and stderr."""

    def run(lines: str, *flags: str, url: str = server.url) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", StringIO(lines))
        status = main(["chat", "--url", url, *flags])
        return status, *capsys.readouterr()

    return run


def test_piped_lines_are_turns_of_one_conversation(server: ScriptedServer, chat: Chat) -> None:
    status, out, err = chat("one\n\ntwo\n")
    assert (status, out, err) == (0, "you said one\u00e9\nyou said two\u00e9\n", "")
    assert [body["model"] for body in server.bodies] == ["echo", "echo"]
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "you said one\u00e9"},
        {"role": "user", "content": "two"},
    ]
    assert server.bodies[0]["stream"] is True
    assert "temperature" not in server.bodies[0]


def test_chat_flags_are_sent_in_request(server: ScriptedServer, chat: Chat) -> None:
    flags = ["echo", "--temperature", "0", "--max-tokens", "7", "--system", "Be brief.", "--api-key", "secret"]
    assert chat("one\n", *flags)[0] == 0
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("echo", 0.0, 7)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize("flags", [("ecko",), ("--model", "ecko")])
def test_unknown_model_is_rejected_at_start(server: ScriptedServer, chat: Chat, flags: tuple[str, ...]) -> None:
    status, out, err = chat("one\n", *flags)
    assert (status, out, err) == (1, "", "quire chat: no model ecko; did you mean echo?\n")
    assert not server.bodies


def test_set_command_rejects_values_outside_api_limits(server: ScriptedServer, chat: Chat) -> None:
    invalid, valid = ("temperature 9", "temperature cold", "max_tokens 0"), ("top_k 5", "stop END", "min_tokens 40")
    lines = ["", *invalid, *valid, "mirostat 2", ""]
    _, out, err = chat("".join(f"/set {line}\n" for line in lines) + "one\n")
    first, *rest = out.splitlines()
    assert first == "all defaults"
    assert [line.partition(": ")[2] for line in err.splitlines()] == [
        "temperature must be in [0, 2], got 9.0",
        "temperature: Input should be a valid number, unable to parse string as a number",
        "max_tokens must be at least 1 and at most 2147483647, got 0",
    ]
    assert rest[:4] == ["top_k = 5", 'stop = "END"', "min_tokens = 40", "mirostat = 2"]
    assert {"temperature", "max_tokens"}.isdisjoint(server.bodies[0])


def test_save_command_overwrites_only_saved_conversations(chat: Chat, tmp_path: Path) -> None:
    notes, talk, request = (tmp_path / name for name in ("notes.txt", "talk.json", "request.json"))
    notes.write_text("my notes\n")
    request.write_text('{"model": "echo", "messages": []}')
    lines = ["one", *(f"/save {path}" for path in (notes, request, talk)), "two", f"/save {talk}", f"/load {talk}"]
    _, out, err = chat("\n".join([*lines, ""]))
    assert [line.rpartition("/")[2] for line in err.splitlines()] == [
        f"{name} exists and is not a saved conversation: choose another name" for name in ("notes.txt", "request.json")
    ]
    assert notes.read_text() == "my notes\n"
    assert f"4 messages are in {talk}" in out
    assert out.endswith("4 messages; echo goes on; the last one, of the assistant:\nyou said two\u00e9\n")


def file_of(path: Path) -> str:
    """Write an image file and return its data: URL."""
    Image.new("RGB", (8, 6), "red").save(path, "PNG")
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def test_images_are_sent_with_next_message(server: ScriptedServer, chat: Chat, tmp_path: Path) -> None:
    one, two = tmp_path / "a fox.png", tmp_path / "two.png"
    urls = file_of(one), file_of(two)
    plain = str(one).replace(" ", "\\ ")
    lines = [f"/image {plain}", f"/image '{two}'", "what\\", "is it?", "/retry", "and now?"]
    lines += [f"/save {tmp_path}/t.json", f"/load {tmp_path}/t.json", "/undo", "/undo", "one"]
    _, out, err = chat("\n".join([*lines, ""]))
    assert err == ""
    assert out.splitlines()[:2] == ["a picture goes with the next message", "2 pictures go with the next message"]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    user_message = {"role": "user", "content": [*shown, {"type": "text", "text": "what\nis it?"}]}
    first, again, later, last = (body["messages"] for body in server.bodies)
    assert first == again == [user_message]
    assert later == [
        user_message,
        {"role": "assistant", "content": "you said what\nis it?\u00e9"},
        {"role": "user", "content": "and now?"},
    ]
    assert last == [{"role": "user", "content": "one"}]


def test_invalid_image_file_prints_one_line(server: ScriptedServer, chat: Chat, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("no picture")
    _, out, err = chat(f"/image\n/image {tmp_path}/no.png\n/image {tmp_path}\n/image {text}\none\n")
    assert out.splitlines()[0] == "/image needs a file's name"
    assert err.splitlines() == [
        f"quire chat: cannot read {tmp_path}/no.png: No such file or directory",
        f"quire chat: cannot read {tmp_path}: Is a directory",
        f"quire chat: {text}: is not a PNG, JPEG, WEBP or GIF file",
    ]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "one"}]


def test_reset_system_and_exit_commands_change_conversation(server: ScriptedServer, chat: Chat) -> None:
    status, out, _ = chat("one\n/reset\ntwo\n/system Rhyme.\nthree\n/nonsense\n/help\n/exit\nfour\n")
    assert status == 0
    messages = [body["messages"] for body in server.bodies]
    assert messages[1] == [{"role": "user", "content": "two"}]
    assert messages[2] == [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "three"}]
    assert len(messages) == 3
    assert "/nonsense: no such command" in out
    assert "/reset" in out


def test_bye_command_exits(server: ScriptedServer, chat: Chat) -> None:
    assert chat("/bye\none\n")[0] == 0
    assert server.bodies == []


def test_rejected_message_is_dropped_and_partial_answer_is_kept(server: ScriptedServer, chat: Chat) -> None:
    status, out, err = chat("refuse\nbreak\none\n")
    assert status == 0
    assert out == "\nyou said \nyou said one\u00e9\n"
    assert "too long a prompt" in err
    assert "the engine died" in err
    assert [message["content"] for message in server.bodies[2]["messages"]] == ["break", "you said ", "one"]


def test_cut_answer_is_reported_on_stderr(server: ScriptedServer, chat: Chat) -> None:
    notice = "quire chat: cut at max tokens"
    limits = "the server's limit, or the end of the context"
    said = "you said cut\u00e9\n"
    assert chat("cut\n") == (0, said, f"{notice}: {limits}\n")
    assert chat("cut\none\n", "--max-tokens", "8") == (0, f"{said}you said one\u00e9\n", f"{notice}\n")


@pytest.mark.parametrize(
    ("text", "flags", "status"),
    [
        ("cut", [], 0),
        ("cut", ["--format", "json"], 1),
        ("cut", ["--format", '{"type": "object"}'], 1),
        ("one", ["--format", "json"], 0),
    ],
)
@pytest.mark.parametrize("is_piped", [True, False])
def test_run_reports_cut_answer_and_fails_if_it_has_a_format(
    text: str,
    flags: list[str],
    status: int,
    is_piped: bool,
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(text if is_piped else ""))
    prompt = [] if is_piped else [text]
    assert main(["run", "echo", *prompt, "--url", server.url, "--max-tokens", "8", *flags]) == status
    notice = "quire run: cut at max tokens\n" if text == "cut" else ""
    assert capsys.readouterr() == (f"you said {text}\u00e9\n", notice)


@pytest.mark.parametrize("argv", [["refuse"], []])
def test_run_names_itself_in_errors(
    argv: list[str], server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = StringIO("" if argv else "/image nowhere.png\nrefuse\n")
    monkeypatch.setattr(stdin, "isatty", lambda: not argv)  # a conversation, since stdout is no terminal
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["run", "echo", *argv, "--url", server.url]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 - len(argv)
    assert all(line.startswith("quire run: ") for line in lines)


def test_exit_status_is_1_when_last_message_was_rejected(chat: Chat) -> None:
    assert chat("refuse\n")[0] == 1


def test_ctrl_c_stops_answer_and_chat_continues(server: ScriptedServer) -> None:
    command = [sys.executable, "-m", "quire", "chat", "--url", server.url]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hold\n")
    process.stdin.flush()
    assert process.stdout.read(len("you said ")) == "you said "
    process.send_signal(signal.SIGINT)
    assert server.hung_up.wait(30), "the connection must close, so that the server stops generating"
    out, err = process.communicate("two\n", timeout=60)
    assert out == " [stopped]\nyou said two\u00e9\n"
    assert (process.returncode, err) == (0, "")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hold", "you said ", "two"]


def test_chat_url_may_omit_v1(server: ScriptedServer, chat: Chat) -> None:
    status, _, err = chat("Hello\n", url=server.url.removesuffix("/v1") + "/")
    assert (status, err) == (0, "")
    assert server.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("named", [[], ["--model", "echo"]])
def test_chat_without_server_prints_one_line(chat: Chat, named: list[str]) -> None:
    status, _, err = chat("one\n", *named, url="http://127.0.0.1:9/v1")
    assert status == 1
    assert err.startswith("quire chat: no server at http://127.0.0.1:9/v1")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_chat_without_url_starts_in_process_engine() -> None:
    flags = ["--max-model-len", "512", "--num-kv-blocks", "64", "--threads", "1", "--max-tokens", "4"]
    command = [sys.executable, "-m", "quire", "chat", "--temperature", "0", *flags]
    done = subprocess.run(command, input="one\n/reset\none\n", capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "quire chat: cut at max tokens\n" * 2)
    first, notice, second = done.stdout.splitlines()
    assert notice == "forgot the conversation"
    assert first == second != ""


def test_missing_model_directory_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("one\n"))
    assert main(["chat", "./nowhere"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire chat: model: there is no directory './nowhere'")
    assert error.count("\n") == 1
