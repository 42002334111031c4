"""Recurrent states on a GPU, token by token and in chunks."""
