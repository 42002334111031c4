"""The design, enforced: who may import whom, what stays light, how large things may grow.

server > engine's control half > architecture > engine/common, kernels/parameters > nothing;
engine_core, engine_builder > worker > models > layers > kernels > kernels/parameters.
Inside server, engine and kernels the rooms have an order too.
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
"""The folders of quire/ that have links at the top: imported as quire.server and so on, never by these names alone."""
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
"""Parts, and the parts that each may import from. `common` is what both halves of the engine share.
`control` is all of engine/ that has no part of its own."""
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
"""The modules outside of engine/common that both halves use: data and file reading, no decisions."""

ROOMS = {
    "server": (
        "config",
        "encoding",
        "error_responses",
        "shared_capacity",
        "store",
        "protocol",
        "formats",
        "access",
        "observe",
        "adapter_registry",
        "served_model",
        "peers",
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
"""The rooms (folders, and modules that stand beside them), each of which may import those before it and no other."""

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
"""What begins with _ and is used all the same: an expression, or an attribute of anything."""

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 90
MAX_MODULES = 16


@cache
def tree_of(path: Path) -> ast.Module:
    text = (ROOT / path).read_text(encoding="utf-8")
    # CPython 3.11 raises SystemError if the garbage collector has a traceback logged meanwhile, because that parses too
    # (python/cpython#106905).
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def trees_are_freed() -> Iterator[None]:
    """For they are half a gigabyte, which the garbage collector would look through in every later test."""
    yield
    tree_of.cache_clear()


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str
    lazy: bool
    """Inside a function, or for type checkers only."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def python_files() -> list[Path]:
    return [path for path in source_files() if path.suffix == ".py"]


def our_files() -> list[Path]:
    """The modules of the package."""
    return [path for path in python_files() if part_of(module_name(path)) is not None]


def module_name(path: Path) -> str:
    """As it is imported: `quire.server.app` for quire/server/app.py."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str | None:
    """The key of ALLOWED that a module belongs to; None for what is not the package's."""
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
    """The key of ROOMS and the room: ("server", "routes") for quire.server.routes.chat."""
    names = module.split(".")
    return (names[1], names[2]) if names[0] == "quire" and len(names) > 2 and names[1] in ROOMS else None


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[Import]:
    nodes: list[tuple[ast.AST, bool]] = [(tree_of(path), False)]
    for node, outside in nodes:
        lazy = outside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        lazy = lazy or _for_type_checkers(node)
        nodes += [(child, lazy) for child in ast.iter_child_nodes(node)]
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


def _for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _resolve(base: str, name: str) -> str:
    """`from quire.engine import errors` imports the module quire.engine.errors, as an import from that module does."""
    if base.split(".")[0] not in LINKED | {"quire", "tests"}:
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


def test_everything_is_imported_below_the_root() -> None:
    wrong = [
        f"{found}: write quire.{found.module}"
        for path in python_files()
        for found in imports(path)
        if found.module.split(".")[0] in LINKED
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["server", "engine.types"])
def test_a_folder_is_no_package_of_its_own(name: str) -> None:
    """Else a program that runs at the root would have each module, and each class, twice."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT / "quire", capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert f"import it as quire.{name.partition('.')[0]}" in ran.stderr


def upward() -> Iterator[str]:
    """Imports that point up, each with what is allowed there."""
    for path in our_files():
        part = part_of(module_name(path))
        assert part is not None
        for found in imports(path):
            target = part_of(found.module)
            starts_it = (
                part == "control" and target in ("engine_core", "engine_core_process", "worker_node") and found.lazy
            )  # engine/main.py does
            if target is not None and not permitted(part, found.module) and not starts_it:
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
def test_every_room_has_a_place(house: str) -> None:
    """So there are no cycles among them. An import for type checkers counts like any other."""
    places = [room_of(module_name(path)) for path in our_files()]
    rooms = {room for place in places if place is not None and place[0] == house for room in place[1:]}
    wrong = [f"{house}/{room} is in ROOMS or on disk, not in both" for room in sorted(rooms ^ {*ROOMS[house]})]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    """Directly or by way of others; neither inside a function nor for type checkers."""
    above = {module_name(path): {found.module for found in imports(path)} - {module_name(path)} for path in our_files()}
    while free := {module for module, found in above.items() if not found & above.keys()}:
        above = {module: found for module, found in above.items() if module not in free}
    circles = {module: sorted(found & above.keys()) for module, found in above.items()}
    advice = "Modules of a circle, or above one: move what both need into a module below them."
    assert not circles, f"{circles}\n{advice}"


def test_the_server_and_the_control_half_never_import_torch() -> None:
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
        # before the engine's process is launched, which takes longest
        ("quire.server.cli.serve", ("fastapi", "starlette", "numpy", "PIL", "prometheus_client", "jinja2")),
        # again in a process of its own
        ("quire.server.workers.worker", ("fastapi", "prometheus_client", "zmq", "uvloop", "PIL")),
    ],
)
def test_importing_is_light(module: str, others: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*sorted({HEAVY | {*others}!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [], (
        f"`import {module}` loads {done.stdout.strip()}; `python -X importtime -c 'import {module}'` shows through whom"
    )


@dataclass(frozen=True)
class ClassOfOurs:
    name: str
    file: Path
    bases: tuple[tuple[str, Path | None], ...]
    """By name, each with the file that it is imported from; None: not one of ours."""
    private: frozenset[str]
    """Methods and attributes whose names begin with one _."""
    methods: frozenset[str]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def classes_of(path: Path) -> dict[str, ClassOfOurs]:
    tree = tree_of(path)
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire."):
            stem = Path(*(node.module or "").split("."))
            file = next(
                (each for each in (stem.with_suffix(".py"), stem / "__init__.py") if (ROOT / each).exists()), None
            )
            origins |= {alias.asname or alias.name: file for alias in node.names}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
            bases = [base.id for base in names if isinstance(base, ast.Name)]
            defined = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            written = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and of_self(each)}
            declared = {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                if isinstance(each.target, ast.Name)
            }
            found[node.name] = ClassOfOurs(
                node.name,
                path,
                tuple((base, origins.get(base, path)) for base in bases),
                frozenset(filter(is_private, defined | written | declared)),
                frozenset(filter(is_private, defined)),
            )
    return found


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def inherited(of: ClassOfOurs) -> Iterator[ClassOfOurs]:
    """The classes that it inherits from, near and far, as far as they are ours."""
    for name, file in of.bases:
        if file is not None and (base := classes_of(file).get(name)) is not None and base is not of:
            yield base
            yield from inherited(base)


def test_nothing_private_is_used_in_another_file() -> None:
    wrong = []
    for path in our_files():
        if path.parts[1] not in ("engine", "server"):
            continue
        own = {name for each in classes_of(path).values() for name in each.private}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and is_private(node.attr) and not of_self(node) and node.attr not in own:
                allowed = {node.attr, ast.unparse(node)} & OTHERS_PRIVATE.keys()
                if not allowed and not ast.unparse(node).startswith("super()."):
                    wrong.append(f"{path}:{node.lineno} {ast.unparse(node)}")
        for each in classes_of(path).values():
            for base in inherited(each):
                for name in sorted(each.methods & base.private) if base.file != path else ():
                    wrong.append(f"{path}: {each.name}.{name} overrides that of {base.name} in {base.file}")
    advice = "A file's private names are its own. Make public what another one needs, or ask for it as an argument."
    assert not wrong, "\n".join([*wrong, advice])


SETTERS = {"setattr", "delattr", "__setattr__", "__delattr__", "setitem", "delitem", "patch", "object"}
"""Functions that set what their second argument names, or their first one alone."""


def private_names_set(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines, and the private names of somebody else that are set there: by assignment to an attribute, or by a call as
    `monkeypatch.setattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and not of_self(node):
            names = [node.attr]
        elif isinstance(node, ast.Call) and _called(node) in SETTERS:
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            names = [each.rpartition(".")[2] for each in texts if isinstance(each, str)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if is_private(name))


def test_no_test_sets_a_private_name() -> None:
    """They hold what the code does, not how: every private name may change without them."""
    wrong = [
        f"{path}:{line} sets {name}"
        for path in python_files()
        if path.parts[0] == "tests"
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
def test_a_private_name_that_is_set_is_found(line: str) -> None:
    assert [name for _, name in private_names_set(ast.parse(line))] == ["_x"]


@pytest.mark.parametrize(
    "line", ["self._x = 1", "monkeypatch.setattr(module, 'x', 1)", "made.__class__ = other", "assert made._x == 1"]
)
def test_what_is_ones_own_or_public_may_be_set(line: str) -> None:
    assert not [*private_names_set(ast.parse(line))]


OF_THE_MACHINE = {
    **dict.fromkeys(("time.time", "time.time_ns", "datetime.now"), "quire/engine/common/clock.py"),
    **dict.fromkeys(("time.monotonic", "time.monotonic_ns"), "quire/engine/common/clock.py"),
    **dict.fromkeys(
        ("secrets.token_hex", "secrets.randbits", "os.urandom", "uuid.uuid4"), "quire/engine/common/random_source.py"
    ),
}
"""What tells the time or draws at random, and the module that is asked instead."""


def test_the_time_and_chance_come_from_one_place_each() -> None:
    """So that a simulation of a whole server has them. Commands and device code are no part of one."""
    wrong = []
    for path in our_files():
        if part_of(module_name(path)) not in ("server", "control", "worker_node") or path.parts[:3] == (
            "quire",
            "server",
            "cli",
        ):
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        if re.search(r"^(import|from) (time|datetime|secrets|os|uuid)\b", text, re.MULTILINE):
            for node in ast.walk(tree_of(path)):
                names = []
                if isinstance(node, ast.Attribute):
                    names = [ast.unparse(node)]
                elif isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{each.name}" for each in node.names]
                instead = [(name, OF_THE_MACHINE[name]) for name in names if name in OF_THE_MACHINE]
                wrong += [f"{path}:{node.lineno} {name}: ask {of}" for name, of in instead if of != str(path)]
    assert not wrong, "\n".join(wrong)


def test_no_file_outgrows_a_reader() -> None:
    suffixes = {".py", ".cpp", ".h", ".cu", ".js", ".css", ".html"}
    long = []
    for path in source_files():
        if path.suffix in suffixes and path.parts[0] != "tests":
            count = len((ROOT / path).read_text(encoding="utf-8").splitlines())
            if count > MAX_FILE_LINES:
                long.append(f"{path}: {count} lines, at most {MAX_FILE_LINES}")
    assert not long, "\n".join([*long, "Split it along a noun: one noun per file."])


def test_no_function_outgrows_a_screen() -> None:
    long = []
    for path in python_files():
        if path.parts[0] != "tests":
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    count = (node.end_lineno or node.lineno) - node.lineno + 1
                    if count > MAX_FUNCTION_LINES:
                        long.append(f"{path}:{node.lineno} {node.name}: {count} lines, at most {MAX_FUNCTION_LINES}")
    assert not long, "\n".join([*long, "Name its steps and give each a function."])


def test_no_room_outgrows_a_glance() -> None:
    modules = [path for path in source_files() if path.suffix in {".py", ".cpp", ".js"} and path.parts[0] != "tests"]
    counts = Counter(path.parent for path in modules if path.name != "__init__.py")
    full = [
        f"{room}: {count} modules, at most {MAX_MODULES}"
        for room, count in counts.items()
        if count > MAX_MODULES and room not in MANY_OF_ONE_KIND
    ]
    assert not full, "\n".join([*full, "Give what belongs together a room of its own."])


MANY_OF_ONE_KIND = {Path("quire/engine/families")}
"""Folders with a file for each of many things of one kind."""
MAX_IMPORTS = 20
KNOWS_MANY = {
    "quire/engine/worker/model_runner.py",
    "quire/engine/worker/ranks/follower_rank.py",
}
"""Files that still import more of ours: this set may only shrink."""


def own_imports(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    return {found.module for found in imports(path) if part_of(found.module) is not None}


def test_no_file_knows_too_many_others() -> None:
    counts = {str(path): len(own_imports(path)) for path in our_files()}
    wrong = [
        f"{path} imports {count} modules of ours, at most {MAX_IMPORTS}"
        for path, count in counts.items()
        if count > MAX_IMPORTS and path not in KNOWS_MANY
    ]
    assert not wrong, "\n".join([*wrong, "Let a builder or a room's own module put some of them together."])
    fewer = [path for path in KNOWS_MANY if counts[path] <= MAX_IMPORTS]
    assert not fewer, f"{fewer} need not stand in KNOWS_MANY any more"


def joined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that save lines: a display that is written within another one by a star, and an assignment of more than two
    values to as many targets. Triton's kernels may."""
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


def test_no_line_is_saved_by_joining() -> None:
    wrong = [f"{path}:{line} {what}" for path in our_files() for line, what in joined(tree_of(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line", ["x = (*('a', 'b'), 'c')", "a, b, c = 1, 2, 3"])
def test_joining_is_found(line: str) -> None:
    assert [*joined(ast.parse(line))]


@pytest.mark.parametrize("line", ["x = (*names, 'c')", "a, b = b, a", "a, b, c = triple", "a = 1, 2, 3"])
def test_other_lines_are_no_joining(line: str) -> None:
    assert not [*joined(ast.parse(line))]
