"""A Jinja sandbox against templates that never end or fill the memory. It limits steps, so the limit is the same on
every machine, and checks the size of large results beforehand.
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
"""A rendering of this many steps takes about a second. Real templates need about 10 per message."""
_STEPS_PER_CALL = 10
MAX_RESULT_SIZE = 1_000_000
"""Characters that a format or a repetition such as `'=' * 80` may produce, and bits of a product."""
_SIZE_PER_STEP = 64
"""Characters or list entries that count as one step. So a rendering produces at most 128 million of them."""
_MAX_TOTAL_SIZE = MAX_STEPS * _SIZE_PER_STEP
_EXPANDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "translate", "join", "to_bytes"}
"""Methods whose results can be as large as the product of two arguments."""
_EXPANDING_FILTERS = {"center", "replace", "join", "indent", "wordwrap", "urlize", "batch", "slice", "round"}
_NESTED_SIZE_FILTERS = {"string", "pprint", "format", "tojson", "e", "escape", "forceescape", "sum"}
"""Filters whose results are as large as all nested values together. A list can contain another list several times."""
_SEQUENCES = (str, bytes, list, tuple)
"""Templates get bytes from `'a'.encode()`."""
_CHARACTERS_PER_EXTRA_STEP, _NODES_PER_EXTRA_STEP = 256, 256
"""Each run of a body costs one extra step per this many characters or syntax nodes of the body."""


class TemplateStepLimitExceeded(jinja2.TemplateRuntimeError): ...


class _StepBudget:
    def __init__(self, max_steps: int) -> None:
        self._steps_left = self._max_steps = max_steps

    def spend_steps(self, steps: int = 1) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TemplateStepLimitExceeded(f"it takes more than {self._max_steps:,} steps")

    def charge_value(self, value: Any) -> Any:
        self.spend_steps(self._value_size(value) // _SIZE_PER_STEP)
        return value

    def charge_growth(self, before: Any, after: Any) -> Any:
        if isinstance(after, str | bytes | list):
            size_before = len(before) if isinstance(before, str | bytes | list) else 0
            self.spend_steps(max(len(after) - size_before, 0) // _SIZE_PER_STEP)
        return after

    def concat_operands(self, *parts: Any) -> str:
        return "".join(str(self.charge_value(part)) for part in parts)

    def _value_size(self, value: Any) -> int:
        size, rest = 0, [value]
        while rest and size <= self._steps_left * _SIZE_PER_STEP:
            one = rest.pop()
            if isinstance(one, str | bytes | list | tuple | dict):
                size += len(one)
            if isinstance(one, list | tuple | dict):
                rest.extend(one)
            if isinstance(one, dict):
                rest.extend(one.values())
        return size


_CURRENT_BUDGET: ContextVar[_StepBudget] = ContextVar("budget")
"""A variable that templates cannot reach, so they cannot raise their budget."""


class _BoundedIterable:
    """Counts the rounds of a loop as steps."""

    def __init__(self, values: Iterable[Any], budget: _StepBudget, steps_per_round: int) -> None:
        self._values = values
        self._budget = budget
        self._steps_per_round = steps_per_round

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.spend_steps(self._steps_per_round)
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # without a length, len() raises what Jinja expects


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        """`filters` replace Jinja's filters of the same names."""
        super().__init__(finalize=_finalize, **options)
        self._unbounded_environment = ImmutableSandboxedEnvironment()
        self._unbounded_environment.filters |= filters
        self.filters |= filters
        for name in _EXPANDING_FILTERS | _NESTED_SIZE_FILTERS:
            self.filters[name] = jinja2.pass_context(partial(self._call_bounded_filter, name))
        del self.globals["lipsum"]  # its size is unbounded

    @staticmethod
    def render_template(template: jinja2.Template, variables: Mapping[str, Any], max_steps: int = MAX_STEPS) -> str:
        """Raises TemplateStepLimitExceeded and the template's own errors."""
        token = _CURRENT_BUDGET.set(_StepBudget(max_steps))
        try:
            return template.render(variables)
        finally:
            _CURRENT_BUDGET.reset(token)

    @staticmethod
    def bounded_loop(values: Iterable[Any], steps: int) -> _BoundedIterable:
        return _BoundedIterable(values, _CURRENT_BUDGET.get(), steps)

    @staticmethod
    def spend_steps(steps: int) -> None:
        _CURRENT_BUDGET.get().spend_steps(steps)

    @staticmethod
    def bounded_concat(*parts: Any) -> str:
        return _CURRENT_BUDGET.get().concat_operands(*parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            steps = nodes.Const(1 + _extra_steps_of_body(loop.body), lineno=loop.lineno)
            loop.iter = _environment_call_node("bounded_loop", [loop.iter, steps], loop.lineno)
        for concat in template.find_all(nodes.Concat):
            concat.nodes = [_environment_call_node("bounded_concat", concat.nodes, concat.lineno)]
        parts: list[nodes.Macro | nodes.CallBlock | nodes.Block] = [*template.find_all(nodes.Macro)]
        parts += [*template.find_all(nodes.CallBlock), *template.find_all(nodes.Block)]
        for part in parts:
            if extra_steps := _extra_steps_of_body(part.body):
                spend_call = _environment_call_node(
                    "spend_steps", [nodes.Const(extra_steps, lineno=part.lineno)], part.lineno
                )
                part.body.insert(0, nodes.ExprStmt(spend_call, lineno=part.lineno))
        return template

    def call(__self, __context: Context, __obj: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The parameters' names are mangled, so that a template's call may use any name for its own arguments."""
        budget = _CURRENT_BUDGET.get()
        budget.spend_steps(_STEPS_PER_CALL)
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if not isinstance(owner, str | bytes | int):
            return super().call(__context, __obj, *args, **kwargs)
        if name in _EXPANDING_METHODS:
            _check_result_size(name, _result_size_upper_bound(name, owner, *args, *kwargs.values()), _MAX_TOTAL_SIZE)
        if name in ("format", "format_map"):
            _check_result_size(name, _total_format_width(owner))
            budget.charge_value([*args, *kwargs.values()])
        if name == "join":
            args = tuple([budget.charge_value(part) for part in parts] for parts in args)
        return budget.charge_growth(owner, super().call(__context, __obj, *args, **kwargs))

    def _call_bounded_filter(self, name: str, context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _CURRENT_BUDGET.get()
        if name in _EXPANDING_FILTERS:
            _check_result_size(name, _result_size_upper_bound(name, value, *args, *kwargs.values()), _MAX_TOTAL_SIZE)
        if name == "format":
            _check_result_size(name, _total_format_width(value))
            budget.charge_value(list(args))
        if isinstance(value, Iterator) and name in ("join", "sum"):
            value = list(value)
        if not isinstance(value, str):
            budget.charge_value(value)
        return budget.charge_growth(
            value, self._unbounded_environment.call_filter(name, value, args, kwargs, context, context.eval_ctx)
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, _SEQUENCES) and isinstance(right, _SEQUENCES):
                _CURRENT_BUDGET.get().spend_steps((len(left) + len(right)) // _SIZE_PER_STEP)
        else:
            _check_result_size(operator, _binop_result_size(operator, left, right))
        if operator == "%" and isinstance(left, str | bytes):
            _CURRENT_BUDGET.get().charge_value(right)
        return super().call_binop(context, operator, left, right)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Called for every {{ }}. It takes a context so that Jinja does not fold constants."""
    return _CURRENT_BUDGET.get().charge_value(value)


def _environment_call_node(method: str, arguments: Sequence[nodes.Node], line: int) -> nodes.Call:
    """Templates can neither name nor replace `method`."""
    passed = cast(list[nodes.Expr], list(arguments))
    return nodes.Call(nodes.EnvironmentAttribute(method), passed, [], None, None, lineno=line)


def _extra_steps_of_body(body: list[nodes.Node]) -> int:
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
    return text // _CHARACTERS_PER_EXTRA_STEP + num_nodes // _NODES_PER_EXTRA_STEP


def _check_result_size(name: str, size: int, max_size: int = MAX_RESULT_SIZE) -> None:
    if size > max_size:
        raise TemplateStepLimitExceeded(f"{name} creates a value larger than {max_size:,}")


def _binop_result_size(operator: str, left: Any, right: Any) -> int:
    """Returns the number of elements or bits; 0 if the result cannot be large."""
    if operator == "%":
        return _total_format_width(left)
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    sequence, factor = (right, left) if isinstance(left, int) else (left, right)
    return len(sequence) * factor if isinstance(sequence, _SEQUENCES) and isinstance(factor, int) else 0


def _total_format_width(text: Any) -> int:
    """Returns an upper bound of the total width of a format's fields: the sum of all numbers in it, also of those that
    are no widths. If a width comes from an argument, returns more than MAX_RESULT_SIZE.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not isinstance(text, str):
        return 0
    taken = re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{", text)
    return MAX_RESULT_SIZE + 1 if taken else sum(map(int, re.findall(r"\d{1,20}", text)))


def _result_size_upper_bound(name: str, *values: Any) -> int:
    if name == "replace" and len(values) > 2 and all(isinstance(value, str) for value in values[:3]):
        text, old, new = values[:3]
        return (len(text) // max(len(old), 1) + 1) * len(new)
    return prod(sorted(map(_argument_size, values))[-2:])


def _argument_size(value: Any) -> int:
    if isinstance(value, dict):  # argument of str.translate
        return max(map(_argument_size, value.values()), default=1)
    if isinstance(value, str | bytes | list | tuple):
        return max(len(value), 1)
    return max(value, 1) if isinstance(value, int) else 1
