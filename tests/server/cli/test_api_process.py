"""One API process, with the test as its hub."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

from quire.engine.processes.child import module
from quire.server.cli.api_process_manager import ApiProcessSetup


def test_api_process_exits_without_reply_on_malformed_hub_message(tmp_path: Path) -> None:
    """As if it were killed: its requests go on elsewhere, and none is reported or stored as failed."""
    hub = f"ipc://{tmp_path}/hub"
    setup = ApiProcessSetup("{}", hub, "0.0", socket.AF_INET, ("127.0.0.1", 0), time.perf_counter())
    with zmq.Context() as context, context.socket(zmq.ROUTER) as wire:
        wire.bind(hub)
        wire.setsockopt(zmq.RCVTIMEO, 60_000)
        command = [sys.executable, *module("quire.server.cli.api_process")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as api:
            try:
                assert api.stdin is not None
                assert api.stderr is not None
                api.stdin.write(msgspec.json.encode(setup) + b"\n")
                api.stdin.flush()
                identity, _ = wire.recv_multipart()
                wire.send_multipart([identity, b"\xc1"])  # no message begins with this byte
                assert api.wait(60) == 1
                assert b"connection to the server's main process was lost" in api.stderr.read()
            finally:
                api.kill()
        assert not wire.poll(0), "not even that it could not start"
