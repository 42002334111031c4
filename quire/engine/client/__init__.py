"""An EngineClient has a process's open requests; an EngineCoreClient reaches the engine core."""
