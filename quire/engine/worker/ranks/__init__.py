"""Several ranks that compute one model. The first rank is the engine; the others follow its commands and know nothing
of requests.
"""
