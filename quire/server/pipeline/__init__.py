"""The stations that a request passes, a file each: read, parse, resolve, authorize, admit, generate, write.

`answer.py` calls them in this order for every endpoint that generates or computes. A `ResolvedRequest` is immutable;
each station completes the field that it owns, once.
"""
