"""Images on the host, without torch."""
