"""Images on the device's side: the tower's weights, and the features that take the place of embeddings."""
