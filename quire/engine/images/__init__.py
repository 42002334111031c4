"""Images on the host's side: what a model reads of one, how a file becomes that, and which tokens stand for it."""
