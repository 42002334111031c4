"""KV blocks of requests, and cached prefixes."""
