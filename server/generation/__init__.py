"""A resolved call on its way through the engine, up to the bytes of its answer."""
