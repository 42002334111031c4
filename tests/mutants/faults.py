"""Faults that can be put into a module: which statements there are, and what can be made wrong in each.

Not touched: docstrings, texts, log calls, annotations, headers of functions and classes, `assert`, `__all__`, what only
type checkers read, and Triton's kernels.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import re
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPARISONS: dict[type[ast.cmpop], tuple[str, dict[str, str]]] = {
    ast.Lt: (r"<", {"comparison edge": "<=", "comparison swapped": ">="}),
    ast.LtE: (r"<=", {"comparison edge": "<", "comparison swapped": ">"}),
    ast.Gt: (r">", {"comparison edge": ">=", "comparison swapped": "<="}),
    ast.GtE: (r">=", {"comparison edge": ">", "comparison swapped": "<"}),
    ast.Eq: (r"==", {"comparison swapped": "!="}),
    ast.NotEq: (r"!=", {"comparison swapped": "=="}),
    ast.Is: (r"\bis\b", {"comparison swapped": "is not"}),
    ast.IsNot: (r"\bis\s+not\b", {"comparison swapped": "is"}),
    ast.In: (r"\bin\b", {"comparison swapped": "not in"}),
    ast.NotIn: (r"\bnot\s+in\b", {"comparison swapped": "in"}),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "//"),
    ast.Div: (r"/", "*"),
    ast.FloorDiv: (r"//", "*"),
    ast.Mod: (r"%", "*"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
    ast.BitAnd: (r"&", "|"),
    ast.BitOr: (r"\|", "&"),
}
_LOG_METHODS = frozenset(("debug", "info", "warning", "error", "exception", "critical", "log", "warn"))
_LOGGERS = frozenset(("log", "logger", "logging", "warnings"))
_OF_TYPES = frozenset(("TypeVar", "ParamSpec", "NewType", "cast", "getLogger", "isinstance", "issubclass"))
"""Functions whose arguments are types and names of such."""
_TYPE_FORMS = frozenset(("Literal", "Annotated", "Callable", "Optional", "Union", "ClassVar"))
_TEXT_KEYWORDS = frozenset(("description", "help", "metavar", "summary", "title", "epilog"))
_DANGEROUS = frozenset(("kill", "killpg", "rmtree", "rmdir", "unlink", "remove", "removedirs", "execv", "execve"))
"""Calls that a wrong argument would aim at something else on this machine. They are deleted as a whole, or stay."""
_OPTIONAL_ARGUMENTS = frozenset(
    (
        "get",
        "pop",
        "next",
        "getattr",
        "min",
        "max",
        "range",
        "round",
        "split",
        "rsplit",
        "sum",
        "suppress",
        "setdefault",
    )
)
"""Functions and methods that mostly take one argument fewer, too."""
_EMPTY = {"str": '""', "bytes": 'b""', "list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "frozenset": "()"}


@dataclass(frozen=True)
class Fault:
    """The bytes [start, end) of a file become `replacement`."""

    file: str
    function: str
    """Dotted, with its classes; "" at the module's level."""
    line: int
    operator: str
    start: int
    end: int
    replacement: str

    def apply(self, source: str) -> str:
        content = source.encode()
        return (content[: self.start] + self.replacement.encode() + content[self.end :]).decode()

    def lines(self, source: str) -> tuple[str, str]:
        """The changed lines before and after, without indentation, each joined by a space."""
        content = source.encode()
        first = content.rfind(b"\n", 0, self.start) + 1
        last = (content + b"\n").find(b"\n", self.end)
        before = content[first:last].decode()
        after = (content[first : self.start] + self.replacement.encode() + content[self.end : last]).decode()
        return " ".join(before.split()), " ".join(after.split())


@dataclass
class Statement:
    """A statement, or the head of one that has a body; lines are counted from 1."""

    file: str
    function: str
    lines: range
    runs_at_import: bool
    faults: list[Fault] = field(default_factory=list)


def statements_of(file: str, source: str) -> list[Statement]:
    """The statements in which something can be made wrong, in the order of lines."""
    finder = _Finder(file, source)
    finder.visit_body(ast.parse(source).body, "", None)
    return sorted((each for each in finder.statements if each.faults), key=lambda each: each.lines.start)


def is_valid(fault: Fault, source: str) -> bool:
    """False for what is no Python, or means what the source means."""
    try:
        tree = ast.parse(fault.apply(source))
        compile(tree, fault.file, "exec")
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self.statements: list[Statement] = []
        self._file = file
        self._content = source.encode()
        self._line_starts = [0]
        for line in self._content.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._statement = Statement(file, "", range(0), True)
        self._is_in_function = False

    def visit_body(self, body: list[ast.stmt], function: str, returns: ast.expr | None) -> None:
        for node in body:
            self._visit_statement(node, function, returns)

    def _visit_statement(self, node: ast.stmt, function: str, returns: ast.expr | None) -> None:
        if isinstance(node, Function | ast.ClassDef):
            if not _is_left_out(node):
                outer, self._is_in_function = self._is_in_function, isinstance(node, Function) or self._is_in_function
                own = None if isinstance(node, ast.ClassDef) else node.returns
                self.visit_body(node.body, f"{function}.{node.name}".lstrip("."), own)
                self._is_in_function = outer
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            self.visit_body(node.orelse, function, returns)
            return
        if not isinstance(node, ast.Try | ast.TryStar):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            last_line = (node.end_lineno or node.lineno) if body is None else max(node.lineno, _first_line(body[0]) - 1)
            self._begin(function, node.lineno, last_line)
            self._visit_head(node, returns)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                self._visit_statement(child, function, returns)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                if isinstance(child, ast.ExceptHandler) and child.type is not None:
                    self._begin(function, child.lineno, child.lineno)
                    self._add_node("handler removed", child.type, "()")
                self.visit_body(child.body, function, returns)

    def _begin(self, function: str, first_line: int, last_line: int) -> None:
        lines = range(first_line, last_line + 1)
        self._statement = Statement(self._file, function, lines, not self._is_in_function)
        self.statements.append(self._statement)

    def _visit_head(self, node: ast.stmt, returns: ast.expr | None) -> None:
        match node:
            case ast.Expr(value=value):
                self._visit_expression_statement(node, value)
            case ast.Assign(targets=targets, value=value):
                names = {each.id for each in targets if isinstance(each, ast.Name)}
                if not names & {"__all__", "__slots__", "__match_args__"}:
                    self._visit(value)
                if any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets):
                    self._add_node("statement deleted", node, "pass")
            case ast.AugAssign():
                self._visit_augmented(node)
            case ast.AnnAssign(value=value, target=target) if value is not None:
                self._visit(value)
                if isinstance(target, ast.Attribute):
                    self._add_node("statement deleted", node, "pass")
            case ast.Return(value=value) if value is not None:
                self._visit(value)
                self._replace_return(value, returns)
            case ast.Raise() | ast.Delete() | ast.Continue():
                self._add_node("statement deleted", node, "pass")
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    self._visit_exception(node.exc)
            case ast.If(test=test) | ast.While(test=test):
                self._visit(test)
                self._force(test, always=isinstance(node, ast.If))
            case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated):
                self._visit(iterated)
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    self._visit(item.context_expr)
            case ast.Match(subject=subject):
                self._visit(subject)

    def _visit_expression_statement(self, node: ast.Expr, value: ast.expr) -> None:
        call = value.value if isinstance(value, ast.Await) else value
        if not isinstance(call, ast.Call) or _is_log_call(call):
            return
        self._add_node("statement deleted", node, "pass")
        self._visit(value)

    def _visit_augmented(self, node: ast.AugAssign) -> None:
        self._visit(node.value)
        self._add_node("statement deleted", node, "pass")
        if type(node.op) in _ARITHMETIC and not _is_text_or_list(node.value):
            pattern, other = _ARITHMETIC[type(node.op)]
            self._add_between("arithmetic swapped", node.target, node.value, f"{pattern}=", f"{other}=")

    def _replace_return(self, value: ast.expr, returns: ast.expr | None) -> None:
        if isinstance(value, ast.Constant) and value.value in (None, NotImplemented):
            return
        name = ast.unparse(returns).partition("[")[0] if returns is not None else ""
        if name == "bool":
            self._add_node("return replaced", value, f"not ({self._text_of(value)})")
        elif name in ("int", "float"):
            self._add_node("return replaced", value, f"({self._text_of(value)}) + 1")
        elif name:
            self._add_node("return replaced", value, _EMPTY.get(name, "None"))

    def _force(self, test: ast.expr, *, always: bool) -> None:
        """always: True is tried, too; of a loop it would be one that never ends."""
        if not isinstance(test, ast.Constant):
            self._add_node("condition forced", test, "False")
            if always:
                self._add_node("condition forced", test, "True")

    def _visit(self, node: ast.AST) -> None:
        """An expression and all within it."""
        match node:
            case ast.JoinedStr():  # texts; and Python 3.11 places what is inside wrongly
                return
            case ast.Call():
                self._visit_call(node)
                return
            case ast.Subscript(value=value) if _name_of(value) in _TYPE_FORMS:
                return
            case ast.Compare(left=left, ops=operations, comparators=comparators):
                for one, operation, other in zip([left, *comparators], operations, comparators, strict=False):
                    pattern, changes = _COMPARISONS[type(operation)]
                    for operator, change in changes.items():
                        self._add_between(operator, one, other, pattern, change)
            case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
                if not _is_union(node) and not any(map(_is_text_or_list, (left, right))):
                    self._add_between("arithmetic swapped", left, right, *_ARITHMETIC[type(operation)])
            case ast.BoolOp(op=operation, values=values):
                words = ("and", "or") if isinstance(operation, ast.And) else ("or", "and")
                for one, other in itertools.pairwise(values):
                    self._add_between("and/or swapped", one, other, rf"\b{words[0]}\b", words[1])
            case ast.UnaryOp(op=ast.Not()):
                start = self._start_of(node)
                dropped = re.match(rb"not\b\s*", self._content[start:])
                self._add("not dropped", start, start + (dropped.end() if dropped else 0), "")
            case ast.IfExp(test=test):
                self._force(test, always=True)
            case ast.comprehension(ifs=conditions):
                for condition in conditions:
                    self._force(condition, always=True)
            case ast.Constant():
                self._change_constant(node)
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _visit_call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if name in _OF_TYPES or name in _DANGEROUS or _is_log_call(node):
            return
        if name.endswith(("Error", "Exception", "Warning")):
            self._visit_exception(node)
            return
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in _TEXT_KEYWORDS:
                self._drop_argument(keyword)
        if name in _OPTIONAL_ARGUMENTS and node.args and (len(node.args) > 1 or name == "suppress"):
            self._drop_argument(node.args[-1])
        self._visit(node.func)
        for argument in node.args:
            self._visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in _TEXT_KEYWORDS:
                self._visit(keyword.value)

    def _visit_exception(self, node: ast.Call) -> None:
        """Its positional texts are what people read; the rest, such as the field's name, is behavior."""
        for argument in node.args:
            if not isinstance(argument, ast.Constant):
                self._visit(argument)
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._drop_argument(keyword)
            self._visit(keyword.value)

    def _change_constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self._add_node("constant changed", node, str(not value))
            case int(value):
                self._add_node("constant changed", node, str(value + 1))
            case float(value):
                self._add_node("constant changed", node, repr(value * 2 or 1.0))
            case str(value) if not re.search(r"\s", value) and self._text_of(node)[:1] in "\"'":
                end = self._end_of(node) - 1
                self._add("constant changed", end, end, "x")
            case bytes(value):
                self._add_node("constant changed", node, repr(value + b"x"))

    def _drop_argument(self, node: ast.expr | ast.keyword) -> None:
        start, end = self._start_of(node), self._end_of(node)
        if after := re.match(rb"\s*,[ ]*", self._content[end:]):
            self._add("argument dropped", start, end + after.end(), "")
        else:
            before = re.search(rb",?\s*$", self._content[:start])
            self._add("argument dropped", before.start() if before else start, end, "")

    def _add_between(self, operator: str, left: ast.AST, right: ast.AST, pattern: str, replacement: str) -> None:
        start, end = self._end_of(left), self._start_of(right)
        if place := re.search(pattern.encode(), self._content[start:end]):
            self._add(operator, start + place.start(), start + place.end(), replacement)

    def _add_node(self, operator: str, node: ast.AST, replacement: str) -> None:
        self._add(operator, self._start_of(node), self._end_of(node), replacement)

    def _add(self, operator: str, start: int, end: int, replacement: str) -> None:
        line = bisect.bisect(self._line_starts, start)
        fault = Fault(self._file, self._statement.function, line, operator, start, end, replacement)
        self._statement.faults.append(fault)

    def _text_of(self, node: ast.AST) -> str:
        return self._content[self._start_of(node) : self._end_of(node)].decode()

    def _start_of(self, node: ast.AST) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end_of(self, node: ast.AST) -> int:
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _is_left_out(node: Function | ast.ClassDef) -> bool:
    decorators = {_name_of(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list}
    return bool(decorators & {"jit", "overload", "abstractmethod"})


def _first_line(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    decorators = getattr(node, "decorator_list", [])
    return min(each.lineno for each in (node, *decorators))  # type: ignore[attr-defined]


def _name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_log_call(node: ast.Call) -> bool:
    function = node.func
    if not isinstance(function, ast.Attribute) or function.attr not in _LOG_METHODS:
        return False
    return _name_of(function.value).lstrip("_") in _LOGGERS


def _is_text_or_list(node: ast.AST) -> bool:
    """What has no difference, so that any test would notice one."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_text or isinstance(node, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)


def _is_union(node: ast.BinOp) -> bool:
    """`int | None`, at run time."""
    types = [each for each in (node.left, node.right) if _name_of(each)[:1].isupper() or _name_of(each) in _EMPTY]
    is_none = isinstance(node.right, ast.Constant) and node.right.value is None
    return isinstance(node.op, ast.BitOr) and (bool(types) or is_none)
