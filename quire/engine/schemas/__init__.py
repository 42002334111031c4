"""JSON schemas as data: what they say, before a grammar is made of them."""
