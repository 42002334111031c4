"""What a built wheel carries, and that it runs from there alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tree import ROOT, source_files

pytestmark = pytest.mark.slow

PACKAGES = ("server", "engine", "kernels")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clean copy: nothing that lies about in the checkout can slip in."""
    folder = tmp_path_factory.mktemp("package")
    for path in source_files():
        target = folder / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target, follow_symlinks=False)
    options = ["--no-deps", "--no-build-isolation", "--quiet", "-w", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("quire-*.whl")
    return built


def test_it_carries_every_source_and_data_file(wheel: Path) -> None:
    code = (".py", ".cpp", ".h", ".toml")
    wanted = {path for path in source_files() if path.parts[0] in PACKAGES and path.suffix in code}
    wanted |= {path for path in source_files() if path.match("configs/*.toml") or path.match("configs/demo/*")}
    wanted |= {path for path in source_files() if path.is_relative_to("server/web")}
    names = {f"quire/{path}" for path in wanted} | {"quire/__init__.py", "quire/__main__.py"}
    assert {"quire/configs/demo/model.safetensors", "quire/server/web/index.html"} <= names
    assert "quire/kernels/cpu/attention.cpp" in names
    missing = names - set(zipfile.ZipFile(wheel).namelist())
    assert not missing, f"{sorted(missing)} not in the wheel: name them in pyproject.toml under tool.setuptools"


def test_it_carries_the_compiled_kernels(wheel: Path) -> None:
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler here")
    assert any(
        name.startswith("quire/kernels/cpu/") and name.endswith(".so") for name in zipfile.ZipFile(wheel).namelist()
    )


def test_it_carries_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"quire"}
    assert not any("training" in name for name in zipfile.ZipFile(wheel).namelist())


def test_it_has_the_command_and_the_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: name for name in archive.namelist() if ".dist-info/" in name}
    assert "quire = quire.server.cli.main:main" in archive.read(texts["entry_points.txt"]).decode()
    assert "LICENSE" in texts


def test_it_generates_with_the_embedded_model(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import quire.engine.config; from quire import LLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)\n"
        "out = LLM(max_model_len=64, num_kv_blocks=16).generate('Once upon a time', params, use_tqdm=False)\n"
        "print(quire.engine.config.__file__, len(out[0].outputs[0].token_ids), out[0].outputs[0].finish_reason)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "site" / "quire" / "engine" / "config.py"), "4", "length"]
