"""Room in the queue, beside several engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.errors import Overloaded
from quire.server.access.admission import Admission
from quire.server.config import ServerConfig


@pytest.mark.parametrize("engines", [1, 3])
def test_the_queue_begins_where_all_engines_are_full(engines: int) -> None:
    client: Any = SimpleNamespace(refusing=False, queued_tokens=0, num_open=0, num_open_of=lambda name: 0)
    tenant: Any = SimpleNamespace(name="")
    config = ServerConfig(max_num_seqs=4, max_queued_requests=2, data_parallel_size=engines)
    admission = Admission(client, config, keyed=False, context_length=512)
    client.num_open = 4 * engines + 1
    admission.check_open(tenant)
    client.num_open += 1
    with pytest.raises(Overloaded, match="Too many requests wait"):
        admission.check_open(tenant)
