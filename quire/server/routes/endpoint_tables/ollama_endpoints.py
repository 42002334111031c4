from __future__ import annotations

from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from quire.server.resolve.other_apis import ollama
from quire.server.routes.endpoint_tables.endpoint import Endpoint

OLLAMA_ENDPOINTS = (
    Endpoint("/api/chat", "chat", "Answer a conversation.", ollama.resolve_ollama_chat, (OllamaChatRequest,)),
    Endpoint(
        "/api/generate",
        "generate",
        "Answer a prompt, or continue one that is raw.",
        ollama.resolve_ollama_generate,
        (OllamaGenerateRequest,),
    ),
    Endpoint(
        "/api/embed",
        "embed",
        "An embedding of each input, normalized to length 1.",
        ollama.resolve_ollama_embed,
        (OllamaEmbedRequest,),
    ),
    Endpoint(
        "/api/embeddings",
        "embeddings",
        "An embedding of one prompt.",
        ollama.resolve_ollama_embeddings,
        (OllamaEmbeddingsRequest,),
    ),
)
