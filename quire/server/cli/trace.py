"""`quire trace`: records some seconds of a running server's engine, to open in ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx

from quire.engine.common.errors import ConfigError
from quire.server.cli.flags import build_parser
from quire.server.cli.server_client import (
    auth_headers,
    client_ssl_context,
    error_from_response,
    normalize_server_url,
    server_flags,
    unreachable_error,
)
from quire.server.cli.unknown_flags import parse_flags


def main(argv: Sequence[str], started: float) -> int:
    args = parse_flags(
        build_parser(
            "quire trace",
            __doc__,
            {
                **server_flags("http://127.0.0.1:8000"),
                "--seconds": {
                    "type": float,
                    "default": 5.0,
                    "metavar": "N",
                    "help": "seconds to record (default: 5, at most 120)",
                },
                "-o --output": {
                    "type": Path,
                    "default": Path("trace.json"),
                    "metavar": "OUT.json",
                    "help": "file for the trace (trace.json)",
                },
            },
        ),
        argv,
    )
    url = normalize_server_url(args.url, tls=args.cacert is not None)
    try:
        response = httpx.get(
            f"{url}/v1/engine/trace",
            params={"seconds": args.seconds},
            headers=auth_headers(args.api_key),
            timeout=args.seconds + 30,
            verify=client_ssl_context(args.cacert),
        )
        if response.is_error:
            raise error_from_response(response)
        args.output.write_bytes(response.content)
    except httpx.HTTPError as error:
        raise unreachable_error(url, error) from None
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
    phases = response.json()["otherData"]["phases_seconds"]
    summary = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
    print(f"{args.output}: {summary}\nopen it in https://ui.perfetto.dev")
    return 0
