"""`quire ps`: the models that a running server has in memory, as Ollama's command of this name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.cli.connect import server_flags
from quire.server.cli.flags import command
from quire.server.cli.models.asking import LOCAL, ask, opened
from quire.server.cli.models.downloaded import size
from quire.server.cli.unknown_flags import parse_known

_HEAD = ("NAME", "SIZE", "CONTEXT", "STATE")


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status."""
    args = parse_known(command("quire ps", __doc__, server_flags(LOCAL)), argv)
    with opened(args) as http:
        held = ask(http, "GET", "/api/ps")["models"]
        states = {each["id"]: each.get("state", "awake") for each in ask(http, "GET", "/v1/models")["data"]}
    rows = [_HEAD, *(_row(each, states) for each in held)]
    wide = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, wide, strict=True)).rstrip())
    return 0


def _row(model: dict[str, Any], states: dict[str, str]) -> tuple[str, str, str, str]:
    name = str(model["name"])
    held = model.get("size_vram") or model.get("size") or 0
    return name, size(held), str(model.get("context_length", "")), states.get(name, "awake")
