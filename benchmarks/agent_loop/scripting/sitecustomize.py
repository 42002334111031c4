"""With this folder on PYTHONPATH, `quire serve` gives scripted answers and logs prompts. Nothing else changes.

A grammar, which is attached where a request goes to the engine, forces the answer. Journal, engine, sampler and prefix
cache are those of any server. The variable AGENT_LOOP names a folder with script.json: a list of texts that
begin with `Turn N of M.`. The answer is the text after the highest N in the prompt, whatever was requested before.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

if "AGENT_LOOP" in os.environ and "serve" in sys.orig_argv:
    import msgspec

    from quire.engine.common.request_params import Grammar, SamplingParams
    from quire.engine.common.types import EngineCoreRequest
    from quire.server.generation.resolved_request import GenerationRequest

    FOLDER = Path(os.environ["AGENT_LOOP"])
    TURNS: list[str] = json.loads((FOLDER / "script.json").read_text(encoding="utf-8"))
    SUMMARY = "summarize this partial conversation"
    """Aider's requests to shorten its history contain these words."""
    make_engine_requests = GenerationRequest.engine_requests

    def next_text(prompt: str) -> str:
        num_turns = max(map(int, re.findall(r"Turn (\d+) of \d+\.", prompt)), default=0)
        if SUMMARY in prompt:
            return f"I asked you to count, and you did. Turn {num_turns} of {len(TURNS)}."
        return TURNS[min(num_turns, len(TURNS) - 1)]

    def script_answer(request: EngineCoreRequest) -> EngineCoreRequest:
        """A token id is a byte, or above 255 a special token."""
        prompt = "".join(map(chr, request.prompt_ids))
        answer = next_text(prompt)
        with (FOLDER / "prompts.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"id": request.id, "prompt": prompt, "answer": answer}) + "\n")
        assert isinstance(request.params, SamplingParams)
        grammar = Grammar("regex", re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", answer))
        return msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar=grammar))

    def make_scripted_requests(self: GenerationRequest) -> list[EngineCoreRequest]:
        return [script_answer(request) for request in make_engine_requests(self)]

    GenerationRequest.engine_requests = make_scripted_requests  # type: ignore[method-assign]
