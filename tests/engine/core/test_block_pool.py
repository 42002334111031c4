"""The block pool against a plain model of what it should do."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.core.kv_cache.block_pool import BlockPool
from quire.engine.core.request import block_hash, root_hash
from tests.tiers import examples


def test_block_hash_depends_on_parent_tokens_and_salt() -> None:
    a = block_hash(root_hash(""), [1, 2])
    assert a == block_hash(root_hash(""), [1, 2])
    different = {
        a,
        block_hash(root_hash("salt"), [1, 2]),
        block_hash(root_hash(""), [2, 1]),
        block_hash(a, [1, 2]),
        block_hash(root_hash(""), [1, 2, 0]),
    }
    assert len(different) == 5


def test_block_pool_evicts_freed_blocks_least_recent_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    digests = [bytes([i]) * 16 for i in range(3)]
    for block, digest in zip(blocks, digests, strict=True):
        pool.cache_block(block, digest)
    pool.unref(blocks)
    assert pool.num_used == 0
    assert pool.get_cached_prefix(digests) == blocks
    assert pool.allocate(1) == [3], "a page without content is taken first"
    assert pool.allocate(1) == [blocks[2]], "then the end of the prefix"
    assert pool.get_cached_prefix(digests) == blocks[:2]
    pool.ref(blocks[:2])
    assert pool.num_free == 0
    pool.unref(blocks[:2])
    assert pool.get_cached_prefix(digests) == blocks[:2]
    pool.allocate(2)
    assert pool.get_cached_prefix(digests) == [], "content goes with the page"
    pool.check_invariants()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "share"]), st.integers(0, 10**6)), max_size=80))
def test_block_pool_counts_used_blocks_for_random_actions(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(6)
    held: list[int] = []
    num_cached = 0
    for action, pick in actions:
        if action == "take" and pool.num_free:
            (block,) = pool.allocate(1)
            assert block not in held
            held.append(block)
            pool.cache_block(block, num_cached.to_bytes(16, "big"))
            num_cached += 1
        elif action == "drop" and held:
            pool.unref([held.pop(pick % len(held))])
        elif action == "share" and num_cached:
            prefix = pool.get_cached_prefix([(pick % num_cached).to_bytes(16, "big")])
            pool.ref(prefix)
            held += prefix
        pool.check_invariants()
        assert pool.num_used == len(set(held))
        assert len(pool.cached_blocks) <= pool.num_blocks


def test_block_pool_reuses_unhashed_block_before_cached_block() -> None:
    pool = BlockPool(3)
    cached, other, _ = pool.allocate(3)
    pool.cache_block(cached, block_hash(b"", [1]))
    pool.unref([cached])
    pool.unref([other])
    assert pool.allocate(1) == [other]
    assert pool.has_hash(block_hash(b"", [1]))
