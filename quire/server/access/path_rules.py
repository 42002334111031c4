from __future__ import annotations

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/live"})
"""Paths without a key, because load balancers have none."""
METRICS_PATH = "/metrics"
"""This path also accepts a key of --metrics-api-key."""
WEB_PREFIX = "/web/"
"""These files need no key, because they contain no secrets; the page itself asks for a key."""
ADMIN_PREFIX = "/v1/engine/"

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
LOCAL_ONLY_PATHS = ADMIN_PATHS - {"/is_sleeping"}
"""Without API keys, only programs on this machine may use these paths; web pages may not."""


def is_public_path(path: str) -> bool:
    return path in PUBLIC_PATHS or path == "/" or path.startswith(WEB_PREFIX)
