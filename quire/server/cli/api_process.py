"""One of several API processes (`python -m quire.server.cli.api_process`). It reaches the engine through the leader."""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import sys
from functools import partial

import msgspec
import uvloop
import zmq

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.messages import LeaderMethods
from quire.engine.client.shared_client import SharedClient
from quire.engine.common.errors import ConfigError, Overloaded, QuireError
from quire.engine.processes.child import end_with_parent, read_configuration
from quire.engine.processes.utility_calls import Fault, encode, make_notification
from quire.server.cli.api_process_manager import ApiProcessSetup
from quire.server.cli.process_setup import dump_threads_on_signal, exit_on_sigterm_or_sighup
from quire.server.cli.serve import ServerRun, SingleModelHost
from quire.server.config import ServerConfig
from quire.server.observe import log_setup

_LINGER_MS = 1000


class ApiProcessRun(ServerRun):
    def __init__(self, config: ServerConfig, link: SharedClient, listener: socket.socket, started: float) -> None:
        super().__init__(config, SingleModelHost(config, EngineClient(link)), listener, started)
        self._link = link

    def publish_announcement(self, announcement: str) -> None:
        self._link.tell_serving(announcement)


def main() -> int:
    exit_on_sigterm_or_sighup()
    dump_threads_on_signal()
    setup = msgspec.json.decode(read_configuration(), type=ApiProcessSetup)
    end_with_parent()
    config = ServerConfig.model_validate_json(setup.config)
    log_setup.set_up_logging(config)
    logging.getLogger("quire.server.cli.serve").setLevel(logging.WARNING)
    try:
        with bind_shared_port(setup) as listener:
            link = SharedClient(config, setup.hub, setup.identity)
            # ends like a killed process, so that other processes continue this process's calls and no call fails
            link.on_failure = partial(os._exit, 1)
            return uvloop.run(ApiProcessRun(config, link, listener, setup.started).run())
    except (QuireError, sqlite3.OperationalError) as error:
        report_failure_to_parent(setup, error if isinstance(error, QuireError) else Overloaded(str(error)))
        return 1


def bind_shared_port(setup: ApiProcessSetup) -> socket.socket:
    """Raises ConfigError."""
    if setup.descriptor is not None:
        return socket.socket(fileno=setup.descriptor)
    listener = socket.socket(setup.family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(tuple(setup.address))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot share port {setup.address[1]}: {error.strerror}", param="port") from None
    return listener


def report_failure_to_parent(setup: ApiProcessSetup, error: QuireError) -> None:
    context = zmq.Context()
    link = context.socket(zmq.DEALER)
    link.set(zmq.IDENTITY, setup.identity.encode())
    link.set(zmq.LINGER, _LINGER_MS)
    link.connect(setup.hub)
    link.send(encode(make_notification(LeaderMethods.report_failed_start, Fault.of(error))))
    link.close()
    context.term()


if __name__ == "__main__":
    sys.exit(main())
