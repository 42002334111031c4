"""Writers that turn deltas into the bytes of answers: one file for each form of answer."""
