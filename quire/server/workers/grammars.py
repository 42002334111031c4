"""Checks that callers' grammars compile, before an engine gets them: see engine/text/grammar.py."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from quire.engine.errors import InvalidRequest, QuireError
from quire.engine.schemas.enforceable import WEAKEST
from quire.engine.text.grammar import CHECK_STACK_BYTES, MAX_CHECK_MEMORY, MAX_CPU_SECONDS
from quire.engine.types import Grammar
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.common import Resolved, with_answer
from quire.server.resolve.translated.as_chat import in_words_of_caller
from quire.server.served_model import ServedModel
from quire.server.workers.pool import WorkerPool
from quire.server.workers.worker import Limits

_KEPT_VERDICTS = 64
_MOST_PARTS = 32
"""Parts of a wrong grammar that are checked by themselves."""
_LIMITS = Limits(seconds=30.0, memory=MAX_CHECK_MEMORY)
"""Of a worker's first grammar, before which it reads the vocabulary. MAX_CPU_SECONDS limits the check itself."""


def check(given: bytes, model: ServedModel, config: ServerConfig) -> None:
    """Runs in a worker. Raises InvalidRequest for a grammar, given as JSON, that no answer can follow."""
    grammar = msgspec.json.decode(given, type=Grammar)
    wrong: list[str] = []

    def run() -> None:
        try:
            compiler = model.grammar_compiler
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)
            compiler.check(grammar)
        except QuireError as error:
            wrong.append(error.message)

    threading.stack_size(CHECK_STACK_BYTES)  # of threads that begin from now on
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if wrong:
        raise InvalidRequest(wrong[0])


class GrammarChecker:
    """Checks grammars in workers, and keeps the last verdicts. Threads make those that it tries itself: schemas may
    take long to be closed."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()

    async def check(
        self,
        grammars: Sequence[tuple[str, Grammar]],
        tenant: Tenant,
        parts: Sequence[tuple[str, Grammar]] = (),
    ) -> None:
        """Raises InvalidRequest for the first grammar that is wrong, not supported or too complex; each grammar comes
        with the parameter that the error names. Raises what WorkerPool.run raises.

        parts: what the last grammar was made of, by the caller's names. Where one of them is wrong by itself, the error
        names it, because the caller wrote it and not the grammar.
        """
        for param, grammar in grammars:
            wrong = await self._verdict(grammar, tenant)
            if wrong is None:
                continue
            for name, part in parts[:_MOST_PARTS] if grammar is grammars[-1][1] else ():
                if (own := await self._verdict(part, tenant)) is not None:
                    raise InvalidRequest(f"{name}: {own}", param=param)
            raise InvalidRequest(f"{param}: {wrong}", param=param)

    async def held(self, call: Resolved, tenant: Tenant, model: ServedModel) -> Resolved:
        """The call, whose grammars compile. Where they do not, tools that nobody asked to hold have the nearest weaker
        schema with which they do. Raises as `check`, which names fields as the caller calls them."""
        *first, last = call.grammars
        await self.check(first, tenant)
        try:
            await self.check([last], tenant)
            return call
        except InvalidRequest:
            if call.answer is None:
                raise
        answer = call.answer
        weakest = dict.fromkeys(answer.tools.loose, WEAKEST)
        for levels in (await self._levels(answer, tenant), weakest) if weakest else ():
            weaker = await asyncio.to_thread(with_answer, call, answer.weaker(levels), model)
            if await self._verdict(weaker.grammars[-1][1], tenant) is None:
                return weaker
        schemas = await asyncio.to_thread(lambda: answer.tools.schemas)
        parts = [(in_words_of_caller(place, None, call.names), schema) for place, schema in schemas]
        await self.check([last], tenant, parts)
        return call

    async def _levels(self, answer: AnswerGrammar, tenant: Tenant) -> dict[str, int]:
        """The nearest level, of each tool that nobody asked to hold, at which its schema compiles by itself."""
        found: dict[str, int] = {}
        for number, name in enumerate(answer.tools.loose):
            found[name] = WEAKEST if number >= _MOST_PARTS else 0
            while found[name] < WEAKEST:
                schema = await asyncio.to_thread(answer.weaker(found).tools.schema, name)
                if await self._verdict(schema, tenant) is None:
                    break
                found[name] += 1
        return found

    async def _verdict(self, grammar: Grammar, tenant: Tenant) -> str | None:
        """What is wrong with the grammar; None where it is right."""
        if grammar not in self._verdicts:
            self._verdicts[grammar] = await self._checked(grammar, tenant)
            if len(self._verdicts) > _KEPT_VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(grammar)
        return self._verdicts[grammar]

    async def _checked(self, grammar: Grammar, tenant: Tenant) -> str | None:
        too_complex = InvalidRequest("too complex to be compiled")
        try:
            await self._workers.within(_LIMITS, check, [msgspec.json.encode(grammar)], tenant, too_complex, slow=True)
        except InvalidRequest as error:
            return error.message
        return None
