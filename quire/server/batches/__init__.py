"""Requests that are answered after all others: OpenAI's Batch API and `quire run`."""
