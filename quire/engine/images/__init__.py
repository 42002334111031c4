"""Images on the host: decoding, preparation, and the tokens that stand for them. No torch."""
