"""The pages of docs/reference match the code."""

from __future__ import annotations

import argparse
import re

import pytest
from starlette.routing import Route

from quire.server.routes.routers import ROUTERS
from tests.reference_docs import FOLDER, GeneratedPart, command_lines, find_parser, generated_parts


@pytest.mark.parametrize("part", generated_parts(), ids=lambda part: f"{part.page} {part.name}")
def test_generated_tables_are_up_to_date(part: GeneratedPart) -> None:
    page = (FOLDER / part.page).read_text(encoding="utf-8")
    assert part.put_into(page) == page, "run python -m tests.reference_docs"


@pytest.mark.parametrize("command", command_lines(), ids=" ".join)
def test_help_names_and_explains_every_argument(command: list[str]) -> None:
    parser = find_parser(command)
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            assert action.help, f"{action.dest} has no help"
            assert action.option_strings or action.metavar or action.choices, f"{action.dest} has no metavar"
    assert parser.format_usage().startswith(f"usage: quire {' '.join(command)}")


def test_http_api_lists_every_endpoint() -> None:
    page = (FOLDER / "http-api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([A-Z]+) (/\S*)` \|", page, re.MULTILINE))
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, Route)]
    served = {(method, re.sub(":path}", "}", route.path)) for route in routes for method in route.methods or ()}
    assert listed == {(method, path) for method, path in served if method != "HEAD"}
