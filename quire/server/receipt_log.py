"""Logs receipts on request and, with --receipt-log, of every answer."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from pathlib import Path

from quire.engine.common.errors import ConfigError
from quire.engine.common.types import EngineInfo
from quire.engine.receipts.model_hasher import ModelHasher
from quire.engine.receipts.receipt import AdapterReceipt, PromptReceipt, Receipt, encode_receipt
from quire.server.generation.generation import Generation, RunningGeneration
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.observe.metrics import Metrics

log = logging.getLogger("quire.server")
_MAX_PENDING_BYTES = 64 << 20
"""If the disk is too slow, further receipts are dropped and counted."""


class ReceiptLog:
    """A file of receipts, to which several processes may append. A file above `max_bytes` is renamed to `.1`, and
    replaces the last `.1`.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises ConfigError."""
        self._path = path
        self._max_bytes = max_bytes
        self._queued_lines: list[bytes] = []
        self._pending_bytes = 0
        self._write_task: asyncio.Task[None] | None = None
        try:
            os.close(self._open_file())
        except OSError as error:
            raise ConfigError(f"receipt_log: {path}: {error.strerror}", param="receipt_log") from None

    def queue_line(self, line: bytes) -> bool:
        if self._pending_bytes + len(line) > _MAX_PENDING_BYTES:
            return False
        self._queued_lines.append(line)
        self._pending_bytes += len(line)
        if self._write_task is None or self._write_task.done():
            self._write_task = asyncio.create_task(self._write_queued_lines())
        return True

    async def close(self) -> None:
        if self._write_task is not None:
            await self._write_task

    async def _write_queued_lines(self) -> None:
        while self._queued_lines:
            lines, self._queued_lines = self._queued_lines, []
            try:
                await asyncio.to_thread(self._append_bytes, b"".join([line + b"\n" for line in lines]))
            except OSError as error:
                log.error("receipt_log: %d receipts were lost: %s", len(lines), error.strerror)
            self._pending_bytes -= sum(map(len, lines))

    def _append_bytes(self, content: bytes) -> None:
        file = self._open_file()
        try:
            while True:  # until the locked file is still the one at this path
                fcntl.flock(file, fcntl.LOCK_EX)
                file_status = os.fstat(file)
                if self._path.exists() and self._path.stat().st_ino == file_status.st_ino:
                    if not file_status.st_size or file_status.st_size + len(content) <= self._max_bytes:
                        break
                    self._path.rename(f"{self._path}.1")
                os.close(file)
                file = self._open_file()
            view = memoryview(content)
            while view:
                view = view[os.write(file, view) :]
        finally:
            os.close(file)

    def _open_file(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class ReceiptWriter:
    def __init__(self, hashes: ModelHasher, info: EngineInfo, metrics: Metrics, log: ReceiptLog | None) -> None:
        self.hashes = hashes
        self.receipt_log = log
        self._info = info
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def encode_answer_receipt(self, request: GenerationRequest, running: RunningGeneration[Generation]) -> bytes:
        self._metrics.receipt_counters["answer"].inc()
        return encode_receipt(await self._build_receipt(request, running))

    def log_answer(self, request: GenerationRequest, running: RunningGeneration[Generation]) -> None:
        """Logs failed answers too. An answer that is repeated from the journal without the engine has been logged
        already.
        """
        if self.receipt_log is not None and running.needs_engine:
            task = asyncio.create_task(self._write_receipt(request, running))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.receipt_log is not None:
            await self.receipt_log.close()

    async def _write_receipt(self, request: GenerationRequest, running: RunningGeneration[Generation]) -> None:
        assert self.receipt_log is not None
        was_accepted = self.receipt_log.queue_line(encode_receipt(await self._build_receipt(request, running)))
        self._metrics.receipt_counters["log" if was_accepted else "lost"].inc()

    async def _build_receipt(self, request: GenerationRequest, running: RunningGeneration[Generation]) -> Receipt:
        choices = running.choice_receipts()
        versions = [version for choice in choices for version, _ in choice.versions]
        return Receipt(
            id=request.answer_id,
            created=request.created,
            model=request.model,
            hashes=await self.hashes.get_receipt_hashes(versions or [running.generation.weights_version]),
            computed=await self.hashes.describe_compute(self._info),
            adapter=AdapterReceipt.from_adapter(request.adapter),
            params=request.sampling_params,
            prompts=[PromptReceipt.from_prompt(prompt.ids, prompt.spans) for prompt in request.prompts],
            choices=choices,
            irreproducible="use_beam_search: a beam search is not a single sequence of samples"
            if request.beam_search
            else "",
        )
