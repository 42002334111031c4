from __future__ import annotations

from quire.server.error_responses import COMPLETION_PATH, INFILL_PATH
from quire.server.protocol.llama_cpp import InfillRequest, LlamaCppCompletionRequest
from quire.server.resolve.other_apis.llama_cpp import resolve_infill, resolve_llama_cpp_completion
from quire.server.routes.endpoint_tables.endpoint import Endpoint

LLAMA_CPP_ENDPOINTS = (
    Endpoint(
        COMPLETION_PATH,
        "llama_cpp_completion",
        "Continue a prompt, in llama.cpp's form.",
        resolve_llama_cpp_completion,
        (LlamaCppCompletionRequest,),
    ),
    Endpoint(
        INFILL_PATH,
        "infill",
        "Fill in the text between a prefix and a suffix, in llama.cpp's form; for llama.vim and llama.vscode.",
        resolve_infill,
        (InfillRequest,),
    ),
)
