"""HTTP on uvicorn and sse-starlette. Only this package overrides their internals."""
