"""A Jinja sandbox that ends templates which loop for ever: it counts what a rendering does.

The count is the same on every machine, unlike a time. It bounds what templates do by mistake, and most that they could
do on purpose; a text that a filter or a method makes long still fills the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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
"""Characters, or entries of a list, that + and ~ put together in a step: 128 million in one rendering."""
_BUDGET = "_quire_budget"
_BOUNDED = "_quire_bounded"
_JOINED = "_quire_joined"


class TooManySteps(jinja2.TemplateRuntimeError):
    """A rendering took more than MAX_STEPS."""


class _Budget:
    """What is left of one rendering's steps."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise TooManySteps(f"it takes more than {MAX_STEPS:,} steps")

    def join(self, *parts: Any) -> str:
        """What ~ does."""
        texts = [str(part) for part in parts]
        self.spend(sum(map(len, texts)) // _STEP_SIZE)
        return "".join(texts)


class _Bounded:
    """What a loop goes over; each round is a step. It has a length where the original has one, for `loop.length`."""

    def __init__(self, values: Iterable[Any], budget: _Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.spend()
            yield value

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type]  # without a length this raises what Jinja expects


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Templates of this environment must be rendered with the variables of `budget()`."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    @staticmethod
    def budget() -> dict[str, Any]:
        """Variables that one rendering needs; make them anew for each."""
        budget = _Budget()
        return {_BUDGET: budget, _BOUNDED: lambda values: _Bounded(values, budget), _JOINED: budget.join}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.Name(_BOUNDED, "load"), [loop.iter], [], None, None, lineno=loop.lineno)
        for joined in template.find_all(nodes.Concat):
            joined.nodes = [nodes.Call(nodes.Name(_JOINED, "load"), joined.nodes, [], None, None, lineno=joined.lineno)]
        return template

    def call(__self, __context: Context, __obj: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the sandbox's, whose names of arguments leave all others to the template's own calls."""
        __context.parent[_BUDGET].spend(_CALL_STEPS)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, str | list) and isinstance(right, str | list):
                context.parent[_BUDGET].spend((len(left) + len(right)) // _STEP_SIZE)
        elif _size(operator, left, right) > MAX_SIZE:
            raise TooManySteps(f"{operator} makes something larger than {MAX_SIZE:,}")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """About how large the result of *, ** or % becomes, in elements or bits; 0 where it cannot become large."""
    if operator == "%":
        return max(map(int, re.findall(r"\d+", left)), default=0) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    sequence, factor = (right, left) if isinstance(left, int) else (left, right)
    return len(sequence) * factor if isinstance(sequence, str | list | tuple) and isinstance(factor, int) else 0
