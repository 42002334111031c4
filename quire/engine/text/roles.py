from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from jinja2 import nodes

from quire.engine.common.errors import InvalidRequest
from quire.engine.unsupported_options import suggest_nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_roles(messages: Sequence[Mapping[str, Any]], template_roles: Set[str]) -> None:
    """Raises InvalidRequest for an unknown role, because most templates would write it into the prompt, and answers
    would be worse.
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
    """Includes roles that the template treats specially."""
    texts = [each.value for each in template.find_all(nodes.Const)]
    return frozenset(text for text in texts if isinstance(text, str) and text.strip())
