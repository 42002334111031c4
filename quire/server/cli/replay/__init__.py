"""`quire replay`: recomputes receipts, of one answer or of a day's log, and prints the first difference."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import uvloop

from quire.engine.checkpoint.model_resolver import resolve_model
from quire.engine.checkpoint.overrides import load_model_config, resolve_model_with_overrides
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_core_client import EngineCoreClient
from quire.engine.client.process_client import ProcessClient
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, InvalidRequest, ModelError
from quire.engine.common.types import Image
from quire.engine.images.multimodal_prompt import (
    RequestImage,
    make_multimodal_prompt_builder,
    make_tiles_by_tile_digest,
)
from quire.engine.lora.local_adapters import LocalAdapters, LoRARequest
from quire.engine.receipts.model_hasher import ModelHasher
from quire.engine.receipts.receipt import Receipt, parse_receipt_json
from quire.engine.receipts.receipt_replay import ReplayModel, ReplayVerdict, replay_receipt
from quire.engine.text.null_tokenizer import load_tokenizer
from quire.engine.text.tokenizer import Tokenizer
from quire.server.cli.flags import build_parser
from quire.server.cli.models.pull import pull_configured_model_if_missing
from quire.server.cli.settings_flags import add_settings_flags, parse_settings
from quire.server.config import DEMO_NAME
from quire.server.encoding import EVENT_PREFIX, encode_ascii_json

MAX_CONCURRENT_RECEIPTS = 32
RECEIPT_SETTINGS = (
    "dtype",
    "quantization",
    "quantize_embedding",
    "kv_cache_dtype",
    "activation_bits",
    "rope_context",
    "tensor_parallel_size",
)
"""Settings that are taken from the first receipt, unless flags set them."""
MakeLink = Callable[[EngineConfig], EngineCoreClient]


def main(argv: Sequence[str], started: float) -> int:
    """Return 0 if all receipts gave the same tokens, else 1, also if nothing was compared."""
    several = {"action": "extend", "nargs": "+", "default": []}
    flags = {
        "file": {
            "metavar": "FILE",
            "type": Path,
            "help": "an answer or a receipt as JSON, or a line for each (--receipt-log)",
        },
        "--adapter": {**several, "metavar": "FOLDER", "help": "adapters that the answers used"},
        "--image": {**several, "metavar": "FILE", "help": "images of the prompts"},
        "--quiet": {"action": "store_true", "help": "print no line for receipts that are equal"},
        "--json": {"action": "store_true", "help": "print a JSON object for each receipt"},
    }
    parser = build_parser("quire replay", __doc__, flags, usage="quire replay FILE [flags]", add_help=False)
    add_settings_flags(parser, EngineConfig, {EngineConfig: "engine"})
    args, config = parse_settings(parser, argv, EngineConfig)
    config = replay_config(config, read_first_receipt(args.file), lora=bool(args.adapter))
    pull_configured_model_if_missing(config)
    return uvloop.run(_replay_and_print(config, args))


async def _replay_and_print(config: EngineConfig, args: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    tokens, last_warning = 0, ""
    async for verdict in replay_receipts(config, args.file, args.adapter, args.image, ProcessClient):
        counts[verdict.outcome] += 1
        tokens += verdict.tokens
        if args.json:
            print(encode_ascii_json(asdict(verdict)).decode(), flush=True)
            continue
        if verdict.warning and verdict.warning != last_warning:
            last_warning = verdict.warning
            print(
                f"warning    {escape_unprintable(verdict.id)}  "
                f"computed otherwise here: {escape_unprintable(last_warning)}",
                flush=True,
            )
        if verdict.outcome != "equal" or not args.quiet:
            print(
                f"{verdict.outcome:<10} {escape_unprintable(verdict.id)}  {escape_unprintable(verdict.what)}",
                flush=True,
            )
    if not args.json:
        totals = ", ".join(f"{counts[each]} {each}" for each in ("equal", "different", "refused"))
        print(f"{counts.total()} receipts: {totals}; {tokens:,} tokens computed again")
    return 0 if counts["equal"] == counts.total() > 0 else 1


def escape_unprintable(text: str) -> str:
    """Escapes control characters, which could overwrite terminal lines."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


async def replay_receipts(
    config: EngineConfig, file: Path, adapters: Sequence[str], images: Sequence[str], make_link: MakeLink
) -> AsyncIterator[ReplayVerdict]:
    """Yields one verdict per receipt, in order. Raises errors of the engine's start, InvalidRequest for unreadable
    adapters and images, and EngineError.
    """
    path = resolve_model_with_overrides(config)
    model_config = load_model_config(config, path)
    folder = resolve_model(config.tokenizer, config.revision) if config.tokenizer else path
    tokenizer = load_tokenizer(
        folder,
        config.chat_template,
        model_config.vocab_size,
        model_config.eos_token_ids,
        skip=config.skip_tokenizer_init,
    )
    local_adapters = LocalAdapters(config, model_config) if adapters else None
    lora_requests = [LoRARequest(str(index), index, each) for index, each in enumerate(adapters, 1)]
    loaded = (
        []
        if local_adapters is None
        else [each for each in local_adapters.resolve_requests(lora_requests, len(lora_requests)) if each is not None]
    )
    client = EngineClient(make_link(config))
    hashes = ModelHasher(config, tokenizer, client.engine_core.weights_paths)
    try:
        info = await client.engine_core.start()
        model = ReplayModel(
            hashes=await hashes.get_receipt_hashes(["1"]),
            computed=await hashes.describe_compute(info),
            tokenizer=tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=model_config.vocab_size,
            adapters={each.digest: each for each in loaded},
            images=read_images_by_digest(path, tokenizer, images),
        )
        running: deque[asyncio.Task[ReplayVerdict]] = deque()
        for number, encoded in enumerate(read_encoded_receipts(file), 1):
            running.append(asyncio.create_task(_replay_receipt(encoded, f"line {number}", model, client)))
            while len(running) >= MAX_CONCURRENT_RECEIPTS:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        await client.engine_core.stop()


async def _replay_receipt(encoded: bytes, where: str, model: ReplayModel, client: EngineClient) -> ReplayVerdict:
    try:
        receipt = parse_receipt_json(encoded)
    except InvalidRequest as error:
        return ReplayVerdict(where, "refused", error.message)
    return await replay_receipt(_add_line_to_id(receipt, where), model, client)


def _add_line_to_id(receipt: Receipt, where: str) -> Receipt:
    """Makes ids unique, because callers may give several answers the same id."""
    return msgspec.structs.replace(receipt, id=f"{receipt.id} ({where})")


def read_encoded_receipts(file: Path) -> Iterator[bytes]:
    """Yields receipts from JSON lines, from the events of a stream, or from a file that is one indented receipt. Raises
    ConfigError.
    """
    try:
        with file.open("rb") as lines:
            first = lines.readline()
            if first.strip() in (b"{", b"["):  # indented JSON
                yield first + lines.read()
                return
            for line in (first, *lines):
                if line.startswith(EVENT_PREFIX) and b'"receipt"' in line:
                    yield line.removeprefix(EVENT_PREFIX)
                elif line.startswith(b"{"):
                    yield line
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def read_first_receipt(file: Path) -> Receipt:
    """Raises ConfigError."""
    why = "it has no lines of JSON"
    for encoded in read_encoded_receipts(file):
        try:
            return parse_receipt_json(encoded)
        except InvalidRequest as error:
            why = error.message
    raise ConfigError(f"{file} has no receipt: {why}")


def replay_config(config: EngineConfig, receipt: Receipt, *, lora: bool) -> EngineConfig:
    """Uses the receipt's model and settings unless flags set them. Raises ConfigError."""
    given_settings = config.model_fields_set
    update = {name: getattr(receipt.computed, name) for name in RECEIPT_SETTINGS if name not in given_settings}
    if lora:
        update["enable_lora"] = True
    if "model" not in given_settings and receipt.model != DEMO_NAME:
        update["model"] = receipt.model
        try:
            resolve_model(receipt.model, config.revision)
        except ModelError as error:
            raise ConfigError(
                f"use --model to say where the receipt's model is: {escape_unprintable(error.message)}"
            ) from None
    return config.model_copy(update=update)


def read_images_by_digest(path: Path, tokenizer: Tokenizer, files: Sequence[str]) -> dict[str, Image]:
    """The keys are hexadecimal digests. Raises ConfigError and InvalidRequest."""
    if not files:
        return {}
    reader, images = make_multimodal_prompt_builder(path, tokenizer), list[RequestImage]()
    if reader is None:
        raise ConfigError("--image: this model does not accept images")
    for file in files:
        try:
            images.append(RequestImage(file, Path(file).read_bytes()))
        except OSError as error:
            raise ConfigError(f"--image: {file}: {error.strerror}") from None
    return make_tiles_by_tile_digest(reader, images)
