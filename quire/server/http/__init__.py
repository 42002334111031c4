"""HTTP on uvicorn and sse-starlette: what overrides their inner parts stands here and nowhere else."""
