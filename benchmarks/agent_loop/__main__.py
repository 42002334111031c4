"""`python -m benchmarks.agent_loop`: coding agents, 40 turns each, while the server's processes are killed.

Each agent runs without a user, in four processes. A scripted model makes it run commands, and read and edit a file.
Tables show each prompt's cached and missed tokens, and why they were missed. Exits with 1 if a turn was lost or acted
twice, or if the cache lacked blocks that it must have.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.agent_loop.agents import (
    AGENTS,
    COUNTER,
    NUM_RUNS,
    NUM_TURNS,
    WEAK_MODEL,
    expected_files,
    find_executable,
)
from benchmarks.agent_loop.killed_server import KilledServer
from benchmarks.agent_loop.proxy import AgentProxy, Kill, proxy_to
from benchmarks.agent_loop.turn_table import TurnRow, format_rows, make_rows
from tests.clients.scripted import MODEL

KILLS = {7: Kill("engine", True), 15: Kill("API", True), 24: Kill("engine", False), 33: Kill("API", False)}
RUN_SECONDS = 600
"""Longest time of one process of an agent."""


def choose_kills(name: str) -> dict[int, Kill]:
    """The proxy recognizes a request on a WebSocket only when its answer begins, so no kill can precede it."""
    return {turn: Kill(kill.process, kill.in_stream or "websocket" in name) for turn, kill in KILLS.items()}


def run_agent(name: str, proxy: AgentProxy, folder: Path, agents: Path, aider: Path) -> list[str]:
    """Returns the output of each of the agent's processes."""
    agent, home, work = AGENTS[name], folder / "home", folder / "work"
    for file, text in agent.files(proxy.port).items():
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(text, encoding="utf-8")
    outputs = []
    for run in range(NUM_RUNS):
        command = agent.later_command if run else agent.first_command
        prompts = agent.make_prompts(run)
        completed = subprocess.run(
            [
                find_executable(agents, aider, command[0]),
                *(prompts[0] if each == "PROMPT" else each for each in command[1:]),
            ],
            cwd=work,
            env=os.environ | {"HOME": str(home), "PWD": str(work)} | agent.environment(proxy.port),
            input="" if "PROMPT" in command else "".join(f"{each}\n" for each in prompts),
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
        )
        outputs.append(completed.stdout + completed.stderr)
    return outputs


def run_session(name: str, folder: Path, arguments: argparse.Namespace) -> tuple[list[TurnRow], list[str]]:
    """Returns a row per prompt, and error messages."""
    work = folder / "work"
    for each in (work, folder / "home"):
        each.mkdir(parents=True)
    (work / COUNTER).write_text("COUNT = 0\n", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)
    (folder / "script.json").write_text(json.dumps(AGENTS[name].make_script(str(work))), encoding="utf-8")
    server = KilledServer(folder, (MODEL, WEAK_MODEL), arguments.flags)
    try:
        kills = {} if arguments.no_kills else choose_kills(name)
        with proxy_to(server, kills, uses_tools=bool(AGENTS[name].tools)) as proxy:
            outputs = run_agent(name, proxy, folder, arguments.agents, arguments.aider)
    finally:
        server.stop()
    (folder / "outputs.txt").write_text("\n\n".join(outputs), encoding="utf-8")
    rows = make_rows(proxy.exchanges, folder / "prompts.jsonl")
    faults = [
        f"{file}: {content!r}, expected {text!r}"
        for file, text in expected_files(name).items()
        if (content := (work / file).read_text(encoding="utf-8") if (work / file).exists() else "") != text
    ]
    answered = [row.turn for row in rows if row.is_turn and row.is_complete]
    faults += [
        f"turn {turn}: {count} answers" for turn in range(1, NUM_TURNS + 1) if (count := answered.count(turn)) != 1
    ]
    faults += filter(None, (row.find_fault() for row in rows))
    return rows, faults


def main() -> int:
    venv = Path(sys.executable).parents[1]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agent_loop", description=__doc__)
    parser.add_argument("names", nargs="*", default=[*AGENTS], metavar="AGENT", help=", ".join(AGENTS))
    parser.add_argument("--agents", type=Path, default=venv / "agents", help="folder of `make agents`")
    parser.add_argument("--aider", type=Path, default=venv / "aider", help="aider's environment")
    parser.add_argument("--out", type=Path, help="keep logs, prompts and rows here")
    parser.add_argument("--no-kills", action="store_true")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more flags of quire serve; last")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.names:
            folder = (arguments.out or Path(temporary)).resolve() / name
            rows, faults = run_session(name, folder, arguments)
            print(f"{name}\n{format_rows(rows)}\nfaults: {faults or 'none'}\n", flush=True)
            failed |= bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
