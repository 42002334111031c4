"""EngineClient knows all requests; an EngineCoreClient reaches the engine core: in its own process, in several, or
through the leader of several API processes.
"""
