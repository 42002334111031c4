"""Stores the tokens that were computed for one tenant recently, as a tree of pieces. One look-up for each piece finds
the known beginning of a prompt. The tree has a size limit: it drops the least recently used pieces first, and the end
of a sequence before its beginning."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from quire.engine.prefixes.rewrites import WIDTH, common_prefix

PIECE = 64
"""The tokens of a piece. The last piece of a sequence may have fewer."""
TREE_BYTES = 2000
"""The size of an empty tree."""
NODE_BYTES = 900
"""The size of a piece without its tokens but with its place in the order of use. Measured, and rounded up."""
_ORIGINS = 3
"""How many origins (salts, adapters, versions) each piece remembers."""
_NEIGHBOURS = 32
"""How many pieces after an equal beginning are compared with a prompt, the most recently used first."""
_MOST_AHEAD = 65_536
"""How many tokens after a difference are compared."""


class Origin(NamedTuple):
    """What a prefix was computed with. Prefixes of different origins share no pages."""

    salt: str
    adapter: str
    """The digest of its content; "": no adapter."""
    weights: str


@dataclass(eq=False, slots=True)
class Conversation:
    id: str
    """The id of its first request."""


@dataclass(eq=False, slots=True)
class Visit:
    """A request that computed some pieces, or found them cached."""

    origin: Origin
    engine: int
    life: int
    """The number of the engine's cache, which counts up when the cache is lost."""
    prompt_tokens: int
    conversation: Conversation
    turn: int = 1
    """The place of this prompt in the conversation, from 1 on."""
    computed: int = 0
    """The tokens that are computed so far."""
    open: bool = True
    load: int = 0
    """The tenant's PrefixTree.load when the request ended."""


@dataclass(eq=False, slots=True)
class Node:
    tokens: bytes
    """The tokens of this piece."""
    parent: Node | None
    visits: tuple[Visit, ...] = ()
    """The latest visit of each origin, the latest first."""
    children: dict[bytes, Node] | None = None
    """In the order of their use, the last used at the end."""

    def visit(self, origin: Origin) -> Visit | None:
        return next((each for each in self.visits if each.origin == origin), None)


class Neighbour(NamedTuple):
    """An earlier sequence that continues differently from a prompt."""

    common: int
    """The number of tokens with which both start."""
    rest: bytes
    """The sequence's tokens after these, at most _MOST_AHEAD."""
    visit: Visit
    """The visit of the last of these tokens."""


@dataclass(slots=True)
class Walk:
    """What is known about the beginning of a prompt."""

    own: list[Visit] = field(default_factory=list)
    """For each of its first pieces: the last visit of the prompt's own origin."""
    beyond: list[Visit] = field(default_factory=list)
    """For each piece after these: the last visit of another origin."""
    tail: int = 0
    """How many tokens after the pieces in `own` the nearest sequence of the same origin has in common with it."""
    tail_visit: Visit | None = None
    neighbours: list[Neighbour] = field(default_factory=list)
    """The sequences that continue differently, the nearest first. Empty where an earlier sequence ended."""

    @property
    def common(self) -> int:
        """How many of its first tokens an earlier sequence of the same origin has."""
        return len(self.own) * PIECE + self.tail


class PrefixTree:
    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.bytes = TREE_BYTES
        self.load = 0
        """How many tokens were computed for this tenant in all."""
        self._root = Node(b"", None)
        self._order: OrderedDict[Node, None] = OrderedDict()
        """All pieces in the order of their use, the last used at the end. A piece comes after the pieces that follow it
        in a sequence."""

    def walk(self, tokens: bytes, origin: Origin) -> Walk:
        """What is known about the beginning of a sequence."""
        found, node = Walk(), self._root
        whole = len(tokens) // (PIECE * WIDTH)
        for index in range(whole):
            visit, child = None, self._child(node, tokens, index)
            if child is None or (visit := child.visit(origin)) is None:
                break
            found.own.append(visit)
            node = child
        self._compare(found, node, tokens[len(found.own) * PIECE * WIDTH :], origin)
        for index in range(len(found.own), whole):
            if (child := self._child(node, tokens, index)) is None:
                break
            found.beyond.append(child.visits[0])
            node = child
        return found

    def add(self, tokens: bytes, visit: Visit) -> None:
        """Store the tokens of a visit, which becomes the latest visit of their pieces."""
        node, path = self._root, list[Node]()
        size = PIECE * WIDTH
        for at in range(0, len(tokens), size):
            key = tokens[at : at + size]
            child = None if node.children is None else node.children.pop(key, None)
            if child is None:
                self._drop_beginnings(node, key, visit.origin)
                child = Node(key, node)
                self.bytes += NODE_BYTES + len(key)
            node.children = node.children or {}
            node.children[key] = child  # at the end
            others = [each for each in child.visits if each.origin != visit.origin]
            child.visits = (visit, *others[: _ORIGINS - 1])
            path.append(child)
            node = child
        for child in reversed(path):
            self._order[child] = None
            self._order.move_to_end(child)
        self.shrink(self._most)

    def shrink(self, most: int) -> None:
        """Drop the least recently used pieces until the tree has at most `most` bytes."""
        while self.bytes > most and self._order:
            node, _ = self._order.popitem(last=False)
            self._remove(node)

    def _remove(self, node: Node) -> None:
        assert not node.children, "a piece is dropped before one that follows it"
        self.bytes -= NODE_BYTES + len(node.tokens)
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.tokens]
        if not parent.children:
            parent.children = None

    def _drop_beginnings(self, node: Node, key: bytes, origin: Origin) -> None:
        """Drop short last pieces that the new piece begins with, such as the end of a prompt when its answer comes."""
        for child in [*islice(reversed((node.children or {}).values()), 4)]:
            alone = all(each.origin == origin for each in child.visits)
            if alone and len(child.tokens) < len(key) and key.startswith(child.tokens):
                del self._order[child]
                self._remove(child)

    @staticmethod
    def _child(node: Node, tokens: bytes, index: int) -> Node | None:
        if node.children is None:
            return None
        return node.children.get(tokens[index * PIECE * WIDTH : (index + 1) * PIECE * WIDTH])

    def _compare(self, found: Walk, node: Node, rest: bytes, origin: Origin) -> None:
        """Compare a sequence with others that have the same pieces up to `node`. `rest`: its tokens after these."""
        begins = len(found.own) * PIECE
        near: list[tuple[int, Node, Visit]] = []
        for child in islice(reversed((node.children or {}).values()), _NEIGHBOURS):
            visit = child.visit(origin)
            if visit is not None:
                near.append((common_prefix(child.tokens, rest), child, visit))
        if not near:
            return
        near.sort(key=lambda each: -each[0])  # stable: equal ones stay in the order of use
        found.tail, _, found.tail_visit = near[0]
        if any(count * WIDTH == len(child.tokens) for count, child, _ in near if count == found.tail):
            return  # this sequence continues an earlier one
        if found.tail * WIDTH == len(rest):
            return  # an earlier sequence continues this one
        for count, child, visit in near[:3]:
            tail, last = self._continued(child, origin, visit)
            found.neighbours.append(Neighbour(begins + count, tail[count * WIDTH :], last))

    @staticmethod
    def _continued(node: Node, origin: Origin, visit: Visit) -> tuple[bytes, Visit]:
        """The tokens of a piece and of the most recently used pieces that follow it, and the visit of the last one."""
        parts = [node.tokens]
        while node.children and len(parts) * PIECE < _MOST_AHEAD:
            following = next(
                ((child, own) for child in islice(reversed(node.children.values()), 4) if (own := child.visit(origin))),
                None,
            )
            if following is None:
                break
            node, visit = following
            parts.append(node.tokens)
        return b"".join(parts), visit
