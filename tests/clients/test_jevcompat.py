"""jevcompat's conformance suite of the System One API, with TypeSafe's SDK: all MUST and SHOULD requirements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.tree import ROOT

KEY = "a-key-of-this-test"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """The embedded model with a context that holds 255 options."""
    folder = tmp_path / "wide"
    shutil.copytree(ROOT / "quire" / "configs" / "demo", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    return folder


def run_jevcompat(folder: Path, log: Path, key: str | None) -> dict[str, Any]:
    report_file, quire = log.with_suffix(".json"), Path(os.environ["QUIRE"])
    env = {} if key is None else {"QUIRE_API_KEY": key}
    with Server(log, str(folder), "--threads", "1", "--num-kv-blocks", "2000", quire=quire, env=env) as server:
        command = [str(Path(sys.executable).with_name("jevcompat")), "test", server.url, "--json", str(report_file)]
        subprocess.run(command + ([] if key is None else ["--key", key]), capture_output=True, timeout=240, check=False)
    content: dict[str, Any] = json.loads(report_file.read_text())
    return content


def test_jevcompat_finds_no_failed_requirement(wide: Path, tmp_path: Path) -> None:
    """Requirements about keys need a server with a key, the others one without."""
    passed: set[str] = set()
    for key in (None, KEY):
        outcome = run_jevcompat(wide, tmp_path / f"log-{key}", key)
        failed = {each["id"]: each["findings"] for each in outcome["results"] if each["status"] == "fail"}
        assert not failed
        assert outcome["summary"]["verdict"] == "conformant"
        passed |= {each["id"] for each in outcome["results"] if each["status"] == "pass"}
    assert len(passed) == 48
