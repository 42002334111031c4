"""The KV cache of requests: who has which blocks, and which prefixes are cached."""
