"""Reference attention, and the token shards of decode context parallelism."""
