"""`quire ps`: the models that a running server has in memory, like Ollama's command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.cli.flags import build_parser
from quire.server.cli.models.downloaded import format_size
from quire.server.cli.models.server_requests import LOCAL_URL, open_client, request_json
from quire.server.cli.server_client import server_flags
from quire.server.cli.unknown_flags import parse_flags

_HEADER = ("NAME", "SIZE", "CONTEXT", "STATE")


def main(argv: Sequence[str], started: float) -> int:
    args = parse_flags(build_parser("quire ps", __doc__, server_flags(LOCAL_URL)), argv)
    with open_client(args) as http:
        loaded_models = request_json(http, "GET", "/api/ps")["models"]
        states = {each["id"]: each.get("state", "awake") for each in request_json(http, "GET", "/v1/models")["data"]}
    rows = [_HEADER, *(_model_row(each, states) for each in loaded_models)]
    wide = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, wide, strict=True)).rstrip())
    return 0


def _model_row(model: dict[str, Any], states: dict[str, str]) -> tuple[str, str, str, str]:
    name = str(model["name"])
    num_bytes = model.get("size_vram") or model.get("size") or 0
    return name, format_size(num_bytes), str(model.get("context_length", "")), states.get(name, "awake")
