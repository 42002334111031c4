from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.engine.common import clock
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import Adapter
from quire.engine.images.multimodal_prompt import RequestImage, make_tiles_by_tile_digest
from quire.engine.offline.offline_model import GenerationTask
from quire.engine.offline.prompt_images import check_image_types
from quire.engine.offline.running_engine import RunningEngine
from quire.engine.receipts.receipt import (
    AdapterReceipt,
    ChoiceReceipt,
    PromptReceipt,
    Receipt,
    encode_receipt,
    parse_receipt_json,
)
from quire.engine.receipts.receipt_replay import ReplayModel, ReplayVerdict, replay_receipt


class ReceiptMaker:
    """All methods run on the engine's event loop."""

    def __init__(self, running_engine: RunningEngine) -> None:
        self._running_engine = running_engine

    async def make_receipt(self, task: GenerationTask, choices: list[ChoiceReceipt]) -> Receipt:
        running_engine = self._running_engine
        versions = [version for choice in choices for version, _ in choice.versions]
        return Receipt(
            id=task.id,
            created=int(clock.time()),
            model=running_engine.input_processor.name,
            hashes=await running_engine.hashes.get_receipt_hashes(
                versions or [running_engine.client.engine_core.weights_version]
            ),
            computed=await running_engine.hashes.describe_compute(running_engine.info),
            adapter=AdapterReceipt.from_adapter(task.adapter),
            params=task.params,
            prompts=[PromptReceipt.from_prompt(task.prompt.token_ids, task.prompt.spans)],
            choices=choices,
        )

    async def replay_receipt(
        self, receipt: Receipt, adapters: Sequence[Adapter | None], images: Sequence[Any]
    ) -> ReplayVerdict:
        """Raises InvalidRequest for images that are unreadable or not Pillow's."""
        running_engine = self._running_engine
        reader = running_engine.input_processor.multimodal_prompt_builder
        request_images = check_image_types(
            [RequestImage(f"images[{index}]", each) for index, each in enumerate(images)]
        )
        if reader is None and request_images:
            raise InvalidRequest("images: this model does not accept images", param="images")
        model = ReplayModel(
            hashes=await running_engine.hashes.get_receipt_hashes([running_engine.client.engine_core.weights_version]),
            computed=await running_engine.hashes.describe_compute(running_engine.info),
            tokenizer=running_engine.input_processor.tokenizer,
            max_model_len=running_engine.info.max_model_len,
            vocab_size=running_engine.input_processor.vocab_size,
            adapters={each.digest: each for each in adapters if each is not None},
            images={} if reader is None else make_tiles_by_tile_digest(reader, request_images),
        )
        return await replay_receipt(receipt, model, running_engine.client)


def parse_receipt(source: Receipt | Mapping[str, Any] | str | bytes) -> Receipt:
    """`source`: a receipt, or an answer that contains one, as an object or JSON. Raises InvalidRequest."""
    if isinstance(source, Receipt):
        source = encode_receipt(source)
    elif isinstance(source, Mapping):
        source = msgspec.json.encode(source)
    return parse_receipt_json(source.encode() if isinstance(source, str) else source)
