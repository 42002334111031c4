"""A server whose model writes scripted texts, with reasoning and tool calls that the embedded model does not write."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "owner/model"


def call(name: str, **arguments: object) -> str:
    """A tool call in the scripted model's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def scripted(folder: Path, *turns: str, model: str = MODEL) -> Iterator[str]:
    """Yield the URL of a server whose model answers the assistant's first turn with the first text, and so on."""
    script = folder / "script.json"
    script.write_text(json.dumps(turns), encoding="utf-8")
    python = Path(os.environ["QUIRE"]).with_name("python")
    command = [str(python), "-m", "tests.server.scripted", str(script), model]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
