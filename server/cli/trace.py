"""`quire trace`: record some seconds of a running server's engine, and open them in ui.perfetto.dev."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import httpx

from quire.engine.errors import ConfigError


def main(argv: Sequence[str], started: float) -> int:
    parser = argparse.ArgumentParser(prog="quire trace", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="N", help="how long (default: 5, at most 120)")
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.json"), metavar="OUT.json")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    args = parser.parse_args(argv)
    url = args.url.rstrip("/").removesuffix("/v1")
    headers = {} if args.api_key is None else {"Authorization": f"Bearer {args.api_key}"}
    try:
        response = httpx.get(
            f"{url}/v1/engine/trace", params={"seconds": args.seconds}, headers=headers, timeout=args.seconds + 30
        )
        args.output.write_bytes(response.raise_for_status().content)
    except httpx.HTTPStatusError as error:
        raise ConfigError(f"{url} answered {error.response.status_code}: {error.response.text}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"cannot record at {url}: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}") from None
    phases = response.json()["otherData"]["phases_seconds"]
    summary = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
    print(f"{args.output}: {summary}\nopen it in https://ui.perfetto.dev")
    return 0
