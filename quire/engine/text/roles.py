"""Whose a chat's messages may be: the roles of the APIs, and those that the model's template names itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jinja2 import nodes

from quire.engine.common.errors import InvalidRequest
from quire.engine.unsupported_options import suggest_nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_roles(messages: Sequence[Mapping[str, Any]], template_roles: Set[str]) -> None:
    """Raises InvalidRequest for a role that is neither one of the APIs' nor `template_roles` by the template.

    Most templates write any role into the prompt as it is, so that a misspelt one would only make the answer worse.
    """
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and role not in template_roles:
            hint = (
                suggest_nearest(role.lower(), ROLES)
                or f"it must be one of {', '.join(ROLES)}, or named by the chat template, unless the server has "
                "--allow-unknown-roles"
            )
            raise InvalidRequest(f"messages[{number}].role: unknown role {role!r}; {hint}", param="messages")


def find_string_literals(template: nodes.Template) -> frozenset[str]:
    """The strings that stand in a template as literals: a role that it treats in its own way is one of them."""
    texts = [each.value for each in template.find_all(nodes.Const)]
    return frozenset(text for text in texts if isinstance(text, str) and text.strip())
