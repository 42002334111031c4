"""Reports which prompt tokens were computed before, and why the prefix cache did not have them. Reports do not say
whose request evicted tokens, so a tenant learns nothing about others.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.engine.common.types import EngineCoreRequest, MissReason, PrefixDivergence, PrefixMissReport
from quire.engine.core.stats import EngineStats, StepRecord
from quire.engine.prefix_misses.prefix_tree import (
    EMPTY_TREE_BYTES,
    PIECE_TOKENS,
    CacheNamespace,
    Conversation,
    Neighbour,
    PrefixMatch,
    PrefixTree,
    Visit,
)
from quire.engine.prefix_misses.token_diff import TOKEN_BYTES, encode_prompt_tokens, find_equal_runs

MAX_TENANT_BYTES = 16 << 20
"""Room for about 900,000 tokens."""
MAX_TOTAL_BYTES = 64 << 20
"""Above this, the tenant whose last request is oldest loses tokens first."""
_MAX_TURN_SLACK = 8
"""A prompt still counts as the next turn if fewer than this many tokens of the earlier prompt's end are missing from
it. These tokens open the answer, and templates may omit them later.
"""
_NUM_CONTEXT_TOKENS = 24


@dataclass(slots=True)
class _OpenRequest:
    request: EngineCoreRequest
    turn: _PromptInConversation
    visit: Visit | None = None
    """None while no engine computes the request."""
    report: PrefixMissReport | None = None
    num_computed: int = 0
    """Number of computed prompt tokens."""
    seconds: float = 0.0
    """Time of the request's steps, each multiplied by its prompt tokens' share of the step."""


@dataclass(slots=True)
class _PromptInConversation:
    prompt: list[int]
    conversation: Conversation | None = None
    turn_number: int = 0


@dataclass(slots=True)
class _EngineCacheInfo:
    generation: int = 0
    stats: EngineStats = field(default_factory=EngineStats)


class PrefixMissTracker:
    def __init__(
        self, engines: int, max_tenant_bytes: int = MAX_TENANT_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES
    ) -> None:
        self._engines = [_EngineCacheInfo() for _ in range(engines)]
        self._max_tenant_bytes, self._max_total_bytes = max_tenant_bytes, max_total_bytes
        self._trees: OrderedDict[str, PrefixTree] = OrderedDict()
        self._open_requests: dict[str, _OpenRequest] = {}
        self.total_bytes = 0

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        turn = None
        for each in requests:
            if each.sampling_params is None:
                continue  # pooling may need to compute all prompt tokens
            if turn is None or (turn.prompt is not each.prompt_ids and turn.prompt != each.prompt_ids):
                turn = _PromptInConversation(each.prompt_ids)
            self._open_requests[each.id] = _OpenRequest(each, turn)

    def track_step(self, step: StepRecord, engine: int, stats: EngineStats, weights: str) -> None:
        self._engines[engine].stats = stats
        if not stats.prefix_unit:
            return
        for request_id, start, count in step.chunks:
            open_request = self._open_requests.get(request_id)
            if open_request is None:
                continue
            if open_request.visit is None:
                self._start_request(open_request, start, engine, weights)
            assert open_request.visit is not None
            open_request.visit.num_computed = max(open_request.visit.num_computed, start + count)
            if start < len(open_request.request.prompt_ids):
                open_request.num_computed += count
                open_request.seconds += (step.computed_at - step.scheduled_at) * count / max(step.num_tokens, 1)

    def get_request_report(self, request_id: str) -> PrefixMissReport | None:
        """None before the request's first output."""
        open_request = self._open_requests.get(request_id)
        if open_request is None or (report := open_request.report) is None:
            return None
        share = min(report.num_missed_tokens / max(open_request.num_computed, 1), 1.0)
        return PrefixMissReport(
            report.tokens_by_reason,
            round(open_request.seconds * share, 6),
            report.conversation,
            report.turn,
            report.own_load,
            report.nearest,
        )

    def finish_request(self, request_id: str, generated: Sequence[int]) -> None:
        open_request = self._open_requests.pop(request_id, None)
        if open_request is None or (visit := open_request.visit) is None:
            return
        request, visit.is_open = open_request.request, False
        tree = self._get_or_make_tenant_tree(request)
        tree.total_load += open_request.num_computed + len(generated)
        visit.tenant_load = tree.total_load
        if visit.num_computed >= len(request.prompt_ids):
            answer = [*request.emitted_ids, *generated]
            visit.num_computed = len(request.prompt_ids) + len(answer) - 1
            self._store_visit(
                tree, encode_prompt_tokens(request.prompt_ids, request.spans) + array("i", answer).tobytes(), visit
            )

    def record_cache_reset(self, engine: int) -> None:
        self._engines[engine].generation += 1

    def record_engine_loss(self, engine: int, request_ids: Iterable[str] | None) -> None:
        """`request_ids`: the requests that move to another engine; None means all."""
        self.record_cache_reset(engine)
        for each in [*self._open_requests] if request_ids is None else request_ids:
            open_request = self._open_requests.get(each)
            if open_request is not None and open_request.visit is not None and open_request.visit.engine == engine:
                open_request.visit.is_open = False
                open_request.visit = None
                open_request.report = None
                open_request.num_computed, open_request.seconds = 0, 0.0

    def _start_request(self, open_request: _OpenRequest, num_cached: int, engine: int, weights: str) -> None:
        request = open_request.request
        adapter = "" if request.adapter is None else request.adapter.digest
        namespace = CacheNamespace(request.cache_salt, adapter, weights)
        tree, tokens = self._get_or_make_tenant_tree(request), encode_prompt_tokens(request.prompt_ids, request.spans)
        prefix_match = tree.match_prefix(tokens, namespace)
        comparison = _PrefixMissAnalysis(
            prefix_match, tokens, namespace, min(num_cached, len(request.prompt_ids)), self._engines, engine
        )
        missed, own_load = comparison.count_lost_tokens_by_reason(tree.total_load)
        other_misses = comparison.count_other_namespaces()
        nearest = None
        similar_visit = prefix_match.tail_visit or (
            prefix_match.matched_visits[-1] if prefix_match.matched_visits else None
        )
        earlier = (
            similar_visit
            if similar_visit is not None and prefix_match.num_common_tokens >= similar_visit.prompt_tokens
            else None
        )
        is_repeat = earlier is not None and earlier.prompt_tokens == len(request.prompt_ids)
        if prefix_match.neighbours and not other_misses and num_cached <= prefix_match.num_common_tokens:
            nearest, num_moved, rewritten_visit, same_end = comparison.find_nearest_divergence()
            if rewritten_visit is not None:
                earlier, is_repeat = rewritten_visit, same_end
            other_misses = Counter(
                {"diverged" if rewritten_visit is None else "rewritten": num_moved} if num_moved else {}
            )
        missed += other_misses
        if missed and request.sampling_params is not None and request.sampling_params.prompt_logprobs is not None:
            missed = Counter({"prompt_logprobs": missed.total()})
        turn = open_request.turn
        if turn.conversation is None:
            turn.conversation, turn.turn_number = _conversation_and_turn_number(
                earlier, request.id, is_repeat=is_repeat
            )
        if open_request.report is None:
            reasons = sorted(missed.items(), key=lambda each: -each[1])
            open_request.report = PrefixMissReport(
                reasons, 0.0, turn.conversation.id, turn.turn_number, own_load, nearest
            )
        generation = self._engines[engine].generation
        open_request.visit = Visit(
            namespace, engine, generation, len(request.prompt_ids), turn.conversation, turn.turn_number, num_cached
        )
        self._store_visit(tree, tokens, open_request.visit)

    def _get_or_make_tenant_tree(self, request: EngineCoreRequest) -> PrefixTree:
        """Without API keys, all callers are one tenant. Then each cache salt has its own tree."""
        tree_key = f"key:{request.tenant}" if request.tenant else f"salt:{request.cache_salt}"
        tree = self._trees.get(tree_key)
        if tree is None:
            tree = self._trees[tree_key] = PrefixTree(self._max_tenant_bytes)
            self.total_bytes += tree.num_bytes
        self._trees.move_to_end(tree_key)
        return tree

    def _store_visit(self, tree: PrefixTree, tokens: bytes, visit: Visit) -> None:
        self.total_bytes -= tree.num_bytes
        tree.add_visit(tokens, visit)
        self.total_bytes += tree.num_bytes
        while (excess := self.total_bytes - self._max_total_bytes) > 0 and len(self._trees) > 1:
            tree_key, oldest = next(iter(self._trees.items()))
            self.total_bytes -= oldest.num_bytes
            oldest.shrink(oldest.num_bytes - excess)
            if oldest.num_bytes > EMPTY_TREE_BYTES:
                self.total_bytes += oldest.num_bytes
            else:
                del self._trees[tree_key]


@dataclass(slots=True)
class _PrefixMissAnalysis:
    prefix_match: PrefixMatch
    tokens: bytes
    namespace: CacheNamespace
    num_cached: int
    engines: Sequence[_EngineCacheInfo]
    engine: int

    @property
    def _match_unit(self) -> int:
        return self.engines[self.engine].stats.prefix_unit

    @property
    def _max_cached(self) -> int:
        return (len(self.tokens) // TOKEN_BYTES - 1) // self._match_unit * self._match_unit

    @property
    def _num_comparable(self) -> int:
        """Tokens of the longest common prefix that could be cached."""
        return min(self.prefix_match.num_common_tokens // self._match_unit * self._match_unit, self._max_cached)

    def count_lost_tokens_by_reason(self, load: int) -> tuple[Counter[MissReason], bool]:
        """The bool is True if the tenant's own requests have filled the engine's cache since an evicted piece was
        visited. `load`: number of tokens computed for the tenant.
        """
        prefix_match = self.prefix_match
        missed = Counter[MissReason]()
        own_load = False
        num_comparable = self._num_comparable
        for index in range(self.num_cached // PIECE_TOKENS, -(-num_comparable // PIECE_TOKENS)):
            visit = (
                prefix_match.matched_visits[index]
                if index < len(prefix_match.matched_visits)
                else prefix_match.tail_visit
            )
            assert visit is not None
            begin, end = max(index * PIECE_TOKENS, self.num_cached), min((index + 1) * PIECE_TOKENS, num_comparable)
            reason = self._miss_reason(visit, end)
            if begin < end and reason is not None:
                missed[reason] += end - begin
                capacity = self.engines[self.engine].stats.cache_tokens
                own_load |= reason == "evicted" and load - visit.tenant_load >= capacity
        return missed, own_load

    def count_other_namespaces(self) -> Counter[MissReason]:
        prefix_match, missed = self.prefix_match, Counter[MissReason]()
        for index, visit in enumerate(prefix_match.other_visits, len(prefix_match.matched_visits)):
            begin, end = (
                max(index * PIECE_TOKENS, self.num_cached, prefix_match.num_common_tokens),
                min((index + 1) * PIECE_TOKENS, self._max_cached),
            )
            if begin < end and visit.num_computed >= end and visit.namespace != self.namespace:
                missed[self._namespace_reason(visit.namespace)] += end - begin
        return missed

    def _miss_reason(self, visit: Visit, end: int) -> MissReason | None:
        if visit.num_computed < end:
            return "computing" if visit.is_open else None
        if visit.engine != self.engine:
            return "replica"
        return "evicted" if visit.cache_generation == self.engines[self.engine].generation else "restarted"

    def _namespace_reason(self, namespace: CacheNamespace) -> MissReason:
        if namespace.weights != self.namespace.weights:
            return "weights"
        return "adapter" if namespace.adapter != self.namespace.adapter else "cache_salt"

    def find_nearest_divergence(self) -> tuple[PrefixDivergence, int, Visit | None, bool]:
        """Returns the first difference from the nearest earlier sequence; how many later tokens, of those that can be
        cached, both share; the earlier sequence's visit if the prompt continues its conversation; and whether both
        prompts have the same end, which means that one rewrites the other.
        """
        comparisons = [self._compare_neighbour(each) for each in self.prefix_match.neighbours]
        is_same_conversation, num_shared, same_end, nearest_neighbour = max(
            comparisons, key=lambda comparison: comparison[:2]
        )
        common, visit = nearest_neighbour.num_common, nearest_neighbour.visit
        nearest = PrefixDivergence(
            common,
            "answer" if common >= visit.prompt_tokens else "prompt",
            _token_ids_without_images(
                self.tokens[max(common - _NUM_CONTEXT_TOKENS, 0) * TOKEN_BYTES : common * TOKEN_BYTES]
            ),
            _token_ids_without_images(nearest_neighbour.rest[: _NUM_CONTEXT_TOKENS * TOKEN_BYTES]),
            _token_ids_without_images(self.tokens[common * TOKEN_BYTES : (common + _NUM_CONTEXT_TOKENS) * TOKEN_BYTES]),
        )
        return (
            nearest,
            max(min(num_shared, self._max_cached - max(common, self._num_comparable)), 0),
            visit if is_same_conversation else None,
            same_end,
        )

    def _compare_neighbour(self, neighbour: Neighbour) -> tuple[bool, int, bool, Neighbour]:
        """Returns whether the prompt continues the neighbour's conversation, how many tokens after the first difference
        both share and are not counted elsewhere, whether both prompts have the same end, and `neighbour`.
        """
        rest = self.tokens[neighbour.num_common * TOKEN_BYTES :]
        runs = find_equal_runs(neighbour.rest, rest)
        end = min(neighbour.visit.prompt_tokens - neighbour.num_common, len(neighbour.rest) // TOKEN_BYTES)
        end_runs = [each for each in runs if each.old_start + each.length > end - _MAX_TURN_SLACK]
        same_end = any(
            each.new_start + each.length >= len(rest) // TOKEN_BYTES and each.old_start + each.length <= end
            for each in end_runs
        )
        # `rest` may begin within another sequence's longer common prefix, whose lost tokens are counted already.
        begin = max(self._num_comparable - neighbour.num_common, 0)
        num_shared = sum(max(each.new_start + each.length - max(each.new_start, begin), 0) for each in runs)
        return end <= 0 or bool(end_runs), num_shared, same_end, neighbour


def _conversation_and_turn_number(
    earlier_visit: Visit | None, request_id: str, *, is_repeat: bool
) -> tuple[Conversation, int]:
    """Turn numbers begin at 1. A repeated prompt keeps its turn number, but a repeated first prompt begins a new
    conversation.
    """
    if earlier_visit is None or (is_repeat and earlier_visit.turn == 1):
        return Conversation(request_id), 1
    return earlier_visit.conversation, earlier_visit.turn if is_repeat else earlier_visit.turn + 1


def _token_ids_without_images(tokens: bytes) -> list[int]:
    return [token for token in array("i", tokens) if token >= 0]
