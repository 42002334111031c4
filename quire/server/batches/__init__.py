"""Files of requests that are answered behind everything else: OpenAI's Batch API, and `quire run`."""
