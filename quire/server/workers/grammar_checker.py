"""Checks that callers' grammars compile before an engine gets them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from quire.engine.common.errors import InvalidRequest, QuireError
from quire.engine.common.request_params import Grammar
from quire.engine.schemas.enforcement import WEAKEST_LEVEL
from quire.engine.text.grammar_compiler import CHECK_STACK_BYTES, MAX_CHECK_CPU_SECONDS, MAX_CHECK_MEMORY_BYTES
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.generation.resolved_request import CheckedGrammar
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.other_apis.chat_conversion import rename_fields_in_error_text
from quire.server.resolve.resolved_generation import ResolvedGeneration
from quire.server.served_model import ServedModel
from quire.server.workers.pool import WorkerPool
from quire.server.workers.worker import JobLimits

_MAX_VERDICTS = 64
_MAX_CHECKED_PARTS = 32
_CHECK_LIMITS = JobLimits(cpu_seconds=30.0, memory_bytes=MAX_CHECK_MEMORY_BYTES)
"""Limits of a worker's first check, which also reads the vocabulary."""


def compile_grammar_or_raise(encoded_grammar: bytes, model: ServedModel, config: ServerConfig) -> None:
    """Runs in a worker. Raises InvalidRequest if no answer can follow the grammar."""
    grammar = msgspec.json.decode(encoded_grammar, type=Grammar)
    error_messages: list[str] = []

    def compile_grammar() -> None:
        try:
            compiler = model.grammar_compiler
            signal.setitimer(signal.ITIMER_PROF, MAX_CHECK_CPU_SECONDS)
            compiler.check_grammar(grammar)
        except QuireError as error:
            error_messages.append(error.message)

    threading.stack_size(CHECK_STACK_BYTES)  # affects later threads
    thread = threading.Thread(target=compile_grammar)
    thread.start()
    thread.join()
    if error_messages:
        raise InvalidRequest(error_messages[0])


class GrammarChecker:
    """Builds weaker grammars in threads, because this may take long."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def check_grammars(
        self,
        grammars: Sequence[tuple[str, Grammar]],
        tenant: Tenant,
        parts: Sequence[tuple[str, Grammar]] = (),
    ) -> None:
        """Raises InvalidRequest, with the grammar's parameter, for the first grammar that does not compile, and the
        errors of WorkerPool.run_job. `parts`: components of the last grammar, by the caller's names. If a part alone is
        wrong, the error names it.
        """
        for param, grammar in grammars:
            error_message = await self._grammar_error_message(grammar, tenant)
            if error_message is None:
                continue
            for name, part in parts[:_MAX_CHECKED_PARTS] if grammar is grammars[-1][1] else ():
                if (part_error := await self._grammar_error_message(part, tenant)) is not None:
                    raise InvalidRequest(f"{name}: {part_error}", param=param)
            raise InvalidRequest(f"{param}: {error_message}", param=param)

    async def choose_compilable_grammar(
        self, resolved: ResolvedGeneration, tenant: Tenant, model: ServedModel
    ) -> CheckedGrammar:
        """Returns the requested grammar if it compiles; otherwise one in which each non-strict tool has the nearest
        weaker schema that compiles. Raises as `check_grammars` does, with the caller's field names.
        """
        *first, last = resolved.grammars.to_check
        await self.check_grammars(first, tenant)
        try:
            await self.check_grammars([last], tenant)
            return resolved.unchecked_grammar
        except InvalidRequest:
            if resolved.grammars.weakenable is None:
                raise
        answer = resolved.grammars.weakenable
        weakest = dict.fromkeys(answer.tools.non_strict_tool_names, WEAKEST_LEVEL)
        for levels in (await self._nearest_compilable_levels_by_tool(answer, tenant), weakest) if weakest else ():
            weaker = await asyncio.to_thread(resolved.build_weaker_grammar, answer.with_weaker_tools(levels), model)
            if await self._grammar_error_message(weaker.grammar, tenant) is None:
                return weaker
        schemas = await asyncio.to_thread(lambda: answer.tools.schema_grammars)
        field_names = resolved.form.field_names
        parts = [(rename_fields_in_error_text(place, None, field_names), schema) for place, schema in schemas]
        await self.check_grammars([last], tenant, parts)
        return resolved.unchecked_grammar

    async def _nearest_compilable_levels_by_tool(self, answer: AnswerGrammar, tenant: Tenant) -> dict[str, int]:
        levels: dict[str, int] = {}
        for number, name in enumerate(answer.tools.non_strict_tool_names):
            levels[name] = WEAKEST_LEVEL if number >= _MAX_CHECKED_PARTS else 0
            while levels[name] < WEAKEST_LEVEL:
                schema = await asyncio.to_thread(answer.with_weaker_tools(levels).tools.schema_grammar, name)
                if await self._grammar_error_message(schema, tenant) is None:
                    break
                levels[name] += 1
        return levels

    async def _grammar_error_message(self, grammar: Grammar, tenant: Tenant) -> str | None:
        if grammar not in self._verdicts:
            self._verdicts[grammar] = await self._check_in_worker(grammar, tenant)
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(grammar)
        return self._verdicts[grammar]

    async def _check_in_worker(self, grammar: Grammar, tenant: Tenant) -> str | None:
        too_complex = InvalidRequest("too complex to be compiled")
        try:
            await self._workers.run_limited_job(
                _CHECK_LIMITS,
                compile_grammar_or_raise,
                [msgspec.json.encode(grammar)],
                tenant,
                too_complex,
                is_slow=True,
            )
        except InvalidRequest as error:
            return error.message
        return None
