"""The command of a machine that computes with the first of several."""
