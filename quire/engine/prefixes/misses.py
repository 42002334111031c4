"""Reports for each prompt which of its tokens were computed before, and why the prefix cache did not have them.

The owner of the engines' link reports what happens: new requests, steps, outputs that end requests, lost caches. For
each tenant, tree.py remembers the tokens that were computed recently, up to a limit of bytes. This module compares them
with what the engine found. The scheduler never calls it. A tenant learns nothing about the pages of other tenants: a
page that is gone counts as "evicted", whoever needed the room.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.prefixes.rewrites import WIDTH, equal_pieces
from quire.engine.prefixes.tree import PIECE, TREE_BYTES, Conversation, Neighbour, Origin, PrefixTree, Visit, Walk
from quire.engine.types import EngineCoreRequest, MissReason, Nearest, PrefixReport

TENANT_BYTES = 16 << 20
"""The limit for one tenant: about 900,000 tokens."""
ALL_BYTES = 64 << 20
"""The limit for all tenants together. The tenant whose last request is the oldest loses its tokens first."""
_TURN = 8
"""How many last tokens of a prompt the next turn may lack: they start the answer."""
_SHOWN = 24
"""How many tokens a report shows on each side of a difference."""


@dataclass(slots=True)
class _Asked:
    """An open request without output, or with incomplete output."""

    request: EngineCoreRequest
    turn: _Turn
    visit: Visit | None = None
    """None: no engine has started it, or that engine has ended."""
    report: PrefixReport | None = None
    computed: int = 0
    """The number of prompt tokens that were computed."""
    seconds: float = 0.0
    """Their share of the time of their steps."""


@dataclass(slots=True)
class _Turn:
    """One turn of a conversation. All requests of a call with the same prompt share it."""

    prompt: list[int]
    conversation: Conversation | None = None
    number: int = 0


@dataclass(slots=True)
class _Engine:
    life: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class Misses:
    def __init__(self, engines: int, tenant_bytes: int = TENANT_BYTES, all_bytes: int = ALL_BYTES) -> None:
        """`engines`: how many engines there are, each with its own cache."""
        self._engines = [_Engine() for _ in range(engines)]
        self._tenant_bytes, self._all_bytes = tenant_bytes, all_bytes
        self._trees: OrderedDict[str, PrefixTree] = OrderedDict()
        """By owner (see `_tree`), the most recent owner at the end."""
        self._open: dict[str, _Asked] = {}
        self.bytes = 0
        """The size of all trees."""

    def submitted(self, requests: Sequence[EngineCoreRequest]) -> None:
        """A call has submitted these requests."""
        turn = None
        for each in requests:
            if each.sampling is None:
                continue  # a vector may need all tokens of its prompt computed
            if turn is None or (turn.prompt is not each.prompt_ids and turn.prompt != each.prompt_ids):
                turn = _Turn(each.prompt_ids)
            self._open[each.id] = _Asked(each, turn)

    def stepped(self, step: StepRecord, engine: int, stats: EngineStats, weights: str) -> None:
        """An engine computed a step with this version of the weights. `stats`: the engine's stats after the step."""
        self._engines[engine].stats = stats
        if not stats.prefix_unit:
            return
        for request_id, start, count in step.chunks:
            asked = self._open.get(request_id)
            if asked is None:
                continue
            if asked.visit is None:
                self._begin(asked, start, engine, weights)
            assert asked.visit is not None
            asked.visit.computed = max(asked.visit.computed, start + count)
            if start < len(asked.request.prompt_ids):
                asked.computed += count
                asked.seconds += (step.computed - step.decided) * count / max(step.tokens, 1)

    def take(self, request_id: str) -> PrefixReport | None:
        """The report for a request, once its first output has come."""
        asked = self._open.get(request_id)
        if asked is None or (report := asked.report) is None:
            return None
        share = min(report.missed_tokens / max(asked.computed, 1), 1.0)
        return PrefixReport(
            report.missed,
            round(asked.seconds * share, 6),
            report.conversation,
            report.turn,
            report.own_load,
            report.nearest,
        )

    def ended(self, request_id: str, emitted: Sequence[int]) -> None:
        """A request has ended. `emitted`: the tokens that it generated after its `emitted_ids`."""
        asked = self._open.pop(request_id, None)
        if asked is None or (visit := asked.visit) is None:
            return
        request, visit.open = asked.request, False
        tree = self._tree(request)
        tree.load += asked.computed + len(emitted)
        visit.load = tree.load
        if visit.computed >= len(request.prompt_ids):
            answer = [*request.emitted_ids, *emitted]
            visit.computed = len(request.prompt_ids) + len(answer) - 1
            self._add(tree, _tokens(request) + array("i", answer).tobytes(), visit)

    def emptied(self, engine: int) -> None:
        """An engine's cache was emptied."""
        self._engines[engine].life += 1

    def lost(self, engine: int, ids: Iterable[str] | None) -> None:
        """An engine has ended. Another engine will compute these requests; None: all of its requests."""
        self.emptied(engine)
        for each in [*self._open] if ids is None else ids:
            asked = self._open.get(each)
            if asked is not None and asked.visit is not None and asked.visit.engine == engine:
                asked.visit.open, asked.visit, asked.report = False, None, None
                asked.computed, asked.seconds = 0, 0.0

    def _begin(self, asked: _Asked, cached: int, engine: int, weights: str) -> None:
        """An engine starts a request. It has found `cached` of its tokens in its cache."""
        request = asked.request
        adapter = "" if request.adapter is None else request.adapter.digest
        origin = Origin(request.cache_salt, adapter, weights)
        tree, tokens = self._tree(request), _tokens(request)
        walk = tree.walk(tokens, origin)
        look = _Look(walk, tokens, origin, min(cached, len(request.prompt_ids)), self._engines, engine)
        missed, own_load = look.at_places(tree.load)
        elsewhere = look.elsewhere()
        nearest = None
        same = walk.tail_visit or (walk.own[-1] if walk.own else None)
        earlier = same if same is not None and walk.common >= same.prompt_tokens else None
        repeated = earlier is not None and earlier.prompt_tokens == len(request.prompt_ids)
        if walk.neighbours and not elsewhere and cached <= walk.common:
            nearest, moved, rewritten, same_end = look.moved()
            if rewritten is not None:
                earlier, repeated = rewritten, same_end
            elsewhere = Counter({"diverged" if rewritten is None else "rewritten": moved} if moved else {})
        missed += elsewhere
        if missed and request.sampling is not None and request.sampling.prompt_logprobs is not None:
            missed = Counter({"prompt_logprobs": missed.total()})
        turn = asked.turn
        if turn.conversation is None:
            turn.conversation, turn.number = _turn_after(earlier, request.id, repeated=repeated)
        if asked.report is None:
            found = sorted(missed.items(), key=lambda each: -each[1])
            asked.report = PrefixReport(found, 0.0, turn.conversation.id, turn.number, own_load, nearest)
        life = self._engines[engine].life
        asked.visit = Visit(origin, engine, life, len(request.prompt_ids), turn.conversation, turn.number, cached)
        self._add(tree, tokens, asked.visit)

    def _tree(self, request: EngineCoreRequest) -> PrefixTree:
        """The tree of the request's tenant. Without API keys, all callers are one tenant, and only their salts separate
        them. Then each salt has its own tree."""
        owner = f"key:{request.tenant}" if request.tenant else f"salt:{request.cache_salt}"
        tree = self._trees.get(owner)
        if tree is None:
            tree = self._trees[owner] = PrefixTree(self._tenant_bytes)
            self.bytes += tree.bytes
        self._trees.move_to_end(owner)
        return tree

    def _add(self, tree: PrefixTree, tokens: bytes, visit: Visit) -> None:
        """Store the tokens of a visit. Above the limit for all tenants, the least recent tenants lose their tokens."""
        self.bytes -= tree.bytes
        tree.add(tokens, visit)
        self.bytes += tree.bytes
        while (excess := self.bytes - self._all_bytes) > 0 and len(self._trees) > 1:
            owner, oldest = next(iter(self._trees.items()))
            self.bytes -= oldest.bytes
            oldest.shrink(oldest.bytes - excess)
            if oldest.bytes > TREE_BYTES:
                self.bytes += oldest.bytes
            else:
                del self._trees[owner]


@dataclass(slots=True)
class _Look:
    """Compares one prompt with what is known about its beginning."""

    walk: Walk
    tokens: bytes
    origin: Origin
    cached: int
    engines: Sequence[_Engine]
    engine: int

    @property
    def _unit(self) -> int:
        return self.engines[self.engine].stats.prefix_unit

    @property
    def _most(self) -> int:
        """The most tokens that the cache can hold for the prompt. Its last token is always computed."""
        return (len(self.tokens) // WIDTH - 1) // self._unit * self._unit

    def at_places(self, load: int) -> tuple[Counter[MissReason], bool]:
        """Counts, by reason, the tokens that were computed before after the same tokens, but were not found. The second
        value says whether the tenant's own `load` explains evictions."""
        walk, missed, own_load = self.walk, Counter[MissReason](), False
        most = min(walk.common // self._unit * self._unit, self._most)
        for index in range(self.cached // PIECE, -(-most // PIECE)):
            visit = walk.own[index] if index < len(walk.own) else walk.tail_visit
            assert visit is not None
            begin, end = max(index * PIECE, self.cached), min((index + 1) * PIECE, most)
            reason = self._why(visit, end)
            if begin < end and reason is not None:
                missed[reason] += end - begin
                room = self.engines[self.engine].stats.cache_tokens
                own_load |= reason == "evicted" and load - visit.load >= room
        return missed, own_load

    def elsewhere(self) -> Counter[MissReason]:
        """Counts the tokens after these that were computed after the same tokens, but with another origin."""
        walk, missed = self.walk, Counter[MissReason]()
        for index, visit in enumerate(walk.beyond, len(walk.own)):
            begin, end = max(index * PIECE, self.cached, walk.common), min((index + 1) * PIECE, self._most)
            if begin < end and visit.computed >= end and visit.origin != self.origin:
                missed[self._other(visit.origin)] += end - begin
        return missed

    def _why(self, visit: Visit, end: int) -> MissReason | None:
        """Why the tokens of a visit up to `end` were not found; None: they were never computed."""
        if visit.computed < end:
            return "computing" if visit.open else None
        if visit.engine != self.engine:
            return "replica"
        return "evicted" if visit.life == self.engines[self.engine].life else "restarted"

    def _other(self, origin: Origin) -> MissReason:
        if origin.weights != self.origin.weights:
            return "weights"
        return "adapter" if origin.adapter != self.origin.adapter else "cache_salt"

    def moved(self) -> tuple[Nearest, int, Visit | None, bool]:
        """Returns four things: where the prompt first differs from the nearest earlier sequence; how many of its later
        tokens occur in that sequence too; the sequence's visit, if the prompt continues its conversation; and whether
        both prompts have the same end, so that the later one is the earlier one in another form."""
        looks = [self._beside(each) for each in self.walk.neighbours]
        same, count, same_end, other = max(looks, key=lambda look: look[:2])  # equal ones: the first is the nearest
        common, visit = other.common, other.visit
        nearest = Nearest(
            common,
            "answer" if common >= visit.prompt_tokens else "prompt",
            _ids(self.tokens[max(common - _SHOWN, 0) * WIDTH : common * WIDTH]),
            _ids(other.rest[: _SHOWN * WIDTH]),
            _ids(self.tokens[common * WIDTH : (common + _SHOWN) * WIDTH]),
        )
        return nearest, max(min(count, self._most - common), 0), visit if same else None, same_end

    def _beside(self, other: Neighbour) -> tuple[bool, int, bool, Neighbour]:
        """Whether the prompt continues an earlier sequence's conversation, how many tokens both share after their first
        difference, and whether the earlier prompt's end is this prompt's end too."""
        own = self.tokens[other.common * WIDTH :]
        pieces = equal_pieces(other.rest, own)
        end = min(other.visit.prompt_tokens - other.common, len(other.rest) // WIDTH)
        with_end = [each for each in pieces if each.old + each.length > end - _TURN]
        same_end = any(
            each.new + each.length >= len(own) // WIDTH and each.old + each.length <= end for each in with_end
        )
        return end <= 0 or bool(with_end), sum(each.length for each in pieces), same_end, other


def _turn_after(earlier: Visit | None, request_id: str, *, repeated: bool) -> tuple[Conversation, int]:
    """The conversation of a prompt and its turn in it. `earlier`: the visit whose prompt it continues, or repeats. A
    first prompt that somebody repeats begins a conversation of its own."""
    if earlier is None or (repeated and earlier.turn == 1):
        return Conversation(request_id), 1
    return earlier.conversation, earlier.turn if repeated else earlier.turn + 1


def _tokens(request: EngineCoreRequest) -> bytes:
    """A prompt's tokens, four bytes each. An image's tokens are a negative number that depends on its content."""
    found = array("i", request.prompt_ids)
    for span in request.spans:
        place = -1 - int.from_bytes(span.digest[:4], "little") % 2**31
        found[span.start : span.start + span.count] = array("i", [max(place, -(2**31))] * span.count)
    return found.tobytes()


def _ids(tokens: bytes) -> list[int]:
    """The tokens without those of images."""
    return [token for token in array("i", tokens) if token >= 0]
