"""What README, DEVELOPERS.md and deploy/README.md name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.server.config import ServerConfig
from tests.tree import ROOT

DOCS = ("README.md", "DEVELOPERS.md", "deploy/README.md")
NAMED = re.compile(r"`([\w.-]+/[\w./-]+)`|\]\(([\w./-]+)\)")
FLAG = re.compile(r"^\| (`--.*?) \|", re.MULTILINE)


@pytest.mark.parametrize("name", DOCS)
def test_files_that_are_named_are_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    found = [Path(one or other) for one, other in NAMED.findall(text)]
    assert found
    missing = [path for path in found if not any((base / path).exists() for base in (ROOT, (ROOT / name).parent))]
    assert [path for path in missing if path.parts[0] not in (".venv", "OWNER")] == []


def test_flags_of_the_table_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    flags = re.findall(r"--(?:no-)?([a-z-]+)", " ".join(FLAG.findall(text)))
    assert len(flags) > 20
    assert {flag.replace("-", "_") for flag in flags} <= ServerConfig.model_fields.keys()
