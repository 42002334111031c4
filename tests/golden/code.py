"""The instructions of every module, with names replaced by numbers: equal for two trees that differ only in names,
docstrings and comments.

A name's number is the order of its first use in a code object; locals, globals and keywords are counted separately. Two
names merged into one, or one split into two, are therefore a difference. Attributes have no numbers, because classes
may share a name: mypy and the tests check these. Names in strings (getattr, quoted annotations) are values. A module's
leading imports are left out, because they are sorted by name.
"""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

from tests.golden.models import Captured
from tests.golden.tree import Tree

_LOCALS = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "DEREF", "CLASSDEREF")
_BY_ORDER_OF_NAMES = ("LOAD_CLOSURE", "MAKE_CELL")
_ATTRIBUTES = ("_ATTR", "LOAD_METHOD")
_NAMES = ("_GLOBAL", "_NAME", "IMPORT_FROM")


def capture_code(tree: Tree) -> Captured:
    """A text for each module of the package, by path."""
    package = tree.root / "quire"
    # Before quire/ held them, these folders were links, which pathlib's globs do not follow.
    folders = [package, *(each for each in sorted(package.iterdir()) if each.is_dir())]
    files = {
        path for folder in folders for path in (folder.glob("*.py") if folder == package else folder.rglob("*.py"))
    }
    return {str(path.relative_to(tree.root)): code_of(path.read_text(encoding="utf-8")) for path in sorted(files)}


def code_of(source: str) -> str:
    """The module's code as text, an instruction a line, an inner code object indented."""
    tree = _Bare().visit(ast.parse(source))
    for node in ast.walk(ast.fix_missing_locations(tree)):
        for place in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(node, place):  # else jumps depend on where a long line is broken
                setattr(node, place, 1)
    return "\n".join(_lines(compile(tree, "module", "exec", dont_inherit=True), ""))


class _Bare(ast.NodeTransformer):
    """Drops docstrings (of attributes too), the module's imports (so that annotations are not strings) and functions'
    annotations.
    """

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        body = getattr(node, "body", None)
        if isinstance(body, list):
            at_top = isinstance(node, ast.Module)
            kept = [each for each in body if not _is_text(each) and not (at_top and _is_import(each))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


class _Numbers(dict[str, int]):
    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number


def _lines(code: CodeType, indent: str) -> Iterator[str]:
    numbers = {kind: _Numbers() for kind in ("local", "name", "keyword")}
    yield f"{indent}code of {code.co_argcount} + {code.co_kwonlyargcount} arguments, flags {code.co_flags:x}"
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        numbers["local"][name]  # in their order
    instructions = list(dis.get_instructions(code))
    for i, instruction in enumerate(instructions):
        before, after = instructions[i - 1].opname, [each.opname for each in instructions[i + 1 : i + 3]]
        kind, value = _kind(instruction, before, after), instruction.argval
        value = code.co_consts[instruction.arg or 0] if instruction.opname == "KW_NAMES" else value
        if isinstance(value, CodeType):
            yield f"{indent}{instruction.opname}"
            yield from _lines(value, indent + "  ")
        elif kind == "attribute" or instruction.opname in _BY_ORDER_OF_NAMES:
            yield f"{indent}{instruction.opname}"
        elif kind in numbers:
            known = numbers[kind]
            of = [known[name] for name in value] if isinstance(value, tuple) else known[value]
            yield f"{indent}{instruction.opname} {kind} {of}"
        else:
            shown = sorted(map(repr, value)) if isinstance(value, frozenset) else "" if kind == "none" else repr(value)
            yield f"{indent}{instruction.opname} {shown}".rstrip()


def _kind(instruction: dis.Instruction, before: str, after: list[str]) -> str:
    """What an instruction's argument is: a kind of name, "none" if it says nothing, or "value"."""
    operation, value = instruction.opname, instruction.argval
    if any(kind in operation for kind in _LOCALS):
        return "local"
    if operation.endswith(_ATTRIBUTES) or (before == "LOAD_NAME" and after[:1] == ["STORE_SUBSCR"] and _is_name(value)):
        return "attribute"  # the second: of a class, as its annotations have it
    if operation.endswith(_NAMES):
        return "name"
    if operation == "IMPORT_NAME" or after[:1] == ["IMPORT_NAME"]:
        return "none"
    if operation == "KW_NAMES" or (isinstance(value, tuple) and after[:1] == ["MATCH_CLASS"]):
        return "keyword"
    if operation == "LOAD_CONST" and isinstance(value, tuple) and after[:1] == ["BUILD_CONST_KEY_MAP"]:
        return "keyword" if after[1:] in (["LOAD_CONST"], ["LOAD_CLOSURE"]) and all(map(_is_name, value)) else "value"
    if operation == "LOAD_CONST" and isinstance(value, str) and before == "MAKE_FUNCTION":
        return "name"  # a class's
    return "none" if after[:1] == ["STORE_NAME"] and before == "STORE_NAME" and _is_name(value) else "value"


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.replace(".", "").replace("<locals>", "").isidentifier()
