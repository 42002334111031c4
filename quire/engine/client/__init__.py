"""Between those who ask and an engine core: the book of requests (EngineClient), and what it reaches the engine core
by (EngineCoreClient): in a process of its own, in several, or through the leader of several API processes."""
