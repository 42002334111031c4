"""The OpenAI SDK for Node: streams, parse, runTools, errors."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the packages of node/package-lock.json and the test script."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm (Debian: apt install nodejs npm)")
    folder = tmp_path_factory.mktemp("node")
    for path in HERE.iterdir():
        shutil.copy(path, folder)
    completed = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return folder


def test_openai_node_sdk_script_passes(installed: Path, url: str) -> None:
    completed = subprocess.run(["node", "openai.mjs", url], cwd=installed, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed.stderr
