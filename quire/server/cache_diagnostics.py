"""OpenAI's and Anthropic's cache diagnostics: where a prompt first differs from the prompt of an earlier answer,
whether or not that one was cached.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from quire.engine.common.types import MediaSpan
from quire.engine.prefix_misses.token_diff import TOKEN_BYTES, common_prefix_length, encode_prompt_tokens
from quire.server.encoding import encode_ascii_json
from quire.server.shared_capacity import BytesByOwner

BLOCK_TOKENS = 16
DIGEST_BYTES = 8
MAX_OWNER_BYTES = 4 << 20
MAX_TOTAL_BYTES = 32 << 20
_OVERHEAD_BYTES = 700
SETTINGS = "settings"
"""Name of the part for whose change neither vendor's API has a reason."""
Outcome = Literal["unchanged", "changed", "not_found", "unavailable"]


class CacheDiagnosis(msgspec.Struct, frozen=True):
    outcome: Outcome
    """`unavailable`: the prompts were not compared, or neither vendor's API has a reason for the change."""
    changed: str = ""
    missed_tokens: int = 0
    reusable_tokens: int = 0


class PromptFingerprint(msgspec.Struct, frozen=True, array_like=True):
    parts: dict[str, bytes]
    """Digests in the order in which changes are reported."""
    messages: bytes
    """DIGEST_BYTES per message."""
    blocks: bytes
    """DIGEST_BYTES per BLOCK_TOKENS tokens. An incomplete last block has no digest, because such blocks are never
    cached.
    """

    def with_model(self, *identity: str) -> PromptFingerprint:
        """Prompts share blocks only if their `identity` is equal."""
        return msgspec.structs.replace(self, parts={"model": _digest_json(identity), **self.parts})

    @property
    def num_bytes(self) -> int:
        return len(self.messages) + len(self.blocks) + _OVERHEAD_BYTES

    @property
    def reusable_tokens(self) -> int:
        return len(self.blocks) // DIGEST_BYTES * BLOCK_TOKENS

    def diagnose_change_from(self, earlier: PromptFingerprint) -> CacheDiagnosis:
        """Both fingerprints must come from `with_model`. Changed parts do not count if the shorter prompt has full
        blocks and the longer one begins with all of them.
        """
        num_common = 0
        if self.parts["model"] == earlier.parts["model"]:
            num_common = common_prefix_length(self.blocks, earlier.blocks) * TOKEN_BYTES // DIGEST_BYTES * BLOCK_TOKENS
        num_comparable = min(self.reusable_tokens, earlier.reusable_tokens)
        changed = self._find_changed_part(earlier)
        if not changed or 0 < num_comparable == num_common:
            return CacheDiagnosis("unchanged")
        if changed == SETTINGS:
            return CacheDiagnosis("unavailable")
        return CacheDiagnosis("changed", changed, num_comparable - num_common, earlier.reusable_tokens)

    def _find_changed_part(self, earlier: PromptFingerprint) -> str:
        """Returns "" if messages were only appended. Blocks may differ even then, because templates may render earlier
        messages differently.
        """
        changed_part = next((name for name, digest in self.parts.items() if earlier.parts.get(name) != digest), "")
        return changed_part or ("" if self.messages.startswith(earlier.messages) else "messages")


def make_fingerprint(
    parts: Mapping[str, object], messages: Sequence[object], prompt_ids: Sequence[int], spans: Sequence[MediaSpan]
) -> PromptFingerprint:
    """`parts` and `messages` are JSON values. The order of the keys in them counts, because templates render it."""
    tokens = encode_prompt_tokens(prompt_ids, spans)
    size = BLOCK_TOKENS * TOKEN_BYTES
    return PromptFingerprint(
        {name: _digest_json(value) for name, value in parts.items()},
        b"".join(map(_digest_json, messages)),
        b"".join(_digest(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)),
    )


def _digest_json(value: object) -> bytes:
    return _digest(encode_ascii_json(value))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class RecentPrompts:
    """An owner above its limit loses its oldest prompts. Above the total limit, the largest owner loses its oldest
    prompts.
    """

    def __init__(self, max_owner_bytes: int = MAX_OWNER_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_owner_bytes, self._max_total_bytes = max_owner_bytes, max_total_bytes
        self._prompts_by_owner: dict[str, OrderedDict[tuple[bytes, str], PromptFingerprint]] = {}
        """Keyed by owner, then by the cache salt's digest (salts may be long) and the answer id. The latest comes last.
        """
        self._sizes = BytesByOwner()

    @property
    def total_bytes(self) -> int:
        return self._sizes.total_bytes()

    def add_prompt(self, owner: str, cache_salt: str, answer_id: str, fingerprint: PromptFingerprint) -> None:
        prompts = self._prompts_by_owner.setdefault(owner, OrderedDict())
        key = _digest(cache_salt.encode()), answer_id
        if (replaced := prompts.pop(key, None)) is not None:
            self._sizes.add_bytes(owner, -replaced.num_bytes)
        prompts[key] = fingerprint
        self._sizes.add_bytes(owner, fingerprint.num_bytes)
        while self._sizes[owner] > self._max_owner_bytes:
            self._evict_oldest(owner)
        while self.total_bytes > self._max_total_bytes:
            self._evict_oldest(self._sizes.largest_owner())

    def find_prompt(self, owner: str, cache_salt: str, answer_id: str) -> PromptFingerprint | None:
        prompts = self._prompts_by_owner.get(owner)
        return None if prompts is None else prompts.get((_digest(cache_salt.encode()), answer_id))

    def _evict_oldest(self, owner: str) -> None:
        prompts = self._prompts_by_owner[owner]
        _, oldest = prompts.popitem(last=False)
        self._sizes.add_bytes(owner, -oldest.num_bytes)
        if not prompts:
            del self._prompts_by_owner[owner]
