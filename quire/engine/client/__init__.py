"""EngineClient holds the open requests; an EngineCoreClient reaches the engine core."""
