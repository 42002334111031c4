"""Tests that chat templates that would never end are stopped, and that others render unchanged by the step limit."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.common.errors import InvalidRequest, ModelError
from quire.engine.text.conversation.chat_template import ChatRenderer

ROUNDS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
TREE = "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}"


def render(template: str, **variables: Any) -> str:
    return ChatRenderer({"default": template}, {}).render([{"role": "user", "content": "Hi"}], variables=variables)


DOUBLED = "{% set n = namespace(x='a' * 9999) %}{% for i in range(40) %}{% set n.x = n.x {sign} n.x %}{% endfor %}"


TWICE = "{% set n = namespace(x=['a' * 9999]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
OFTEN = "{% set many = [] %}{% for i in range(9999) %}{% set _ = many.append('a' * 99999) %}{% endfor %}"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "template",
    [
        DOUBLED.replace("{% set n.x = n.x {sign} n.x %}", "{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}"),
        DOUBLED.replace("n.x {sign} n.x", "n.x | replace('a', 'aa')"),
        DOUBLED.replace("n.x {sign} n.x", "n.x.replace('a', 'aa')"),
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}" + DOUBLED.replace("n.x {sign} n.x", "twice(n.x)"),
        TWICE + "{{ n.x }}",
        *(
            TWICE + "{{ n.x | FILTER | length }}".replace("FILTER", name)
            for name in ("string", "tojson", "pprint", "e")
        ),
        *(OFTEN + end for end in ("{{ many | join }}", "{{ ''.join(many) }}", "{{ many | map('upper') | join }}")),
        *(TWICE + end for end in ("{{ ('' ~ n.x) | length }}", "{{ '%s' % [n.x] }}", "{{ '{}'.format(n.x) }}")),
    ],
)
def test_template_text_growth_is_bounded(template: str) -> None:
    with pytest.raises(ModelError, match=r"steps|larger than"):
        render(template)


@pytest.mark.parametrize("sign", ["~", "+"])
def test_repeated_doubling_in_template_exceeds_step_limit(sign: str) -> None:
    with pytest.raises(ModelError, match="steps"):
        render(DOUBLED.replace("{sign}", sign))


@pytest.mark.few(1)
@pytest.mark.parametrize("template", [ROUNDS, CALLS, TREE])
def test_endless_template_raises_model_error(template: str) -> None:
    with pytest.raises(ModelError, match=r"chat template 'default' cannot be rendered: .* steps"):
        render(template)


@pytest.mark.few(1)
@pytest.mark.parametrize("template", [ROUNDS, CALLS, TREE])
def test_template_endless_for_some_requests_rejects_only_these(template: str) -> None:
    guarded = "{% if endless %}" + template + "{% endif %}done"
    assert render(guarded) == "done"
    with pytest.raises(InvalidRequest, match="steps"):
        render(guarded, endless=True)


@pytest.mark.parametrize(
    "source",
    [
        *("'x' * 10 ** 9", "10 ** 9 * [1]", "2 ** (10 ** 9)", "'%0999999999d' % 1", "'%*d' % (10 ** 9, 1)"),
        *("'x' | center(10 ** 9)", "'x'.center(10 ** 9)", "'x'.rjust(10 ** 9)", "'7'.zfill(10 ** 9)"),
        *("'{:>999999999}'.format(1)", "'{:>{}}'.format(1, 10 ** 9)", "'%999999999d' | format(1)"),
        *("'\t'.expandtabs(10 ** 9)", "'x\ny' | indent(10 ** 9)", "(1).to_bytes(10 ** 9, 'big')"),
        *("[1] | batch(10 ** 9, 0) | list", "[1] | slice(10 ** 9) | list", "['x'] | map('center', 10 ** 9) | list"),
        *("('a' * 99999).replace('', 'b' * 99999)", "('a' * 99999) | replace('a', 'b' * 99999)"),
        *("('a' * 99999).join(range(99999) | list)", "('a' * 99999).translate({97: 'b' * 99999})"),
        "range(99999) | list | join('a' * 99999)",
    ],
)
def test_huge_single_expression_in_template_is_rejected(source: str) -> None:
    with pytest.raises(ModelError, match="larger than"):
        render("{{ " + source + " }}")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '=' * 8 }}{{ 6 * 7 }}{{ 2 ** 8 }}{{ 2 * 1.5 }}{{ 7 % 4 }}", "========422563.03"),
        ("{{ '%03d %s' % (5, 'a') }}", "005 a"),
        ("{% for a in 'ab' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }};{% endfor %}", "1/2False;2/2True;"),
        ("{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{{ loop.revindex }}{% endfor %}", "x11"),
        ("{{ 'a' ~ 1 ~ nothing ~ none ~ [2] }}{{ 'b' + 'c' }}{{ 1 + 2 }}{{ [1] + [2] }}", "a1None[2]bc3[1, 2]"),
        ("{% macro m(x) %}{{ x ~ '!' }}{% endmacro %}{{ m('a' ~ 'b') }}", "ab!"),
        (
            "{{ ['a', 1, none] | join('-') }}{{ ','.join(['b', 'c']) }}{{ 'b' | center(3) }}{{ [2, 1] | sum }}",
            "a-1-Noneb,c b 3",
        ),
        (
            "{{ 'aXbX' | replace('X', '--') }}{{ 'aXb'.replace('X', '') }}{{ nothing | join }}{{ none | string }}",
            "a--b--abNone",
        ),
        (
            "{{ {'a': [1, '<']} | tojson }}{{ '%d %s' | format(5, 'x') }}{{ '{} {x}'.format(123456789, x=2) }}",
            '{"a": [1, "<"]}5 x123456789 2',
        ),
        (
            "{% filter upper | replace('A', 'b') %}a{{ 'c' }}{% endfilter %}{{ [1, 2, 3] | batch(2) | list }}",
            "bC[[1, 2], [3]]",
        ),
        (
            "{{ [{'c': 'x'}, {'c': 'y'}] | map(attribute='c') | join }}{{ 2.567 | round(2) }}{{ 'a\nb' | indent }}",
            "xy2.57a\n    b",
        ),
        ("{% for a in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% for a in range(9) if a % 2 %}{{ loop.nextitem }}{% if a > 4 %}{% break %}{% endif %}{% endfor %}", "357"),
        ("{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}", "123"),
    ],
)
def test_ordinary_expressions_render_as_in_jinja(template: str, text: str) -> None:
    assert render(template) == text


def test_step_limit_applies_per_rendering() -> None:
    renderer = ChatRenderer({"default": "{% for a in range(90000) %}{% endfor %}{{ messages | length }}"}, {})
    for _ in range(30):
        assert renderer.render([{"role": "user", "content": "Hi"}]) == "1"
