"""`python -m tests.server.scripted FILE NAME`: a server for third-party clients with scripted answers.

FILE is a JSON list of texts: the assistant's first turn, its second and so on. The prompt determines the turn,
regardless of earlier requests. NAME is the model's name. The port is printed. Prompts are cached as by a real engine: a
prefix is a hit if an earlier prompt with its answer began with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from tests.server.fake import FakeEngine
from tests.server.hosted import serving

START, EOS = 257, 258
CONTEXT = 1_000_000
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call> <think><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class ScriptedEngine(FakeEngine):
    def __init__(self, turns: Sequence[str]) -> None:
        super().__init__(self._scripted, eos=[EOS], max_model_len=CONTEXT)
        self._turns = [turn.encode() for turn in turns]
        self._known: list[list[int]] = []
        """Prompts with their answers."""
        self._hits: dict[str, int] = {}

    def _scripted(self, request: EngineCoreRequest, position: int) -> int:
        text = self._answer(request)
        return text[position] if position < len(text) else EOS

    def _answer(self, request: EngineCoreRequest) -> bytes:
        return self._turns[min(turns_in(request.prompt_ids) - 1, len(self._turns) - 1)]

    def send(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self._hits[request.id] = max((alike(request.prompt_ids, known) for known in self._known), default=0)
            self._known.append([*request.prompt_ids, *self._answer(request)])
        super().send(requests)

    def _step(self, request: EngineCoreRequest) -> EngineCoreOutput:
        return msgspec.structs.replace(super()._step(request), cached_tokens=self._hits[request.id])


def turns_in(ids: Sequence[int]) -> int:
    """Return the number of assistant turns in a prompt, including the one that it asks for."""
    mark = [START, *b"assistant\n"]
    starts = [at for at, token in enumerate(ids) if token == START]
    return max(1, sum(list(ids[at : at + len(mark)]) == mark for at in starts))


def alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of leading tokens that both have in common."""
    pairs = zip(ids, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))


async def main(turns: Sequence[str], name: str) -> None:
    async with serving(
        ScriptedEngine(turns),
        chat_template=TEMPLATE,
        tool_call_parser="hermes",
        reasoning_parser="think",
        served_model_name=[name],
    ) as port:
        print(port.number, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2]))
