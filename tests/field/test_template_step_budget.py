"""Chat templates cannot change their step budget, and long bodies cost more than one step. A user saw: a checkpoint's
template wrote `_quire_budget.spend(-…)` and held the event loop for 9.4 s (issue 56, item 6).
"""

from __future__ import annotations

import pytest

from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.text.conversation.chat_template import ChatRenderer
from quire.engine.text.conversation.template_sandbox import BoundedEnvironment

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NAMES = ("_quire_budget", "_quire_bounded", "_quire_joined", "environment", "budget", "bounded_loop", "bounded_concat")
SET, MACRO = "{% set NAME = namespace(x=1) %}", "{% macro NAME(x, y=1) %}{% endmacro %}"
CHEATS = {
    "spends less than nothing": "{% if _quire_budget %}{% set x = _quire_budget.spend(-10**12) %}{% endif %}",
    "sets the names": "".join(SET.replace("NAME", name) for name in NAMES),
    "macros of these names": "".join(MACRO.replace("NAME", name) for name in NAMES),
    "sets what ~ needs": "{% set _quire_joined = '' %}{% set x = 'a' ~ 'b' %}",
    "asks the environment": "{% if environment is defined %}{{ environment.spend_steps(-10**12) }}{% endif %}",
    "asks itself": "{{ self.environment }}{{ self._TemplateReference__context }}",
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CHEATS)
def test_template_cannot_reach_step_budget_by_name(name: str) -> None:
    with pytest.raises(ModelError, match="steps"):
        ChatRenderer({"default": CHEATS[name] + LOOP}, {})


def test_request_variables_cannot_reset_step_budget() -> None:
    renderer = ChatRenderer({"default": "{% if go is defined %}" + LOOP + "{% endif %}"}, {})
    names = dict.fromkeys((*NAMES, "go"), 10**12)
    with pytest.raises(InvalidRequest, match="steps"):
        renderer.render([{"role": "user", "content": "a"}], variables=names)


def test_template_may_use_budget_names_as_variables() -> None:
    template = "{% set _quire_bounded = 'a' %}{% for m in messages %}{{ _quire_bounded ~ m.content }}{% endfor %}"
    assert ChatRenderer({"default": template}, {}).render([{"role": "user", "content": "b"}]) == "ab"


FOR, END, TEXT, STATEMENTS = "{% for a in range(99999) %}", "{% endfor %}", "x" * 100_000, "{% set x = 1 %}" * 9000
LONG = {
    "text in a loop": FOR + TEXT + END,
    "statements in a loop": FOR + STATEMENTS + END,
    "text in a macro that loops": "{% macro m() %}" + FOR + TEXT + END + "{% endmacro %}{{ m() }}",
    "statements in a macro": "{% macro m() %}" + STATEMENTS + "{% endmacro %}" + FOR + "{{ m() }}" + END,
    "statements in a block": "{% block b %}" + STATEMENTS + "{% endblock %}" + FOR + "{{ self.b() }}" + END,
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LONG)
def test_long_template_bodies_exhaust_step_budget(name: str) -> None:
    with pytest.raises(ModelError, match="steps"):
        ChatRenderer({"default": LONG[name]}, {})


DOUBLED = (
    "{% set v = namespace(x=START) %}{% for a in range(24) %}{% set v.x = v.x + v.x %}{% endfor %}{{ v.x | length }}"
)
LARGE = {
    "format of bytes": "{{ ('%20000000d'.encode() % 1) | length }}",
    "format of bytes with an argument's width": "{{ ('%*d'.encode() % (20000000, 1)) | length }}",
    "repeated bytes": "{{ ('a'.encode() * 20000000) | length }}",
    "doubled bytes": DOUBLED.replace("START", "('abcdefgh' * 40).encode()"),
    "doubled tuples": DOUBLED.replace("START", "('abcdefgh' * 40, 1, 2, 3, 4, 5, 6, 7, 8, 9)"),
    "doubled text": DOUBLED.replace("START", "'abcdefgh' * 40"),
}


@pytest.mark.parametrize("name", LARGE)
def test_template_cannot_create_large_values_of_any_type(name: str) -> None:
    """A reader of the sandbox's docstrings saw that `'%20000000d'.encode() % 1` made 20 MB, past the limit."""
    with pytest.raises(ModelError, match=r"steps|larger than"):
        ChatRenderer({"default": LARGE[name]}, {})


def test_step_budget_restarts_with_each_rendering() -> None:
    environment = BoundedEnvironment({})
    template = environment.from_string("{% for a in range(99999) %}{% endfor %}" * 15)
    assert [environment.render_template(template, {}) for _ in range(3)] == ["", "", ""]
    with pytest.raises(LookupError):
        template.render({})
