"""HTTP on uvicorn and sse-starlette; only here are their internals overridden."""
