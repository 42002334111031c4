from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.engine.client.output_stream import OutputSource, WrappedOutputs
from quire.engine.common.types import EngineCoreOutput, EngineCoreRequest
from quire.engine.receipts.receipt import ChoiceReceipt


class ReceiptRecorder(WrappedOutputs):
    def __init__(self, outputs: OutputSource, requests: Sequence[EngineCoreRequest]) -> None:
        super().__init__(outputs)
        versions = outputs.record_versions()
        self._receipts_by_id = {
            request.id: ChoiceReceipt(index=index, seed=request.seed, versions=versions[request.id])
            for index, request in enumerate(requests)
        }

    async def __anext__(self) -> list[EngineCoreOutput]:
        outputs = await super().__anext__()
        self._record_outputs(outputs)
        return outputs

    def take_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        self._record_outputs(outputs)
        super().take_outputs(outputs)

    def _record_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            self._receipts_by_id[output.id].add_output(output)

    def choice_receipts(self, choices: Iterable[tuple[int, str]]) -> list[ChoiceReceipt]:
        return [
            receipt.truncated(count, reason)
            for receipt, (count, reason) in zip(self._receipts_by_id.values(), choices, strict=True)
        ]
