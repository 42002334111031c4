"""A Jinja sandbox that ends templates which loop for ever or fill the memory: it counts what a rendering does.

The count is the same on every machine, unlike a time: rounds of loops, calls, and what texts and lists grow by. What
one operation can make much larger is looked at before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from math import prod
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 2_000_000
"""Of one rendering; they take a second or so. A round of a loop is one. Real templates need some 10 per message."""
_CALL_STEPS = 10
MAX_SIZE = 1_000_000
"""The largest result of a repetition such as `'=' * 80` or of a format, in characters, and of a product, in bits."""
_STEP_SIZE = 64
"""Characters, or entries of a list, that texts and lists grow by in a step: 128 million in one rendering."""
_MOST = MAX_STEPS * _STEP_SIZE
_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "translate", "join", "to_bytes"}
"""Of texts, bytes and integers, whose result can be as large as the product of two of their arguments."""
_FILTERS = {"center", "replace", "join", "indent", "wordwrap", "urlize", "batch", "slice", "round"}
"""The same."""
_NESTED = {"string", "pprint", "format", "tojson", "e", "escape", "forceescape", "sum"}
"""Filters whose result is as large as all that is in what they are given: a list can hold another one twice."""
_TEXT_PART, _NODES_PART = 256, 256
"""Characters, and nodes of the syntax tree, in the body of a loop or macro for which each run of it is a step more."""


class TooManySteps(jinja2.TemplateRuntimeError):
    """A rendering took more steps than it may."""


class _Budget:
    """What is left of one rendering's steps."""

    def __init__(self, most: int) -> None:
        self._left = self._most = most

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooManySteps(f"it takes more than {self._most:,} steps")

    def put(self, value: Any) -> Any:
        """Count a value that becomes a part of a text. Returns it."""
        self.spend(self._size(value) // _STEP_SIZE)
        return value

    def grown(self, before: Any, after: Any) -> Any:
        """Count what a text or list has grown by; returns `after`."""
        if isinstance(after, str | bytes | list):
            had = len(before) if isinstance(before, str | bytes | list) else 0
            self.spend(max(len(after) - had, 0) // _STEP_SIZE)
        return after

    def join(self, *parts: Any) -> str:
        """What ~ does."""
        return "".join(str(self.put(part)) for part in parts)

    def _size(self, value: Any) -> int:
        """Characters and entries in a value, as often as they stand there; not counted to the end where they are more
        than may be spent."""
        size, rest = 0, [value]
        while rest and size <= self._left * _STEP_SIZE:
            one = rest.pop()
            if isinstance(one, str | bytes | list | tuple | dict):
                size += len(one)
            if isinstance(one, list | tuple | dict):
                rest.extend(one)
            if isinstance(one, dict):
                rest.extend(one.values())
        return size


_BUDGET: ContextVar[_Budget] = ContextVar("budget")
"""Of the rendering under way. No variable of the template leads to it: a template could give itself more."""


class _Bounded:
    """What a loop goes over; each round is a step. It has a length where the original has one, for `loop.length`."""

    def __init__(self, values: Iterable[Any], budget: _Budget, steps: int) -> None:
        """`steps`: of a round."""
        self._values = values
        self._budget = budget
        self._steps = steps

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.spend(self._steps)
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # without a length this raises what Jinja expects


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of this environment must be rendered by `render`."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters`: in place of Jinja's own of the same names."""
        super().__init__(finalize=_put, **options)
        self._unbounded = ImmutableSandboxedEnvironment()
        self._unbounded.filters |= filters
        self.filters |= filters
        for name in _FILTERS | _NESTED:
            self.filters[name] = jinja2.pass_context(partial(self._filter, name))
        del self.globals["lipsum"]  # as many paragraphs as it is asked for

    @staticmethod
    def render(template: jinja2.Template, variables: Mapping[str, Any], most: int = MAX_STEPS) -> str:
        """In at most so many steps. Raises TooManySteps, and whatever the template raises."""
        token = _BUDGET.set(_Budget(most))
        try:
            return template.render(variables)
        finally:
            _BUDGET.reset(token)

    @staticmethod
    def bounded_loop(values: Iterable[Any], steps: int) -> _Bounded:
        """What templates call for the values of each loop."""
        return _Bounded(values, _BUDGET.get(), steps)

    @staticmethod
    def spend_steps(steps: int) -> None:
        """What templates call where a long macro or block begins."""
        _BUDGET.get().spend(steps)

    @staticmethod
    def join_parts(*parts: Any) -> str:
        """What templates call for ~."""
        return _BUDGET.get().join(*parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            steps = nodes.Const(1 + _more_steps(loop.body), lineno=loop.lineno)
            loop.iter = _call("bounded_loop", [loop.iter, steps], loop.lineno)
        for joined in template.find_all(nodes.Concat):
            joined.nodes = [_call("join_parts", joined.nodes, joined.lineno)]
        parts: list[nodes.Macro | nodes.CallBlock | nodes.Block] = [*template.find_all(nodes.Macro)]
        parts += [*template.find_all(nodes.CallBlock), *template.find_all(nodes.Block)]
        for part in parts:
            if steps_more := _more_steps(part.body):
                spent = _call("spend_steps", [nodes.Const(steps_more, lineno=part.lineno)], part.lineno)
                part.body.insert(0, nodes.ExprStmt(spent, lineno=part.lineno))
        return template

    def call(__self, __context: Context, __obj: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the sandbox's, whose names of arguments leave all others to the template's own calls."""
        budget = _BUDGET.get()
        budget.spend(_CALL_STEPS)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if not isinstance(owner, str | bytes | int):
            return super().call(__context, __obj, *args, **kwargs)
        if name in _METHODS:
            _check(name, _product(name, owner, *args, *kwargs.values()), _MOST)
        if name in ("format", "format_map"):
            _check(name, _digits(owner))
            budget.put([*args, *kwargs.values()])
        if name == "join":
            args = tuple([budget.put(part) for part in parts] for parts in args)
        return budget.grown(owner, super().call(__context, __obj, *args, **kwargs))

    def _filter(self, name: str, context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        if name in _FILTERS:
            _check(name, _product(name, value, *args, *kwargs.values()), _MOST)
        if name == "format":
            _check(name, _digits(value))
            budget.put(list(args))
        if isinstance(value, Iterator) and name in ("join", "sum"):
            value = list(value)
        if not isinstance(value, str):
            budget.put(value)
        return budget.grown(value, self._unbounded.call_filter(name, value, args, kwargs, context, context.eval_ctx))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str | list) and isinstance(right, str | list):
                _BUDGET.get().spend((len(left) + len(right)) // _STEP_SIZE)
        else:
            _check(operator, _size(operator, left, right))
        if operator == "%" and isinstance(left, str):
            _BUDGET.get().put(right)
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _put(context: Context, value: Any) -> Any:
    """What Jinja calls for the value of every {{ }}. It wants the context so that no value is written ahead."""
    return _BUDGET.get().put(value)


def _call(method: str, arguments: Sequence[nodes.Node], line: int) -> nodes.Call:
    """A call of the environment's method, which templates can neither replace nor call by a name."""
    passed = cast(list[nodes.Expr], list(arguments))
    return nodes.Call(nodes.EnvironmentAttribute(method), passed, [], None, None, lineno=line)


def _more_steps(body: list[nodes.Node]) -> int:
    """Of each time that a body is run, which may be as long as the template; loops in it count their own."""
    text = num_nodes = 0
    rest: list[nodes.Node] = [*body]
    while rest:
        node = rest.pop()
        num_nodes += 1
        if isinstance(node, nodes.TemplateData):
            text += len(node.data)
        if isinstance(node, nodes.For):
            rest += [node.iter, *node.else_]
        else:
            rest += node.iter_child_nodes()
    return text // _TEXT_PART + num_nodes // _NODES_PART


def _check(name: str, size: int, most: int = MAX_SIZE) -> None:
    if size > most:
        raise TooManySteps(f"{name} makes something larger than {most:,}")


def _size(operator: str, left: Any, right: Any) -> int:
    """About how large the result of *, ** or % becomes, in elements or bits; 0 where it cannot become large."""
    if operator == "%":
        return _digits(left)
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    sequence, factor = (right, left) if isinstance(left, int) else (left, right)
    return len(sequence) * factor if isinstance(sequence, str | list | tuple) and isinstance(factor, int) else 0


def _digits(text: Any) -> int:
    """The widths that a format gives, and more than MAX_SIZE where one is taken from what is formatted."""
    if not isinstance(text, str):
        return 0
    taken = re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{", text)
    return MAX_SIZE + 1 if taken else sum(map(int, re.findall(r"\d{1,20}", text)))


def _product(name: str, *values: Any) -> int:
    """The most that such a method or filter can make of these values: of numbers and lengths, the two largest ones."""
    if name == "replace" and len(values) > 2 and all(isinstance(value, str) for value in values[:3]):
        text, old, new = values[:3]
        return (len(text) // max(len(old), 1) + 1) * len(new)
    return prod(sorted(map(_length, values))[-2:])


def _length(value: Any) -> int:
    if isinstance(value, dict):  # of str.translate
        return max(map(_length, value.values()), default=1)
    if isinstance(value, str | bytes | list | tuple):
        return max(len(value), 1)
    return max(value, 1) if isinstance(value, int) else 1
