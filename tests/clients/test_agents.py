"""Headless coding agents edit two files with a scripted model's tool calls and hit the prefix cache.

`make agents` installs the agents and runs these tests; `RECORD=1 make agents` also writes their requests to
tests/server/agents, which tests/server/routes/test_agents.py replays.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents.recording import Exchange, anonymous, recording, shape
from tests.clients.agents.settings import claude_code_environment, codex_settings, opencode_settings
from tests.clients.scripted import MODEL, ROOT, call, scripted

INSTALLED = os.environ.get("AGENTS")
PROMPT = "Set NAME to 'new' in one.py and LIMIT to 2 in two.py."
FILES = {"one.py": ("NAME = 'old'\n", "NAME = 'new'\n"), "two.py": ("LIMIT = 1\n", "LIMIT = 2\n")}
DONE = "Both files are edited."
RECORDS = ROOT / "tests" / "server" / "agents"
pytestmark = pytest.mark.skipif(INSTALLED is None, reason="`make agents` installs the agents, which are large")


@dataclass(frozen=True)
class Agent:
    package: str
    command: Sequence[str]
    script: Callable[[str], Sequence[str]]
    """Texts of the model, given the folder that the agent works in."""
    environment: Callable[[int], dict[str, str]]
    """Variables, given the server's port."""
    files: Callable[[int], dict[str, str]] = lambda port: {}
    """Settings files by their path below the home directory."""
    model: str = MODEL
    """Name by which the agent requests the model."""


def edit_script(read: str, edit: str, names: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """The script reads both files at once and edits one after the other."""
    path, old, new = names

    def turns(folder: str) -> Sequence[str]:
        one, two = (f"{folder}/{name}" for name in FILES)
        return (
            "I read both.\n" + call(read, **{path: one}) + "\n" + call(read, **{path: two}),
            call(edit, **{path: one, old: "NAME = 'old'", new: "NAME = 'new'"}),
            call(edit, **{path: two, old: "LIMIT = 1", new: "LIMIT = 2"}),
            DONE,
        )

    return turns


def patch_script(folder: str) -> Sequence[str]:
    def patch(name: str, old: str, new: str) -> str:
        return f"*** Begin Patch\n*** Update File: {name}\n@@\n-{old}\n+{new}\n*** End Patch\n"

    return (
        "I look.\n" + call("exec_command", cmd="cat one.py two.py"),
        call("apply_patch", input=patch("one.py", "NAME = 'old'", "NAME = 'new'")),
        call("apply_patch", input=patch("two.py", "LIMIT = 1", "LIMIT = 2")),
        DONE,
    )


def shell_script(folder: str) -> Sequence[str]:
    return (
        "I look.\n" + call("exec_command", cmd="cat one.py two.py"),
        call("exec_command", cmd="sed -i s/old/new/ one.py"),
        call("exec_command", cmd="sed -i 's/LIMIT = 1/LIMIT = 2/' two.py"),
        DONE,
    )


def codex(script: Callable[[str], Sequence[str]], model: str, *, websocket: bool = False) -> Agent:
    command = ("codex", "exec", "--sandbox", "danger-full-access", "--skip-git-repo-check", PROMPT)
    return Agent(
        "@openai/codex",
        command,
        script,
        lambda port: {},
        lambda port: codex_settings(port, model, websocket=websocket),
        model,
    )


AGENTS = {
    "claude_code": Agent(
        "@anthropic-ai/claude-code",
        ("claude", "-p", PROMPT, "--permission-mode", "acceptEdits"),
        edit_script("Read", "Edit", ("file_path", "old_string", "new_string")),
        claude_code_environment,
    ),
    "codex": codex(shell_script, MODEL),
    "codex_patches": codex(patch_script, "gpt-5.5"),
    "codex_websocket": codex(shell_script, MODEL, websocket=True),
    "opencode": Agent(
        "opencode-ai",
        ("opencode", "run", PROMPT),
        edit_script("read", "edit", ("filePath", "oldString", "newString")),
        lambda port: {},
        opencode_settings,
    ),
    "qwen_code": Agent(
        "@qwen-code/qwen-code",
        ("qwen", "--auth-type", "openai", "--yolo", "-p", PROMPT),
        lambda folder: ("", *edit_script("read_file", "edit", ("file_path", "old_string", "new_string"))(folder)),
        lambda port: {
            "OPENAI_API_KEY": "none",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
            "OPENAI_MODEL": MODEL,
        },
    ),
}
"""codex_patches serves the model under a name that Codex knows. codex_websocket is not recorded. qwen-code sends a
request of its own before the model's first answer.
"""


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent_edits_two_files(name: str, tmp_path: Path) -> None:
    assert INSTALLED is not None
    agent, home, work = AGENTS[name], tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    for file, (before, _) in FILES.items():
        (work / file).write_text(before, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)
    script = agent.script(str(work))
    with scripted(tmp_path, *script, model=agent.model) as url, recording(url) as recorder:
        for file, text in agent.files(recorder.port).items():
            path = work / file if file.startswith("./") else home / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        completed = subprocess.run(
            [Path(INSTALLED) / "node_modules" / ".bin" / agent.command[0], *agent.command[1:]],
            cwd=work,
            env=os.environ | {"HOME": str(home), "PWD": str(work)} | agent.environment(recorder.port),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
    output = completed.stdout + completed.stderr
    assert {file: (work / file).read_text(encoding="utf-8") for file in FILES} == {
        file: after for file, (_, after) in FILES.items()
    }, output
    assert DONE in completed.stdout, output
    assert [each.status for each in recorder.seen] == [200] * len(recorder.seen), output
    assert (recorder.websockets > 0) == (recorder.seen == []) == (name == "codex_websocket")
    if "RECORD" in os.environ and recorder.seen:
        write_record(name, agent, script, recorder.seen, str(work))


def write_record(name: str, agent: Agent, script: Sequence[str], seen: Sequence[Exchange], folder: str) -> None:
    """Write the shapes of the requests; fields that they have in common are written once."""
    package = Path(INSTALLED or "") / "node_modules" / agent.package / "package.json"
    bodies = [shape(each.body, folder) for each in seen]
    often = bodies[-1]
    common = {key: often[key] for key in often if sum(body.get(key) == often[key] for body in bodies) > 1}
    turns = [
        {
            "path": each.path,
            "leaves_out": sorted(common.keys() - body.keys()),
            "body": {key: value for key, value in body.items() if key not in common or common[key] != value},
        }
        for each, body in zip(seen, bodies, strict=True)
    ]
    record: dict[str, Any] = {
        "agent": f"{agent.package} {json.loads(package.read_text(encoding='utf-8'))['version']}",
        "script": [anonymous(text, folder) for text in script],
        "headers": {key: anonymous(value, folder) for key, value in seen[-1].headers.items()},
        "common": common,
        "requests": turns,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    (RECORDS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
