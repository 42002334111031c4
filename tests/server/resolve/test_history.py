"""Limits of what a request adds to a conversation."""

from __future__ import annotations

import pytest

from quire.engine.common.errors import InvalidRequest
from quire.server.protocol.response_items import Message
from quire.server.resolve.other_apis.history import to_stored_items

ITEM = Message(role="user", content="Hi")


def test_items_are_stored_when_a_request_adds_a_thousand_of_them_to_a_conversation() -> None:
    stored = to_stored_items([ITEM] * 1000, "input", in_conversation=True)
    assert len({item.id for item in stored}) == 1000


def test_items_are_refused_when_a_request_adds_more_than_a_thousand_to_a_conversation() -> None:
    with pytest.raises(InvalidRequest, match="input: a request adds at most 1000 items") as refused:
        to_stored_items([ITEM] * 1001, "input", in_conversation=True)
    assert refused.value.param == "input"
    assert len(to_stored_items([ITEM] * 1001, "input")) == 1001, "what belongs to no conversation may have more"
