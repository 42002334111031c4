"""The log warns before a slow tokenizer load. A user saw: a start stood still for 40 s without a message, for a
tokenizer.json with three million added tokens (issue 56, item 6). The library needs that time.
"""

from __future__ import annotations

import json
import logging

import pytest

from quire.engine.text.tokenizer import ADDED_TOKENS_WARNING_THRESHOLD, warn_if_added_tokens_load_slowly

TOKEN = json.dumps({"id": 5, "content": "a", "single_word": False, "special": False}).encode()


@pytest.mark.parametrize(("count", "warns"), [(ADDED_TOKENS_WARNING_THRESHOLD, True), (1000, False)])
def test_log_warns_before_loading_many_added_tokens(caplog: pytest.LogCaptureFixture, count: int, warns: bool) -> None:
    content = b'{"added_tokens": [%s]}' % b",".join([TOKEN] * count)
    with caplog.at_level(logging.WARNING, "quire.engine"):
        warn_if_added_tokens_load_slowly(content, "tokenizer.json")
    assert (f"{ADDED_TOKENS_WARNING_THRESHOLD:,} added tokens" in caplog.text) == warns
