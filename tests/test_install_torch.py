"""deploy/install_torch.py chooses the build of PyTorch for a machine; tested with local package indexes."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import venv
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.tree import ROOT

SCRIPT = ROOT / "deploy/install_torch.py"
PINNED = next(iter(re.findall(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)))
_spec = spec_from_file_location("install_torch", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
install_torch = module_from_spec(_spec)
_spec.loader.exec_module(install_torch)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


def wheel(folder: Path, version: str) -> None:
    """Write an empty package `torch` and its page of the PEP 503 index."""
    folder.mkdir(parents=True)
    info, name = f"torch-{version}.dist-info", f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{name}">{name}</a></body></html>')


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with the indexes `usual/` and `cpu/`; the second has the CPU build."""
    folder = tmp_path_factory.mktemp("indexes")
    wheel(folder / "usual/torch", PINNED)
    wheel(folder / "cpu/torch", f"{PINNED}+cpu")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with pip and without PyTorch."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin/python"


def install_with_script(python: Path, served: str, target: Path, *arguments: str, **variables: str) -> tuple[str, str]:
    """Run the script; return the version that it installs into `target`, and its output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name != "TORCH_INDEX"
    }
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{served}/usual", "PIP_TARGET": str(target)}
    command = [str(python), str(SCRIPT), *arguments]
    completed = subprocess.run(command, env=environment | pip | variables, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    (info,) = target.glob("torch-*.dist-info")
    before_pip, collects, _ = completed.stdout.partition("Looking in indexes")
    assert collects, "pip shows its progress"
    return info.name.removeprefix("torch-").removesuffix(".dist-info"), before_pip


@pytest.mark.slow
def test_script_installs_torch_from_named_index(python: Path, served: str, tmp_path: Path) -> None:
    assert install_with_script(python, served, tmp_path / "cpu", TORCH_INDEX=f"{served}/cpu") == (f"{PINNED}+cpu", "")
    assert install_with_script(python, served, tmp_path / "usual", TORCH_INDEX="") == (PINNED, "")
    assert install_with_script(python, served, tmp_path / "cuda", "cuda") == (PINNED, "")


@pytest.mark.slow
def test_unreachable_index_is_reported_and_default_index_used(python: Path, served: str, tmp_path: Path) -> None:
    version, output = install_with_script(python, served, tmp_path / "gone", TORCH_INDEX=f"{served}/gone")
    assert version == PINNED
    reason = f"{served}/gone cannot be reached (File not found)"
    assert output == f"{reason}: PyTorch comes from pip's usual index, which may have only CUDA builds\n"


def test_cpu_build_is_chosen_without_nvidia_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_torch.shutil, "which", lambda name: None)
    assert install_torch.driver(tmp_path) == "cpu"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert install_torch.driver(tmp_path) == "cuda"
    wanted_index = install_torch.wanted_index
    assert wanted_index({}, "linux", "cpu") == install_torch.CPU_BUILDS
    assert wanted_index({}, "linux", "cuda") is wanted_index({}, "darwin", "cpu") is None
    assert wanted_index({"TORCH_INDEX": ""}, "linux", "cpu") is None
    assert wanted_index({"TORCH_INDEX": "https://mine"}, "linux", "cuda") == "https://mine"


def test_pip_shows_its_progress_while_make_sets_up_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads take minutes, in which a silent `make serve` looks hung."""
    commands: list[list[str]] = []
    monkeypatch.setattr(install_torch, "is_installed", lambda: False)
    monkeypatch.setattr(install_torch, "unreachable", lambda index: "")
    done: subprocess.CompletedProcess[bytes] = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(install_torch.subprocess, "run", lambda command: commands.append(command) or done)
    assert install_torch.main(["cpu"]) == 0
    recipes = re.findall(r"^\t.*pip install.*EDITABLE.*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [len(commands), len(recipes)] == [1, 2]
    assert not {"-q", "--quiet"} & {word for command in [*commands, *map(str.split, recipes)] for word in command}


def test_installed_torch_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks no index and prints nothing."""
    monkeypatch.setattr(install_torch.metadata, "version", lambda name: f"{PINNED}+cu130")
    monkeypatch.setattr(install_torch, "unreachable", lambda index: pytest.fail("it was asked"))
    assert install_torch.main([]) == 0
    monkeypatch.setattr(install_torch.metadata, "version", lambda name: "2.0.0")
    assert not install_torch.is_installed()


def test_unreachable_returns_reason_of_index(served: str) -> None:
    assert install_torch.unreachable(f"{served}/cpu/") == ""
    assert install_torch.unreachable(f"{served}/none") == "File not found"
    assert "refused" in install_torch.unreachable("http://127.0.0.1:9")
    assert "unknown url type" in install_torch.unreachable("nowhere")


def test_cpu_index_url_is_written_once() -> None:
    """Makefile, Dockerfile and compose.yaml leave the choice to the script."""
    paths = ["Makefile", "Dockerfile", "deploy/compose.yaml", "README.md", "pyproject.toml", "constraints.txt"]
    assert not [path for path in paths if install_torch.CPU_BUILDS in (ROOT / path).read_text()]
    assert SCRIPT.read_text().count(install_torch.CPU_BUILDS) == 1
    for path in paths[:2]:
        assert "deploy/install_torch.py" in (ROOT / path).read_text()
