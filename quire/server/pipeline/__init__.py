"""A request's stations, called by `answer.py` in order: read, parse, resolve, authorize, admit, generate, write. A
`ResolvedRequest` is immutable; each station sets its own field once.
"""
