"""The api plan, enforced: who may import whom, what stays light, how large things may grow.

server > engine's control half > nothing; engine/loop.py > worker > models > layers > kernels > nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tree import ROOT, source_files

OURS = {"quire", "server", "engine", "kernels", "configs", "tests"}
HEAVY = {"torch", "transformers", "flash_attn", "triton"}

ALLOWED = {
    "quire.py": {"control"},
    "server": {"server", "control"},
    "control": {"control"},
    "loop": {"control", "worker", "models", "kernels"},
    "worker": {"worker", "models", "layers", "kernels", "shared"},
    "models": {"models", "layers", "kernels", "shared"},
    "layers": {"layers", "kernels", "shared"},
    "kernels": {"kernels"},
}
SHARED = {
    "quire.engine.types",
    "quire.engine.errors",
    "quire.engine.config",
    "quire.engine.checkpoint.families",
    "quire.engine.checkpoint.files",
    "quire.engine.checkpoint.kv_plan",
    "quire.engine.text.tokenizer",
    "quire.engine.text.grammar",
}
"""The modules of the control half that the device half may use: data and file reading, no decisions."""

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_TOTAL_LINES = 400, 60, 23_000


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    lazy: bool
    """Inside a function, or for type checkers only."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def code_files() -> list[Path]:
    """Python outside tests and outside configs, whose scripts stand beside the api and are imported by nobody."""
    return [path for path in source_files() if path.suffix == ".py" and path.parts[0] not in ("tests", "configs")]


def house_files() -> list[Path]:
    return [path for path in code_files() if part_of(module_name(path)) is not None]


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str | None:
    """The part of the api that a module belongs to; None for what is not ours."""
    names = module.split(".")
    if names[0] == "engine" and len(names) > 1:
        return {"loop": "loop", "worker": "worker", "models": "models", "layers": "layers"}.get(names[1], "control")
    return {"quire": "quire.py", "server": "server", "engine": "control", "kernels": "kernels"}.get(names[0])


def imports(path: Path) -> Iterator[Import]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    inner = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _for_type_checkers(node)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively: write the full name, as all files do"
            base = node.module or ""
            modules = [_resolve(base, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and _called(node) == "import_module" and node.args:
            modules = [_literal(node.args[0])]
        else:
            continue
        for module in modules:
            yield Import(path, node.lineno, module, id(node) in inner)


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _resolve(base: str, name: str) -> str:
    """`from engine import loop` imports the module engine.loop; `from engine.loop import x` does too."""
    if base.split(".")[0] not in OURS:
        return base
    stem = ROOT / Path(*base.split("."), name)
    return f"{base}.{name}" if stem.with_suffix(".py").exists() or stem.is_dir() else base


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _literal(node: ast.expr) -> str:
    """The text of a literal, or what an f-string starts with."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0] if isinstance(node.values[0], ast.Constant) else node
    return str(node.value).rstrip(".") if isinstance(node, ast.Constant) else ""


def permitted(part: str, target: str) -> bool:
    allowed = ALLOWED[part]
    return part_of(target) in allowed or ("shared" in allowed and target in SHARED)


@pytest.mark.parametrize("path", house_files(), ids=str)
def test_imports_run_downward(path: Path) -> None:
    part = part_of(module_name(path))
    assert part is not None
    wrong = []
    for found in imports(path):
        target = part_of(found.module)
        starts_loop = part == "control" and target == "loop" and found.lazy  # engine/client/in_process.py does
        if target is not None and not permitted(part, found.module) and not starts_loop:
            wrong.append(
                f"{found}: {part} may import from {', '.join(sorted(ALLOWED[part] & ALLOWED.keys() | {part}))} only"
            )
    advice = (
        "Move what is needed down, or pass it as an argument. 'control' is engine/*.py; of it the device half may use "
        f"{', '.join(sorted(SHARED))}; the control half reaches engine.loop from inside a function only."
    )
    assert not wrong, "\n".join([*wrong, advice])


@pytest.mark.parametrize("path", house_files(), ids=str)
def test_the_server_and_the_control_half_never_import_torch(path: Path) -> None:
    part = part_of(module_name(path))
    wrong = []
    for found in imports(path):
        top = found.module.split(".")[0]
        fallback = path == Path("engine/text/tokenizer.py") and found.lazy
        if top == "transformers":
            if not fallback:
                wrong.append(
                    f"{found}: it costs seconds; only a function of engine/text/tokenizer.py may, as a fallback"
                )
        elif top in HEAVY and part in ("quire.py", "server", "control"):
            wrong.append(f"{found}: tensors belong to engine/worker and below; hand over plain lists or bytes")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module", ["quire", "quire.server.cli.main", "quire.server.app", "quire.engine.client.client", "kernels"]
)
def test_importing_is_light(module: str) -> None:
    script = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], (
        f"`import {module}` loads {done.stdout.strip()}; `python -X importtime -c 'import {module}'` shows through whom"
    )


def test_no_file_outgrows_a_reader() -> None:
    suffixes = {".py", ".cpp", ".h", ".cu", ".js", ".css", ".html"}
    lines = {
        path: len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in source_files()
        if path.suffix in suffixes and path.parts[0] != "tests"
    }
    long = [
        f"{path}: {count} lines, at most {MAX_FILE_LINES}" for path, count in lines.items() if count > MAX_FILE_LINES
    ]
    assert not long, "\n".join([*long, "Split it along a noun: one noun per file."])
    total = sum(lines.values())
    assert total <= MAX_TOTAL_LINES, f"{total} lines without tests, at most {MAX_TOTAL_LINES}: delete something first"


def test_no_function_outgrows_a_screen() -> None:
    long = []
    for path in source_files():
        if path.suffix == ".py" and path.parts[0] != "tests":
            for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    count = (node.end_lineno or node.lineno) - node.lineno + 1
                    if count > MAX_FUNCTION_LINES:
                        long.append(f"{path}:{node.lineno} {node.name}: {count} lines, at most {MAX_FUNCTION_LINES}")
    assert not long, "\n".join([*long, "Name its steps and give each a function."])


def test_no_machine_is_named() -> None:
    hosts = "|".join(["pypi" + r"\.org", "python" + "hosted", "deb" + r"\.debian", "registry" + r"\.npmjs"])
    paths = "|".join(["work", "farm", "root", "home/[a-z]+"])
    names = re.compile(rf"{hosts}|download\.{'pytorch'}|(?:^|[\s\"'`=(:])/(?:{paths})/", re.MULTILINE)
    wrong = []
    for path in source_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [
            f"{path}:{text.count(chr(10), 0, found.start()) + 1} {found.group()!r}" for found in names.finditer(text)
        ]
    advice = "Name packages, not the hosts they come from; make paths relative to the project or ask for them."
    assert not wrong, "\n".join([*wrong, advice])
