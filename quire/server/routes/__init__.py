"""One file per noun."""
