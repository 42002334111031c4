"""Traces one chat: which functions of Quire run for it in the server's and the engine's process, ordered by first call.
`python -m tests.trace_chat` prints them. Functions that also run when idle (heartbeats, watchdogs) or at the start are
left out.
"""

from __future__ import annotations

import ast
import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import httpx

from tests.e2e.server import Server
from tests.tree import ROOT

_IDLE_SECONDS = 3.0
_TRACER = """
import os, sys, threading, time
root, folder = os.environ["TRACED_WAY"].split(":")
rooms = tuple(os.path.join(root, "quire", room) + os.sep for room in ("server", "engine", "kernels"))
seen = {}
phase, looked = "", 0.0
output = open(os.path.join(folder, f"{os.getpid()}.calls"), "a", buffering=1)

def look(now):
    global phase, looked
    looked = now
    try:
        found = open(os.path.join(folder, "phase")).read()
    except OSError:
        found = ""
    if found != phase:
        seen.clear()
        phase = found

def note(frame, event, argument):
    if event != "call":
        return
    now = time.monotonic()
    if now - looked > 0.01:
        look(now)
    code = frame.f_code
    if phase and code not in seen:
        seen[code] = True
        path = os.path.realpath(code.co_filename)
        if path.startswith(rooms):
            found = phase, now, os.path.relpath(path, root), code.co_qualname, code.co_firstlineno
            output.write("\\t".join(map(str, found)) + "\\n")

threading.setprofile(note)
sys.setprofile(note)
"""
"""sitecustomize.py of the traced processes. The content of the file `phase` controls what it records."""


@dataclass(frozen=True)
class Call:
    """A function's first call during the chat."""

    process: str
    when: float
    path: str
    name: str
    line: int


def traced() -> list[Call]:
    """Functions that one streamed chat with default settings runs, by the time of their first call."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_TRACER)
        server = Server(folder / "log", env={"PYTHONPATH": f"{name}:{ROOT}", "TRACED_WAY": f"{ROOT}:{name}"})
        try:
            for animal in ("wolf", "hen"):  # so that objects made at the first request exist
                _chat(server.url, animal)
            _enter(folder, "idle")
            time.sleep(_IDLE_SECONDS)
            _enter(folder, "chat")
            _chat(server.url, "fox")
            _enter(folder, "over")
            pids = {str(server.process.pid): "server", str(server.engine_pid()): "engine"}
        finally:
            server.stop()
        lines = [
            (pids.get(file.stem, "worker"), *line.split("\t"))
            for file in folder.glob("*.calls")
            for line in file.read_text().splitlines()
        ]
    idle = {(process, path, name) for process, phase, _, path, name, _ in lines if phase == "idle"}
    calls = [
        Call(process, float(when), path, name, int(line))
        for process, phase, when, path, name, line in lines
        if phase == "chat" and (process, path, name) not in idle
    ]
    return sorted(calls, key=lambda call: call.when)


def _enter(folder: Path, phase: str) -> None:
    (folder / "phase.new").write_text(phase)
    (folder / "phase.new").rename(folder / "phase")
    time.sleep(0.1)  # all running threads see it within that time


def _chat(url: str, animal: str) -> None:
    messages = [{"role": "user", "content": f"Tell me about a {animal}."}]
    body = {"model": "quire-demo", "messages": messages, "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60.0) as answer:
        assert answer.status_code == 200, answer.read()
        assert any(line == "data: [DONE]" for line in answer.iter_lines())


def lines_of(calls: Iterable[Call]) -> int:
    """Number of lines of these functions; lines of nested functions count once."""
    return sum(len(_lines(path, {call.line for call in each})) for path, each in _by_path(calls).items())


def _by_path(calls: Iterable[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(call.path, []).append(call)
    return found


def _lines(path: str, firsts: set[int]) -> set[int]:
    """Lines of a file's functions that begin at these lines, decorators included."""
    found: set[int] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first in firsts:
                found |= set(range(first, node.end_lineno + 1))
    return found


def page(calls: list[Call]) -> str:
    """One line for each stay in a file: the process, the file, and its functions that run."""
    rows = []
    for (process, path), group in groupby(named(calls), key=lambda call: (call.process, call.path)):
        names = dict.fromkeys(_short(call.name) for call in group)
        rows.append(f"{process} {path}: {', '.join(names)}")
    return "\n".join(rows)


def named(calls: Iterable[Call]) -> list[Call]:
    """Calls without lambdas and comprehensions."""
    return [call for call in calls if re.fullmatch(r"[\w.]+", _short(call.name))]


def summary(calls: Sequence[Call]) -> str:
    """Functions, files, folder changes and lines of the server, of the engine and of both."""
    parts = {process: [call for call in named(calls) if call.process == process] for process in ("server", "engine")}
    rows = []
    for name, part in {**parts, "both": parts["server"] + parts["engine"]}.items():
        paths, changes = {call.path for call in part}, sum(room_changes(part, process) for process in parts)
        rows.append(
            f"{name}: {len(part)} functions, {len(paths)} files, {changes} changes of room, {lines_of(part)} lines"
        )
    return "\n".join(rows)


def room_changes(calls: Iterable[Call], process: str) -> int:
    """Number of first calls that move from one folder to another within a process."""
    rooms = [call.path.rpartition("/")[0] for call in calls if call.process == process]
    return sum(before != after for before, after in pairwise(rooms))


def _short(name: str) -> str:
    """The name without its enclosing functions; a comprehension or lambda gets the name of its enclosing function."""
    return name.rpartition("<locals>.")[2]


def main() -> None:
    calls = traced()
    print(page(calls))
    print(summary(calls))


if __name__ == "__main__":
    main()
