"""tests/image_check.py without an index: how it reads the Dockerfile and pip's report."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from tests import image_check
from tests.image_check import (
    Environment,
    Package,
    check_disk,
    failure_line,
    find_missing_imports,
    find_overwritten_files,
    find_python,
    find_unpinned,
    normalize,
    python_steps,
    read_pins,
    read_report,
    third_party_imports,
)
from tests.tree import ROOT


def test_steps_are_those_of_the_dockerfile_without_apt() -> None:
    variables = {"KIND": "cuda", "KERNELS": ""}
    steps = python_steps((ROOT / "Dockerfile").read_text(encoding="utf-8"), variables)
    assert steps[0] == "python3 -m venv /opt/quire"
    assert not [each for each in steps if "apt-get" in each or "\n" in each]
    torch, flash, quire, kernels, model = steps[1:]
    assert "deploy/install_torch.py" in torch
    assert torch.endswith("pip install -c constraints.txt -r requirements.txt")
    assert "$FLASH_PACKAGE" in flash
    assert variables["FLASH_PACKAGE"] == "-r deploy/flash-attn-4.txt"
    assert quire == "pip install --no-deps --no-build-isolation ."
    assert "kernel_compilation.fill" in kernels
    assert variables["KERNELS"] == "", "the caller's value is not replaced"
    assert "smollm2" in model
    assert variables["PIP_NO_CACHE_DIR"] == "1"


def test_unpinned_packages_are_reported() -> None:
    toolkit = 'a_b[x,y]==13.0.3; platform_system == "Linux"'
    report = {
        "install": [
            {"metadata": {"name": "Torch", "version": "2.13.0+cu130", "requires_dist": [toolkit]}},
            {"metadata": {"name": "a-b", "version": "13.0.3.0", "requires_dist": ["c ==13.1.*", "d<14,>=13"]}},
            {"metadata": {"name": "c", "version": "13.1.7"}},
            {"metadata": {"name": "d", "version": "13.9"}},
            {"metadata": {"name": "e", "version": "2"}},
        ]
    }
    problems = list(find_unpinned(read_report(report), {"torch": {"2.13.0"}, "e": {"1"}}))
    assert problems == [
        "d: nothing pins 13.9, so later builds may install another version",
        "e: 2 would be installed, and 1 is pinned",
    ]


@pytest.mark.slow
def test_every_import_belongs_to_a_pinned_package() -> None:
    pinned = [Package(name, "", ()) for name in read_pins()]
    assert {"torch", "flash-attn-4", "transformers"} <= {each.name for each in pinned}
    assert not list(find_missing_imports([*pinned, Package("triton", "", ())]))
    assert "fastapi" in third_party_imports()
    without = [each for each in pinned if each.name != normalize("PyYAML")]
    assert [each.partition(" imports ")[2] for each in find_missing_imports([*without, Package("triton", "", ())])] == [
        "yaml, of pyyaml: the image lacks it"
    ]


def test_failing_step_is_reported_in_one_line(tmp_path: Path) -> None:
    environment = Environment("cuda", tmp_path)
    with pytest.raises(SystemExit) as raised:
        environment.run(["sh", "-c", "echo 'ERROR: No matching distribution found for torch==9'; echo more; exit 3"])
    assert str(raised.value).startswith("ERROR: No matching distribution found for torch==9 (exit status 3 of: sh -c ")
    assert environment.run(["sh", "-c", "echo $KIND $OTHER"], OTHER="that") == ["cuda that"]


def test_failure_line_is_first_error_of_pip_or_last_line() -> None:
    assert failure_line(["ERROR: a", "ERROR: b", "c"]) == "ERROR: a"
    assert failure_line(["a", "b", ""]) == "b"
    assert failure_line([]) == "it printed nothing"


def test_full_disk_is_reported_before_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 5 * 2**30))
    with pytest.raises(SystemExit, match=r"--install: .* has 5\.0 GiB free, and --kind cuda needs 8"):
        check_disk("cuda", tmp_path / "new" / "folder")
    check_disk("cpu", tmp_path / "new" / "folder")
    (tmp_path / "quire").mkdir()
    check_disk("cuda", tmp_path)


def test_files_of_two_packages_are_found(tmp_path: Path) -> None:
    records = {
        "one-1": "shared.py,sha256=a,1\nsame.py,sha256=s,1\none-1.dist-info/RECORD,,\nbin/tool,sha256=t,1\n",
        "two-2": "shared.py,sha256=b,1\nsame.py,sha256=s,1\ntwo-2.dist-info/RECORD,,\n",
    }
    for name, text in records.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info/RECORD").write_text(text)
    assert list(find_overwritten_files(tmp_path)) == ["shared.py of one-1 and two-2"]


def test_python_of_image_is_used_if_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyenv's shim exists for versions that are not chosen, and fails."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    shim = tmp_path / f"python{image_check.IMAGE_PYTHON}"
    for script, found in (("exit 127", image_check.sys.executable), ("echo 3.12", shim.name)):
        shim.write_text(f"#!/bin/sh\n{script}\n")
        shim.chmod(0o755)
        assert find_python() == found
