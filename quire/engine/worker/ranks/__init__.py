"""Ranks that compute one model. The first is the engine; the others follow its commands and know no requests."""
