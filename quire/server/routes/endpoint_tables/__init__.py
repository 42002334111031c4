"""Endpoints answered from a POST body alone, in the order of the API description."""
