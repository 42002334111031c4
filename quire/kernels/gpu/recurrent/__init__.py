"""Recurrent states on a GPU."""
