from __future__ import annotations

import logging
import socket

from quire.engine.checkpoint.model_resolver import needs_download, read_raw_config
from quire.engine.common.errors import ConfigError, ModelError
from quire.server.access.host_addresses import is_loopback_listener
from quire.server.config import ServerConfig

log = logging.getLogger("quire.server.cli.serve")
UNPROTECTED_WARNING = (
    "anyone who can reach %s may use this server, read and delete its stored data, and watch it: no API key is needed "
    "(--api-key, --api-key-file)"
)


def bind_or_explain(config: ServerConfig) -> socket.socket:
    """One error names both a taken port and an invalid model."""
    try:
        return bind_tcp_socket(config.host, config.port)
    except ConfigError as error:
        try:
            if not needs_download(config.model, config.revision):
                read_raw_config(config.model, config.revision)
        except ModelError as wrong:
            raise ConfigError(f"{error}; {wrong}") from None
        raise


def bind_tcp_socket(host: str, port: int) -> socket.socket:
    """Does not listen: connections are refused until the model is loaded. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no valid name"
        shown = host if host.isprintable() else repr(host)
        raise ConfigError(f"cannot listen on {shown}:{port}: {why}; choose another --port or --host") from None
    return listener


def warn_if_unprotected(config: ServerConfig, listener: socket.socket) -> None:
    """Warns if other machines can reach a server without keys."""
    if not (config.has_api_keys or is_loopback_listener(listener)):
        log.warning(UNPROTECTED_WARNING, config.host)
