"""`quire chat` in a real pty: every command, against the scripted server of test_chat.py."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from quire.server.cli.chat.commands import COMMANDS
from quire.server.cli.chat.markdown import print_stream, split_finished_blocks
from tests.server.cli.test_chat import ScriptedServer, file_of, server  # noqa: F401 - a fixture

pytest.importorskip("prompt_toolkit")
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_]|[()].)")
PASTE = "\x1b[200~{}\x1b[201~"


class Terminal:
    """A process in a pty of 60 x 20 characters. `expect` waits for its output."""

    def __init__(self, command: list[str], state: Path) -> None:
        self.parent, child = pty.openpty()
        termios.tcsetwinsize(self.parent, (20, 60))
        there = {"XDG_STATE_HOME": str(state), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "COLUMNS": "60"}
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=os.environ | there, start_new_session=True
        )
        os.close(child)
        self.seen = ""
        self._raw = b""

    def send(self, text: str) -> None:
        os.write(self.parent, text.encode())

    def expect(self, *texts: str, seconds: float = 60) -> str:
        """Wait until all of `texts` came, in this order, and return the output up to the last. Later output stays in
        `seen`.
        """
        ends = time.monotonic() + seconds
        while True:
            place = 0
            for text in texts:
                place = self.seen.find(text, place) + len(text) if text in self.seen[place:] else -1
                if place < 0:
                    break
            if place >= 0:
                output, self.seen = self.seen[:place], self.seen[place:]
                return output
            left = ends - time.monotonic()
            assert left > 0, f"{texts} did not come: {self.seen!r}"
            self._read(left)

    def _read(self, seconds: float) -> None:
        if not select.select([self.parent], [], [], seconds)[0]:
            return
        try:
            self._raw += os.read(self.parent, 65536)
        except OSError:  # the process has ended
            time.sleep(0.05)
        whole, _, rest = self._raw.rpartition(b"\x1b")
        complete = self._raw if ESCAPES.match("\x1b" + rest.decode(errors="replace")) or not whole else whole
        self._raw = self._raw[len(complete) :] if complete is not self._raw else b""
        self.seen += ESCAPES.sub("", complete.decode(errors="replace")).replace("\r", "")

    def end(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
        each.process.wait()
        os.close(each.parent)


def open_chat(terminals: list[Terminal], server: ScriptedServer, state: Path) -> Terminal:  # noqa: F811
    url = server.url.removeprefix("http://")  # without a scheme
    terminals.append(Terminal([sys.executable, "-m", "quire", "chat", "--url", url], state))
    terminals[-1].expect("echo; /help lists the commands", "> ")
    return terminals[-1]


def last_request_contents(server: ScriptedServer) -> list[str]:  # noqa: F811
    return [message["content"] for message in server.bodies[-1]["messages"]]


def test_chat_commands_print_expected_output(server: ScriptedServer, terminals: list[Terminal], tmp_path: Path) -> None:  # noqa: F811
    chat = open_chat(terminals, server, tmp_path)

    def ask(line: str, *answer: str) -> None:
        chat.send(line + "\r")
        chat.expect(*answer, "> ")

    ask("/help", *COMMANDS, "Alt+Enter")
    ask("/retry", "there are no messages yet")
    ask("one", "you said oneé")
    assert last_request_contents(server) == ["one"]
    ask("/retry", "you said oneé")
    assert last_request_contents(server) == ["one"]
    ask("two", "you said twoé")
    assert last_request_contents(server) == ["one", "you said oneé", "two"]
    ask("/undo", "forgot: two")
    ask("/edit three", "you said threeé")
    assert last_request_contents(server) == ["three"]
    chat.send("/edit\r")
    chat.expect("three")
    chat.send(" more\r")
    chat.expect("you said three moreé", "> ")
    assert last_request_contents(server) == ["three more"]
    ask("/set", "all defaults")
    ask("/set temperature 9", "temperature must be in [0, 2]")
    ask("/set temperature 0.5", "temperature = 0.5")
    ask("/set", "temperature = 0.5")
    ask("four", "you said fouré")
    assert server.bodies[-1]["temperature"] == 0.5
    ask("/set temperature", "temperature: the default")
    ask("/set messages 1", "cannot be set")
    ask("/set temprature 1", "temprature: no such parameter; did you mean temperature?")
    ask("/model", "* echo")
    ask("/model ecko", "no model ecko; did you mean echo?")
    ask("/model echo", "echo goes on")
    ask(f"/save {tmp_path}/talk.json", "4 messages are in")
    ask("/system Rhyme.", "with that system message")
    ask("five", "you said fiveé")
    assert last_request_contents(server) == ["Rhyme.", "five"]
    ask("/reset", "forgot the conversation")
    ask(f"/load {tmp_path}/talk.json", "4 messages; echo goes on", "you said fouré")
    ask("cut", "you said cuté", "cut at max tokens")
    ask("/undo", "forgot: cut")
    ask("six", "you said sixé")
    assert last_request_contents(server) == ["three more", "you said three moreé", "four", "you said fouré", "six"]
    ask(f"/load {tmp_path}/nowhere.json", "cannot read")
    ask(f"/save {tmp_path}/no/where.json", "cannot write")
    file_of(tmp_path / "a fox.png")
    ask(f"/image '{tmp_path}/a fox.png'", "a picture goes with the next message")
    ask("/exti", "no such command; did you mean /exit?")
    ask("refuse", "too long a prompt")
    chat.send("/exit\r")
    assert chat.end() == 1  # the last message was refused
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0] == {"role": "user", "content": "three more"}


@pytest.mark.slow
def test_multiline_history_and_ctrl_c_work(server: ScriptedServer, terminals: list[Terminal], tmp_path: Path) -> None:  # noqa: F811
    chat = open_chat(terminals, server, tmp_path)
    chat.send("one\x1b\rtwo\\\rthree" + PASTE.format("\nfour\nfive") + "\r")
    chat.expect("you said one", "> ")
    assert last_request_contents(server) == ["one\ntwo\nthree\nfour\nfive"]
    chat.send("hold\r")
    chat.expect("you said ")
    chat.send("typed meanwhile")
    os.killpg(chat.process.pid, signal.SIGINT)
    assert "typed" not in chat.expect("stopped; /retry asks again")
    assert server.hung_up.wait(30)
    chat.expect("typed meanwhile")
    chat.send("\x03")
    chat.expect("/exit or Ctrl-D to leave", "> ")
    chat.send("\x04")
    assert chat.end() == 0
    history = tmp_path / "quire" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    again = open_chat(terminals, server, tmp_path)
    again.send("\x1b[A\x1b[A\r")  # twice up: the message before "hold", with all of its lines
    again.expect("you said one", "> ")
    assert last_request_contents(server) == ["one\ntwo\nthree\nfour\nfive"]


def render_markdown(*pieces: str) -> str:
    console = Console(width=40, height=10, force_terminal=False, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_stream(console, iter(pieces))
    return console.export_text()


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
def test_streamed_markdown_prints_same_as_whole_text(cut: int) -> None:
    text = (
        "# The fox\n\nIt went out into the world to see what there was, and **came back**.\n\n"
        "1. one\n\n2. two\n\n   still two\n\n```python\ndef fox():\n\n    return 1\n```\n\nThe end.\n"
    )
    whole = render_markdown(text)
    assert render_markdown(*(text[at : at + cut] for at in range(0, len(text), cut))) == whole
    words = whole.split()
    assert {"went", "world", "there", "was,", "and", "came"} <= {*words}
    assert words.count("fox():") == words.count("end.") == 1
    assert " 2 two" in whole
    assert "**" not in whole


def test_streamed_markdown_keeps_line_breaks() -> None:
    verse = "The fox\nran out,\n\n```\na\n\nb\n```\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n- one\n  more\n- two"
    lines = [line.strip() for line in render_markdown(verse).splitlines()]
    assert lines[:2] == ["The fox", "ran out,"]
    expected = ["a", "b", "x  y", "1  2", "• one", "more", "• two"]
    assert [line for line in lines if line in expected] == expected
    assert render_markdown(*verse) == render_markdown(verse)


def test_split_finished_blocks_returns_only_complete_blocks() -> None:
    assert split_finished_blocks("one\n\ntwo") == ([], "one\n\ntwo")
    assert split_finished_blocks("one\n\ntwo\n") == (["one\n"], "two\n")
    assert split_finished_blocks("- a\n\n- b\n\n  c\n\nend\nx") == (["- a\n\n- b\n\n  c\n"], "end\nx")
    assert split_finished_blocks("```\na\n\nb\n") == ([], "```\na\n\nb\n")
    assert split_finished_blocks("```\na\n\nb\n```\n\nc\n") == (["```\na\n\nb\n```\n"], "c\n")
    assert split_finished_blocks("~~~\n```\n\na\n~~~\n\nb\n")[0] == ["~~~\n```\n\na\n~~~\n"]
