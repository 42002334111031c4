"""How each agent is started, continued and scripted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.clients.agents.settings import (
    claude_code_environment,
    codex_settings,
    opencode_settings,
)
from tests.clients.scripted import MODEL, call

TURNS_PER_RUN = 10
"""Then the agent's process ends, and a new one continues the session."""
NUM_RUNS = 4
NUM_TURNS = TURNS_PER_RUN * NUM_RUNS
COUNTER, LOG = "counter.py", "log.txt"
WEAK_MODEL = "summary"
Tool = Callable[[str, int], str]
"""Maps the working folder and the turn to the text of a tool call."""


@dataclass(frozen=True)
class LoopAgent:
    package: str
    first_command: Sequence[str]
    later_command: Sequence[str]
    """Continues the session of earlier processes."""
    tools: Sequence[Tool]
    """Called one after another, turn by turn. Empty: the answer itself contains the edit."""
    environment: Callable[[int], dict[str, str]] = lambda port: {}
    """Maps the proxy's port to environment variables."""
    files: Callable[[int], dict[str, str]] = lambda port: {}
    """Maps the proxy's port to settings files: their text by path below the home directory."""

    def make_script(self, folder: str) -> list[str]:
        return [self._turn_text(folder, turn) for turn in range(1, NUM_TURNS + 1)]

    def make_prompts(self, run: int) -> list[str]:
        """Returns what the user writes to one process."""
        if self.tools:
            return [f"Please count on, part {run + 1}."]
        first = run * TURNS_PER_RUN + 1
        return [f"Please count to {turn}." for turn in range(first, first + TURNS_PER_RUN)]

    def _turn_text(self, folder: str, turn: int) -> str:
        text = f"Turn {turn} of {NUM_TURNS}."
        if not self.tools:
            return f"{text}\n\n{format_edit_block(turn)}"
        if turn % TURNS_PER_RUN == 0:
            return f"{text} This part is done."
        return f"{text}\n{self.tools[turn % len(self.tools)](folder, turn)}"


def num_edits(turn: int) -> int:
    """Number of counter edits in the turns before this one."""
    return sum(1 for each in range(1, turn) if each % 3 == 2 and each % TURNS_PER_RUN)


def log_line(turn: int) -> str:
    return f"echo {turn} >> {LOG}"


def format_edit_block(turn: int) -> str:
    """Aider reads edits in this form from answers."""
    return f"{COUNTER}\n```python\n<<<<<<< SEARCH\nCOUNT = {turn - 1}\n=======\nCOUNT = {turn}\n>>>>>>> REPLACE\n```\n"


def counter_lines(turn: int) -> tuple[str, str]:
    count = num_edits(turn)
    return f"COUNT = {count}", f"COUNT = {count + 1}"


def make_shell_edit(folder: str, turn: int) -> str:
    before, after = counter_lines(turn)
    return call("exec_command", cmd=f"sed -i 's/^{before}$/{after}/' {COUNTER}")


def make_file_tools(read: str, edit: str, shell: str, names: Sequence[str]) -> Sequence[Tool]:
    path, old, new = names

    def edit_call(folder: str, turn: int) -> str:
        before, after = counter_lines(turn)
        return call(edit, **{path: f"{folder}/{COUNTER}", old: before, new: after})

    return (
        lambda folder, turn: call(shell, command=log_line(turn), description="Log the turn"),
        lambda folder, turn: call(read, **{path: f"{folder}/{COUNTER}"}),
        edit_call,
    )


CODEX = LoopAgent(
    "@openai/codex",
    ("codex", "exec", "--sandbox", "danger-full-access", "--skip-git-repo-check", "PROMPT"),
    ("codex", "exec", "--sandbox", "danger-full-access", "--skip-git-repo-check", "resume", "--last", "PROMPT"),
    (
        lambda folder, turn: call("exec_command", cmd=log_line(turn)),
        lambda folder, turn: call("exec_command", cmd=f"cat {COUNTER}"),
        make_shell_edit,
    ),
    files=lambda port: codex_settings(port, MODEL),
)
AIDER_FLAGS = (
    f"--model=openai/{MODEL}",
    f"--weak-model=openai/{WEAK_MODEL}",
    "--edit-format=diff",
    "--yes-always",
    "--no-git",
    "--no-check-update",
    "--analytics-disable",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--no-suggest-shell-commands",
    "--no-auto-lint",
    "--no-pretty",
    "--no-fancy-input",
    "--map-tokens=0",
    COUNTER,
)
AGENTS = {
    "claude_code": LoopAgent(
        "@anthropic-ai/claude-code",
        ("claude", "-p", "PROMPT", "--allowedTools", "Bash,Read,Edit"),
        ("claude", "-p", "--continue", "PROMPT", "--allowedTools", "Bash,Read,Edit"),
        make_file_tools("Read", "Edit", "Bash", ("file_path", "old_string", "new_string")),
        claude_code_environment,
    ),
    "codex": CODEX,
    "codex_websocket": replace(CODEX, files=lambda port: codex_settings(port, MODEL, websocket=True)),
    "opencode": LoopAgent(
        "opencode-ai",
        ("opencode", "run", "PROMPT"),
        ("opencode", "run", "--continue", "PROMPT"),
        make_file_tools("read", "edit", "bash", ("filePath", "oldString", "newString")),
        files=opencode_settings,
    ),
    "aider": LoopAgent(
        "aider-chat",
        ("aider", *AIDER_FLAGS),
        ("aider", "--restore-chat-history", *AIDER_FLAGS),
        (),
        lambda port: {"OPENAI_API_BASE": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "none"},
    ),
}


def expected_files(name: str) -> dict[str, str]:
    """Returns each file's text after a session in which every turn acted once."""
    if not AGENTS[name].tools:
        return {COUNTER: f"COUNT = {NUM_TURNS}\n"}
    logged = [turn for turn in range(1, NUM_TURNS + 1) if turn % 3 == 0 and turn % TURNS_PER_RUN]
    return {
        COUNTER: f"COUNT = {num_edits(NUM_TURNS + 1)}\n",
        LOG: "".join(f"{turn}\n" for turn in logged),
    }


def find_executable(agents: Path, aider: Path, command: str) -> Path:
    return aider / "bin" / command if command == "aider" else agents / "node_modules" / ".bin" / command
