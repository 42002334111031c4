"""Counts what makes code hard to read.

`python -m tests.house` prints the counts, `python -m tests.house NAME` the places of one.

No count is a limit, and none fails a test, except upward imports (test_architecture).
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.test_architecture import classes_of, imports, inherited, our_files, part_of, tree_of, upward
from tests.tree import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_PARAMETERS, MAX_BRANCHES, MAX_IMPORTS = 8, 10, 20

IRREGULAR = """
begun bound broken brought built chosen done drawn driven fallen felt found given gone grown had heard held kept known
laid led left lent lost made met overwritten paid risen said seen sent shown shut spent spoken stood sunk taken thought
told torn understood won worn written
"""
"""Participles that do not end in -ed."""
NO_PARTICIPLES = """
cached embed exceed fused indeed merged nested packed paged proceed quantized scheduled shared signed tied
"""
"""Words that end in -ed and are not participles, or that are the field's adjective for a kind of thing."""
VAGUE = frozenset(("asked", "found", "given", "kept", "made", "said", "told"))


def is_participle(word: str) -> bool:
    regular = word.endswith("ed") and len(word) > 4
    return word in IRREGULAR.split() or (regular and word not in NO_PARTICIPLES.split())


def definitions(node: ast.AST) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Each class and function within, with the name of its class, or ""."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield (node.name if isinstance(node, ast.ClassDef) else ""), child
        yield from definitions(child)


def participles() -> Iterator[str]:
    """Functions whose first word is a past participle: they do not tell a query from a command."""
    for path in our_files():
        for _, node in definitions(tree_of(path)):
            if isinstance(node, Function) and is_participle(node.name.lstrip("_").split("_")[0]):
                yield f"{path}:{node.lineno} {node.name}"


def shared_names() -> Iterator[str]:
    """Definitions whose name has two or more others in unrelated classes."""
    places: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in our_files():
        classes = classes_of(path)
        for holder, node in definitions(tree_of(path)):
            if node.name.startswith("__"):
                continue
            first = (str(path), holder or f"line {node.lineno}")
            if holder in classes:
                for base in inherited(classes[holder]):
                    if node.name in methods_of(base.file, base.name):
                        first = (str(base.file), base.name)
            places[node.name][first].append(f"{path}:{node.lineno} {node.name}")
    for kin in places.values():
        if len(kin) > 2:
            yield from (place for lines in kin.values() for place in lines)


def methods_of(path: Path, name: str) -> set[str]:
    return {
        child.name
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for child in node.body
        if isinstance(child, Function)
    }


def vague_locals() -> Iterator[str]:
    """Locals and parameters whose name says only that something was found, made or given."""
    for path in our_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                names |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
                for name in sorted(names & VAGUE):
                    yield f"{path}:{node.lineno} {node.name}: {name}"


def parameters() -> Iterator[str]:
    """Functions of more than eight parameters, without self."""
    for path in our_files():
        for holder, node in definitions(tree_of(path)):
            if isinstance(node, Function):
                arguments = node.args
                names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                count = len(names) - (bool(holder) and bool(names) and names[0].arg in ("self", "cls"))
                if count > MAX_PARAMETERS:
                    yield f"{path}:{node.lineno} {node.name}: {count}"


BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.comprehension, ast.match_case)


def branches() -> Iterator[str]:
    """Functions of more than ten branches (comprehensions and conditional expressions count)."""
    for path in our_files():
        for _, node in definitions(tree_of(path)):
            if isinstance(node, Function) and (count := branches_of(node)) > MAX_BRANCHES:
                yield f"{path}:{node.lineno} {node.name}: {count}"


def branches_of(function: Function) -> int:
    """Branches of nested functions count for these only."""
    count, nodes = 0, list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            count += isinstance(node, BRANCHES)
            nodes += ast.iter_child_nodes(node)
    return count


def own_imports() -> Iterator[str]:
    """Files that import more than twenty of our modules."""
    for path in our_files():
        count = len({each.module for each in imports(path) if part_of(each.module) is not None})
        if count > MAX_IMPORTS:
            yield f"{path}: {count}"


def arrows_up() -> Iterator[str]:
    """Imports that point up."""
    yield from upward()


def links() -> Iterator[str]:
    """Symbolic links within the package."""
    yield from (str(path.relative_to(ROOT)) for path in (ROOT / "quire").rglob("*") if path.is_symlink())


def statements() -> Iterator[str]:
    """Statements outside of tests, docstrings not counted."""
    for path in our_files():
        for node in ast.walk(tree_of(path)):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and not is_docstring:
                yield f"{path}:{node.lineno}"


COUNTS: dict[str, Callable[[], Iterator[str]]] = {
    each.__name__: each
    for each in (
        participles,
        shared_names,
        vague_locals,
        parameters,
        branches,
        own_imports,
        arrows_up,
        links,
        statements,
    )
}


def main(names: list[str]) -> int:
    if unknown := set(names) - COUNTS.keys():
        print(f"No such count: {', '.join(sorted(unknown))}. There are {', '.join(COUNTS)}.", file=sys.stderr)
        return 2
    for name in names:
        print(*COUNTS[name](), sep="\n")
    for name, count in COUNTS.items() if not names else ():
        print(f"{sum(1 for _ in count()):7,}  {name.replace('_', ' ')}: {(count.__doc__ or '').partition(chr(10))[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
