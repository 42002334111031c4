"""A broken model folder ends a start with one line that names the fault, without a traceback, and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.server.cli.main import main
from quire.server.config import ServerConfig
from quire.server.runtime.model_spec_loader import load_served_model_spec
from tests.broken_folders import ALL, Broken, copy_demo

FEW = {"num_hidden_layers-billion", "fifo-config.json", "weights-cut", "template-endless", "other-layers"}
"""Folders of different kinds, including faults that only the engine sees; the command is tested with them in every run.
"""


TRIED = (
    ALL
    if os.environ.get("TEST_FOLDERS") == "all"
    else [each for i, each in enumerate(ALL) if i % 6 == 0 or each.name in FEW]
)
"""One start takes a second, all of them take eight minutes."""


def read_model(folder: str) -> None:
    """Read what the server reads before an engine is ready."""
    config = ServerConfig(model=folder)
    source, _ = load_served_model_spec(config)
    source.build_served_model()


def read_all(folder: str) -> None:
    read_model(folder)
    EngineCore(EngineConfig(model=folder, num_kv_blocks=8, threads=1))


def check_error_line(text: str, broken: Broken) -> None:
    assert "\n" not in text.strip(), text
    assert len(text) < 1000
    for word in broken.says:
        assert word in text, text


def test_broken_folders_are_over_200_with_unique_names() -> None:
    names = [broken.name for broken in ALL]
    assert len(set(names)) == len(names) > 200


@pytest.mark.few(12)
@pytest.mark.parametrize("broken", ALL, ids=lambda broken: broken.name)
def test_broken_folder_raises_one_line_error_naming_file_and_field(broken: Broken, tmp_path: Path) -> None:
    """Covers what the server reads and what the engine reads."""
    folder = str(broken.make(tmp_path / "model"))
    with pytest.raises(ConfigError) as caught:
        read_all(folder)
    check_error_line(str(caught.value), broken)


def test_unbroken_demo_folder_loads(tmp_path: Path) -> None:
    folder = str(copy_demo(tmp_path / "model"))
    read_all(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "broken",
    [pytest.param(each, marks=() if each.name in FEW else pytest.mark.slow, id=each.name) for each in TRIED],
)
def test_serve_exits_with_one_error_line_for_broken_folder(broken: Broken, tmp_path: Path) -> None:
    folder = str(broken.make(tmp_path / "model"))
    flags = ["--port", "0", "--num-kv-blocks", "64", "--threads", "1"]
    command = [sys.executable, "-m", "quire", "serve", folder, *flags]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr.startswith("quire serve: ")
    check_error_line(completed.stderr, broken)


@pytest.mark.few(6)
@pytest.mark.parametrize("broken", ALL, ids=lambda broken: broken.name)
@pytest.mark.usefixtures("kept_rates")
def test_plan_succeeds_or_prints_one_error_line_for_broken_folder(
    broken: Broken, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`quire plan` reads less than a server and knows more families, so some of the folders are valid for it."""
    status = main(["plan", str(broken.make(tmp_path / "model"))])
    stderr = capsys.readouterr().err
    assert (status, stderr.count("\n")) in ((0, 0), (1, 1))


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_config_without_read_permission_is_reported(tmp_path: Path) -> None:
    folder = copy_demo(tmp_path / "model")
    (folder / "config.json").chmod(0)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: Permission denied"):
        read_model(str(folder))


def test_hub_snapshot_of_symlinks_loads(tmp_path: Path) -> None:
    copy_demo(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00001.safetensors")
    index = '{"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}'
    (snapshot / "model.safetensors.index.json").write_text(index)
    read_all(str(snapshot))
