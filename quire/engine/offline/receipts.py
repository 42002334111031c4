"""Receipts of a program's answers, and their replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.engine import clock
from quire.engine.errors import InvalidRequest
from quire.engine.images.reader import Asked, by_digest
from quire.engine.offline.images import checked
from quire.engine.offline.model import Task
from quire.engine.offline.running import RunningEngine
from quire.engine.receipts.receipt import (
    AdapterReceipt,
    ChoiceReceipt,
    PromptReceipt,
    Receipt,
    decode_receipt,
    encode_receipt,
)
from quire.engine.receipts.replay import Model, Verdict, replay
from quire.engine.types import Adapter


class Receipts:
    """Of one engine. All methods run on its event loop."""

    def __init__(self, running: RunningEngine) -> None:
        self._running = running

    async def of(self, task: Task, choices: list[ChoiceReceipt]) -> Receipt:
        running = self._running
        versions = [version for choice in choices for version, _ in choice.versions]
        return Receipt(
            id=task.id,
            created=int(clock.time()),
            model=running.model.name,
            hashes=await running.hashes.of(versions or [running.client.link.weights_version]),
            computed=await running.hashes.computed(running.info),
            adapter=AdapterReceipt.of(task.adapter),
            params=task.params,
            prompts=[PromptReceipt.of(task.prompt.ids, task.prompt.spans)],
            choices=choices,
        )

    async def replay(self, receipt: Receipt, adapters: Sequence[Adapter | None], images: Sequence[Any]) -> Verdict:
        """`images`: of Pillow. Raises InvalidRequest for others, and where the model reads none."""
        running = self._running
        reader = running.model.images
        asked = checked([Asked(f"images[{index}]", each) for index, each in enumerate(images)])
        if reader is None and asked:
            raise InvalidRequest("images: this model reads no images", param="images")
        model = Model(
            hashes=await running.hashes.of([running.client.link.weights_version]),
            computed=await running.hashes.computed(running.info),
            tokenizer=running.model.tokenizer,
            max_model_len=running.info.max_model_len,
            vocab_size=running.model.vocab_size,
            adapters={each.digest: each for each in adapters if each is not None},
            images={} if reader is None else by_digest(reader, asked),
        )
        return await replay(receipt, model, running.client)


def read_receipt(given: Receipt | Mapping[str, Any] | str | bytes) -> Receipt:
    """A receipt, or an answer with one, as an object or as JSON. Raises InvalidRequest."""
    if isinstance(given, Receipt):
        given = encode_receipt(given)
    elif isinstance(given, Mapping):
        given = msgspec.json.encode(given)
    return decode_receipt(given.encode() if isinstance(given, str) else given)
