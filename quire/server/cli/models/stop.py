"""`quire stop MODEL`: unloads a model from a running server (quire serve --models), like Ollama's; the next request
loads it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.common.errors import EngineError
from quire.engine.unsupported_options import suggest_nearest
from quire.server.cli.flags import build_parser
from quire.server.cli.models.model_names import equivalent_names
from quire.server.cli.models.server_requests import LOCAL_URL, open_client, request_json
from quire.server.cli.server_client import server_flags
from quire.server.cli.unknown_flags import parse_flags


def main(argv: Sequence[str], started: float) -> int:
    flags = {"names": {"nargs": "+", "metavar": "MODEL", "help": "as quire ps prints it"}, **server_flags(LOCAL_URL)}
    args = parse_flags(build_parser("quire stop", __doc__, flags), argv)
    with open_client(args) as http:
        cards = request_json(http, "GET", "/v1/models")["data"]
        served = [str(each["id"]) for each in cards]
        for requested_name in args.names:
            name = next((each for each in equivalent_names(requested_name) if each in served), None)
            if name is None:
                raise EngineError(
                    f"no model {requested_name}; "
                    f"{suggest_nearest(requested_name, served) or 'there are ' + ', '.join(served)}"
                )
            if not any("state" in each for each in cards):
                raise EngineError(
                    f"{name} is the server's only model, and ends with it (Ctrl-C, SIGTERM); "
                    "quire serve --models cache has all that is downloaded, and unloads one"
                )
            request_json(http, "POST", "/v1/models/unload", {"model": name})
            print(f"{name}: stopped")
    return 0
