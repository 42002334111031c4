"""tests/image_check.py without an index: how it reads the Dockerfile and pip's report."""

from __future__ import annotations

import pytest

from tests.image_check import (
    Package,
    find_missing_imports,
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
