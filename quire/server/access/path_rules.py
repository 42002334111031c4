"""Paths that need no key, and those that need an admin's."""

from __future__ import annotations

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/live"})
"""Paths that need no key, because load balancers request them and have none."""
WEB_PREFIX = "/web/"
"""The web page's files need no key: they contain nothing secret, and the page asks its user for a key."""
ADMIN_PREFIX = "/v1/engine/"
"""Routes for the server's operators: on a server with keys they need an admin's."""

ADMIN_PATHS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/models/load",
        "/v1/models/unload",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/update_weights",
        "/init_weights_group",
        "/close_weights_group",
        "/api/pull",
        "/collective_rpc",
    }
)
"""More of these."""
LOCAL_ONLY_PATHS = ADMIN_PATHS - {"/is_sleeping"}
"""Those of them that on a server without keys are this machine's alone, and no web page's."""


def is_public_path(path: str) -> bool:
    return path in PUBLIC_PATHS or path == "/" or path.startswith(WEB_PREFIX)
