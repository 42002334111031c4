from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.engine.client.output_stream import Versions, add_tokens
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import Adapter, EngineCoreOutput, MediaSpan, TokenLogprob


class ComputeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What decides an answer's bits besides the weights. If `deterministic`, equal values with equal weights give equal
    results, bit for bit.
    """

    quire: str
    kernels: str
    backend: str
    device: str
    dtype: str
    quantization: str | None = None
    quantize_embedding: bool | None = None
    kv_cache_dtype: str = "auto"
    activation_bits: str = "auto"
    rope_context: int | None = None
    tensor_parallel_size: int = 1
    deterministic: bool = True
    """If False, tokens depend on concurrent requests, so a replay may differ."""


class ReceiptHashes(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of 16 bytes each, in hexadecimal."""

    config: str
    """Hash of config.json, or of a GGUF file's equivalent."""
    tokenizer: str
    template: str
    weights: dict[str, str | None]
    """Keyed by weights version; "dummy-SEED" for dummy weights. None if the weights came as tensors, or their files
    changed or vanished before hashing.
    """


class PromptReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    ids: list[int]
    images: list[tuple[int, int, str]] = []
    """(start, count, hexadecimal hash of the resized pixels) of each image span in `ids`."""

    @classmethod
    def from_prompt(cls, ids: Sequence[int], spans: Sequence[MediaSpan]) -> PromptReceipt:
        return cls(ids=list(ids), images=[(each.start, each.count, each.digest.hex()) for each in spans])


class AdapterReceipt(msgspec.Struct, frozen=True):
    name: str
    digest: str

    @classmethod
    def from_adapter(cls, adapter: Adapter | None) -> AdapterReceipt | None:
        return None if adapter is None else cls(adapter.name, adapter.digest)


class ChoiceReceipt(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Choice i of prompt p has index p * n + i."""

    index: int
    seed: int
    """Chosen by the server if the request had none."""
    token_ids: list[int] = []
    versions: Versions = []
    logprobs: list[float | None] | None = None
    """None means minus infinity, which JSON lacks."""
    prompt_logprobs: list[float | None] | None = None
    finish_reason: str = ""

    def add_output(self, output: EngineCoreOutput) -> None:
        """The output may have tokens after a stop string; see `truncated`."""
        self.token_ids += output.new_ids
        if output.logprobs is not None:
            self.logprobs = (self.logprobs or []) + logprob_values(output.logprobs)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = logprob_values(output.prompt_logprobs[1:])

    def truncated(self, count: int, finish_reason: str) -> ChoiceReceipt:
        """Drops tokens after a stop string, because they are not part of the answer."""
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[:count],
            versions=truncate_weight_versions(self.versions, count),
            logprobs=None if self.logprobs is None else self.logprobs[:count],
            finish_reason=finish_reason,
        )


class Receipt(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="receipt"):
    id: str
    created: int
    """Unix time."""
    model: str
    hashes: ReceiptHashes
    computed: ComputeInfo
    adapter: AdapterReceipt | None
    params: SamplingParams
    """Model defaults and the grammar are filled in. Fields with default values are omitted."""
    prompts: list[PromptReceipt]
    choices: list[ChoiceReceipt]
    irreproducible: str = ""
    """"" if the receipt can be replayed."""

    def choice_prompt(self, choice: ChoiceReceipt) -> PromptReceipt:
        return self.prompts[choice.index // self.params.n]


encode_receipt = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(Receipt).decode


def parse_receipt_json(content: bytes) -> Receipt:
    """Parse a receipt, or an answer with a field `receipt`. Raises InvalidRequest."""
    try:
        parsed = msgspec.json.decode(content)
        receipt_object = _find_receipt(parsed)
        receipt = msgspec.convert(receipt_object, Receipt, strict=True, str_keys=True)
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidRequest(f"this is not a receipt: {error}") from None
    bad_choices = [
        each.index for each in receipt.choices if not 0 <= each.index // receipt.params.n < len(receipt.prompts)
    ]
    if bad_choices or not all(map(_is_consistent_choice, receipt.choices)):
        raise InvalidRequest(
            "this is not a receipt: its choices do not fit its prompts, or versions and log probabilities their tokens"
        )
    return receipt


def _is_consistent_choice(choice: ChoiceReceipt) -> bool:
    counts = [count for _, count in choice.versions]
    if min(counts, default=0) < 0 or sum(counts) != len(choice.token_ids):
        return False
    return choice.logprobs is None or len(choice.logprobs) == len(choice.token_ids)


def _find_receipt(parsed: Any) -> Any:
    """The receipt may be in a response, a stream event or a line of a batch's output."""
    for path in ((), ("receipt",), ("x_receipt",), ("response", "receipt"), ("response", "body", "receipt")):
        candidate = parsed
        for name in path:
            candidate = candidate.get(name) if isinstance(candidate, dict) else None
        if isinstance(candidate, dict) and candidate.get("object") == "receipt":
            return candidate
    raise InvalidRequest("it has no `receipt`")


def logprob_values(logprobs: Iterable[TokenLogprob | None]) -> list[float | None]:
    """None means minus infinity, which JSON lacks, or a missing entry."""
    return [None if each is None or each.logprob == -float("inf") else each.logprob for each in logprobs]


def truncate_weight_versions(versions: Versions, count: int) -> Versions:
    truncated: Versions = []
    for version, tokens in versions:
        add_tokens(truncated, version, min(tokens, count - sum(each for _, each in truncated)))
    return truncated
