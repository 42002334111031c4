"""`quire replay`: computes receipts again, of one answer or of a day's log, and says where the first difference is."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import uvloop

from quire.engine.checkpoint.files import resolve_model
from quire.engine.checkpoint.overrides import model_path, read_configured
from quire.engine.config import EngineConfig
from quire.engine.errors import ConfigError, InvalidRequest, ModelError
from quire.engine.images.reader import Asked, by_digest, image_reader
from quire.engine.link.client import EngineClient
from quire.engine.link.link import Link
from quire.engine.link.supervisor import ProcessLink
from quire.engine.lora.offline import LocalAdapters, LoRARequest
from quire.engine.receipts.hashes import ModelHashes
from quire.engine.receipts.receipt import Receipt, decode_receipt
from quire.engine.receipts.replay import Model, Verdict, replay
from quire.engine.text.no_tokenizer import load_tokenizer
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Image
from quire.server.cli.flags import command
from quire.server.cli.models.pull import pull_missing
from quire.server.cli.settings import add_flags, parse
from quire.server.config import DEMO_NAME
from quire.server.encoding import DATA, encode_ascii

AT_ONCE = 32
"""Receipts that are computed at the same time."""
SAME = (
    *("dtype", "quantization", "quantize_embedding", "kv_cache_dtype", "activation_bits", "rope_context"),
    "tensor_parallel_size",
)
"""Settings that are as the first receipt says, unless they are given."""
MakeLink = Callable[[EngineConfig], Link]


def main(argv: Sequence[str], started: float) -> int:
    """Returns the exit status: 0 if all receipts came to the same tokens, else 1, also where there was nothing to
    compare."""
    several = {"action": "extend", "nargs": "+", "default": []}
    flags = {
        "file": {"type": Path, "help": "an answer or a receipt as JSON, or a line for each (--receipt-log)"},
        "--adapter": {**several, "metavar": "FOLDER", "help": "adapters that answers were made with"},
        "--image": {**several, "metavar": "FILE", "help": "images that prompts had"},
        "--quiet": {"action": "store_true", "help": "no line for receipts that are equal"},
        "--json": {"action": "store_true", "help": "print a JSON object for each receipt"},
    }
    parser = command("quire replay", __doc__, flags, usage="quire replay FILE [flags]", add_help=False)
    add_flags(parser, EngineConfig, {EngineConfig: "engine"})
    args, config = parse(parser, argv, EngineConfig)
    config = configured(config, first_receipt(args.file), lora=bool(args.adapter))
    pull_missing(config)
    return uvloop.run(_shown(config, args))


async def _shown(config: EngineConfig, args: argparse.Namespace) -> int:
    """Print all verdicts. Returns the exit status."""
    counts: Counter[str] = Counter()
    tokens, warned = 0, ""
    async for verdict in verdicts(config, args.file, args.adapter, args.image, ProcessLink):
        counts[verdict.outcome] += 1
        tokens += verdict.tokens
        if args.json:
            print(encode_ascii(asdict(verdict)).decode(), flush=True)
            continue
        if verdict.warning and verdict.warning != warned:
            warned = verdict.warning
            print(f"warning    {printable(verdict.id)}  computed otherwise here: {printable(warned)}", flush=True)
        if verdict.outcome != "equal" or not args.quiet:
            print(f"{verdict.outcome:<10} {printable(verdict.id)}  {printable(verdict.what)}", flush=True)
    if not args.json:
        told = ", ".join(f"{counts[each]} {each}" for each in ("equal", "different", "refused"))
        print(f"{counts.total()} receipts: {told}; {tokens:,} tokens computed again")
    return 0 if counts["equal"] == counts.total() > 0 else 1


def printable(text: str) -> str:
    """A receipt's text, whose control characters could write over lines of the terminal, as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


async def verdicts(
    config: EngineConfig, file: Path, adapters: Sequence[str], images: Sequence[str], make_link: MakeLink
) -> AsyncIterator[Verdict]:
    """Of each receipt in a file, in its order. Raises what starting the engine raises, InvalidRequest for adapters and
    images that cannot be read, and EngineError when the engine fails."""
    path = model_path(config)
    shape = read_configured(config, path)
    folder = resolve_model(config.tokenizer, config.revision) if config.tokenizer else path
    tokenizer = load_tokenizer(
        folder, config.chat_template, shape.vocab_size, shape.eos_token_ids, skip=config.skip_tokenizer_init
    )
    kept = LocalAdapters(config, shape) if adapters else None
    asked = [LoRARequest(str(index), index, each) for index, each in enumerate(adapters, 1)]
    loaded = [] if kept is None else [each for each in kept.each(asked, len(asked)) if each is not None]
    client = EngineClient(make_link(config))
    hashes = ModelHashes(config, tokenizer, client.link.weights_paths)
    try:
        info = await client.link.start()
        model = Model(
            hashes=await hashes.of(["1"]),
            computed=await hashes.computed(info),
            tokenizer=tokenizer,
            max_model_len=info.max_model_len,
            vocab_size=shape.vocab_size,
            adapters={each.digest: each for each in loaded},
            images=read_images(path, tokenizer, images),
        )
        running: deque[asyncio.Task[Verdict]] = deque()
        for number, given in enumerate(receipts_in(file), 1):
            running.append(asyncio.create_task(_verdict(given, f"line {number}", model, client)))
            while len(running) >= AT_ONCE:
                yield await running.popleft()
        while running:
            yield await running.popleft()
    finally:
        await client.link.stop()


async def _verdict(given: bytes, where: str, model: Model, client: EngineClient) -> Verdict:
    try:
        receipt = decode_receipt(given)
    except InvalidRequest as error:
        return Verdict(where, "refused", error.message)
    return await replay(_numbered(receipt, where), model, client)


def _numbered(receipt: Receipt, where: str) -> Receipt:
    """With an id of its own: callers may give several answers the same."""
    return msgspec.structs.replace(receipt, id=f"{receipt.id} ({where})")


def receipts_in(file: Path) -> Iterator[bytes]:
    """Each receipt of a file, still as JSON: a line each, in events of a stream, or one that is all of the file. Raises
    ConfigError where it cannot be read."""
    try:
        with file.open("rb") as lines:
            first = lines.readline()
            if first.strip() in (b"{", b"["):  # written for people to read
                yield first + lines.read()
                return
            for line in (first, *lines):
                if line.startswith(DATA) and b'"receipt"' in line:
                    yield line.removeprefix(DATA)
                elif line.startswith(b"{"):
                    yield line
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def first_receipt(file: Path) -> Receipt:
    """Raises ConfigError where there is none."""
    why = "it has no lines of JSON"
    for given in receipts_in(file):
        try:
            return decode_receipt(given)
        except InvalidRequest as error:
            why = error.message
    raise ConfigError(f"{file} has no receipt: {why}")


def configured(config: EngineConfig, first: Receipt, *, lora: bool) -> EngineConfig:
    """The settings with which a receipt's answer is computed again: those that were not given are the receipt's. Raises
    ConfigError where its model is not found by its name alone."""
    given = config.model_fields_set
    update = {name: getattr(first.computed, name) for name in SAME if name not in given}
    if lora:
        update["enable_lora"] = True
    if "model" not in given and first.model != DEMO_NAME:
        update["model"] = first.model
        try:
            resolve_model(first.model, config.revision)
        except ModelError as error:
            raise ConfigError(f"--model says where the receipt's model is: {printable(error.message)}") from None
    return config.model_copy(update=update)


def read_images(path: Path, tokenizer: Tokenizer, files: Sequence[str]) -> dict[str, Image]:
    """All that images become when the model at `path` reads them, by digest in hexadecimal. Raises ConfigError and
    InvalidRequest."""
    if not files:
        return {}
    reader, asked = image_reader(path, tokenizer), list[Asked]()
    if reader is None:
        raise ConfigError("--image: this model reads no images")
    for file in files:
        try:
            asked.append(Asked(file, Path(file).read_bytes()))
        except OSError as error:
            raise ConfigError(f"--image: {file}: {error.strerror}") from None
    return by_digest(reader, asked)
