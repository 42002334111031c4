"""What a model consists of: layers, each a tuple of sublayers' specs. No torch. engine/layers makes modules of them."""
