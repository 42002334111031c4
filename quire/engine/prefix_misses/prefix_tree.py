"""A tree of the tokens recently computed for a tenant, in pieces. The least recently used pieces are dropped first, and
a sequence's end before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from quire.engine.prefix_misses.token_diff import TOKEN_BYTES, common_prefix_length

PIECE_TOKENS = 64
"""A sequence's last piece may be shorter."""
EMPTY_TREE_BYTES = 2000
NODE_BYTES = 900
"""Size of a node without its tokens, measured and rounded up."""
_MAX_NAMESPACES = 3
_MAX_NEIGHBOURS = 32
"""Only the most recently used pieces after a common prefix are compared."""
_MAX_COMPARED_TOKENS = 65_536
"""Counted from the first difference."""


class CacheNamespace(NamedTuple):
    """Requests share blocks only within a namespace."""

    salt: str
    adapter: str
    """Digest of the adapter's content; "" without an adapter."""
    weights: str


@dataclass(eq=False, slots=True)
class Conversation:
    id: str


@dataclass(eq=False, slots=True)
class Visit:
    """A request that computed some pieces or found them cached."""

    namespace: CacheNamespace
    engine: int
    cache_generation: int
    """Number of times that the engine had lost its cache before this visit."""
    prompt_tokens: int
    conversation: Conversation
    turn: int = 1
    num_computed: int = 0
    is_open: bool = True
    tenant_load: int = 0


@dataclass(eq=False, slots=True)
class PrefixNode:
    tokens: bytes
    parent: PrefixNode | None
    visits: tuple[Visit, ...] = ()
    """The latest visit of each namespace, latest first."""
    children: dict[bytes, PrefixNode] | None = None

    def find_visit(self, namespace: CacheNamespace) -> Visit | None:
        return next((each for each in self.visits if each.namespace == namespace), None)


class Neighbour(NamedTuple):
    """An earlier sequence that diverges from a prompt."""

    num_common: int
    rest: bytes
    visit: Visit


@dataclass(slots=True)
class PrefixMatch:
    matched_visits: list[Visit] = field(default_factory=list)
    """One for each leading piece that was visited in the prompt's namespace."""
    other_visits: list[Visit] = field(default_factory=list)
    """The latest visit, in any namespace, of each piece after `matched_visits`, up to the first that is not in the
    tree.
    """
    num_tail_tokens: int = 0
    """Number of tokens after `matched_visits` that the nearest sequence shares."""
    tail_visit: Visit | None = None
    neighbours: list[Neighbour] = field(default_factory=list)
    """Nearest first. Empty if the prompt continues an earlier sequence, or an earlier sequence continues the prompt."""

    @property
    def num_common_tokens(self) -> int:
        return len(self.matched_visits) * PIECE_TOKENS + self.num_tail_tokens


class PrefixTree:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = EMPTY_TREE_BYTES
        self.total_load = 0
        """Number of tokens ever computed for the tenant."""
        self._root = PrefixNode(b"", None)
        self._nodes_by_use: OrderedDict[PrefixNode, None] = OrderedDict()
        """Least recently used first. Each piece comes after the pieces that follow it in a sequence."""

    def match_prefix(self, tokens: bytes, namespace: CacheNamespace) -> PrefixMatch:
        prefix_match, node = PrefixMatch(), self._root
        num_pieces = len(tokens) // (PIECE_TOKENS * TOKEN_BYTES)
        for index in range(num_pieces):
            visit, child = None, self._child_for_piece(node, tokens, index)
            if child is None or (visit := child.find_visit(namespace)) is None:
                break
            prefix_match.matched_visits.append(visit)
            node = child
        self._add_tail_and_neighbours(
            prefix_match, node, tokens[len(prefix_match.matched_visits) * PIECE_TOKENS * TOKEN_BYTES :], namespace
        )
        for index in range(len(prefix_match.matched_visits), num_pieces):
            if (child := self._child_for_piece(node, tokens, index)) is None:
                break
            prefix_match.other_visits.append(child.visits[0])
            node = child
        return prefix_match

    def add_visit(self, tokens: bytes, visit: Visit) -> None:
        node, path = self._root, list[PrefixNode]()
        size = PIECE_TOKENS * TOKEN_BYTES
        for at in range(0, len(tokens), size):
            key = tokens[at : at + size]
            child = None if node.children is None else node.children.pop(key, None)
            if child is None:
                self._drop_shorter_nodes(node, key, visit.namespace)
                child = PrefixNode(key, node)
                self.num_bytes += NODE_BYTES + len(key)
            node.children = node.children or {}
            node.children[key] = child
            others = [each for each in child.visits if each.namespace != visit.namespace]
            child.visits = (visit, *others[: _MAX_NAMESPACES - 1])
            path.append(child)
            node = child
        for child in reversed(path):
            self._nodes_by_use[child] = None
            self._nodes_by_use.move_to_end(child)
        self.shrink(self._max_bytes)

    def shrink(self, max_bytes: int) -> None:
        while self.num_bytes > max_bytes and self._nodes_by_use:
            node, _ = self._nodes_by_use.popitem(last=False)
            self._remove_node(node)

    def _remove_node(self, node: PrefixNode) -> None:
        assert not node.children, "a piece is dropped before one that follows it"
        self.num_bytes -= NODE_BYTES + len(node.tokens)
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.tokens]
        if not parent.children:
            parent.children = None

    def _drop_shorter_nodes(self, node: PrefixNode, key: bytes, namespace: CacheNamespace) -> None:
        """Drops last pieces that the new piece extends, such as a prompt's end when its answer is added."""
        for child in [*islice(reversed((node.children or {}).values()), 4)]:
            has_one_namespace = all(each.namespace == namespace for each in child.visits)
            if has_one_namespace and len(child.tokens) < len(key) and key.startswith(child.tokens):
                del self._nodes_by_use[child]
                self._remove_node(child)

    @staticmethod
    def _child_for_piece(node: PrefixNode, tokens: bytes, index: int) -> PrefixNode | None:
        if node.children is None:
            return None
        return node.children.get(tokens[index * PIECE_TOKENS * TOKEN_BYTES : (index + 1) * PIECE_TOKENS * TOKEN_BYTES])

    def _add_tail_and_neighbours(
        self, prefix_match: PrefixMatch, node: PrefixNode, rest: bytes, namespace: CacheNamespace
    ) -> None:
        num_matched = len(prefix_match.matched_visits) * PIECE_TOKENS
        candidates: list[tuple[int, PrefixNode, Visit]] = []
        for child in islice(reversed((node.children or {}).values()), _MAX_NEIGHBOURS):
            visit = child.find_visit(namespace)
            if visit is not None:
                candidates.append((common_prefix_length(child.tokens, rest), child, visit))
        if not candidates:
            return
        candidates.sort(key=lambda each: -each[0])  # stable: neighbours that share equally much stay in order of use
        prefix_match.num_tail_tokens, _, prefix_match.tail_visit = candidates[0]
        if any(
            count * TOKEN_BYTES == len(child.tokens)
            for count, child, _ in candidates
            if count == prefix_match.num_tail_tokens
        ):
            return  # the prompt continues an earlier sequence
        if prefix_match.num_tail_tokens * TOKEN_BYTES == len(rest):
            return  # an earlier sequence continues the prompt
        for count, child, visit in candidates[:3]:
            tail, last_visit = self._most_recent_continuation(child, namespace, visit)
            prefix_match.neighbours.append(Neighbour(num_matched + count, tail[count * TOKEN_BYTES :], last_visit))

    @staticmethod
    def _most_recent_continuation(node: PrefixNode, namespace: CacheNamespace, visit: Visit) -> tuple[bytes, Visit]:
        parts = [node.tokens]
        while node.children and len(parts) * PIECE_TOKENS < _MAX_COMPARED_TOKENS:
            next_node = next(
                (
                    (child, child_visit)
                    for child in islice(reversed(node.children.values()), 4)
                    if (child_visit := child.find_visit(namespace))
                ),
                None,
            )
            if next_node is None:
                break
            node, visit = next_node
            parts.append(node.tokens)
        return b"".join(parts), visit
