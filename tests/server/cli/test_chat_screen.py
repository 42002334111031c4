"""`quire chat` on the screen of a real terminal (tmux), after each command, against the scripted server of
test_chat.py. With RECORD=FILE the test writes all screens to that file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.server.cli.chat.commands import COMMANDS
from tests.server.cli.test_chat import ScriptedServer, server  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow
pytest.importorskip("prompt_toolkit")

TMUX = shutil.which("tmux")
WIDTH, HEIGHT = 72, 30
PATIENCE = 60.0
ENV = ("env", "-u", "COLUMNS", "-u", "LINES")  # these would take precedence over the terminal's size


class Screen:
    """A command in a terminal of WIDTH x HEIGHT characters."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.seen: list[str] = []
        self._status = folder / "status"
        variables = {"XDG_STATE_HOME": str(folder), "TERM": "xterm-256color"}
        settings = [f"{name}={value}" for name, value in variables.items()]
        self._tmux(
            "new-session",
            "-d",
            "-x",
            str(WIDTH),
            "-y",
            str(HEIGHT),
            shlex.join([*ENV, *settings, *command]) + f"; echo $? > {shlex.quote(str(self._status))}",
        )
        self._tmux("set-option", "-g", "remain-on-exit", "on")

    def _tmux(self, *args: str) -> str:
        command = [str(TMUX), "-S", str(self.folder / "tmux"), "-f", "/dev/null", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def type(self, line: str) -> None:
        self._tmux("send-keys", "-l", line)
        self._tmux("send-keys", "Enter")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def clear(self) -> None:
        self.press("C-l")
        ends = time.monotonic() + PATIENCE
        while self.lines() != [">"]:
            assert time.monotonic() < ends
            time.sleep(0.02)

    def lines(self) -> list[str]:
        return self._tmux("capture-pane", "-p").rstrip("\n").split("\n")

    def until(self, *texts: str, last: str = "> ?") -> list[str]:
        """The lines of the screen, once it shows `texts` in this order and its last line matches `last`."""
        pattern = re.compile(".*".join(map(re.escape, texts)), re.DOTALL)
        ends = time.monotonic() + PATIENCE
        while True:
            lines = self.lines()
            if pattern.search("\n".join(lines)) and re.fullmatch(last, lines[-1]):
                self.seen.append("\n".join(lines))
                return lines
            assert time.monotonic() < ends, f"{texts} did not come; the screen is:\n" + "\n".join(lines)
            time.sleep(0.02)

    def ended(self) -> str:
        """The command's exit status, once it has ended."""
        ends = time.monotonic() + PATIENCE
        while not self._status.exists() or not (status := self._status.read_text().strip()):
            assert time.monotonic() < ends, "it does not end; the screen is:\n" + "\n".join(self.lines())
            time.sleep(0.02)
        return status

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def screen(server: ScriptedServer, tmp_path: Path) -> Iterator[Screen]:  # noqa: F811
    if TMUX is None:
        pytest.skip("no tmux here (Debian: apt install tmux)")
    terminal = Screen([sys.executable, "-m", "quire", "chat", "--url", server.url], tmp_path)
    yield terminal
    terminal.close()
    if record := os.environ.get("RECORD"):
        rule = f"\n{'─' * WIDTH}\n"
        Path(record).write_text(rule.join(terminal.seen) + "\n", encoding="utf-8")


def test_chat_screen_shows_expected_lines_after_every_command(screen: Screen, tmp_path: Path) -> None:
    lines = screen.until("echo; /help lists the commands")
    assert lines == ["echo; /help lists the commands", ">"]

    def ask(line: str, *texts: str, last: str = "> ?") -> list[str]:
        commands.add(line.split()[0])
        screen.clear()  # so that no earlier output matches
        screen.type(line)
        return screen.until(f"> {line[:30]}", *texts, last=last)

    commands: set[str] = set()
    lines = ask("/help", "Ctrl-C stops an answer.")
    listed = [line.split()[0] for line in lines if re.match(r"/\w+ ", line)]
    assert listed == list(COMMANDS), "each on a line of its own"
    lines = ask("The fox", "you said The foxé")
    assert lines.count("you said The foxé") == 1, "what was drawn while it came is gone"
    ask("and the raven " * 8, "you said and the raven")
    cut = [line for line in screen.seen[-1].split("\n") if re.search(r"\b(rave|th|an)$", line)]
    assert not [line for line in cut if not line.startswith(">")], "no word is broken at the margin"
    ask("/undo", "forgot: and the raven and the raven")
    ask("/retry", "you said The foxé")
    ask("/edit", "The fox", last="> The fox")
    screen.type(" ran")
    screen.until("you said The fox rané")
    ask("/edit The wolf", "you said The wolfé")
    ask("/set temperature 0.5", "temperature = 0.5")
    ask("/set", "temperature = 0.5")
    ask("/set temperature", "temperature: the default")
    ask("/model", "* echo")
    ask("/system Rhyme.", "a new conversation, with that system message")
    ask("again", "you said againé")
    ask(f"/save {tmp_path}/t.json", "2 messages are in")
    ask("/reset", "forgot the conversation")
    ask(f"/load {tmp_path}/t.json", "2 messages; echo goes on")
    ask("/image nowhere.png", "cannot read nowhere.png: No such file or directory")
    ask("/rset", "/rset: no such command; did you mean /reset?")
    screen.clear()
    screen.type("/exit")
    assert screen.ended() == "0"
    assert commands | {"/exit"} >= COMMANDS.keys()
