"""What families are described with: config.json as data, readers of its fields, names of weights."""
