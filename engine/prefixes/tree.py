"""The tokens that one tenant had computed lately, as a tree of pieces: one look-up for each piece finds what a prompt
begins with. Bounded: the pieces that were used longest ago go first, the ends of sequences before their beginnings."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from quire.engine.prefixes.rewrites import WIDTH, common_prefix

PIECE = 64
"""Tokens of a piece; the last one of a sequence may have fewer."""
TREE_BYTES = 2000
"""What a tree takes that has no pieces."""
NODE_BYTES = 900
"""What a piece takes beside its tokens, its place in the order of use included; measured, and rounded up."""
_ORIGINS = 3
"""Kinds of prefixes (salts, adapters, versions) that are remembered of a piece."""
_NEIGHBOURS = 32
"""Pieces behind an equal beginning that a prompt is compared with: those that were used last."""
_MOST_AHEAD = 65_536
"""Tokens behind a difference that are compared."""


class Origin(NamedTuple):
    """Prefixes of different origins share no pages."""

    salt: str
    adapter: str
    """The digest of its content; "" for none."""
    weights: str


@dataclass(eq=False, slots=True)
class Conversation:
    id: str
    """Of the request that began it."""
    turns: int = 0


@dataclass(eq=False, slots=True)
class Visit:
    """A request that computed the pieces on its way, or found them cached."""

    origin: Origin
    engine: int
    life: int
    """Which of the caches that this engine has had it was."""
    prompt_tokens: int
    conversation: Conversation
    computed: int = 0
    """Tokens that are computed so far."""
    open: bool = True
    load: int = 0
    """Tokens that its tenant had had computed when it ended."""


@dataclass(eq=False, slots=True)
class Node:
    tokens: bytes
    """Of this piece."""
    parent: Node | None
    visits: tuple[Visit, ...] = ()
    """The latest of each origin, the latest first."""
    children: dict[bytes, Node] | None = None
    """The one that was used last comes last."""

    def visit(self, origin: Origin) -> Visit | None:
        return next((each for each in self.visits if each.origin == origin), None)


class Neighbour(NamedTuple):
    """An earlier sequence that goes on otherwise than a prompt."""

    common: int
    """Tokens that both begin with."""
    rest: bytes
    """Its tokens behind these, _MOST_AHEAD at most."""
    visit: Visit
    """Of the last of them."""


@dataclass(slots=True)
class Walk:
    """What is known of a prompt's beginning."""

    own: list[Visit] = field(default_factory=list)
    """For each of its first pieces, who had it computed last, of the prompt's own origin."""
    beyond: list[Visit] = field(default_factory=list)
    """For each piece behind these who had it computed, of another origin."""
    tail: int = 0
    """Tokens behind the pieces of its own origin that the nearest sequence of that origin has, too."""
    tail_visit: Visit | None = None
    neighbours: list[Neighbour] = field(default_factory=list)
    """Those that go on otherwise, the nearest first; none where an earlier sequence ended there."""

    @property
    def common(self) -> int:
        """Tokens that an earlier sequence of its own origin began with."""
        return len(self.own) * PIECE + self.tail


class PrefixTree:
    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.bytes = TREE_BYTES
        self.load = 0
        """Tokens that this tenant had computed, in all."""
        self._root = Node(b"", None)
        self._order: OrderedDict[Node, None] = OrderedDict()
        """All pieces, the one that was used last at the end; each comes after those behind it."""

    def walk(self, tokens: bytes, origin: Origin) -> Walk:
        """What is known of a sequence's beginning."""
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
        """A visit's tokens: all pieces are its own from now on."""
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
        """Forget what was used longest ago, until no more than so many bytes are left."""
        while self.bytes > most and self._order:
            node, _ = self._order.popitem(last=False)
            self._remove(node)

    def _remove(self, node: Node) -> None:
        assert not node.children, "a piece is forgotten before one behind it"
        self.bytes -= NODE_BYTES + len(node.tokens)
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.tokens]
        if not parent.children:
            parent.children = None

    def _drop_beginnings(self, node: Node, key: bytes, origin: Origin) -> None:
        """Forget the ends of sequences that a new piece goes on from, as the end of a prompt does when the answer
        comes."""
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
        """Compare a sequence with those that begin as it does up to a piece's end; `rest`: its tokens from there."""
        begins = len(found.own) * PIECE
        near: list[tuple[int, Node, Visit]] = []
        for child in islice(reversed((node.children or {}).values()), _NEIGHBOURS):
            visit = child.visit(origin)
            if visit is not None:
                near.append((common_prefix(child.tokens, rest), child, visit))
        if not near:
            return
        near.sort(key=lambda each: -each[0])  # stable: of equals, the one that was used last comes first
        found.tail, _, found.tail_visit = near[0]
        if any(count * WIDTH == len(child.tokens) for count, child, _ in near if count == found.tail):
            return  # an earlier sequence is a beginning of this one
        if found.tail * WIDTH == len(rest):
            return  # this one is a beginning of an earlier one
        for count, child, visit in near[:3]:
            tail, last = self._continued(child, origin, visit)
            found.neighbours.append(Neighbour(begins + count, tail[count * WIDTH :], last))

    @staticmethod
    def _continued(node: Node, origin: Origin, visit: Visit) -> tuple[bytes, Visit]:
        """The tokens of a piece and of those behind it, each the one that was used last; and who had the last one."""
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
