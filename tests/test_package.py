"""Contents of the sdist and of the wheel built from it; Quire runs from there next to modules of other people."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server
from tests.tree import ROOT, source_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # compiles all kernels in a minute or two of processor time

LINKED = ("server", "engine", "kernels")
SCRIPT = """
import server, engine, kernels
assert {module.OWNER for module in (server, engine, kernels)} == {"the user"}
import quire.engine.common.config
from quire import LLM, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    (out,) = LLM(max_model_len=64, num_kv_blocks=16).generate("Once upon a time", params, use_tqdm=False)
    print(quire.engine.common.config.__file__, len(out.outputs[0].token_ids), out.outputs[0].finish_reason)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clean copy, so that stray files of the checkout cannot slip in."""
    folder = tmp_path_factory.mktemp("package")
    for path in source_files():
        target = folder / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target, follow_symlinks=False)
    (folder / "source/quire/kernels/cpu/plain.so").write_bytes(b"of another machine")
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(folder / "source"),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("quire_llm-*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def site(dist: Path) -> Path:
    """A folder of packages with the wheel installed."""
    (path,) = dist.glob("quire_llm-*.whl")
    target = dist.with_name("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(path)]
    subprocess.run(command, check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def tool(dist: Path) -> Path:
    """The `quire` command of an environment with the wheel, as uvx and pipx make them; the wheel's dependencies come
    from the tests' environment.
    """
    (path,) = dist.glob("quire_llm-*.whl")
    folder = dist.with_name("tool")
    venv.create(folder, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(path)], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin/quire"


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A folder whose modules have the names of Quire's and, in `stdlib/`, of Python's modules."""
    for name in LINKED:
        (tmp_path / f"{name}.py").write_text("OWNER = 'the user'\n")
    (tmp_path / "stdlib").mkdir()
    for name in ("random", "queue", *LINKED):
        (tmp_path / "stdlib" / f"{name}.py").write_text(f"raise SystemExit('the user\\'s {name}.py was imported')\n")
    return tmp_path


def test_sdist_contains_build_sources_only(dist: Path) -> None:
    (path,) = dist.glob("quire_llm-*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert {"setup.py", "quire/kernels/cpu/attention.cpp", "quire/kernels/cpu/simd.h"} <= members.keys()
    assert not any(member.issym() or member.islnk() for member in members.values()), "links do not travel well"
    tops = {name.split("/")[0] for name, member in members.items() if member.isfile()}
    files = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert tops == {"quire", "quire_llm.egg-info", *files}
    assert not any(name.endswith(".so") for name in members), "compiled for one machine"


def test_wheel_contains_every_source_and_data_file(wheel: zipfile.ZipFile) -> None:
    code = (".py", ".cpp", ".h", ".toml")
    package_files = [path for path in source_files() if path.parts[0] == "quire"]
    expected = {path for path in package_files if path.parts[1] in LINKED and path.suffix in code}
    expected |= {path for path in package_files if path.match("configs/*.toml") or path.match("configs/demo/*")}
    expected |= {path for path in package_files if path.is_relative_to("quire/server/web")}
    expected |= {path for path in package_files if path.is_relative_to("quire/server/api_docs")}
    names = {str(path) for path in expected} | {"quire/__init__.py", "quire/__main__.py", "quire/py.typed"}
    names |= {f"quire/{module}.py" for module in ("sampling_params", "inputs", "outputs", "lora/request")}
    assert {"quire/configs/demo/model.safetensors", "quire/server/web/index.html"} <= names
    assert "quire/kernels/cpu/attention.cpp" in names
    missing = names - set(wheel.namelist())
    assert not missing, f"{sorted(missing)} not in the wheel: name them in pyproject.toml under tool.setuptools"


def test_wheel_contains_compiled_kernels(wheel: zipfile.ZipFile) -> None:
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        pytest.skip("no C++ compiler here")
    assert wheel.read("quire/kernels/cpu/plain.so").startswith((b"\x7fELF", b"\xcf\xfa\xed\xfe"))


def test_wheel_has_one_top_level_package_without_training_files(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist()} - {"quire"}
    assert info.endswith(".dist-info")
    assert wheel.read(f"{info}/top_level.txt").decode().split() == ["quire"]
    assert not any("training" in name for name in wheel.namelist())
    assert "quire = quire.server.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.parametrize("installed", [True, False], ids=["wheel", "checkout"])
def test_llm_generates_when_user_modules_have_same_names(
    installed: bool, crowded: Path, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue("site") if installed else ROOT
    (crowded / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(crowded / "script.py")]
    environment = os.environ | {"PYTHONPATH": str(root)}
    completed = subprocess.run(command, cwd=crowded, env=environment, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.split() == [str(root / "quire" / "engine" / "common" / "config.py"), "4", "length"]


def test_server_answers_when_working_directory_shadows_stdlib(
    site: Path, crowded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has a grammar, which a separate process checks; the engine is a separate process, too."""
    monkeypatch.chdir(crowded / "stdlib")
    server = Server(tmp_path / "log", quire=site / "bin" / "quire", env={"PYTHONPATH": str(site)})
    body = {"prompt": "Once", "max_tokens": 4, "guided_regex": "[a-z ]+", "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert server.stop() == 0, server.log.read_text()
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_quire_command_of_wheel_serves(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    help_text, version = (subprocess.check_output([tool, flag], text=True) for flag in ("--help", "--version"))
    assert "usage: quire [-h] [--version] COMMAND" in help_text
    assert version == "quire 0.1.0\n"
    server = Server(tmp_path / "log", quire=tool)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once", "max_tokens": 4}, timeout=60)
    assert server.stop() == 0, server.log.read_text()
    assert answer.json()["usage"]["completion_tokens"] == 4, answer.text


def test_demo_training_script_prints_help() -> None:
    """The script finds its modules, words and templates; no wheel contains it."""
    command = [sys.executable, str(ROOT / "quire/configs/demo/training/train.py"), "--help"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    assert "--tokens" in completed.stdout
    assert (ROOT / "quire/configs/demo/training/card.md").is_file()
