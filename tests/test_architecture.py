"""Enforces the design: allowed imports, imports that load no heavy modules, and limits of size.

server > engine's control half > architecture > engine/common, kernels/parameters > nothing; engine_core, engine_builder
> worker > models > layers > kernels > kernels/parameters. The rooms inside server, engine and kernels are ordered, too.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.tree import ROOT, source_files

LINKED = {"server", "engine", "kernels", "configs"}
"""Folders of quire/. They are imported as quire.server and so on, never by these names alone."""
HEAVY = {"torch", "transformers", "flash_attn", "triton"}
ADAPTED = "engine.models.transformers_backend"

ALLOWED = {
    "quire": {"common", "server", "control"},
    "server": {"common", "server", "control", "families", "architecture"},
    "control": {"common", "control", "families", "architecture", "parameters"},
    "families": {"common", "families", "architecture", "parameters", "shared"},
    "architecture": {"common", "architecture", "parameters"},
    "engine_builder": {"common", "engine_builder", "control", "worker", "families", "architecture"},
    "engine_core": {"common", "engine_builder", "control", "worker"},
    "engine_core_process": {"common", "engine_core", "control"},
    "worker_node": {"common", "control", "worker"},
    "worker": {
        "common",
        "families",
        "worker",
        "models",
        "encoders",
        "layers",
        "kernels",
        "shared",
        "architecture",
        "parameters",
    },
    "models": {"common", "families", "models", "layers", "kernels", "shared", "architecture", "parameters"},
    "encoders": {"common", "families", "encoders", "layers", "kernels", "shared", "architecture", "parameters"},
    "layers": {"common", "layers", "kernels", "shared", "architecture", "parameters"},
    "common": {"common"},
    "kernels": {"kernels", "parameters"},
    "parameters": {"parameters"},
}
"""Parts, and the parts that each may import from. `common` is shared by both halves of the engine. `control` is
everything in engine/ that has no part of its own.
"""
SHARED = {
    "quire.engine",
    "quire.engine.checkpoint.transformers_classes",
    "quire.engine.checkpoint.mtp_names",
    "quire.engine.checkpoint.config_reader",
    "quire.engine.checkpoint.family_spec",
    "quire.engine.checkpoint.model_resolver",
    "quire.engine.checkpoint.kv_cache_plan",
    "quire.engine.checkpoint.overrides",
    "quire.engine.checkpoint.kv_cache_groups",
    "quire.engine.checkpoint.pooling",
    "quire.engine.checkpoint.quantization",
    "quire.engine.checkpoint.tensor_headers",
    "quire.engine.checkpoint.layer_placement",
    "quire.engine.gguf.hf_config",
    "quire.engine.gguf.model_files",
    "quire.engine.gguf.header",
    "quire.engine.gguf.tensor_names",
    "quire.engine.gguf.tensor_types",
    "quire.engine.images.vision_config",
    "quire.engine.lora.adapter_files",
    "quire.engine.lora.target_modules",
    "quire.engine.processes.child",
    "quire.engine.processes.exit_cause",
    "quire.engine.processes.frames",
    "quire.engine.processes.gpus",
    "quire.engine.processes.heartbeat",
    "quire.engine.processes.procfs",
    "quire.engine.processes.utility_calls",
    "quire.engine.processes.cpu_cores",
    "quire.engine.settings.class_import",
    "quire.engine.text.grammar_compiler",
    "quire.engine.text.tokenizer",
}
"""Modules outside engine/common that both halves use: data and file reading, no decisions."""

ROOMS = {
    "server": (
        "config",
        "encoding",
        "error_responses",
        "shared_capacity",
        "cache_diagnostics",
        "store",
        "protocol",
        "formats",
        "access",
        "observe",
        "adapter_registry",
        "served_model",
        "generation",
        "images",
        "resolve",
        "workers",
        "batches",
        "durability",
        "receipt_log",
        "runtime",
        "http",
        "pipeline",
        "routes",
        "app_builder",
        "app",
        "multi_model",
        "cli",
        "asgi",
    ),
    "engine": (
        "common",
        "types",
        "config",
        "architecture",
        "unsupported_options",
        "settings",
        "families",
        "malloc",
        "gguf",
        "schemas",
        "text",
        "images",
        "checkpoint",
        "processes",
        "core",
        "prefix_misses",
        "lora",
        "spec_decode",
        "tiers",
        "client",
        "receipts",
        "layers",
        "models",
        "encoders",
        "worker",
        "engine_builder",
        "engine_core",
        "engine_core_process",
        "worker_node",
        "offline",
        "main",
    ),
    "kernels": (
        "parameters",
        "activation",
        "kv_quantization",
        "attention_params",
        "qk_norm_rope",
        "latent_params",
        "quantized_tensors",
        "int4_fit",
        "routing",
        "recurrent",
        "collective",
        "socket_group",
        "backend",
        "streaming",
        "lora",
        "experts",
        "attention",
        "mla",
        "reference",
        "device",
        "probes",
        "cpu",
        "gpu",
        "distributed",
        "backend_selection",
        "rates",
    ),
}
"""Rooms (folders, and modules next to them) in order; each may import only from those before it."""

OTHERS_PRIVATE = {
    "os._exit": "ends a process at once, which the standard library has no other name for",
    "parser._option_string_actions": "argparse has no other list of its flags",
    "renderer._call": "jinja2's",
    "_asdict": "of every NamedTuple, which begins its methods with _ for the fields' sake",
    "_replace": "the same",
    "_from_config": "transformers', which makes a class's model of a config by no other name",
    "_init_weights": "transformers', which makes buffers that no checkpoint holds",
    "_is_stateful": "transformers', which says of a class whether it keeps other things than keys and values",
    "torch._C": "PyTorch's, which ends a pool of a failed capture",
    "_cuda_endAllocateToPool": "by no other names",
    "_cuda_releasePool": "than these two",
    "_apply_gate": "transformers', which is a part of its experts' interface",
}
"""Private names that are used nevertheless, with the reason. They are expressions, or attributes of any object."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 90
MAX_MODULES = 16


@cache
def read_source(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    text = read_source(path)
    # CPython 3.11 raises SystemError if the garbage collector logs a traceback meanwhile, because logging parses, too
    # (python/cpython#106905).
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def trees_are_freed() -> Iterator[None]:
    """The trees take half a gigabyte, which the garbage collector would scan in every later test."""
    yield
    tree_of.cache_clear()
    read_source.cache_clear()


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    lazy: bool
    """True inside a function or under TYPE_CHECKING."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files() -> list[Path]:
    return [path for path in source_files() if path.suffix == ".py"]


def our_files() -> list[Path]:
    """The modules of the package."""
    return [path for path in python_files() if part_of(module_name(path)) is not None]


def module_name(path: Path) -> str:
    """Import name: `quire.server.app` for quire/server/app.py."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str | None:
    """Key of ALLOWED for a module; None outside the package."""
    names = module.split(".")
    if names[0] != "quire":
        return None
    if names[1:2] == ["engine"]:
        return names[2] if len(names) > 2 and names[2] in ALLOWED else "control"
    if names[1:2] == ["configs"]:
        return None
    if names[1:3] == ["kernels", "parameters"]:
        return "parameters"
    return names[1] if names[1:2] in (["server"], ["kernels"]) else "quire"


def room_of(module: str) -> tuple[str, str] | None:
    """Key of ROOMS and room: ("server", "routes") for quire.server.routes.chat."""
    names = module.split(".")
    return (names[1], names[2]) if names[0] == "quire" and len(names) > 2 and names[1] in ROOMS else None


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    # Only calls of import_module are expressions. Statements alone are a tenth of a tree.
    children = ast.iter_child_nodes if "import_module" in read_source(path) else inner_statements
    nodes: list[tuple[ast.AST, bool]] = [(tree_of(path), False)]
    for node, outside in nodes:
        lazy = outside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        lazy = lazy or _for_type_checkers(node)
        nodes += [(child, lazy) for child in children(node)]
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
            yield Import(path, node.lineno, module, lazy)


def inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Statements directly inside a module or a statement."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        yield from getattr(node, name, ())


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _resolve(base: str, name: str) -> str:
    """`from quire.engine import errors` imports quire.engine.errors; other names resolve to the base module."""
    if base.split(".")[0] not in LINKED | {"quire", "tests"}:
        return base
    stem = ROOT / Path(*base.split("."), name)
    return f"{base}.{name}" if stem.with_suffix(".py").exists() or stem.is_dir() else base


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _literal(node: ast.expr) -> str:
    """Text of a literal, or the beginning of an f-string."""
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0] if isinstance(node.values[0], ast.Constant) else node
    return str(node.value).rstrip(".") if isinstance(node, ast.Constant) else ""


def is_permitted(part: str, target: str) -> bool:
    allowed = ALLOWED[part]
    return part_of(target) in allowed or ("shared" in allowed and target in SHARED)


MAYBE_BARE = re.compile(
    rf"\bimport_module\(|\bfrom\s+\.|\b(?:from|import)\s(?:[^\n]*,)?\s*(?:{'|'.join(sorted(LINKED))})\b"
)
"""Matches in all files with a relative import or one that may lack `quire.`. Other files need no parsing, which takes
seconds.
"""


def test_imports_use_full_quire_module_names() -> None:
    wrong = [
        f"{found}: write quire.{found.module}"
        for path in python_files()
        if MAYBE_BARE.search(read_source(path))
        for found in imports(path)
        if found.module.split(".")[0] in LINKED
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    ["from server import app", "import os, engine.types", "import_module('server.app')", "def f():\n    import engine"],
)
def test_imports_without_quire_prefix_are_found(line: str, tmp_path: Path) -> None:
    (file := tmp_path / "some.py").write_text(line)
    assert MAYBE_BARE.search(line)
    assert any(found.module.split(".")[0] in LINKED for found in imports(file))


@pytest.mark.parametrize("name", ["server", "engine.types"])
def test_subpackage_import_without_quire_prefix_fails(name: str) -> None:
    """Otherwise a program that runs in quire/ would have each module and class twice."""
    completed = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT / "quire", capture_output=True, text=True, check=False
    )
    assert completed.returncode == 1
    assert f"import it as quire.{name.partition('.')[0]}" in completed.stderr


def upward() -> Iterator[str]:
    """Upward imports, each with the parts that are allowed."""
    for path in our_files():
        part = part_of(module_name(path))
        assert part is not None
        for found in imports(path):
            target = part_of(found.module)
            starts_it = (
                part == "control" and target in ("engine_core", "engine_core_process", "worker_node") and found.lazy
            )  # engine/main.py does so
            if target is not None and not is_permitted(part, found.module) and not starts_it:
                below = ", ".join(sorted(ALLOWED[part] & ALLOWED.keys() | {part}))
                yield f"{found}: {part} may import from {below} only"
    for house in ROOMS:
        yield from upward_in(house)


def upward_in(house: str) -> Iterator[str]:
    order = {room: at for at, room in enumerate(ROOMS[house])}
    for path in our_files():
        place = room_of(module_name(path))
        for found in imports(path) if place is not None and place[0] == house else ():
            target = room_of(found.module)
            if target is None or place is None or target[0] != house or target == place:
                continue
            if order.get(target[1], -1) > order.get(place[1], len(order)):
                yield f"{found}: {house}/{place[1]} stands before {house}/{target[1]}"


def test_imports_run_downward() -> None:
    wrong = [*upward()]
    advice = (
        "Move what is needed down, or pass it as an argument; a new room gets a place in ROOMS. 'control' is engine/ "
        f"without its device half, which may use of it {', '.join(sorted(SHARED))}; the control half reaches "
        "engine.engine_core, engine.engine_core_process and engine.worker_node from inside a function only."
    )
    assert not wrong, "\n".join([*wrong, advice])


@pytest.mark.parametrize("house", ROOMS)
def test_rooms_list_matches_packages_on_disk(house: str) -> None:
    """With a complete order there are no cycles among rooms. Imports under TYPE_CHECKING count, too."""
    places = [room_of(module_name(path)) for path in our_files()]
    rooms = {room for place in places if place is not None and place[0] == house for room in place[1:]}
    wrong = [f"{house}/{room} is in ROOMS or on disk, not in both" for room in sorted(rooms ^ {*ROOMS[house]})]
    assert not wrong, "\n".join(wrong)


def test_imports_have_no_cycles() -> None:
    """Directly or indirectly, including imports inside functions and under TYPE_CHECKING."""
    above = {module_name(path): {found.module for found in imports(path)} - {module_name(path)} for path in our_files()}
    while free := {module for module, found in above.items() if not found & above.keys()}:
        above = {module: found for module, found in above.items() if module not in free}
    circles = {module: sorted(found & above.keys()) for module, found in above.items()}
    advice = "Modules of a circle, or above one: move what both need into a module below them."
    assert not circles, f"{circles}\n{advice}"


def test_server_and_control_half_never_import_torch() -> None:
    wrong = [line for path in our_files() for line in _heavy_imports(path)]
    assert not wrong, "\n".join(wrong)


def _heavy_imports(path: Path) -> list[str]:
    part = part_of(module_name(path))
    wrong = []
    for found in imports(path):
        top = found.module.split(".")[0]
        fallback = path == Path("quire/engine/text/tokenizer.py") and found.lazy
        fallback = fallback or path.parent == Path("quire", *ADAPTED.split("."))
        if top == "transformers":
            if not fallback:
                wrong.append(
                    f"{found}: it costs seconds; only a function of engine/text/tokenizer.py may, as a fallback, and "
                    "engine/models/transformers_backend, which is imported where transformers' class computes a model"
                )
        elif found.module.startswith(f"quire.{ADAPTED}") and not (
            found.lazy or path.parent == Path("quire", *ADAPTED.split("."))
        ):
            wrong.append(f"{found}: it imports transformers; `import_module` does so where a model needs it")
        elif top in HEAVY and part in ("quire", "server", "control", "architecture", "parameters"):
            wrong.append(f"{found}: tensors belong to engine/worker and below; hand over plain lists or bytes")
    return wrong


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("quire", ()),
        ("quire.server.app", ()),
        ("quire.kernels", ()),
        # imported by every command
        ("quire.server.cli.main", ("asyncio", "dataclasses", "importlib.metadata", "msgspec", "pydantic")),
        ("quire.server.cli.models.downloaded", ("pydantic", "quire.engine.families")),
        ("quire.server.cli.plan.command", ("asyncio", "fastapi", "httpx", "numpy", "PIL", "tokenizers")),
        # imported before the engine process starts, which takes longest
        ("quire.server.cli.serve", ("fastapi", "starlette", "numpy", "PIL", "prometheus_client", "jinja2")),
        # imported again in another process
        ("quire.server.workers.worker", ("fastapi", "prometheus_client", "zmq", "uvloop", "PIL")),
    ],
)
def test_import_loads_no_heavy_modules(module: str, others: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*sorted({HEAVY | {*others}!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], (
        f"`import {module}` loads {done.stdout.strip()}; `python -X importtime -c 'import {module}'` shows through whom"
    )


@dataclass(frozen=True)
class ProjectClass:
    name: str
    file: Path
    bases: tuple[tuple[str, Path | None], ...]
    """Base names with the file that each is imported from; None for a class outside the package."""
    private: frozenset[str]
    """Methods and attributes whose names begin with a single underscore."""
    methods: frozenset[str]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def classes_of(path: Path) -> dict[str, ProjectClass]:
    tree = tree_of(path)
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
            stem = Path(*(node.module or "").split("."))
            file = next(
                (each for each in (stem.with_suffix(".py"), stem / "__init__.py") if (ROOT / each).exists()), None
            )
            origins |= {alias.asname or alias.name: file for alias in node.names}
    classes = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            bases = [base.id for base in names if isinstance(base, ast.Name)]
            defined = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            written = {
                each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and is_self_attribute(each)
            }
            declared = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                if isinstance(each.target, ast.Name)
            }
            classes[node.name] = ProjectClass(
                node.name,
                path,
                tuple((base, origins.get(base, path)) for base in bases),
                frozenset(filter(is_private, defined | written | declared)),
                frozenset(filter(is_private, defined)),
            )
    return classes


def is_self_attribute(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def inherited(of: ProjectClass) -> Iterator[ProjectClass]:
    """Direct and indirect base classes within the package."""
    for name, file in of.bases:
        if file is not None and (base := classes_of(file).get(name)) is not None and base is not of:
            yield base
            yield from inherited(base)


OF_ANOTHER = re.compile(r"(?<!\bself)(?<!\bcls)\._[A-Za-z]")
"""Matches in all files that use a private name of another object."""


def test_private_names_are_used_in_own_file_only() -> None:
    wrong = []
    for path in our_files():
        if path.parts[1] not in ("engine", "server"):
            continue
        own = {name for each in classes_of(path).values() for name in each.private}
        for node in ast.walk(tree_of(path)) if OF_ANOTHER.search(read_source(path)) else ():
            if (
                isinstance(node, ast.Attribute)
                and is_private(node.attr)
                and not is_self_attribute(node)
                and node.attr not in own
            ):
                allowed = {node.attr, ast.unparse(node)} & OTHERS_PRIVATE.keys()
                if not allowed and not ast.unparse(node).startswith("super()."):
                    wrong.append(f"{path}:{node.lineno} {ast.unparse(node)}")
        for each in classes_of(path).values():
            for base in inherited(each):
                for name in sorted(each.methods & base.private) if base.file != path else ():
                    wrong.append(f"{path}: {each.name}.{name} overrides that of {base.name} in {base.file}")
    advice = "A file's private names are its own. Make public what another one needs, or ask for it as an argument."
    assert not wrong, "\n".join([*wrong, advice])


MAYBE_SETS = re.compile(rf"{OF_ANOTHER.pattern}|[\"'.]_[A-Za-z]\w*[\"']")
"""Matches in all files that set a private name of another object."""
SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "setitem", "delitem", "patch", "object"}
"""Functions that set the name in their second argument, or in their only one."""


def private_names_set(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and private names of other objects that are set there, by assignment to an attribute or by a call such as
    `monkeypatch.setattr`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and not is_self_attribute(node):
            names = [node.attr]
        elif isinstance(node, ast.Call) and _called(node) in SETTERS:
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            names = [each.rpartition(".")[2] for each in texts if isinstance(each, str)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if is_private(name))


def test_tests_set_no_private_names() -> None:
    """Tests check what the code does, not how, so every private name may change without breaking them."""
    wrong = [
        f"{path}:{line} sets {name}"
        for path in python_files()
        if path.parts[0] == "tests" and MAYBE_SETS.search(read_source(path))
        for line, name in private_names_set(tree_of(path))
    ]
    advice = "Hand over an argument, set a public attribute, or try it from outside."
    assert not wrong, "\n".join([*wrong, advice])


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(module, '_x', 1)",
        "patch.setattr('quire.module._x', 1)",
        "patch.delattr(module.Class, '_x')",
        "mock.patch('module._x')",
        "mock.patch.object(module, '_x')",
        "object.__setattr__(frozen, '_x', 1)",
        "setattr(made, '_x', 1)",
        "made._x = 1",
        "made.inner._x += 1",
        "made.y, made._x = 1, 2",
        "made._x: int = 1",
        "del self.made._x",
    ],
)
def test_private_names_set_finds_each_way_of_setting(line: str) -> None:
    assert [name for _, name in private_names_set(ast.parse(line))] == ["_x"]
    assert MAYBE_SETS.search(line)


@pytest.mark.parametrize(
    "line", ["self._x = 1", "monkeypatch.setattr(module, 'x', 1)", "made.__class__ = other", "assert made._x == 1"]
)
def test_private_names_set_ignores_own_and_public_names(line: str) -> None:
    assert not [*private_names_set(ast.parse(line))]


OF_THE_MACHINE = {
    **dict.fromkeys(("time.time", "time.time_ns", "datetime.now"), "quire/engine/common/clock.py"),
    **dict.fromkeys(("time.monotonic", "time.monotonic_ns"), "quire/engine/common/clock.py"),
    **dict.fromkeys(
        ("secrets.token_hex", "secrets.randbits", "os.urandom", "uuid.uuid4"), "quire/engine/common/random_source.py"
    ),
}
"""Functions that read the time or random numbers, and the module to use instead."""


def test_clock_and_random_source_are_read_in_one_module_each() -> None:
    """A simulation of a whole server replaces both. Commands and device code are not part of one."""
    wrong = []
    for path in our_files():
        if part_of(module_name(path)) not in ("server", "control", "worker_node") or path.parts[:3] == (
            "quire",
            "server",
            "cli",
        ):
            continue
        if re.search(r"^(import|from) (time|datetime|secrets|os|uuid)\b", read_source(path), re.MULTILINE):
            for node in ast.walk(tree_of(path)):
                names = []
                if isinstance(node, ast.Attribute):
                    names = [ast.unparse(node)]
                elif isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{each.name}" for each in node.names]
                instead = [(name, OF_THE_MACHINE[name]) for name in names if name in OF_THE_MACHINE]
                wrong += [f"{path}:{node.lineno} {name}: ask {of}" for name, of in instead if of != str(path)]
    assert not wrong, "\n".join(wrong)


DURABILITY = ("quire", "server", "durability")


def test_code_outside_durability_names_no_journal() -> None:
    """How calls survive a process is that room's own matter; other code asks for a durable request."""
    wrong = [
        f"{path}:{line} {name}"
        for path in our_files()
        if path.parts[:3] != DURABILITY
        for line, name in identifiers(tree_of(path))
        if "journal" in name.lower()
    ]
    assert not wrong, "\n".join([*wrong, "Say what the caller needs: DurableRequest has a method for it, or gets one."])


def identifiers(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that code defines, uses and imports, with their lines."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize(
    "line",
    [
        "journal = 1",
        "x.journal",
        "def journal(): pass",
        "class Journal: pass",
        "f(journal=1)",
        "lambda journal: 1",
        "import a.journal",
        "import a as journal",
        "from journal import a",
    ],
)
def test_identifiers_are_found(line: str) -> None:
    assert [name for _, name in identifiers(ast.parse(line)) if "journal" in name.lower()]


def test_files_have_at_most_500_lines() -> None:
    suffixes = {".py", ".cpp", ".h", ".cu", ".js", ".css", ".html"}
    too_long = []
    for path in source_files():
        if path.suffix in suffixes and path.parts[0] != "tests":
            count = len((ROOT / path).read_text(encoding="utf-8").splitlines())
            if count > MAX_FILE_LINES:
                too_long.append(f"{path}: {count} lines, at most {MAX_FILE_LINES}")
    assert not too_long, "\n".join([*too_long, "Split it along a noun: one noun per file."])


def test_functions_have_at_most_90_lines() -> None:
    too_long = []
    for path in python_files():
        if path.parts[0] != "tests":
            nodes: list[ast.AST] = [tree_of(path)]
            for node in nodes:
                nodes += inner_statements(node)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    count = (node.end_lineno or node.lineno) - node.lineno + 1
                    if count > MAX_FUNCTION_LINES:
                        too_long.append(
                            f"{path}:{node.lineno} {node.name}: {count} lines, at most {MAX_FUNCTION_LINES}"
                        )
    assert not too_long, "\n".join([*too_long, "Name its steps and give each a function."])


def test_folders_have_at_most_16_modules() -> None:
    modules = [path for path in source_files() if path.suffix in {".py", ".cpp", ".js"} and path.parts[0] != "tests"]
    counts = Counter(path.parent for path in modules if path.name != "__init__.py")
    full = [
        f"{room}: {count} modules, at most {MAX_MODULES}"
        for room, count in counts.items()
        if count > MAX_MODULES and room not in MANY_OF_ONE_KIND
    ]
    assert not full, "\n".join([*full, "Give what belongs together a room of its own."])


MANY_OF_ONE_KIND = {Path("quire/engine/families")}
"""Folders with one file for each of many things of one kind."""
MAX_IMPORTS = 20
KNOWS_MANY = {
    "quire/engine/worker/model_runner.py",
    "quire/engine/worker/ranks/follower_rank.py",
}
"""Files that still import more modules of the package; this set may only shrink."""


def own_imports(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    return {found.module for found in imports(path) if part_of(found.module) is not None}


def test_files_import_at_most_20_own_modules() -> None:
    counts = {str(path): len(own_imports(path)) for path in our_files()}
    wrong = [
        f"{path} imports {count} modules of ours, at most {MAX_IMPORTS}"
        for path, count in counts.items()
        if count > MAX_IMPORTS and path not in KNOWS_MANY
    ]
    assert not wrong, "\n".join([*wrong, "Let a builder or a room's own module put some of them together."])
    fewer = [path for path in KNOWS_MANY if counts[path] <= MAX_IMPORTS]
    assert not fewer, f"{fewer} need not stand in KNOWS_MANY any more"


def joined_lines(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Statements that are joined to save lines: a starred literal inside another display, and an assignment of more
    than two values to as many targets. Triton kernels are exempt.
    """
    nodes = [tree]
    for node in nodes:
        nodes += [each for each in ast.iter_child_nodes(node) if not is_triton_kernel(each)]
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set):
            yield node.lineno, "a starred literal: write its items one a line"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) and len(node.value.elts) > MAX_TARGETS:
            targets = [each for each in node.targets if isinstance(each, ast.Tuple)]
            if targets:
                yield node.lineno, f"assigns {len(node.value.elts)} values at once: write one a line"


MAX_TARGETS = 2


def is_triton_kernel(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)


def test_code_has_no_joined_lines() -> None:
    wrong = [f"{path}:{line} {what}" for path in our_files() for line, what in joined_lines(tree_of(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line", ["x = (*('a', 'b'), 'c')", "a, b, c = 1, 2, 3"])
def test_joined_lines_are_found(line: str) -> None:
    assert [*joined_lines(ast.parse(line))]


@pytest.mark.parametrize("line", ["x = (*names, 'c')", "a, b = b, a", "a, b, c = triple", "a = 1, 2, 3"])
def test_plain_lines_are_not_reported_as_joined(line: str) -> None:
    assert not [*joined_lines(ast.parse(line))]
