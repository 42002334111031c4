"""A model that answers with the text between SAY[[ and ]]END in its prompt, one token per byte."""

from __future__ import annotations

import re
from typing import Any

from quire.engine.common.types import EngineCoreRequest
from tests.server.fake import FakeEngine

EOS = 258
SAID = re.compile(rb"SAY\[\[(.*?)\]\]END", re.DOTALL)


def saying_engine(**options: Any) -> FakeEngine:
    return FakeEngine(_said, eos=[EOS], max_model_len=100_000, **options)


def _said(request: EngineCoreRequest, position: int) -> int:
    prompt = bytes(token for token in request.prompt_ids if token < 256)
    text = SAID.findall(prompt)[-1]
    return int(text[position]) if position < len(text) else EOS
