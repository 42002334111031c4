"""Loads what guesses tokens with weights of its own."""
