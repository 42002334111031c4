"""Requests answered after everything else: OpenAI's Batch API and `quire run`."""
