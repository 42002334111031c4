"""Small networks that guess tokens from a decoder's hidden states."""
