"""`quire stop MODEL`: takes a model out of a running server's memory, as Ollama's command of this name; the next
request loads it again. The server has several: quire serve --models."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.advice import nearest
from quire.engine.errors import EngineError
from quire.server.cli.connect import server_flags
from quire.server.cli.flags import command
from quire.server.cli.models.asking import LOCAL, ask, opened
from quire.server.cli.models.names import names_of
from quire.server.cli.unknown_flags import parse_known


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status."""
    flags = {"names": {"nargs": "+", "metavar": "MODEL", "help": "as quire ps prints it"}, **server_flags(LOCAL)}
    args = parse_known(command("quire stop", __doc__, flags), argv)
    with opened(args) as http:
        cards = ask(http, "GET", "/v1/models")["data"]
        served = [str(each["id"]) for each in cards]
        for asked in args.names:
            name = next((each for each in names_of(asked) if each in served), None)
            if name is None:
                raise EngineError(f"no model {asked}; {nearest(asked, served) or 'there are ' + ', '.join(served)}")
            if not any("state" in each for each in cards):
                raise EngineError(
                    f"{name} is the server's only model, and ends with it (Ctrl-C, SIGTERM); "
                    "quire serve --models cache has all that is downloaded, and unloads one"
                )
            ask(http, "POST", "/v1/models/unload", {"model": name})
            print(f"{name}: stopped")
    return 0
