"""One real server with the embedded model for all clients. The model was not trained on tools: a grammar makes it call
them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import makes a network request


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    quire = os.environ.get("QUIRE")
    if quire is None:
        pytest.fail("the variable QUIRE names the `quire` to test, as `make clients` does")
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--tool-call-parser", "hermes", "--dtype", "float32", "--threads", "1", "--pooling-type", "last"]
    server = Server(log, *flags, quire=Path(quire))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    return f"{server.url}/v1"


@pytest.fixture(scope="session")
def closing(server: Server) -> dict[str, int]:
    """A logit_bias that ends JSON objects as soon as their schema allows, because the model would continue them."""
    (brace,) = httpx.post(f"{server.url}/tokenize", json={"prompt": "}"}).json()["tokens"]
    return {str(brace): 100}
