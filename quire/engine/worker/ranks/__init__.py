"""Ranks that compute one model. The first is the engine. The others follow its commands and know no requests."""
