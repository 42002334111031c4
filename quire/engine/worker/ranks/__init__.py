"""The first rank is the engine. The other ranks follow its commands and do not schedule requests."""
